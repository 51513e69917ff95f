"""Scoring: hidden states, log-probs and entropies of several completions of one prompt, in one pass of a model.

A tree is a prompt with branches; a branch sees the prompt and itself. `score` gives the hidden states that predict the
branches' tokens, and only these reach the output head (`token_log_probs`). The numbers are those of separate rows up to
rounding. packing.py computes each prompt once and pads nothing, where a model's attention allows it.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from itertools import accumulate
from typing import Any

import torch
from jaxtyping import Float, Int
from peft import LoraConfig, get_peft_model
from torch import Tensor
from trl.kernels import ChunkedLogProbFunction

from composer_stages.gradients.per_row import by_length
from composer_stages.losses.tokens import Head, Predictors, widened
from composer_stages.policy import adapters, small_models, trials
from composer_stages.training.config import SCORED_TOKENS, VOCABULARY_CHUNK
from composer_stages.training.packing import ALIKE, on_device, predicting

PACKED, BATCHED, PADDED, HEAD = "packed", "batched", "padded", "head"
CPU_VOCABULARY_CHUNK = 8192
"""Columns of logits at once on a CPU, where TRL's 32,768, meant for Triton, make temporaries of gigabytes."""


@dataclass(frozen=True)
class Tree:
    """Token ids of a prompt and of each of its completions; neither may be empty."""

    prompt: list[int]
    branches: tuple[list[int], ...]


@dataclass(frozen=True)
class Scored:
    """Hidden states that predict the branches' tokens, in the order of trees, branches, tokens.

    hidden: [N, H]; where the output head is one that `head` does not know, the model's own logits. targets: [N] token
    ids. branch: [N] index of the branch, counted over all trees. sizes: tokens of each branch.
    """

    hidden: Float[Tensor, "n h"]
    targets: Int[Tensor, " n"]
    branch: Int[Tensor, " n"]
    sizes: tuple[int, ...]
    are_logits: bool = False

    @property
    def num_branches(self) -> int:
        """Return the number of branches of all trees."""
        return len(self.sizes)

    def per_branch(self, values: Float[Tensor, " n"]) -> Float[Tensor, " b"]:
        """Return the sums of token values over each branch."""
        return torch.zeros(self.num_branches, dtype=values.dtype, device=values.device).index_add(
            0, self.branch, values
        )

    @property
    def lengths(self) -> Int[Tensor, " b"]:
        """Return the number of tokens of each branch."""
        return on_device([torch.tensor(self.sizes, dtype=torch.long)], self.branch.device)[0]


def score(model: Any, trees: Sequence[Tree]) -> Scored:
    """Return hidden states for all branches; gradients flow if they are enabled.

    All trees are one row where the model can be packed, by `try_scoring`; else rows of like length are batched, and
    those that it found wrong in a batch go alone.
    """
    return _scored(model, trees, trials.outcome(model, try_scoring))


def _scored(model: Any, trees: Sequence[Tree], ways: Mapping[str, Any]) -> Scored:
    branches, device = [branch for tree in trees for branch in tree.branches], next(model.parameters()).device
    longest = max((len(tree.prompt) + len(branch) for tree in trees for branch in tree.branches), default=0)
    packs = ways.get(HEAD) and longest <= trials.longest(ways, PACKED, model.config)
    hidden = predicting(model, [(tree.prompt, tree.branches) for tree in trees], SCORED_TOKENS) if packs else None
    if hidden is None:
        batched = trials.longest(ways, BATCHED, model.config) if ways.get(HEAD) else 0
        hidden = _separately(model, trees, batched, logits=not ways.get(HEAD))
    targets, numbers = (
        torch.tensor(values, dtype=torch.long)
        for values in (
            [token for branch in branches for token in branch],
            [i for i, branch in enumerate(branches) for _ in branch],
        )
    )
    targets, numbers = on_device([targets, numbers], device)
    return Scored(hidden, targets, numbers, tuple(map(len, branches)), not ways.get(HEAD))


def score_together(model: Any, parts: Sequence[Sequence[Tree]]) -> list[Scored]:
    """Return `score` of each part, all from one pass that computes equal prompts and equal branches of them once."""
    families: dict[tuple[int, ...], dict[tuple[int, ...], None]] = {}
    keys = [[(tuple(tree.prompt), tuple(branch)) for tree in part for branch in tree.branches] for part in parts]
    for prompt, branch in (key for part in keys for key in part):
        families.setdefault(prompt, {})[branch] = None
    scored = score(model, [Tree(list(p), tuple(map(list, branches))) for p, branches in families.items()])
    distinct = [(prompt, branch) for prompt, branches in families.items() for branch in branches]
    starts = dict(zip(distinct, accumulate((len(branch) for _, branch in distinct), initial=0), strict=False))
    indices: list[Tensor] = []
    for part in keys:
        rows = [starts[key] + i for key in part for i in range(len(key[1]))]
        numbers = [number for number, key in enumerate(part) for _ in key[1]]
        indices += [torch.tensor(rows, dtype=torch.long), torch.tensor(numbers, dtype=torch.long)]
    placed = on_device(indices, scored.targets.device)
    return [
        Scored(
            scored.hidden.index_select(0, index),
            scored.targets[index],
            number,
            tuple(len(b) for _, b in part),
            scored.are_logits,
        )
        for part, index, number in zip(keys, placed[::2], placed[1::2], strict=True)
    ]


