"""Entropy-aware on-policy distillation (EOPD): reverse KL everywhere, plus forward KL where the teacher is unsure."""

from dataclasses import dataclass, replace

import torch
from torch.nn import functional as F

from stages.losses.divergence import widened
from stages.losses.log_probs import token_log_probs
from stages.losses.reduction import aggregate, masked_mean
from stages.losses.shapes import (
    Logits,
    PerPosition,
    ResponseMask,
    Scalar,
    Support,
    TokenIds,
    TokenMask,
    TokenValues,
)

METRICS_THRESHOLD = 0.8  # nats; upstream's high_entropy_threshold, which only its logged values read
TINY = 1e-8


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
    """agg( max(-A r, -A clip(r)) ) + coef * sum(gate m KL_k) / (sum m + 1e-8), and the metrics; nats.

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
    metrics = {
        "actor/rev_kl": masked_mean(-advantages, mask),
        "actor/avg_teacher_advantage": masked_mean(advantages, mask),
        "actor/avg_teacher_log_prob": masked_mean(teacher, mask),
        "actor/avg_student_log_prob": masked_mean(log_probs.detach(), mask),
        **_clip_metrics(ratio.detach(), mask, options),
        "actor/ppo_kl": masked_mean((log_probs - old).detach(), mask),
        "actor/soft_kd_loss": log_probs.new_zeros(()),
    }
    if soft is None:
        return loss, metrics
    soft_loss, soft_metrics = _gated_forward_kl(soft, mask, options)
    return loss + soft_loss, metrics | soft_metrics


def policy_losses(
    log_probs: PerPosition, old: PerPosition, advantages: PerPosition, options: EopdOptions
) -> tuple[PerPosition, PerPosition]:
    """max(-A r, -A clip(r)) and r = exp(l - l_old), a token."""
    ratio = torch.exp(log_probs - old)
    clipped = ratio.clamp(1 - options.clip_low, 1 + options.clip_high)
    return torch.maximum(-advantages * ratio, -advantages * clipped), ratio


def forward_kl(soft: SoftTargets) -> TokenValues:
    """sum_k exp(t_k) (t_k - s_k), a token."""
    teacher = soft.teacher.detach()
    return (teacher.exp() * (teacher - soft.student)).sum(-1)


def _gated_forward_kl(soft: SoftTargets, mask: TokenMask, options: EopdOptions) -> tuple[Scalar, dict[str, Scalar]]:
    divergence = forward_kl(soft)
    gated = mask * (soft.teacher_entropy >= options.entropy_threshold)
    unsure = mask * (soft.teacher_entropy >= METRICS_THRESHOLD)
    tokens = mask.sum() + TINY
    loss = options.coef * torch.where(gated != 0, divergence * gated, 0.0).sum() / tokens
    return loss, {
        "actor/soft_kd_loss": loss.detach(),
        "actor/soft_kd_high_entropy_ratio": unsure.sum() / tokens,
        "actor/soft_kd_token_ratio": gated.sum() / tokens,
        "actor/soft_kd_avg_high_entropy": masked_mean(soft.teacher_entropy, unsure),
        "actor/soft_kd_avg_kl": masked_mean(divergence.detach(), gated),
        "actor/high_entropy_avg_kl": masked_mean(divergence.detach(), unsure),
        "actor/soft_kd_num_tokens": gated.sum(),
        "actor/soft_kd_num_high_entropy": unsure.sum(),
    }


def _clip_metrics(ratio: TokenValues, mask: TokenMask, options: EopdOptions) -> dict[str, Scalar]:
    low, high = (ratio < 1 - options.clip_low).float(), (ratio > 1 + options.clip_high).float()
    return {"actor/pg_clipfrac": masked_mean(low + high, mask), "actor/pg_clipfrac_lower": masked_mean(low, mask)}


def soft_targets(
    student_logits: Logits,
    teacher_logits: Logits,
    *,
    top_k: int,
    student_full_vocabulary: bool = False,
    temperature: float = 1.0,
) -> SoftTargets:
    """Soft targets from logits that predict the same positions; gradient to the student only.

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
    """Entropy of softmax(logits / temperature), nats, one sequence at a time. Calls TRL 1.16 trainer/utils.py."""
    from trl.trainer.utils import entropy_from_logits

    return torch.stack([entropy_from_logits(widened(sequence) / temperature) for sequence in logits])


def eopd_from_sequences(
    student_logits: Logits,
    teacher_logits: Logits,
    input_ids: TokenIds,
    mask: ResponseMask,
    options: EopdOptions | None = None,
    *,
    top_k: int,
    student_full_vocabulary: bool = False,
    temperature: float = 1.0,
) -> tuple[Scalar, dict[str, Scalar], SoftTargets]:
    """eopd_loss on policy, from logits over prompt + response [b, p+t, v]; mask covers the last t positions.

    Upstream's misalignment is kept: log-probs and entropy are those that predict the response (positions -t-1 to -2),
    the top-k distributions those of the response's own positions (-t to -1), which predict one token later. Use
    eopd_loss with soft_targets to align them. Serves the parity check only.
    Source: ckjsuperhh/CacheEOPD 756951d verl/workers/actor/dp_actor.py:146-491.
    """
    width = mask.shape[1]
    response = input_ids[:, -width:]
    log_probs, teacher = (
        token_log_probs(logits[:, -width - 1 : -1], response, temperature=temperature)
        for logits in (student_logits, teacher_logits)
    )
    soft = soft_targets(
        student_logits[:, -width:],
        teacher_logits[:, -width:],
        top_k=top_k,
        student_full_vocabulary=student_full_vocabulary,
        temperature=temperature,
    )
    soft = replace(soft, teacher_entropy=entropies(teacher_logits[:, -width - 1 : -1], temperature))
    return *eopd_loss(log_probs, log_probs.detach(), teacher, mask, soft, options), soft
