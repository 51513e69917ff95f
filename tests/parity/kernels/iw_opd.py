"""Importance-weighted on-policy distillation (IW-OPD): divergence on a small support; weighted sampled tokens.

Serves the parity check only: no channel uses it.
"""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional as F

from parity.kernels.jsd import generalized_jsd, reduced_entries
from stages.errors import UsageError
from stages.losses.hidden import renormalised, widened, with_tail
from stages.losses.reduction import (
    DEFAULT_CHUNK_TOKENS,
    IGNORED,
    Distribution,
    DistributionIds,
    DistributionMask,
    EntryValues,
    Logits,
    Scalar,
    TokenIds,
    TokenValues,
    Values,
    token_log_probs,
)


def supported_divergence(
    student: Distribution, teacher: Distribution, mask: DistributionMask, beta: float
) -> Distribution:
    """elementwise_divergence where mask is True, else 0; mixes probabilities, and counts 0 * -inf as 0.

    Serves the parity check only.
    Source: TRL 1.16 experimental/iw_opd/iw_opd_trainer.py:112-150 _jsd_divergence with a support mask.
    """
    log_s, log_t = student.where(mask, 0.0), teacher.where(mask, 0.0)
    p_s, p_t = student.exp().where(mask, 0.0), teacher.exp().where(mask, 0.0)
    if beta == 0:
        return (p_t * (log_t - log_s)).nan_to_num(nan=0.0)
    if beta == 1:
        return (p_s * (log_s - log_t)).nan_to_num(nan=0.0)
    mixture = ((1 - beta) * p_s + beta * p_t).clamp_min(torch.finfo(p_s.dtype).tiny).log().where(mask, 0.0)
    to_teacher, to_student = p_t * (log_t - mixture), p_s * (log_s - mixture)
    return beta * to_teacher.nan_to_num(nan=0.0) + (1 - beta) * to_student.nan_to_num(nan=0.0)


def support_entries(
    student_logits: Distribution,
    teacher_logits: Distribution,
    support: DistributionIds,
    *,
    beta: float,
    temperature: float,
    add_tail: bool,
) -> EntryValues:
    """Divergence entries on `support` (token ids; a repeated one counts once), with the tail bucket or renormalised."""
    mask = _first_occurrences(support)
    student = F.log_softmax(widened(student_logits) / temperature, dim=-1).gather(-1, support).where(mask, -torch.inf)
    teacher = F.log_softmax(widened(teacher_logits) / temperature, dim=-1).gather(-1, support).where(mask, -torch.inf)
    if not add_tail:
        return supported_divergence(renormalised(student), renormalised(teacher), mask, beta)
    return supported_divergence(with_tail(student), with_tail(teacher), F.pad(mask, (0, 1), value=True), beta)


def _first_occurrences(support: Tensor) -> Tensor:
    same = support.unsqueeze(-1) == support.unsqueeze(-2)
    return ~same.tril(diagonal=-1).any(-1)


def _top_support(student: Tensor, teacher: Tensor, beta: float, top_k: int) -> Tensor:
    """Token ids: for beta 0 the teacher's top k, for 1 the student's, between them both, the teacher's first."""
    chosen = ([teacher] if beta != 1 else []) + ([student] if beta != 0 else [])
    return torch.cat([logits.topk(top_k, dim=-1).indices for logits in chosen], dim=-1)


def top_k_jsd(
    student_logits: Logits,
    teacher_logits: Logits,
    labels: TokenIds | None = None,
    *,
    beta: float = 0.5,
    temperature: float = 1.0,
    reduction: str = "batchmean",
    top_k: int = 0,
    add_tail: bool = True,
    num_items: Tensor | int | None = None,
    chunk_tokens: int | None = DEFAULT_CHUNK_TOKENS,
) -> Values:
    """Generalised JSD on the top-k support(s) of the two distributions.

    The whole vocabulary counts if top_k is 0 or not below its size. Log-probs are those of the whole vocabulary.
    Reductions as in reduced_entries with min_divisor 1; nats. Serves the parity check only.
    Source: TRL 1.16 experimental/iw_opd/iw_opd_trainer.py:1110-1196 generalized_jsd_loss.
    """
    if not 0 < top_k < student_logits.shape[-1]:
        return generalized_jsd(
            student_logits,
            teacher_logits,
            labels,
            beta=beta,
            temperature=temperature,
            reduction=reduction,
            num_items=num_items,
            min_divisor=1,
            chunk_tokens=chunk_tokens,
        )

    def entries(student: Tensor, teacher: Tensor) -> Tensor:
        support = _top_support(student, teacher, beta, top_k)
        return support_entries(student, teacher, support, beta=beta, temperature=temperature, add_tail=add_tail)

    return reduced_entries(
        entries,
        student_logits,
        teacher_logits,
        labels,
        reduction=reduction,
        num_items=num_items,
        min_divisor=1,
        chunk_tokens=chunk_tokens,
    )


