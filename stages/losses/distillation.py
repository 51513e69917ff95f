"""Distillation on given tokens: a divergence to a teacher (SDPO, OPD), a moving target (TAID), a gated one (EOPD).

Each kernel is a function of logits [n, v] in float32 at least and gives one loss a token, in nats; `over_tokens` sums
it over the tokens of a step. The golden numbers of `./dev parity` are computed by the functions that channels call.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional as F

from composer_stages.errors import UsageError
from composer_stages.losses.tokens import (
    Distribution,
    Entries,
    Listed,
    PerPosition,
    Predictors,
    RowIds,
    RowTable,
    RowValues,
    Scalar,
    Values,
    WithTail,
    chunk_size,
    over_tokens,
)

Side = Literal["student", "teacher"]
Outside = Literal["tail", "renormalised"]
"""The mass outside the top k: one more entry, or divided out."""
LARGEST_LOG_MASS = -1e-7  # a support that holds all the mass still leaves a tail of 1e-7, so that its log is finite


def divergence(
    student: Distribution,
    teacher: Distribution,
    *,
    beta: float,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_k_of: Side = "student",
    outside: Outside = "tail",
    largest: float | None = None,
) -> PerPosition:
    """Return the generalised Jensen-Shannon divergence a token between softmaxes of logits / temperature.

    beta 0 is forward KL, 1 reverse KL (`entries`). top_k: on the k likeliest tokens of one side, at most v. largest:
    upper bound of each entry, before the sum. No factor T^2.
    Source: lasgroup/SDPO 0e6d510 core_algos.py:1085-1192 and dp_actor.py (top k of the student, a tail); siyan-zhao/
    OPSD 590ec26 opsd_trainer.py:374-464 (of the teacher, renormalised; `largest`: 401b849); TRL 1.16 experimental/gkd,
    gold, sdpo.
    """
    both = [student / temperature, teacher / temperature]
    if not top_k:
        log_probs = [F.log_softmax(logits, dim=-1) for logits in both]
    else:
        chosen = both[0] if top_k_of == "student" else both[1]
        support = chosen.topk(min(top_k, chosen.shape[-1]), dim=-1).indices
        if outside == "tail":
            log_probs = [with_tail(F.log_softmax(logits, dim=-1).gather(-1, support)) for logits in both]
        else:  # the softmax of the support's logits is the distribution given the support
            log_probs = [F.log_softmax(logits.gather(-1, support), dim=-1) for logits in both]
    terms = entries(log_probs[0], log_probs[1], beta)
    return (terms if largest is None else terms.clamp(max=largest)).sum(-1)


def entries(student: Entries, teacher: Entries, beta: float) -> Entries:
    """Return the divergence's entries from log-probs; their sum is the divergence in nats.

        0    pT (lT - lS)                             forward KL(T || S)
        1    pS (lS - lT)                             reverse KL(S || T)
        else b pT (lT - lM) + (1-b) pS (lS - lM),     M = b pT + (1-b) pS
    The interior vanishes as beta nears 0 or 1, so the family is discontinuous there. An entry where p = 0 is 0 * -inf =
    NaN, as upstream.
    """
    # torch's kl_div takes (log q, log p) and gives p (log p - log q): the arguments are those of KL(p || q) swapped.
    if beta == 0:
        return F.kl_div(student, teacher, reduction="none", log_target=True)
    if beta == 1:
        return F.kl_div(teacher, student, reduction="none", log_target=True)
    # Mixed in log space: far in the tail exp of a log-prob underflows, and its log would be -inf.
    mixture = torch.logaddexp(student + math.log1p(-beta), teacher + math.log(beta))
    to_teacher = F.kl_div(mixture, teacher, reduction="none", log_target=True)
    to_student = F.kl_div(mixture, student, reduction="none", log_target=True)
    return beta * to_teacher + (1 - beta) * to_student


def with_tail(log_probs: Distribution) -> WithTail:
    """Append log(1 - sum p), the mass outside the support; without gradient where that is below 1e-7.

    Source: lasgroup/SDPO 0e6d510 core_algos.py add_tail; TRL 1.16 experimental/sdpo/loss_utils.py.
    """
    log_mass = torch.logsumexp(log_probs, dim=-1, keepdim=True).clamp(max=LARGEST_LOG_MASS)
    # -expm1(log m) is 1 - m without cancellation, which matters as the support usually holds nearly all mass.
    return torch.cat([log_probs, torch.log(-torch.expm1(log_mass))], dim=-1)


# SDPO: the policy is its own teacher in a context that holds a hint. OPD: another model is, alone (`Taught.teacher`).

LARGEST_LOG_RATIO = 20.0


@dataclass(frozen=True)
class Taught:
    """The teacher: one model's predictions or, in a trust region, lerp(kept, current, share) of two models' logits.

    Predictions that are `Listed` have a divergence on at most as many tokens, the mass outside divided out.
    """

    teacher: Predictors | Listed
    current: Predictors | None = None
    share: float = 0.0


def divergence_sum(
    student: Predictors,
    teacher: Taught,
    weights: RowValues,
    *,
    beta: float = 0.5,
    top_k: int | None = None,
    top_k_of: Side = "student",
    outside: Outside = "tail",
    temperature: float = 1.0,
    chunk_tokens: int | None = None,
) -> tuple[Scalar, RowValues]:
    """Return the sum of weight * `divergence` to the teacher, and the divergence a token (detached), in nats.

    The weights decide the reduction: mask / tokens for lasgroup's, times `importance_weights` for the clip. Tokens of
    weight 0 are not computed, and their divergence is given as 0. Gradient to the student alone. The two models of a
    trust region share a vocabulary. chunk_tokens None: half of what `over_tokens` takes, as the mixture has twice as
    many temporaries.
    """
    chunk_tokens = chunk_tokens or chunk_size(len(weights), student.vocabulary, weights.device, tables=16)
    current, share = teacher.current, teacher.share
    beside = () if current is None else (current.rows.detach(),)

    def kernel(student: Tensor, teacher: Tensor, *rows: Tensor) -> RowTable:
        if current is not None:
            with torch.no_grad():
                now = current.logits(rows[0])
                # Cut to the vocabulary that both heads share: padding rows of a head are no tokens.
                teacher = trust_region_logits(teacher, now[..., : teacher.shape[-1]], share)
        return divergence(
            student, teacher, beta=beta, temperature=temperature, top_k=top_k, top_k_of=top_k_of, outside=outside
        ).unsqueeze(-1)

    total, table = over_tokens(kernel, student, teacher.teacher, weights, *beside, chunk_tokens=chunk_tokens)
    return total, table[:, 0]


def importance_weights(student: Values, old: Values, clip: float) -> Values:
    """Return min(exp(clamp(sg[lS - l_old], -20, 20)), clip) on the sampled token: clipped above, no gradient."""
    # Clamped before exp, as upstream: the upper bound prevents an overflow, the lower one keeps every weight above 0.
    return (student - old).detach().clamp(-LARGEST_LOG_RATIO, LARGEST_LOG_RATIO).exp().clamp(max=clip)


def trust_region_logits(reference_logits: Values, student_logits: Values, student_share: float) -> Values:
    """Return lerp(reference, student, student_share) by entry. Source: lasgroup/SDPO 0e6d510 dp_actor.py:52-64."""
    return torch.lerp(reference_logits, student_logits, student_share)


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


# TAID: a target that moves from student to teacher, at a pace set by how fast the loss falls.


def taid(
    student: Predictors, teacher: Predictors, weights: RowValues, t: Tensor | float, *, chunk_tokens: int | None = None
) -> Scalar:
    """Return the sum over tokens of weight * `moving_target`, nats."""

    def kernel(student: Tensor, teacher: Tensor) -> RowTable:
        return moving_target(student, teacher, t).unsqueeze(-1)

    return over_tokens(kernel, student, teacher, weights, chunk_tokens=chunk_tokens)[0]


def moving_target(student: Distribution, teacher: Distribution, t: Tensor | float) -> PerPosition:
    """Return -sum_v p log softmax(student), p = softmax( (1-t) sg[student] + t teacher ), a token.

    A cross-entropy: the target's entropy is not subtracted (the gradient is that of the KL). Entries whose student
    logit is infinite add 0. No temperature.
    Source: SakanaAI/TAID a062892 src/distil_losses/taid.py:64-80, fkl.py, which mix in the logits' own dtype.
    """
    target = F.softmax((1 - t) * student.detach() + t * teacher, dim=-1)
    # A masked-out token has p = 0 and log-prob -inf, and 0 * -inf would be NaN.
    return -(target * F.log_softmax(student, dim=-1)).masked_fill(student.isinf(), 0.0).sum(-1)


@dataclass(frozen=True)
class TaidSchedule:
    """Pace of t. Raises UsageError outside 0 <= t_start < 1, 0 < t_end <= 1, 0 <= alpha <= 1; t_end may be lower."""

    t_start: float = 0.4
    t_end: float = 1.0
    alpha: float = 5e-4
    beta: float = 0.99
    disable_adaptive: bool = False

    def __post_init__(self) -> None:
        if not (0.0 <= self.t_start < 1.0 and 0.0 < self.t_end <= 1.0 and 0.0 <= self.alpha <= 1.0):
            raise UsageError("losses.taid-schedule-invalid", schedule=str(self))

    def start(self, device: torch.device | str = "cpu") -> "TaidState":
        """Return the state before the first step."""
        values = (self.t_start, float("inf"), 0.0)
        return TaidState(*(torch.tensor(value, dtype=torch.float32, device=device) for value in values))


@dataclass(frozen=True)
class TaidState:
    """t in [0, 1], the loss of the previous call (nats) and the momentum of its relative change: float32 scalars."""

    t: Scalar
    prev_loss: Scalar
    momentum: Scalar


def advance(
    schedule: TaidSchedule, state: TaidState, loss: Scalar, step: int, num_steps: int
) -> tuple[TaidState, Tensor | None]:
    """Return the state after a step whose loss was computed with state.t, and the adaptive increment of t.

    First call (prev_loss is inf): stores the loss, nothing else, increment None. Then
        momentum = beta momentum + (1-beta) (prev - loss)/(prev + 1e-15);  delta = alpha sigmoid(momentum) (1 - t)
        t = min(t_end, max(target, t + delta)), target = t_start + (t_end - t_start) step/num_steps
    and with disable_adaptive t = target.
    Call once a micro batch in training; validation must not call it, where upstream does. As upstream, a NaN loss makes
    the momentum NaN for good while t follows the target, and an infinite loss re-arms the first call.
    Source: SakanaAI/TAID a062892 src/distil_losses/taid.py:32-60.
    """
    loss = loss.detach().clone()
    if torch.isinf(state.prev_loss):
        return replace(state, prev_loss=loss), None
    change = (state.prev_loss - loss) / (state.prev_loss + 1e-15)
    momentum = schedule.beta * state.momentum + (1 - schedule.beta) * change
    # sigmoid(0) = 1/2: t grows without any momentum, by 1.5e-4 a call at the defaults, so that the linear target
    # decides unless num_steps is in the thousands.
    delta = schedule.alpha * torch.sigmoid(momentum) * (1 - state.t)
    target = schedule.t_start + (schedule.t_end - schedule.t_start) * step / num_steps
    # Python's max and min: max(target, NaN) is target.
    t = target if schedule.disable_adaptive else min(schedule.t_end, max(target, state.t + delta))
    return TaidState(torch.as_tensor(t, dtype=state.t.dtype, device=state.t.device), loss, momentum), delta


# EOPD: reverse KL everywhere, plus forward KL where the teacher is unsure. OPD from sampled log-probs is its policy
# gradient alone.

METRICS_THRESHOLD = 0.8  # nats; upstream's high_entropy_threshold, which only its logged values read
Total = tuple[Tensor, Tensor]
"""A sum over tokens and the number of tokens that it is over."""


@dataclass(frozen=True)
class EopdOptions:
    """entropy_threshold in nats: a token at it is in. coef scales the forward KL; clip_* bound the policy ratio."""

    clip_low: float = 0.2
    clip_high: float = 0.2
    coef: float = 1.0
    entropy_threshold: float = 0.8


@dataclass(frozen=True)
class EopdTokens:
    """Log-probs of the sampled tokens under student (gradient), teacher and sampling; [n], nats.

    entropy, forward_kl: the teacher's entropy, and the forward KL on its k likeliest tokens (gradient); None where the
    teacher gives log-probs alone.
    """

    student: RowValues
    teacher: RowValues
    old: RowValues
    entropy: RowValues | None = None
    forward_kl: RowValues | None = None

    def losses(self, options: EopdOptions) -> RowValues:
        """Return max(-A r, -A clip(r)), A = sg[l_T - l_old], r = exp(l - l_old), + coef * forward KL within the gate.

        The gate holds tokens of teacher entropy >= threshold. No dual clip, no clamp of the ratio.
        Source: ckjsuperhh/CacheEOPD 756951d verl/trainer/ppo/core_algos.py:1041-1407, a third party's copy of
        WLS04/EOPD, which could not be had.
        """
        advantages = (self.teacher - self.old).detach()
        losses = clipped_policy_loss(self.student, self.old, advantages, options.clip_low, options.clip_high)
        if self.entropy is None or self.forward_kl is None:
            return losses
        # where, since 0 * NaN at a token outside the gate would be NaN.
        return losses + options.coef * torch.where(self.entropy >= options.entropy_threshold, self.forward_kl, 0.0)

    def totals(self, options: EopdOptions) -> dict[str, Total]:
        """Return upstream's metrics without "actor/", each as a sum and the number of tokens that it is over."""
        student, everywhere = self.student.detach(), torch.ones_like(self.student)
        ratio = torch.exp(student - self.old)
        low, high = (ratio < 1 - options.clip_low).float(), (ratio > 1 + options.clip_high).float()
        metrics = {  # values, and the tokens that they are over
            "rev_kl": (self.old - self.teacher, everywhere),
            "avg_teacher_advantage": (self.teacher - self.old, everywhere),
            "avg_teacher_log_prob": (self.teacher, everywhere),
            "avg_student_log_prob": (student, everywhere),
            "pg_clipfrac": (low + high, everywhere),
            "pg_clipfrac_lower": (low, everywhere),
            "ppo_kl": (student - self.old, everywhere),
        }
        if self.entropy is not None and self.forward_kl is not None:
            forward_kl = self.forward_kl.detach()
            gated = (self.entropy >= options.entropy_threshold).float()
            unsure = (self.entropy >= METRICS_THRESHOLD).float()
            metrics |= {
                "soft_kd_loss": (options.coef * forward_kl * gated, everywhere),
                "soft_kd_high_entropy_ratio": (unsure, everywhere),
                "soft_kd_token_ratio": (gated, everywhere),
                "soft_kd_avg_high_entropy": (self.entropy, unsure),
                "soft_kd_avg_kl": (forward_kl, gated),
                "high_entropy_avg_kl": (forward_kl, unsure),
            }
        return {
            name: (torch.where(over != 0, values, 0.0).sum(), over.sum()) for name, (values, over) in metrics.items()
        }


