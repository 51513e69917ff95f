"""EOPD from hidden states and output heads: both models' logits exist for a chunk of tokens at a time.

Of a teacher that tells log-probs alone, its policy-gradient part, which is on-policy distillation by reverse KL.
"""

from functools import partial

import torch
from torch import Tensor

from stages.losses.eopd import METRICS_THRESHOLD, EopdOptions, forward_kl, policy_losses, soft_targets
from stages.losses.hidden import Predictors, logits_sum
from stages.losses.shapes import RowIds, RowTable, RowValues, Scalar

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
    """eopd_loss in token-mean with aligned soft targets, its sum over the mask / num_tokens, and its metrics as totals.

    num_tokens may count more than the mask (the tokens of a whole step): parts then add up to the whole. Tokens outside
    the mask are not computed. Metrics as in eopd_loss, each a sum and the number of tokens it is over.
    """
    options = options or EopdOptions()
    per_token = partial(_per_token, options, top_k, temperature)
    total, table = logits_sum(
        per_token, student, teacher, mask, token_ids, old_log_probs.detach(), chunk_tokens=chunk_tokens
    )
    return total / num_tokens, _totals(table[mask != 0], options)


def reverse_kl_from_log_probs(
    log_probs: RowValues,
    old_log_probs: RowValues,
    teacher_log_probs: RowValues,
    mask: RowValues,
    *,
    num_tokens: int,
    options: EopdOptions | None = None,
) -> tuple[Scalar, dict[str, Total]]:
    """eopd_loss without soft targets, in token-mean: its sum over the mask / num_tokens, and its metrics as totals.

    All [n], log-probs in nats at one temperature. num_tokens as in `eopd_from_hidden`. Gradient to log_probs.
    """
    options = options or EopdOptions()
    old, teacher = old_log_probs.detach(), teacher_log_probs.detach()
    losses, _ = policy_losses(log_probs, old, teacher - old, options)
    own = mask != 0
    total = torch.where(own, losses, 0.0).sum() / num_tokens
    return total, _policy_totals(log_probs.detach()[own], teacher[own], old[own], options)


def _per_token(
    options: EopdOptions, top_k: int, temperature: float, student: Tensor, teacher: Tensor, ids: Tensor, old: Tensor
) -> RowTable:
    """Columns: loss, log-probs of student, teacher and sampling, the teacher's entropy, forward KL; the loss first."""
    log_probs, teacher_log_probs = (
        (logits / temperature).log_softmax(-1).gather(-1, ids[:, None]).squeeze(-1) for logits in (student, teacher)
    )
    old = old.to(log_probs.dtype)
    losses, _ = policy_losses(log_probs, old, teacher_log_probs - old, options)
    soft = soft_targets(student[None], teacher[None], top_k=min(top_k, student.shape[-1]), temperature=temperature)
    divergence, entropy = forward_kl(soft)[0], soft.teacher_entropy[0]
    unsure = entropy >= options.entropy_threshold
    losses = losses + options.coef * torch.where(unsure, divergence, 0.0)
    statistics = (log_probs.detach(), teacher_log_probs, old, entropy, divergence.detach())
    return torch.stack([losses, *statistics], dim=-1)


def _totals(table: RowTable, options: EopdOptions) -> dict[str, Total]:
    _, log_probs, teacher, old, entropy, divergence = table.unbind(-1)
    everywhere = torch.ones_like(entropy)
    gated, unsure = (entropy >= options.entropy_threshold).float(), (entropy >= METRICS_THRESHOLD).float()
    return {
        **_policy_totals(log_probs, teacher, old, options),
        "soft_kd_loss": _mean(options.coef * divergence * gated, everywhere),
        "soft_kd_high_entropy_ratio": _mean(unsure, everywhere),
        "soft_kd_token_ratio": _mean(gated, everywhere),
        "soft_kd_avg_high_entropy": _mean(entropy, unsure),
        "soft_kd_avg_kl": _mean(divergence, gated),
        "high_entropy_avg_kl": _mean(divergence, unsure),
    }


def _policy_totals(log_probs: Tensor, teacher: Tensor, old: Tensor, options: EopdOptions) -> dict[str, Total]:
    everywhere = torch.ones_like(log_probs)
    ratio = torch.exp(log_probs - old)
    low, high = (ratio < 1 - options.clip_low).float(), (ratio > 1 + options.clip_high).float()
    return {
        "rev_kl": _mean(old - teacher, everywhere),
        "avg_teacher_advantage": _mean(teacher - old, everywhere),
        "avg_teacher_log_prob": _mean(teacher, everywhere),
        "avg_student_log_prob": _mean(log_probs, everywhere),
        "pg_clipfrac": _mean(low + high, everywhere),
        "pg_clipfrac_lower": _mean(low, everywhere),
        "ppo_kl": _mean(log_probs - old, everywhere),
    }


def _mean(values: Tensor, over: Tensor) -> Total:
    return torch.where(over != 0, values, 0.0).sum(), over.sum()
