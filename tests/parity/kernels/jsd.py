"""Generalised Jensen-Shannon divergence: OPSD's form; TRL's GKD and GOLD are the same with another divisor.

Serves the parity check and `benchmarks/losses.py` only: no channel uses it (SDPO's has its own form in sdpo.py).
"""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional as F

from stages.errors import UsageError
from stages.losses.hidden import elementwise_divergence, widened
from stages.losses.reduction import (
    DEFAULT_CHUNK_TOKENS,
    IGNORED,
    Distribution,
    EntryValues,
    Logits,
    RowTable,
    Scalar,
    TokenIds,
    TokenMask,
    Values,
    token_log_probs,
    token_sum,
)

Entries = Callable[[Tensor, Tensor], Tensor]
"""(student logits [..., v], teacher logits [..., v]) -> divergence entries [..., support]."""


REDUCTIONS = ("batchmean", "sum", "mean", "none")


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


SMALLEST_PROB = 1e-8


def jsd_entries(
    student_logits: Distribution,
    teacher_logits: Distribution,
    *,
    beta: float = 0.5,
    temperature: float = 1.0,
    top_k: int | None = None,
    token_clip: float | None = None,
    logits_are_probs: bool = False,
) -> EntryValues:
    """The divergence per (token, vocabulary entry): [..., v], or [..., k] with top_k. No T^2 factor.

    top_k: the teacher's k largest logits, both sides renormalised over them (None or 0: the whole vocabulary).
    token_clip: upper bound on every entry, before any sum; entries above it have no gradient, and the sum may be
    negative.
    logits_are_probs: inputs are probabilities, floored at 1e-8, not renormalised; temperature and top_k have no effect
    then. Half-precision inputs are computed in float32, where upstream stays in half precision.
    Serves the parity check only.
    Source: siyan-zhao/OPSD 590ec26 opsd_trainer.py:374-464; token_clip 401b849.
    """
    student, teacher = widened(student_logits), widened(teacher_logits)
    if logits_are_probs:
        student, teacher = student.clamp_min(SMALLEST_PROB).log(), teacher.clamp_min(SMALLEST_PROB).log()
    else:
        student, teacher = _tempered_log_probs(student, teacher, temperature, top_k)
    entries = elementwise_divergence(student, teacher, beta)
    return entries if token_clip is None else entries.clamp(max=token_clip)


def _tempered_log_probs(
    student: Tensor, teacher: Tensor, temperature: float, top_k: int | None
) -> tuple[Tensor, Tensor]:
    student, teacher = student / temperature, teacher / temperature
    if top_k:
        support = teacher.topk(top_k, dim=-1).indices
        student, teacher = student.gather(-1, support), teacher.gather(-1, support)
    return F.log_softmax(student, dim=-1), F.log_softmax(teacher, dim=-1)


def generalized_jsd(
    student_logits: Logits,
    teacher_logits: Logits,
    labels: TokenIds | None = None,
    *,
    beta: float = 0.5,
    temperature: float = 1.0,
    reduction: str = "batchmean",
    top_k: int | None = None,
    token_clip: float | None = None,
    logits_are_probs: bool = False,
    num_items: Tensor | int | None = None,
    min_divisor: int = 0,
    chunk_tokens: int | None = DEFAULT_CHUNK_TOKENS,
) -> Values:
    """JSD over the positions whose label is not -100, in nats; gradient to the student only.

    Formula in jsd_entries, reductions in reduced_entries. beta 0 is forward KL, 1 reverse KL. Raises UsageError for an
    unknown reduction.
    min_divisor: OPSD divides by 0 on an empty mask and returns NaN (the default here); TRL's GKD and GOLD use 1 and
    return 0. Positions are left out by index: a NaN at an ignored position does no harm. A teacher logit of -inf gives
    NaN, a student's NaN or inf. Serves the parity check only.
    Source: siyan-zhao/OPSD 590ec26, 401b849 opsd_trainer.py; TRL 1.16 experimental/gkd and experimental/gold.
    """
    entries = partial(
        jsd_entries,
        beta=beta,
        temperature=temperature,
        top_k=top_k,
        token_clip=token_clip,
        logits_are_probs=logits_are_probs,
    )
    return reduced_entries(
        entries,
        student_logits,
        teacher_logits,
        labels,
        reduction=reduction,
        num_items=num_items,
        min_divisor=min_divisor,
        chunk_tokens=chunk_tokens,
    )


def divergence_loss(
    student_logits: Logits,
    teacher_logits: Logits,
    mask: TokenMask,
    *,
    beta: float = 0.5,
    temperature: float = 1.0,
    chunk_tokens: int | None = DEFAULT_CHUNK_TOKENS,
) -> Scalar:
    """Mean JSD a token over mask != 0, for training: 0 on an empty mask, where OPSD itself returns NaN.

    For programs that import it: no channel uses it.
    """
    labels = torch.where(mask != 0, 0, IGNORED)
    return generalized_jsd(
        student_logits,
        teacher_logits,
        labels,
        beta=beta,
        temperature=temperature,
        min_divisor=1,
        chunk_tokens=chunk_tokens,
    )


def sampled_token_reverse_kl(
    student_logits: Logits, teacher_logits: Logits, token_ids: TokenIds, labels: TokenIds, *, temperature: float = 1.0
) -> Scalar:
    """-mean( sg[lT - lS] lS ) over the sampled tokens whose label is not -100: reverse KL as a policy gradient.

    Never clipped; NaN on an empty mask, as upstream. Serves the parity check only.
    Source: siyan-zhao/OPSD 590ec26 opsd_trainer.py:611-737, use_thinking_machines_loss.
    """
    student = token_log_probs(student_logits, token_ids, temperature=temperature)
    teacher = token_log_probs(teacher_logits, token_ids, temperature=temperature)
    active = labels != IGNORED
    return -((teacher - student).detach()[active] * student[active]).mean()
