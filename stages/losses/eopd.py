"""Entropy-aware on-policy distillation (EOPD): reverse KL everywhere, plus forward KL where the teacher is unsure."""

from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional as F

from stages.losses.hidden import Predictors, logits_sum, widened
from stages.losses.reduction import (
    Logits,
    PerPosition,
    RowIds,
    RowTable,
    RowValues,
    Scalar,
    Support,
    TokenMask,
    TokenValues,
    aggregate,
    masked_mean,
)

METRICS_THRESHOLD = 0.8  # nats; upstream's high_entropy_threshold, which only its logged values read
TINY = 1e-8  # upstream's; added to the number of tokens, so that an empty mask gives 0 for the second term alone


@dataclass(frozen=True)
class EopdOptions:
    """entropy_threshold in nats: a token at it is in. coef scales the forward KL; clip_* bound the policy ratio."""

    clip_low: float = 0.2
    clip_high: float = 0.2
    coef: float = 1.0
    entropy_threshold: float = 0.8
    agg_mode: str = "token-mean"


@dataclass(frozen=True)
class SoftTargets:
    """Teacher's entropy, its k likeliest tokens' log-probs (renormalised), and the student's at the same tokens."""

    teacher_entropy: TokenValues
    teacher: Support
    student: Support


def eopd_loss(
    log_probs: TokenValues,
    old_log_probs: TokenValues,
    teacher_log_probs: TokenValues,
    mask: TokenMask,
    soft: SoftTargets | None = None,
    options: EopdOptions | None = None,
    *,
    min_tokens: float = 0.0,
) -> tuple[Scalar, dict[str, Scalar]]:
    """Return agg( max(-A r, -A clip(r)) ) + coef * sum(gate m KL_k) / (sum m + 1e-8) and the metrics, in nats.

    A = sg[l_T - l_old], r = exp(l - l_old), gate = teacher entropy >= threshold, KL_k = sum_k exp(t_k) (t_k - s_k). The
    second term is additive and always divided by all valid tokens; agg_mode reduces the first only. No dual clip, no
    clamp of the ratio. Gradient to log_probs and to soft.student. An empty mask gives NaN in token-mean, as upstream;
    min_tokens=1 gives 0.
    Source: ckjsuperhh/CacheEOPD 756951d verl/trainer/ppo/core_algos.py:1041-1407, a third party's copy of WLS04/EOPD,
    which could not be had.
    """
    options = options or EopdOptions()
    old, teacher = old_log_probs.detach(), teacher_log_probs.detach()
    advantages = teacher - old
    losses, ratio = policy_losses(log_probs, old, advantages, options)
    loss = aggregate(losses, mask, options.agg_mode, min_tokens=min_tokens, norm_by_sequences=False)
    low, high = (ratio.detach() < 1 - options.clip_low).float(), (ratio.detach() > 1 + options.clip_high).float()
    metrics = {
        "actor/rev_kl": masked_mean(-advantages, mask),
        "actor/avg_teacher_advantage": masked_mean(advantages, mask),
        "actor/avg_teacher_log_prob": masked_mean(teacher, mask),
        "actor/avg_student_log_prob": masked_mean(log_probs.detach(), mask),
        "actor/pg_clipfrac": masked_mean(low + high, mask),
        "actor/pg_clipfrac_lower": masked_mean(low, mask),
        "actor/ppo_kl": masked_mean((log_probs - old).detach(), mask),
        "actor/soft_kd_loss": log_probs.new_zeros(()),
    }
    if soft is None:
        return loss, metrics
    divergence = forward_kl(soft)
    gated = mask * (soft.teacher_entropy >= options.entropy_threshold)
    unsure = mask * (soft.teacher_entropy >= METRICS_THRESHOLD)
    # All valid tokens, and not the gated ones alone, so that the term fades as the teacher becomes sure.
    tokens = mask.sum() + TINY
    # where, since 0 * NaN at a token outside the gate would be NaN.
    soft_loss = options.coef * torch.where(gated != 0, divergence * gated, 0.0).sum() / tokens
    return loss + soft_loss, metrics | {
        "actor/soft_kd_loss": soft_loss.detach(),
        "actor/soft_kd_high_entropy_ratio": unsure.sum() / tokens,
        "actor/soft_kd_token_ratio": gated.sum() / tokens,
        "actor/soft_kd_avg_high_entropy": masked_mean(soft.teacher_entropy, unsure),
        "actor/soft_kd_avg_kl": masked_mean(divergence.detach(), gated),
        "actor/high_entropy_avg_kl": masked_mean(divergence.detach(), unsure),
        "actor/soft_kd_num_tokens": gated.sum(),
        "actor/soft_kd_num_high_entropy": unsure.sum(),
    }


