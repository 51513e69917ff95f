"""Scoring: hidden states, log-probs and entropies of several completions of one prompt, in one pass of a model.

A tree is a prompt with branches; a branch sees the prompt and itself. `score` gives the hidden states that predict the
branches' tokens, and only these reach the output head (`token_log_probs`). The numbers are those of separate rows up to
rounding. packing.py computes each prompt once and pads nothing, where a model's attention allows it.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor
from trl.kernels import ChunkedLogProbFunction

from composer_stages.errors import UsageError
from composer_stages.losses.tokens import Head
from composer_stages.training.memory import SCORED_TOKENS, VOCABULARY_CHUNK
from composer_stages.training.packing import by_length, on_device, predicting
from composer_stages.words import Sentence

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

    hidden: [N, H]. targets: [N] token ids. branch: [N] index of the branch, counted over all trees. sizes: tokens of
    each branch.
    """

    hidden: Float[Tensor, "n h"]
    targets: Int[Tensor, " n"]
    branch: Int[Tensor, " n"]
    sizes: tuple[int, ...]

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

    All trees are one row where the model can be packed; else rows of like length are batched.
    """
    branches, device = [branch for tree in trees for branch in tree.branches], next(model.parameters()).device
    hidden = predicting(model, [(tree.prompt, tree.branches) for tree in trees], SCORED_TOKENS)
    targets, numbers = (
        torch.tensor(values, dtype=torch.long)
        for values in (
            [token for branch in branches for token in branch],
            [i for i, branch in enumerate(branches) for _ in branch],
        )
    )
    targets, numbers = on_device([targets, numbers], device)
    return Scored(_separately(model, trees) if hidden is None else hidden, targets, numbers, tuple(map(len, branches)))


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
        Scored(scored.hidden.index_select(0, index), scored.targets[index], number, tuple(len(b) for _, b in part))
        for part, index, number in zip(keys, placed[::2], placed[1::2], strict=True)
    ]


def _separately(model: Any, trees: Sequence[Tree]) -> Float[Tensor, "n h"]:
    """Score every branch as a row of its own. Rows are causal and padding follows them, so no mask is needed."""
    rows = list(enumerate((tree.prompt, branch) for tree in trees for branch in tree.branches))
    device = next(model.parameters()).device
    parts, order = list[Tensor](), list[int]()
    for bucket in by_length(rows, lambda row: sum(map(len, row[1])), lambda length: length, SCORED_TOKENS):
        inputs = [prompt + branch[:-1] for _, (prompt, branch) in bucket]
        width = max(map(len, inputs))
        places = [
            row * width + len(prompt) - 1 + i
            for row, (_, (prompt, branch)) in enumerate(bucket)
            for i in range(len(branch))
        ]
        padded = torch.tensor([row + [0] * (width - len(row)) for row in inputs], dtype=torch.long)
        ids, positions = on_device([padded, torch.tensor(places)], device)
        hidden = model.get_decoder()(input_ids=ids, use_cache=False).last_hidden_state  # [B, T, H]
        parts.append(hidden.flatten(0, 1).index_select(0, positions))
        order += [number for number, (_, branch) in bucket for _ in branch]
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
    if scored.hidden.dtype == torch.float64:
        table = (logits(model, scored) / temperature).log_softmax(-1)
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


@torch.no_grad()
def require_head(model: Any, name: str, remedy: str | None = None) -> None:
    """Raise `UsageError` where a model transforms its logits after the output head in a way that `after_head` lacks.

    What architectures do after the head has no common name in transformers, so it is tried on a few tokens.
    """
    ids = torch.arange(8, device=next(model.parameters()).device)
    model_logits = model(input_ids=ids[None], use_cache=False).logits[0]
    hidden = model.get_decoder()(input_ids=ids[None], use_cache=False).last_hidden_state[0]
    head_logits = logits(model, Scored(hidden, ids, ids, (len(ids),)))
    roundings = 2.0**-5 if model_logits.dtype in (torch.bfloat16, torch.float16) else 1e-4
    if (model_logits - head_logits).abs().max() > roundings * model_logits.abs().max():
        kind = type(model).__name__
        raise UsageError(
            "training.unknown-output-head",
            name=name,
            kind=kind,
            remedy=remedy or Sentence("training.train-without-channels"),
        )


def head(model: Any) -> Head:
    """Return a model's output head with the soft cap and the factor."""
    layer, (softcap, scale) = model.get_output_embeddings(), after_head(model)
    return Head(layer.weight, layer.bias, scale, softcap)


def logits(model: Any, scored: Scored) -> Float[Tensor, "n v"]:
    """Return the model's logits for every completion token."""
    softcap, scale = after_head(model)
    raw = model.get_output_embeddings()(scored.hidden) * scale
    return raw if softcap is None else softcap * torch.tanh(raw / softcap)
