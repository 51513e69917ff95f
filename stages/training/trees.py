"""Scoring several completions of one prompt: the prompt is computed once, and only completions reach the output head.

A tree is a prompt with branches; a branch sees the prompt and itself. The numbers are those of separate rows up to
rounding.
"""

from collections.abc import Callable, Sequence
from copy import copy
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, TypeVar

import torch
from jaxtyping import Float, Int
from torch import Tensor
from trl.kernels import ChunkedLogProbFunction

from stages.losses.hidden import Head

MAX_TOKENS = 16_384
"""Tokens, padding included, in one forward pass."""
VOCABULARY_CHUNK = 8192  # columns of logits; TRL takes 32,768, whose temporaries are gigabytes where Triton is not
Item = TypeVar("Item")


@dataclass(frozen=True)
class Tree:
    """Token ids of a prompt and of each of its completions; neither may be empty."""

    prompt: list[int]
    branches: tuple[list[int], ...]

    @property
    def num_tokens(self) -> int:
        """Of all rows, the prompt counted in each."""
        return sum(len(self.prompt) + len(branch) for branch in self.branches)


@dataclass(frozen=True)
class Scored:
    """Hidden states that predict the branches' tokens, in the order of trees, branches, tokens.

    hidden: [N, H]. targets: [N] token ids. branch: [N] index of the branch, counted over all trees.
    """

    hidden: Float[Tensor, "n h"]
    targets: Int[Tensor, " n"]
    branch: Int[Tensor, " n"]
    num_branches: int

    def per_branch(self, values: Float[Tensor, " n"]) -> Float[Tensor, " b"]:
        """Sums of token values over each branch."""
        return torch.zeros(self.num_branches, dtype=values.dtype, device=values.device).index_add(
            0, self.branch, values
        )

    @property
    def lengths(self) -> Int[Tensor, " b"]:
        """Tokens of each branch."""
        return torch.bincount(self.branch, minlength=self.num_branches)


@dataclass(frozen=True)
class Branch:
    """One branch behind its prompt; `number` counts branches over all trees."""

    number: int
    prompt: list[int]
    ids: list[int]


def score(model: Any, trees: Sequence[Tree]) -> Scored:
    """Hidden states for all branches; gradients flow if they are enabled.

    Rows of like length go together, so little is padded.
    """
    alone, families = _sorted(trees, _can_share(model))
    parts: dict[int, Float[Tensor, "m h"]] = {}
    for rows in _buckets(alone, lambda row: len(row.prompt) + len(row.ids), lambda row: 1):
        parts |= _separately(model, rows)
    for bucket in _buckets(families, lambda rows: len(rows[0].prompt), len):
        parts |= _behind_shared_prompts(model, bucket)
    branches, device = [branch for tree in trees for branch in tree.branches], parts[0].device
    return Scored(
        torch.cat([parts[number] for number in range(len(branches))]),
        torch.tensor([token for branch in branches for token in branch], device=device),
        torch.tensor([i for i, branch in enumerate(branches) for _ in branch], device=device),
        len(branches),
    )


def score_together(model: Any, parts: Sequence[Sequence[Tree]]) -> list[Scored]:
    """`score` of each part, all in one pass in which equal prompts are one and equal branches behind them, too."""
    families: dict[tuple[int, ...], dict[tuple[int, ...], None]] = {}
    keys = [[(tuple(tree.prompt), tuple(branch)) for tree in part for branch in tree.branches] for part in parts]
    for prompt, branch in (key for part in keys for key in part):
        families.setdefault(prompt, {})[branch] = None
    scored = score(model, [Tree(list(p), tuple(map(list, branches))) for p, branches in families.items()])
    distinct = [(prompt, branch) for prompt, branches in families.items() for branch in branches]
    starts = dict(zip(distinct, accumulate((len(branch) for _, branch in distinct), initial=0), strict=False))
    return [_picked(scored, [(starts[key], len(key[1])) for key in part]) for part in keys]


