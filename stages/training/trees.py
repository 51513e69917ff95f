"""Scoring several completions of one prompt: the prompt is computed once, and only completions reach the output head.

A tree is a prompt with branches; a branch sees the prompt and itself. The numbers are those of separate rows up to
rounding.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor
from trl.kernels import ChunkedLogProbFunction

from stages.losses.hidden import Head
from stages.training import packing

MAX_TOKENS = 16_384
"""Of one forward pass."""
VOCABULARY_CHUNK = 8192  # columns of logits; TRL takes 32,768, whose temporaries are gigabytes where Triton is not


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


def score(model: Any, trees: Sequence[Tree]) -> Scored:
    """Hidden states for all branches; gradients flow if they are enabled.

    All trees are one row where the model allows it (`packing`); else rows of like length go together.
    """
    branches, device = [branch for tree in trees for branch in tree.branches], next(model.parameters()).device
    hidden = packing.predicting(model, [(tree.prompt, tree.branches) for tree in trees], MAX_TOKENS)
    return Scored(
        _separately(model, trees) if hidden is None else hidden,
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


def _separately(model: Any, trees: Sequence[Tree]) -> Float[Tensor, "n h"]:
    """Every branch as a row of its own. Rows are causal and padding lies behind them, so no mask is needed."""
    rows = list(enumerate((tree.prompt, branch) for tree in trees for branch in tree.branches))
    parts: dict[int, Float[Tensor, "m h"]] = {}
    for bucket in packing.alike(rows, lambda row: sum(map(len, row[1])), lambda length: length, MAX_TOKENS):
        ids = _padded([prompt + branch[:-1] for _, (prompt, branch) in bucket], model)
        hidden = model.get_decoder()(input_ids=ids, use_cache=False).last_hidden_state  # [B, T, H]
        for states, (number, (prompt, branch)) in zip(hidden, bucket, strict=True):
            parts[number] = states[len(prompt) - 1 : len(prompt) - 1 + len(branch)]
    return torch.cat([parts[number] for number in range(len(rows))])


def _padded(rows: Sequence[list[int]], model: Any) -> Int[Tensor, "b t"]:
    width = max(map(len, rows))
    filled = [row + [0] * (width - len(row)) for row in rows]
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