def _separately(model: Any, trees: Sequence[Tree], batched: float, logits: bool) -> Float[Tensor, "n h"]:
    """Score every branch as a row of its own. Rows are causal and padding follows them, so no mask is needed.

    batched: tokens of the longest rows that are batched. logits: whether to return the model's logits.
    """
    rows = [(tree.prompt, branch) for tree in trees for branch in tree.branches]
    device = next(model.parameters()).device
    parts, order = list[Tensor](), list[int]()
    lengths = [len(prompt) + len(branch) for prompt, branch in rows]
    for numbers in by_length(lengths, SCORED_TOKENS, lambda n: n if n <= batched else SCORED_TOKENS, ALIKE):
        bucket = [rows[number] for number in numbers]
        # Nothing is predicted from a last token, but a row that goes alone may switch by its whole length.
        ends = [None if lengths[number] > batched else -1 for number in numbers]
        inputs = [prompt + branch[:end] for end, (prompt, branch) in zip(ends, bucket, strict=True)]
        width = max(map(len, inputs))
        places = [
            row * width + len(prompt) - 1 + i for row, (prompt, branch) in enumerate(bucket) for i in range(len(branch))
        ]
        padded = torch.tensor([row + [0] * (width - len(row)) for row in inputs], dtype=torch.long)
        ids, positions = on_device([padded, torch.tensor(places, dtype=torch.long)], device)
        small_models.forget_lengths(model)
        compute = model if logits else model.get_decoder()
        out = compute(input_ids=ids, use_cache=False)
        hidden = out.logits if logits else out.last_hidden_state  # [B, T, H]
        parts.append(hidden.flatten(0, 1).index_select(0, positions))
        order += [number for number in numbers for _ in rows[number][1]]
    # Buckets are in order of length: a stable order of the rows' numbers puts their tokens back.
    [index] = on_device([torch.tensor(order).argsort(stable=True)], device)
    return torch.cat(parts).index_select(0, index)


def token_log_probs(model: Any, scored: Scored, temperature: float = 1.0) -> Float[Tensor, " n"]:
    """Return the natural log-prob of every completion token, float32."""
    return through_head(model, scored, temperature, ())[0]


def through_head(model: Any, scored: Scored, temperature: float, outputs: tuple[str, ...]) -> tuple[Any, Any]:
    """Return log-probs, and with outputs = ("entropy",) entropies of the distributions they were drawn from, in nats.

    [N, V] logits are never held. Source: TRL 1.16 kernels/chunked_logprob.py. That kernel answers in float32 whatever
    it is given; a float64 model, which serves checks, is answered in float64.
    """
    if scored.are_logits or scored.hidden.dtype == torch.float64:
        table = (widened(logits(model, scored)) / temperature).log_softmax(-1)
        return table.gather(-1, scored.targets[:, None])[:, 0], -(table.exp() * table).sum(-1)
    layer, (softcap, scale) = model.get_output_embeddings(), after_head(model)
    columns = CPU_VOCABULARY_CHUNK if scored.hidden.device.type == "cpu" else VOCABULARY_CHUNK
    logps, entropy, *_ = ChunkedLogProbFunction.apply(
        scored.hidden, layer.weight, layer.bias, scored.targets, temperature, columns, softcap, scale, outputs
    )
    return logps, entropy


def after_head(model: Any) -> tuple[float | None, float]:
    """Return the soft cap (Gemma) and the factor (Cohere multiplies, Granite divides) of a model's logits."""
    config = model.config.get_text_config()
    scale = getattr(config, "logit_scale", 1.0) / getattr(config, "logits_scaling", 1.0)
    return getattr(config, "final_logit_softcapping", None), scale


def head(model: Any) -> Head:
    """Return a model's output head with the soft cap and the factor."""
    layer, (softcap, scale) = model.get_output_embeddings(), after_head(model)
    return Head(layer.weight, layer.bias, scale, softcap)


def predictors(model: Any, scored: Scored) -> Predictors:
    """Return the predictions of every completion token."""
    return Predictors(scored.hidden, None if scored.are_logits else head(model))


def logits(model: Any, scored: Scored) -> Float[Tensor, "n v"]:
    """Return the model's logits for every completion token."""
    if scored.are_logits:
        return scored.hidden
    softcap, scale = after_head(model)
    raw = model.get_output_embeddings()(scored.hidden) * scale
    return raw if softcap is None else softcap * torch.tanh(raw / softcap)


# Which ways are right


