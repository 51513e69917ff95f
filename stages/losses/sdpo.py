"""SDPO self-distillation: the policy is its own teacher in a context that holds a hint.

In order: the loss from logits; teachers made from the student (moving averages of its weights, a trust region in logit
space); the loss from hidden states and output heads, where no model's logits exist beyond a chunk of tokens.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional as F

from stages.losses.hidden import (
    Predictors,
    chunk_size,
    elementwise_divergence,
    logits_sum,
    renormalised,
    widened,
    with_tail,
)
from stages.losses.reduction import (
    DEFAULT_CHUNK_TOKENS,
    Distribution,
    Logits,
    PerPosition,
    RowTable,
    RowValues,
    Scalar,
    TokenMask,
    TokenValues,
    Values,
    token_sum,
)

LARGEST_LOG_RATIO = 20.0

Mass = Literal["all", "tail", "renormalised"]
"""The mass outside the given entries: there is none; it forms one more entry; it is divided out."""


def distribution_loss(student: Distribution, teacher: Distribution, *, alpha: float, mass: Mass = "all") -> PerPosition:
    """Return the divergence a token between log-probs on a support: alpha 0 forward KL, 1 reverse KL, else JSD.

    Source: lasgroup/SDPO 0e6d510 core_algos.py:1085-1192; the same as TRL 1.16 experimental/sdpo/loss_utils.py.
    """
    reshape = {"all": lambda log_probs: log_probs, "tail": with_tail, "renormalised": renormalised}[mass]
    return elementwise_divergence(reshape(student), reshape(teacher), alpha).sum(-1)


def importance_weights(student: Values, old: Values, clip: float) -> Values:
    """Return min(exp(clamp(sg[lS - l_old], -20, 20)), clip) on the sampled token: clipped above, no gradient."""
    # Clamped before exp, as upstream: the upper bound prevents an overflow, the lower one keeps every weight above 0.
    return (student - old).detach().clamp(-LARGEST_LOG_RATIO, LARGEST_LOG_RATIO).exp().clamp(max=clip)


def logits_loss(
    student_logits: Distribution,
    teacher_logits: Distribution,
    *,
    alpha: float,
    top_k: int | None = None,
    add_tail: bool = True,
    temperature: float = 1.0,
) -> PerPosition:
    """Return distribution_loss of logits / temperature; with top_k on the STUDENT's k likeliest tokens (at most v).

    Log-probs are those of the whole vocabulary.
    Source: lasgroup/SDPO 0e6d510 dp_actor.py _forward_micro_batch; TRL 1.16 experimental/sdpo/loss_utils.py.
    """
    logits = widened(student_logits) / temperature
    student, teacher = F.log_softmax(logits, dim=-1), F.log_softmax(widened(teacher_logits) / temperature, dim=-1)
    if top_k is None:
        return distribution_loss(student, teacher, alpha=alpha)
    # The student's tokens and not the teacher's, as upstream's dp_actor: here EOPD differs.
    support = logits.topk(min(top_k, logits.shape[-1]), dim=-1).indices
    mass: Mass = "tail" if add_tail else "renormalised"
    return distribution_loss(student.gather(-1, support), teacher.gather(-1, support), alpha=alpha, mass=mass)


def self_distillation_loss(
    student_logits: Logits,
    teacher_logits: Logits,
    weights: TokenMask,
    *,
    alpha: float = 0.5,
    top_k: int | None = None,
    add_tail: bool = True,
    temperature: float = 1.0,
    chunk_tokens: int | None = DEFAULT_CHUNK_TOKENS,
    skip_masked: bool = True,
) -> tuple[Scalar, TokenValues]:
    """Sum over tokens of weight * logits_loss, and the loss per token (detached, 0 where skipped), in nats.

    The gradient reaches the student only. weights decide the reduction: aggregation_weights(mask, "token-mean",
    min_tokens=1) for lasgroup's, mask / tokens / b for TRL's, times importance_weights for the clip. Tokens of weight 0
    are skipped, so a NaN there does no harm and an empty mask gives 0.
    """
    loss = partial(logits_loss, alpha=alpha, top_k=top_k, add_tail=add_tail, temperature=temperature)
    rows = student_logits.flatten(0, 1), teacher_logits.flatten(0, 1)
    weights = weights.flatten().to(torch.promote_types(student_logits.dtype, torch.float32))
    total, table = token_sum(
        lambda student, teacher: loss(student, teacher).unsqueeze(-1),
        *rows,
        weights,
        chunk_tokens=chunk_tokens,
        skip_masked=skip_masked,
    )
    return total, table[:, 0].unflatten(0, student_logits.shape[:2])


@torch.no_grad()
def update_average(teacher: Sequence[Tensor], student: Sequence[Tensor], student_share: float) -> None:
    """Set teacher = (1 - student_share) * teacher + student_share * student in place; a share of 0 changes nothing.

    OPSD: the teacher starts as a copy of the student at the first step's end (that call only copies), student_share is
    1 - ema_decay, with ema_decay 0.999. SDPO: once per policy update, skipped if no gradient was finite, student_share
    0.05.
    Source: siyan-zhao/OPSD 401b849 opsd_trainer.py _update_ema; lasgroup/SDPO 0e6d510 dp_actor.py:132-151
    _update_teacher.
    """
    if student_share == 0.0:
        return  # without touching the tensors: NaN * 0 of a broken step would be NaN
    for average, weight in zip(teacher, student, strict=True):
        average.mul_(1.0 - student_share).add_(weight.to(average.device), alpha=student_share)


def trust_region_logits(reference_logits: Values, student_logits: Values, student_share: float) -> Values:
    """Return lerp(reference, student, student_share) by entry. Source: lasgroup/SDPO 0e6d510 dp_actor.py:52-64."""
    return torch.lerp(reference_logits, student_logits, student_share)


@dataclass(frozen=True)
class SelfTaught:
    """The teacher: one model's predictions or, in a trust region, lerp(kept, current, share) of two models' logits."""

    kept: Predictors
    current: Predictors | None = None
    share: float = 0.0


def sdpo_from_hidden(
    student: Predictors,
    teacher: SelfTaught,
    weights: RowValues,
    *,
    alpha: float = 0.5,
    top_k: int | None = None,
    add_tail: bool = True,
    temperature: float = 1.0,
    chunk_tokens: int | None = None,
) -> tuple[Scalar, RowValues]:
    """Return self_distillation_loss over N tokens: sum of weight * loss, and the loss a token (detached), in nats.

    Tokens of weight 0 are not computed, and their loss is given as 0. Gradient to the student's hidden states and head
    alone. The two models of a trust region share a vocabulary. chunk_tokens None: half of what `logits_sum` takes,
    as the mixture has twice as many temporaries.
    """
    vocabulary = len(student.head.weight)
    chunk_tokens = chunk_tokens or chunk_size(len(weights), vocabulary, weights.device, tables=16)
    loss = partial(logits_loss, alpha=alpha, top_k=top_k, add_tail=add_tail, temperature=temperature)
    current = teacher.current
    beside = () if current is None else (current.hidden.detach(),)

    def per_token(own: Tensor, kept: Tensor, *rows: Tensor) -> RowTable:
        if current is not None:
            with torch.no_grad():
                # Cut to the vocabulary that both heads share: padding rows of a head are no tokens.
                kept = trust_region_logits(kept, current.head.logits(rows[0])[..., : kept.shape[-1]], teacher.share)
        return loss(own, kept).unsqueeze(-1)

    total, table = logits_sum(per_token, student, teacher.kept, weights, *beside, chunk_tokens=chunk_tokens)
    return total, table[:, 0]