def policy_losses(
    log_probs: PerPosition, old: PerPosition, advantages: PerPosition, options: EopdOptions
) -> tuple[PerPosition, PerPosition]:
    """Return max(-A r, -A clip(r)) and r = exp(l - l_old), [b t], nats.

    The larger loss counts, so that clipping only ever removes an incentive (PPO's pessimistic bound).
    """
    ratio = torch.exp(log_probs - old)
    clipped = ratio.clamp(1 - options.clip_low, 1 + options.clip_high)
    return torch.maximum(-advantages * ratio, -advantages * clipped), ratio


def forward_kl(soft: SoftTargets) -> TokenValues:
    """Return sum_k exp(t_k) (t_k - s_k), [b t], nats; the gradient reaches the student only.

    With the student's log-probs of the whole vocabulary it is larger by -log of the student's mass on the k tokens.
    """
    teacher = soft.teacher.detach()
    return (teacher.exp() * (teacher - soft.student)).sum(-1)


def soft_targets(
    student_logits: Logits,
    teacher_logits: Logits,
    *,
    top_k: int,
    student_full_vocabulary: bool = False,
    temperature: float = 1.0,
) -> SoftTargets:
    """Return soft targets from logits that predict the same positions; gradient to the student only.

    The student's log-probs are of the whole vocabulary with student_full_vocabulary (upstream's README setting; then
    KL_k does not vanish at equal distributions), else renormalised over the teacher's k tokens (upstream's default).
    """
    from trl.trainer.utils import selective_log_softmax

    top = teacher_logits.detach().topk(top_k, dim=-1)
    teacher = F.log_softmax(widened(top.values) / temperature, dim=-1)
    if student_full_vocabulary:
        student = selective_log_softmax(student_logits, top.indices, temperature=temperature)
    else:
        student = F.log_softmax(widened(student_logits.gather(-1, top.indices)) / temperature, dim=-1)
    return SoftTargets(entropies(teacher_logits, temperature), teacher, student)


@torch.no_grad()
def entropies(logits: Logits, temperature: float = 1.0) -> TokenValues:
    """Return the entropy of softmax(logits / temperature), nats. Calls TRL 1.16 trainer/utils.py."""
    from trl.trainer.utils import entropy_from_logits

    # One sequence at a time: widening all of [b, t, v] to float32 at once would take twice the memory of half-precision
    # logits.
    return torch.stack([entropy_from_logits(widened(sequence) / temperature) for sequence in logits])


# From hidden states and output heads: both models' logits exist for one chunk of tokens at a time. With a teacher that
# gives log-probs alone, only the policy-gradient part: on-policy distillation by reverse KL.

Total = tuple[Tensor, Tensor]
"""A sum over tokens and the number of tokens that it is over."""


def eopd_from_hidden(
    student: Predictors,
    teacher: Predictors,
    token_ids: RowIds,
    old_log_probs: RowValues,
    mask: RowValues,
    *,
    num_tokens: int,
    top_k: int,
    temperature: float = 1.0,
    options: EopdOptions | None = None,
    chunk_tokens: int | None = None,
) -> tuple[Scalar, dict[str, Total]]:
    """Return eopd_loss in token-mean with aligned soft targets, and its metrics as totals.

    The loss is its sum over the mask / num_tokens. num_tokens may count more than the mask (the tokens of a whole
    step): parts then add up to the whole. Tokens outside the mask are not computed. Metrics as in eopd_loss, each a sum
    and the number of tokens it is over.
    """
    options = options or EopdOptions()
    per_token = partial(_per_token, options, top_k, temperature)
    total, table = logits_sum(
        per_token, student, teacher, mask, token_ids, old_log_probs.detach(), chunk_tokens=chunk_tokens
    )
    _, log_probs, teacher_log_probs, old, entropy, divergence = table[mask != 0].unbind(-1)
    return total / num_tokens, _totals(log_probs, teacher_log_probs, old, options, (entropy, divergence))