def sparse_top_1_jsd(
    student_logits: Logits,
    teacher_logits: Logits,
    token_ids: TokenIds,
    labels: TokenIds,
    *,
    beta: float,
    mode: Literal["sampled", "argmax"] = "sampled",
    add_tail: bool = True,
    temperature: float = 1.0,
    num_items: Tensor | int | None = None,
) -> Scalar:
    """Divergence on the sampled token (mode argmax: the student's best) and, unless beta is 1, the teacher's best.

    Serves the parity check only.
    Source: TRL 1.16 experimental/iw_opd/iw_opd_trainer.py:1269-1343 _compute_local_sparse_top_1_divergence_loss.
    """
    active = labels != IGNORED
    student, teacher = student_logits[active], teacher_logits[active].detach()
    support = (student.argmax(-1) if mode == "argmax" else token_ids[active]).unsqueeze(-1)
    if beta != 1:
        support = torch.cat([teacher.argmax(-1, keepdim=True), support], dim=-1)
    entries = support_entries(student, teacher, support, beta=beta, temperature=temperature, add_tail=add_tail)
    return entries.sum() / (active.sum().clamp_min(1) if num_items is None else num_items)


@dataclass(frozen=True)
class WeightedTokens:
    """The loss, and the advantages (nats, before weighting; 0 outside the mask) and weights that it used."""

    loss: Scalar
    advantages: TokenValues
    weights: TokenValues
    active: Tensor

    def metrics(self) -> dict[str, Tensor]:
        """Upstream's keys; empty if no token counts. mean_advantage is weighted, mean_abs_advantage is not."""
        if not self.active.any():
            return {}
        advantages, weights = self.advantages[self.active], self.weights[self.active]
        return {
            "iw_opd/mean_advantage": (advantages * weights).mean(),
            "iw_opd/mean_abs_advantage": advantages.abs().mean(),
            "iw_opd/mean_weight": weights.mean(),
            "iw_opd/min_weight": weights.min(),
            "iw_opd/max_weight": weights.max(),
        }


def iw_opd(
    student_logits: Logits,
    token_ids: TokenIds,
    labels: TokenIds,
    teacher_log_probs: TokenValues,
    rollout_log_probs: TokenValues | None = None,
    *,
    temperature: float = 1.0,
    gamma: float = 0.5,
    epsilon: float = 1e-8,
    num_items: Tensor | int | None = None,
) -> WeightedTokens:
    """-sum lS w A / (number of tokens, at least 1, or num_items) over the labels that are not -100.

    A = sg[lT - l_rollout] (the rollout is the student itself when absent); w_t = 1 + gamma (1 - sum_{s<t} |A_s| /
    max(sum |A|, epsilon)). The student's temperature is applied inside its log-softmax; the teacher's values are taken
    as they are.
    Raises UsageError if the teacher has no finite value at a token that counts. Serves the parity check only.
    Source: TRL 1.16 experimental/iw_opd/iw_opd_trainer.py:1212-1267 _compute_iw_opd_loss.
    """
    active = labels != IGNORED
    missing = int((active & ~teacher_log_probs.isfinite()).sum())
    if missing:
        raise UsageError(
            f"the teacher has no log-prob at {missing} of {int(active.sum())} tokens; score them or label them -100"
        )
    student = token_log_probs(student_logits, token_ids, temperature=temperature)
    rollout = student if rollout_log_probs is None else rollout_log_probs
    advantages = (teacher_log_probs - rollout).detach().where(active, 0.0)
    size = advantages.abs()
    share = (size.cumsum(1) - size) / size.sum(1, keepdim=True).clamp_min(epsilon)
    weights = 1.0 + gamma * (1.0 - share)
    total = (-student * weights * advantages).where(active, 0.0).sum()
    loss = total / (active.sum().clamp_min(1) if num_items is None else num_items)
    return WeightedTokens(loss, advantages, weights, active)
