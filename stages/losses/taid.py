"""TAID: distil towards a target that moves from student to teacher, at a pace set by how fast the loss falls."""

from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional as F

from stages.errors import UsageError
from stages.losses.hidden import Predictors, logits_sum
from stages.losses.reduction import DEFAULT_CHUNK_TOKENS, Logits, RowTable, RowValues, Scalar, TokenMask, token_sum


def taid_loss(
    student_logits: Logits,
    teacher_logits: Logits,
    mask: TokenMask,
    t: Tensor | float,
    *,
    min_tokens: int = 0,
    chunk_tokens: int | None = DEFAULT_CHUNK_TOKENS,
    skip_masked: bool = False,
) -> Scalar:
    """Return the mean over the mask of -sum_v p log softmax(student), p = softmax( (1-t) sg[student] + t teacher ).

    In float32 nats, gradient to the student. A cross-entropy: the target's entropy is not subtracted (the gradient is
    that of the KL). The target is mixed in the logits' own dtype, both softmaxes run in float32. Entries whose student
    logit is infinite add 0. No temperature. Logits already predict the mask's tokens. An empty mask gives NaN, and a
    NaN at a masked token (0 * inf: student -inf at t = 1, teacher -inf at t = 0) spreads, as upstream; for training,
    min_tokens=1 gives 0 for the first and skip_masked=True drops the second.
    Source: SakanaAI/TAID a062892 src/distil_losses/taid.py:64-80, fkl.py.
    """
    weights = mask.flatten().float()
    rows = student_logits.flatten(0, 1), teacher_logits.flatten(0, 1)
    total, _ = token_sum(partial(_per_token, t), *rows, weights, chunk_tokens=chunk_tokens, skip_masked=skip_masked)
    return total / weights.sum().clamp_min(min_tokens)


def taid_from_hidden(
    student: Predictors,
    teacher: Predictors,
    weights: RowValues,
    t: Tensor | float,
    *,
    chunk_tokens: int | None = None,
) -> Scalar:
    """Sum over tokens of weight * the loss a token of taid_loss; logits exist for a chunk of tokens at a time.

    The target is mixed in float32 at least, where taid_loss and upstream stay in the logits' dtype.
    """
    dtype = torch.promote_types(student.hidden.dtype, torch.float32)
    per_token = partial(_per_token, t, dtype=dtype)
    return logits_sum(per_token, student, teacher, weights, chunk_tokens=chunk_tokens)[0]


def _per_token(t: Tensor | float, student: Tensor, teacher: Tensor, *, dtype: torch.dtype = torch.float32) -> RowTable:
    # Mixed in the logits' own dtype, as upstream; `dtype` is that of the two softmaxes.
    target = F.softmax((1 - t) * student.detach() + t * teacher, dim=-1, dtype=dtype)
    terms = target * F.log_softmax(student, dim=-1, dtype=dtype)
    # A masked-out token has p = 0 and log-prob -inf, and 0 * -inf would be NaN.
    return -terms.masked_fill(student.isinf(), 0.0).sum(-1, keepdim=True)


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
            raise UsageError(f"{self}: t_start must lie in [0, 1), t_end in (0, 1] and alpha in [0, 1]")

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