def clipped_policy_loss(
    log_probs: PerPosition, old: PerPosition, advantages: PerPosition, low: float = 0.2, high: float = 0.2
) -> PerPosition:
    """Return max(-A r, -A clip(r)), r = exp(l - l_old), nats.

    The larger loss counts, so that clipping only ever removes an incentive (PPO's pessimistic bound).
    """
    ratio = torch.exp(log_probs - old)
    return torch.maximum(-advantages * ratio, -advantages * ratio.clamp(1 - low, 1 + high))


def eopd(
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
    """Return the sum of `EopdTokens.losses` over the mask / num_tokens, and the metrics as totals.

    num_tokens may count more than the mask (the tokens of a whole step): parts then add up to the whole. Tokens outside
    the mask are not computed.
    """
    options = options or EopdOptions()

    def kernel(student: Tensor, teacher: Tensor, ids: Tensor, old: Tensor) -> RowTable:
        student_log_probs, teacher_log_probs = (
            (logits / temperature).log_softmax(-1).gather(-1, ids[:, None]).squeeze(-1) for logits in (student, teacher)
        )
        # Of the same position: the copy of upstream takes the k tokens of the next one and gates them by the entropy of
        # this one.
        forward_kl = divergence(
            student, teacher, beta=0, temperature=temperature, top_k=top_k, top_k_of="teacher", outside="renormalised"
        )
        entropy, old = entropies(teacher, temperature), old.to(student.dtype)
        losses = EopdTokens(student_log_probs, teacher_log_probs, old, entropy, forward_kl).losses(options)
        columns = (student_log_probs, teacher_log_probs, old, entropy, forward_kl)
        return torch.stack([losses, *(column.detach() for column in columns)], dim=-1)

    total, table = over_tokens(
        kernel, student, teacher, mask, token_ids, old_log_probs.detach(), chunk_tokens=chunk_tokens
    )
    return total / num_tokens, EopdTokens(*table[mask != 0, 1:].unbind(-1)).totals(options)


@torch.no_grad()
def entropies(logits: Distribution, temperature: float = 1.0) -> PerPosition:
    """Return the entropy of softmax(logits / temperature), nats. Calls TRL 1.16 trainer/utils.py."""
    from trl.trainer.utils import entropy_from_logits

    return entropy_from_logits(logits / temperature)


def reverse_kl_from_log_probs(
    log_probs: RowValues,
    old_log_probs: RowValues,
    teacher_log_probs: RowValues,
    mask: RowValues,
    *,
    num_tokens: int,
    options: EopdOptions | None = None,
) -> tuple[Scalar, dict[str, Total]]:
    """Return the policy gradient of `eopd` alone, and its metrics as totals.

    The loss is its sum over the mask / num_tokens. All [n], log-probs in nats at one temperature. num_tokens as in
    `eopd`. Gradient to log_probs; on policy, where no ratio is clipped, it is -sg[l_T - l_old] / num_tokens.
    Source: thinking-machines-lab/tinker-cookbook 9dfcc3a tinker_cookbook/distillation/train_on_policy.py; NVIDIA-NeMo/
    RL 01a0fdd docs/about/algorithms/mopd.md.
    """
    options = options or EopdOptions()
    sampled = mask != 0
    tokens = EopdTokens(log_probs[sampled], teacher_log_probs.detach()[sampled], old_log_probs.detach()[sampled])
    return tokens.losses(options).sum() / num_tokens, tokens.totals(options)