def try_scoring(model: Any, switch: int) -> dict[str, Any]:
    """Return for which rows each way to score gives the log-probs and a LoRA's gradients of rows alone.

    packed, batched: those of this module. padded: TRL's batches of rows with padding on both sides. head: whether the
    logits are those of the output head with what `after_head` knows. lora: what peft says where it adapts no layer.
    """
    results, attention = dict[str, Any](), model.config._attn_implementation
    try:
        settings = LoraConfig(
            task_type="CAUSAL_LM", r=2, target_modules=adapters.targets(model), init_lora_weights=False
        )
        get_peft_model(model, settings)
        model(input_ids=torch.arange(5, 9)[None], use_cache=False)
    except Exception as error:
        results["lora"] = f"{type(error).__name__}: {error}"[:300]

    @cache
    def right(length: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Return the model's own numbers, under its own kind of attention, on whose name its pass may depend."""
        name = model.config._attn_implementation
        model.set_attn_implementation(attention)
        numbers = _numbers(model, length, partial(_alone, model))
        model.set_attn_implementation(name)
        return numbers

    def difference(ways: Mapping[str, Any], length: int) -> Tensor:
        """Return how log-probs and gradients differ from those of rows alone, gradients as parts of the largest."""
        numbers = _numbers(model, length, lambda trees: token_log_probs(model, _tried(model, trees, ways)))
        log_probs, gradients = right(length, model.dtype)
        return torch.cat([numbers[0] - log_probs, (numbers[1] - gradients) / gradients.abs().max()])

    wrong = trials.agrees(model, lambda: difference({HEAD: True}, 0))
    results[HEAD] = not wrong
    if wrong:
        results["not_head"] = wrong
    for way in (PACKED, BATCHED) if results[HEAD] else ():
        results[way], wrong = trials.try_lengths(model, partial(difference, {HEAD: True, way: "all"}), switch)
        if results[way] == "all":
            break
        named = way == PACKED and results[way]  # other rows pass under its name, too
        if named and (by_name := trials.agrees(model, lambda: difference({HEAD: True}, switch))):
            results[way], wrong = None, f"by the name of this attention {by_name}"
        if results[way] is None:
            model.set_attn_implementation(attention)
        results[f"not_{way}"] = wrong
    results[PADDED], wrong = trials.try_lengths(model, partial(_padded_difference, model), switch)
    return results


def _trees(switch: int) -> list[Tree]:
    """Return trees whose rows pass `switch`; without one, shorter ones than the shortest."""
    trees = [Tree([5, 6, 7, 8], ([9, 10, 11], [12, 13])), Tree([20, 21], ([22], [23, 24, 25, 26]))]
    room = (switch or small_models.SWITCH - 8) + 3
    long = [30 + i % 50 for i in range(room)]
    return [*trees, Tree(long, ([61, 62], [63, 64, 65])), Tree(long[3:9], (long[:room],))]


def _alone(model: Any, trees: Sequence[Tree]) -> Float[Tensor, " n"]:
    """Return the log-probs of all branches' tokens by the model's own pass of each row."""
    rows_logps = []
    for prompt, branch in ((tree.prompt, branch) for tree in trees for branch in tree.branches):
        table = model(input_ids=torch.tensor([prompt + branch]), use_cache=False).logits[0, len(prompt) - 1 : -1]
        rows_logps.append(table.float().log_softmax(-1).gather(-1, torch.tensor(branch)[:, None])[:, 0])
    return torch.cat(rows_logps)


def _tried(model: Any, trees: Sequence[Tree], ways: Mapping[str, Any]) -> Scored:
    if PACKED in ways and predicting(model, [(tree.prompt, tree.branches) for tree in trees], SCORED_TOKENS) is None:
        raise ValueError("not all layers attend through sdpa")
    return _scored(model, trees, ways)


def _numbers(model: Any, switch: int, log_probs: Callable[[Sequence[Tree]], Tensor]) -> tuple[Tensor, Tensor]:
    """Return log-probs of some trees, and the gradients of all that learns."""
    learning = [weight for weight in model.parameters() if weight.requires_grad]
    logps = log_probs(_trees(switch))
    loss = (logps * torch.linspace(0.5, 1.5, len(logps))).sum()
    gradients = torch.autograd.grad(loss, learning, allow_unused=True)
    return logps.detach(), torch.cat([each.flatten() for each in gradients if each is not None])


@torch.no_grad()
def _padded_difference(model: Any, switch: int) -> Tensor:
    """Return how log-probs of rows in a batch that is padded on both sides, as TRL's, differ from those alone."""
    rows = [(tree.prompt, branch) for tree in _trees(switch) for branch in tree.branches]
    start, right = (max(map(len, side)) for side in zip(*rows, strict=True))
    ids = torch.tensor([[0] * (start - len(p)) + p + b + [0] * (right - len(b)) for p, b in rows])
    mask = torch.tensor([[0] * (start - len(p)) + [1] * len(p + b) + [0] * (right - len(b)) for p, b in rows])
    table = model(input_ids=ids, attention_mask=mask, use_cache=False).logits[:, start - 1 : -1].float().log_softmax(-1)
    logps = table.gather(-1, ids[:, start:, None])[..., 0]
    joined = torch.cat([logps[i, : len(b)] for i, (_, b) in enumerate(rows)])
    return joined - _alone(model, [Tree(p, (b,)) for p, b in rows])