def _picked(scored: Scored, branches: Sequence[tuple[int, int]]) -> Scored:
    """Some branches of what was scored, each by its first row and its length; one may come more than once."""
    device = scored.targets.device
    rows = torch.tensor([start + i for start, length in branches for i in range(length)], device=device).long()
    numbers = torch.tensor([n for n, (_, length) in enumerate(branches) for _ in range(length)], device=device).long()
    return Scored(scored.hidden.index_select(0, rows), scored.targets[rows], numbers, len(branches))


def _can_share(model: Any) -> bool:
    """Whether a prompt's keys and values can be kept: not with recomputed activations, nor in a recurrent state."""
    recomputes = any(getattr(module, "gradient_checkpointing", False) for module in model.modules())
    return not (recomputes and model.training) and not getattr(model, "_is_stateful", False)


def _sorted(trees: Sequence[Tree], shares: bool) -> tuple[list[Branch], list[list[Branch]]]:
    """Rows that are scored by themselves, and families of rows with one prompt."""
    alone: list[Branch] = []
    families: list[list[Branch]] = []
    number = 0
    for tree in trees:
        rows = [Branch(number + i, tree.prompt, branch) for i, branch in enumerate(tree.branches)]
        number += len(rows)
        if shares and len(rows) > 1:
            families.append(rows)
        else:
            alone += rows
    return alone, families


def _buckets(items: Sequence[Item], length: Callable[[Item], int], rows: Callable[[Item], int]) -> list[list[Item]]:
    """Items of like length together, none padded by more than half, no bucket above MAX_TOKENS."""
    buckets: list[list[Item]] = []
    for item in sorted(items, key=length):
        fits = bool(buckets) and length(item) <= 1.5 * length(buckets[-1][0])
        if fits and length(item) * sum(map(rows, [*buckets[-1], item])) <= MAX_TOKENS:
            buckets[-1].append(item)
        else:
            buckets.append([item])
    return buckets


def _separately(model: Any, rows: list[Branch]) -> dict[int, Float[Tensor, "m h"]]:
    """Predicting hidden states of each row. They are causal and padding lies behind them, so no mask is needed."""
    ids = _padded([row.prompt + row.ids[:-1] for row in rows], model)
    hidden = model.get_decoder()(input_ids=ids, use_cache=False).last_hidden_state  # [B, T, H]
    ends = [(row, len(row.prompt) - 1) for row in rows]
    return {row.number: states[end : end + len(row.ids)] for states, (row, end) in zip(hidden, ends, strict=True)}


def _behind_shared_prompts(model: Any, families: list[list[Branch]]) -> dict[int, Float[Tensor, "m h"]]:
    """Prompts once, padded on the left; then all branches behind their keys and values, which pass gradients on."""
    prompts = [rows[0].prompt for rows in families]
    ids = _padded(prompts, model, left=True)
    ends = torch.tensor([len(prompt) for prompt in prompts], device=ids.device)
    first = (ids.shape[1] - ends)[:, None]
    places = torch.arange(ids.shape[1], device=ids.device) - first  # [B, P], negative at padding
    mask = (places >= 0).long()
    prefix = model.get_decoder()(input_ids=ids, attention_mask=mask, position_ids=places.clamp(min=0), use_cache=True)
    members = [(family, row) for family, rows in enumerate(families) for row in rows]
    parts: dict[int, Float[Tensor, "m h"]] = {}
    for bucket in _buckets(members, lambda member: len(member[1].ids), lambda member: 1):
        family = torch.tensor([family for family, _ in bucket], device=ids.device)
        rows = [row for _, row in bucket]
        following = _following(model, rows, _selected(prefix.past_key_values, family), mask[family], ends[family])
        leading = prefix.last_hidden_state[family, -1:]  # predicts the first token of each branch
        hidden = torch.cat([leading, following], 1)
        parts |= {row.number: states[: len(row.ids)] for states, row in zip(hidden, rows, strict=True)}
    return parts