def reverse_kl_from_log_probs(
    log_probs: RowValues,
    old_log_probs: RowValues,
    teacher_log_probs: RowValues,
    mask: RowValues,
    *,
    num_tokens: int,
    options: EopdOptions | None = None,
) -> tuple[Scalar, dict[str, Total]]:
    """Return eopd_loss in token-mean without soft targets, and its metrics as totals.

    The loss is its sum over the mask / num_tokens. All [n], log-probs in nats at one temperature. num_tokens as in
    `eopd_from_hidden`. Gradient to log_probs.
    """
    options = options or EopdOptions()
    old, teacher = old_log_probs.detach(), teacher_log_probs.detach()
    losses, _ = policy_losses(log_probs, old, teacher - old, options)
    own = mask != 0
    total = torch.where(own, losses, 0.0).sum() / num_tokens
    return total, _totals(log_probs.detach()[own], teacher[own], old[own], options)


def _per_token(
    options: EopdOptions, top_k: int, temperature: float, student: Tensor, teacher: Tensor, ids: Tensor, old: Tensor
) -> RowTable:
    """Return columns: loss, log-probs of student, teacher and sampling, the teacher's entropy, forward KL; [n 6]."""
    log_probs, teacher_log_probs = (
        (logits / temperature).log_softmax(-1).gather(-1, ids[:, None]).squeeze(-1) for logits in (student, teacher)
    )
    old = old.to(log_probs.dtype)
    losses, _ = policy_losses(log_probs, old, teacher_log_probs - old, options)
    # Aligned: the copy of upstream takes the k tokens of the next position and gates them by this position's entropy.
    soft = soft_targets(student[None], teacher[None], top_k=min(top_k, student.shape[-1]), temperature=temperature)
    divergence, entropy = forward_kl(soft)[0], soft.teacher_entropy[0]
    unsure = entropy >= options.entropy_threshold
    losses = losses + options.coef * torch.where(unsure, divergence, 0.0)
    statistics = (log_probs.detach(), teacher_log_probs, old, entropy, divergence.detach())
    return torch.stack([losses, *statistics], dim=-1)


def _totals(
    log_probs: Tensor,
    teacher: Tensor,
    old: Tensor,
    options: EopdOptions,
    soft: tuple[Tensor, Tensor] | None = None,
) -> dict[str, Total]:
    """Return the metrics of eopd_loss as totals; soft: the teacher's entropy and the forward KL. All [n]."""
    everywhere = torch.ones_like(log_probs)
    ratio = torch.exp(log_probs - old)
    low, high = (ratio < 1 - options.clip_low).float(), (ratio > 1 + options.clip_high).float()
    metrics = {  # values, and the tokens that they are over
        "rev_kl": (old - teacher, everywhere),
        "avg_teacher_advantage": (teacher - old, everywhere),
        "avg_teacher_log_prob": (teacher, everywhere),
        "avg_student_log_prob": (log_probs, everywhere),
        "pg_clipfrac": (low + high, everywhere),
        "pg_clipfrac_lower": (low, everywhere),
        "ppo_kl": (log_probs - old, everywhere),
    }
    if soft is not None:
        entropy, divergence = soft
        gated, unsure = (entropy >= options.entropy_threshold).float(), (entropy >= METRICS_THRESHOLD).float()
        metrics |= {
            "soft_kd_loss": (options.coef * divergence * gated, everywhere),
            "soft_kd_high_entropy_ratio": (unsure, everywhere),
            "soft_kd_token_ratio": (gated, everywhere),
            "soft_kd_avg_high_entropy": (entropy, unsure),
            "soft_kd_avg_kl": (divergence, gated),
            "high_entropy_avg_kl": (divergence, unsure),
        }
    return {name: (torch.where(over != 0, values, 0.0).sum(), over.sum()) for name, (values, over) in metrics.items()}
