"""GRPO's groups as TRL batches them: scored together with the channels' rows, and cut to a budget of tokens."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from stages.training.trees import Scored, Tree, token_statistics

TOKEN_SUMS = ("cispo", "dapo", "vespo")
"""TRL's loss types whose denominator is that of the whole generation batch, so that parts of a batch add up."""


@dataclass(frozen=True)
class Groups:
    """One tree a distinct prompt; `rows` names the row of each branch in TRL's batch, whose `shape` is [B, T]."""

    trees: list[Tree]
    rows: list[int]
    shape: tuple[int, int]


def group(inputs: Mapping[str, Tensor]) -> Groups:
    """The rows of TRL's batch, padding removed, gathered by prompt."""
    prompts = _unpadded(inputs["prompt_ids"], inputs["prompt_mask"])
    completions = _unpadded(inputs["completion_ids"], inputs["completion_mask"])
    members: dict[tuple[int, ...], list[int]] = {}
    for row, prompt in enumerate(prompts):
        members.setdefault(tuple(prompt), []).append(row)
    trees = [Tree(list(prompt), tuple(completions[row] for row in rows)) for prompt, rows in members.items()]
    height, width = inputs["completion_ids"].shape
    return Groups(trees, [row for rows in members.values() for row in rows], (height, width))


def taken(left: list[Any], inputs: Mapping[str, Tensor], *, all_left: bool) -> list[Any]:
    """The rows of one completion that are in TRL's batch, taken out of `left`; at last all that are left.

    Scored beside the batch they cost nothing (`trees.score_together`), and TRL shuffles a step's rollouts before it
    cuts them into batches.
    """
    here = Counter((tuple(tree.prompt), tuple(branch)) for tree in group(inputs).trees for branch in tree.branches)
    found = []
    for row in list(left):
        key = (tuple(row.tree.prompt), tuple(row.tree.branches[0]))
        if all_left or here[key]:
            here[key] -= 1
            left.remove(row)
            found.append(row)
    return found


def _unpadded(ids: Tensor, mask: Tensor) -> list[list[int]]:
    return [row[kept.bool()].tolist() for row, kept in zip(ids.cpu(), mask.cpu(), strict=True)]


def statistics(
    model: Any, groups: Groups, scored: Scored, temperature: float
) -> tuple[Float[Tensor, "B T"], Float[Tensor, "B T"]]:
    """Log-probs and entropies (nats) of completions where TRL expects them, 0 at padding; no gradient to entropies."""
    logps, entropy = token_statistics(model, scored, temperature)
    rows = torch.tensor(groups.rows, device=logps.device)[scored.branch]  # [N]
    columns = torch.cat([torch.arange(n, device=logps.device) for n in scored.lengths.tolist()])  # [N]
    empty = torch.zeros(groups.shape, dtype=logps.dtype, device=logps.device)
    return empty.index_put((rows, columns), logps), empty.index_put((rows, columns), entropy.detach())


def pack(lengths: Sequence[int], max_tokens: int) -> list[list[int]]:
    """Indices of rows by length, in parts of at most `max_tokens` tokens, padding to a part's longest row included.

    A row longer than that is a part by itself.
    """
    parts: list[list[int]] = []
    for index in sorted(range(len(lengths)), key=lambda i: lengths[i]):  # the next row is the longest of its part
        if parts and lengths[index] * (len(parts[-1]) + 1) <= max_tokens:
            parts[-1].append(index)
        else:
            parts.append([index])
    return parts


def evened(parts: list[list[int]], count: int) -> list[list[int]]:
    """The same rows in `count` parts, no fewer than there are: the largest are halved; not more than there are rows."""
    parts = list(parts)
    while len(parts) < count:
        largest = max(range(len(parts)), key=lambda i: len(parts[i]))
        rows, half = parts[largest], len(parts[largest]) // 2
        parts[largest : largest + 1] = [rows[:half], rows[half:]]
    return parts


def row_lengths(inputs: Mapping[str, Tensor]) -> list[int]:
    """Tokens of each row of TRL's batch, prompt and completion, without padding."""
    lengths: list[int] = (inputs["prompt_mask"].sum(1) + inputs["completion_mask"].sum(1)).tolist()
    return lengths


def rows_of(inputs: Mapping[str, Any], rows: Sequence[int]) -> dict[str, Any]:
    """Some rows of TRL's batch, padded to the longest among them: prompts on the left, completions on the right."""
    height, width = inputs["completion_ids"].shape
    index = torch.tensor(rows, device=inputs["completion_ids"].device)
    prompt = int(inputs["prompt_mask"][index].sum(1).max())
    completion = int(inputs["completion_mask"][index].sum(1).max())
    part: dict[str, Any] = {}
    for name, value in inputs.items():
        if not isinstance(value, Tensor) or value.dim() == 0 or len(value) != height:
            part[name] = value
        elif name in ("prompt_ids", "prompt_mask"):
            part[name] = value[index][:, value.shape[1] - prompt :]
        else:
            part[name] = value[index][:, :completion] if value.dim() > 1 and value.shape[1] == width else value[index]
    return part


def share(loss_type: str, part: Mapping[str, Tensor], whole: Mapping[str, Tensor]) -> float:
    """What a part's loss, as TRL computes it, is multiplied by, so that the parts of a batch add up to its loss."""
    if loss_type in TOKEN_SUMS:
        return 1.0
    if loss_type == "bnpo":
        return _tokens(part) / max(_tokens(whole), 1.0)
    return len(part["completion_ids"]) / len(whole["completion_ids"])


def _tokens(inputs: Mapping[str, Tensor]) -> float:
    mask = inputs["completion_mask"] * inputs["tool_mask"] if "tool_mask" in inputs else inputs["completion_mask"]
    return float(mask.sum())