def _following(
    model: Any, rows: list[Branch], prefix: Any, mask: Int[Tensor, "b p"], ends: Int[Tensor, " b"]
) -> Float[Tensor, "b t h"]:
    """Hidden states of all tokens of the branches but the last, behind their prompts."""
    ids = _padded([row.ids[:-1] for row in rows], model)
    if ids.shape[1] == 0:
        return torch.empty(
            len(rows), 0, model.config.get_text_config().hidden_size, dtype=model.dtype, device=ids.device
        )
    places = ends[:, None] + torch.arange(ids.shape[1], device=ids.device)
    seen = torch.cat([mask, torch.ones_like(ids)], 1)
    return model.get_decoder()(
        input_ids=ids, attention_mask=seen, position_ids=places, past_key_values=prefix, use_cache=True
    ).last_hidden_state


def _selected(prefix: Any, rows: Int[Tensor, " b"]) -> Any:
    """A cache with these rows of another, which stays as it is."""
    chosen = copy(prefix)
    chosen.layers = [copy(layer) for layer in prefix.layers]
    chosen.batch_select_indices(rows)
    return chosen


def _padded(rows: Sequence[list[int]], model: Any, left: bool = False) -> Int[Tensor, "b t"]:
    width = max(map(len, rows))
    pads = [[0] * (width - len(row)) for row in rows]
    filled = [pad + row if left else row + pad for row, pad in zip(rows, pads, strict=True)]
    return torch.tensor(filled, dtype=torch.long, device=next(model.parameters()).device)


def token_statistics(
    model: Any, scored: Scored, temperature: float = 1.0
) -> tuple[Float[Tensor, " n"], Float[Tensor, " n"]]:
    """Log-prob of every completion token, and the entropy of the distribution it was drawn from; nats, float32."""
    logps, entropy = _through_head(model, scored, temperature, ("entropy",))
    return logps, entropy


def token_log_probs(model: Any, scored: Scored, temperature: float = 1.0) -> Float[Tensor, " n"]:
    """Natural log-prob of every completion token, float32."""
    return _through_head(model, scored, temperature, ())[0]


def _through_head(model: Any, scored: Scored, temperature: float, outputs: tuple[str, ...]) -> tuple[Any, Any]:
    """Log-probs, and entropies or None; [N, V] logits are never held. Source: TRL 1.16 kernels/chunked_logprob.py.

    That kernel answers in float32 whatever it is given; a float64 model, which serves checks, is answered in float64.
    """
    if scored.hidden.dtype == torch.float64:
        table = (logits(model, scored) / temperature).log_softmax(-1)
        return table.gather(-1, scored.targets[:, None])[:, 0], -(table.exp() * table).sum(-1)
    layer, (softcap, scale) = model.get_output_embeddings(), after_head(model)
    logps, entropy, *_ = ChunkedLogProbFunction.apply(
        scored.hidden, layer.weight, layer.bias, scored.targets, temperature, VOCABULARY_CHUNK, softcap, scale, outputs
    )
    return logps, entropy


def after_head(model: Any) -> tuple[float | None, float]:
    """A model's soft cap (Gemma) and factor (Cohere multiplies, Granite divides) on the numbers of its output head."""
    config = model.config.get_text_config()
    scale = getattr(config, "logit_scale", 1.0) / getattr(config, "logits_scaling", 1.0)
    return getattr(config, "final_logit_softcapping", None), scale


def head(model: Any) -> Head:
    """A model's output head with what it does after it."""
    layer, (softcap, scale) = model.get_output_embeddings(), after_head(model)
    return Head(layer.weight, layer.bias, scale, softcap)


def logits(model: Any, scored: Scored) -> Float[Tensor, "n v"]:
    """The model's logits for every completion token."""
    softcap, scale = after_head(model)
    raw = model.get_output_embeddings()(scored.hidden) * scale
    return raw if softcap is None else softcap * torch.tanh(raw / softcap)
