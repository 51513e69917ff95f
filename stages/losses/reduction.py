"""Reductions: divergence entries over labelled positions; verl's modes of averaging over tokens and sequences."""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from stages.errors import UsageError
from stages.losses.chunked import token_sum
from stages.losses.shapes import Logits, RowTable, Scalar, TokenIds, TokenMask, TokenValues, Values

IGNORED = -100

Entries = Callable[[Tensor, Tensor], Tensor]
"""(student logits [..., v], teacher logits [..., v]) -> divergence entries [..., support]."""

REDUCTIONS = ("batchmean", "sum", "mean", "none")
AGG_MODES = ("token-mean", "token-sum", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm")


def reduced_entries(
    entries: Entries,
    student_logits: Logits,
    teacher_logits: Logits,
    labels: TokenIds | None,
    *,
    reduction: str,
    num_items: Tensor | int | None,
    min_divisor: int,
    chunk_tokens: int | None,
) -> Values:
    """Entries over the positions whose label is not -100 (all without labels), reduced; gradient to the student.

    batchmean  sum / number of positions, at least min_divisor (without labels: / b)
    sum        over positions and entries
    mean       over positions and entries
    none       the entries [n, support], or [b, t, support] without labels

    num_items replaces the divisor, whatever the reduction. mean and none hold every entry; the others hold chunk_tokens
    of them (None: all). Raises UsageError for an unknown reduction. Serves the parity check only.
    """
    if reduction not in REDUCTIONS:
        raise UsageError(f"reduction is {reduction!r}; choose one of {', '.join(REDUCTIONS)}")
    teacher_logits = teacher_logits.detach()
    if num_items is None and reduction in ("mean", "none"):
        rows = slice(None) if labels is None else labels != IGNORED
        values = entries(student_logits[rows], teacher_logits[rows])
        return values.mean() if reduction == "mean" else values
    active = torch.ones_like(student_logits[..., 0], dtype=torch.bool) if labels is None else labels != IGNORED
    weights = active.flatten().to(torch.promote_types(student_logits.dtype, torch.float32))
    per_token = partial(_row_sums, entries)
    total, _ = token_sum(
        per_token, student_logits.flatten(0, 1), teacher_logits.flatten(0, 1), weights, chunk_tokens=chunk_tokens
    )
    if num_items is None and reduction == "batchmean":
        num_items = weights.sum() if labels is not None else weights.new_tensor(len(student_logits))
        num_items = num_items.clamp_min(min_divisor)
    return total if num_items is None else total / num_items


def _row_sums(entries: Entries, student: Tensor, teacher: Tensor) -> RowTable:
    return entries(student, teacher).sum(-1, keepdim=True)


def aggregation_weights(
    mask: TokenMask,
    mode: str,
    *,
    dtype: torch.dtype = torch.float32,
    min_tokens: float = 0.0,
    norm_by_sequences: bool = True,
) -> TokenValues:
    """Weights w with sum(loss * w) = verl's agg_loss(loss, mask, mode); give the dtype of the losses.

    token-mean               mask / sum(mask), divisor at least min_tokens (0: NaN on an empty mask, as upstream)
    token-sum                mask
    seq-mean-token-sum       mask / number of sequences with a token
    seq-mean-token-mean      mask / (tokens of the sequence + 1e-8) / number of sequences with a token
    seq-mean-token-sum-norm  mask / t, and / number of sequences with a token if norm_by_sequences (verl main does so,
                             lasgroup/SDPO does not)

    The sequence modes give NaN when no sequence has a token, as upstream. Raises UsageError for an unknown mode.
    Source: verl-project/verl 1dda039 core_algos.py:1140-1206; lasgroup/SDPO 0e6d510 core_algos.py:1027-1082.
    """
    tokens = mask.sum(-1, keepdim=True)
    sequences = (tokens > 0).sum()
    weights = mask.to(dtype)
    if mode == "token-mean":
        return weights / tokens.sum().clamp_min(min_tokens)
    if mode == "token-sum":
        return weights
    if mode == "seq-mean-token-sum":
        return weights / sequences
    if mode == "seq-mean-token-mean":
        return weights / (tokens + 1e-8).to(dtype) / sequences
    if mode == "seq-mean-token-sum-norm":
        return weights / mask.shape[-1] / (sequences if norm_by_sequences else 1)
    raise UsageError(f"loss_agg_mode is {mode!r}; choose one of {', '.join(AGG_MODES)}")


def aggregate(
    losses: TokenValues, mask: TokenMask, mode: str, *, min_tokens: float = 0.0, norm_by_sequences: bool = True
) -> Scalar:
    """Sum of losses * aggregation_weights(...): verl's agg_loss.

    A NaN outside the mask is dropped in token-mean and token-sum; in the sequence modes only where the whole sequence
    is masked, as upstream.
    """
    weights = aggregation_weights(
        mask, mode, dtype=losses.dtype, min_tokens=min_tokens, norm_by_sequences=norm_by_sequences
    )
    counted = mask != 0 if mode.startswith("token") else mask.sum(-1, keepdim=True) != 0
    return (torch.where(counted, losses, 0.0) * weights).sum()


def masked_mean(values: TokenValues, mask: TokenMask) -> Scalar:
    """Sum over the mask / (count + 1e-8), NaNs outside dropped. Source: verl 1dda039 utils/torch_functional.py."""
    return (torch.where(mask != 0, values, 0.0) * mask).sum() / (mask.sum() + 1e-8)


def mean_of_sequence_means(losses: TokenValues, mask: TokenMask) -> Scalar:
    """Mean over ALL sequences of their token mean: one without tokens adds 0 and counts. Source: TRL 1.16 SDPO.

    Serves the parity check only.
    """
    return ((losses * mask).sum(-1) / mask.sum(-1).clamp(min=1.0)).mean()
