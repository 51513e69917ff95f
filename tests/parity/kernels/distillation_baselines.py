"""The losses that TAID is compared with, as its repository computes them.

Softmaxes are float32, infinite logits are dropped, the result is the token mean over the mask. Each takes student and
teacher logits [b, t, v] and a mask [b, t], returns nats a token with gradient to the student (AdaptiveKL: also through
its weights), and NaN for an empty mask. All serve the parity check only: no channel uses them.
Source: SakanaAI/TAID a062892 src/distil_losses/.
"""

import torch
from torch import Tensor
from torch.nn import functional as F

from stages.losses.reduction import Logits, Scalar, TokenMask, TokenValues, Values


def forward_kl(student: Logits, teacher: Logits, mask: TokenMask) -> Scalar:
    """-sum pT log pS: cross-entropy, the teacher's entropy is not subtracted. fkl.py.

    Serves the parity check only.
    """
    return _token_mean(_cross_entropy(student, teacher), mask)


def reverse_kl(student: Logits, teacher: Logits, mask: TokenMask) -> Scalar:
    """Reverse KL: sum pS (log pS - log pT). rkl.py.

    Serves the parity check only.
    """
    return _token_mean(_reverse(student, teacher), mask)


def jensen_shannon(student: Logits, teacher: Logits, mask: TokenMask, teacher_weight: float = 0.1) -> Scalar:
    """Jensen-Shannon: w KL(T || M) + (1-w) KL(S || M), M = w pT + (1-w) pS, w = teacher_weight. js.py.

    Serves the parity check only.
    """
    p_s, p_t = _probs(student), _probs(teacher)
    mixture = (teacher_weight * p_t + (1 - teacher_weight) * p_s).log()
    to_student = _finite_sum(p_s * (p_s.log() - mixture), student, teacher)
    to_teacher = _finite_sum(p_t * (p_t.log() - mixture), student, teacher)
    return (1 - teacher_weight) * _token_mean(to_student, mask) + teacher_weight * _token_mean(to_teacher, mask)


def skew_forward_kl(student: Logits, teacher: Logits, mask: TokenMask, target_weight: float = 0.1) -> Scalar:
    """-sum pT log(w pT + (1-w) pS), w = target_weight: the teacher's entropy is not subtracted. skew_fkl.py.

    Serves the parity check only.
    """
    p_s, p_t = _probs(student), _probs(teacher)
    mixture = (target_weight * p_t + (1 - target_weight) * p_s).log()
    return _token_mean(-_finite_sum(p_t * mixture, student, teacher), mask)


def skew_reverse_kl(student: Logits, teacher: Logits, mask: TokenMask, target_weight: float = 0.1) -> Scalar:
    """KL(S || (1-w) pT + w pS), w = target_weight. skew_rkl.py.

    Serves the parity check only.
    """
    p_s, p_t = _probs(student), _probs(teacher)
    mixture = ((1 - target_weight) * p_t + target_weight * p_s).log()
    return _token_mean(_finite_sum(p_s * (_log_probs(student) - mixture), student, teacher), mask)


def total_variation(student: Logits, teacher: Logits, mask: TokenMask) -> Scalar:
    """Total variation: sum |pT - pS| / 2. tvd.py.

    Serves the parity check only.
    """
    return _token_mean(0.5 * _finite_sum((_probs(teacher) - _probs(student)).abs(), student, teacher), mask)


def adaptive_kl(student: Logits, teacher: Logits, mask: TokenMask, head_threshold: float = 0.5) -> Scalar:
    """forward_kl and reverse_kl weighted by the share of |pT - pS| in the teacher's head and tail. adaptive_kl.py.

    Upstream's slip is kept: the head is found in ascending order of the teacher's logits and applied to entries in
    vocabulary order. Serves the parity check only.
    """
    head = teacher.sort(dim=-1).values.softmax(dim=-1).cumsum(dim=-1) >= head_threshold
    gap = (_probs(teacher) - _probs(student)).abs()
    head_gap, tail_gap = (head * gap).sum(-1), (~head * gap).sum(-1)
    total = head_gap + tail_gap
    weighted = head_gap / total * _cross_entropy(student, teacher) + tail_gap / total * _reverse(student, teacher)
    return _token_mean(weighted, mask)


def _cross_entropy(student: Tensor, teacher: Tensor) -> TokenValues:
    return -(_probs(teacher) * _log_probs(student)).masked_fill(student.isinf(), 0.0).sum(-1)


def _reverse(student: Tensor, teacher: Tensor) -> TokenValues:
    return _finite_sum(_probs(student) * (_log_probs(student) - _log_probs(teacher)), student, teacher)


def _finite_sum(terms: Tensor, student: Tensor, teacher: Tensor) -> TokenValues:
    return terms.masked_fill(student.isinf() | teacher.isinf(), 0.0).sum(-1)


def _token_mean(losses: TokenValues, mask: TokenMask) -> Scalar:
    return (losses * mask).sum() / mask.sum()


def _probs(logits: Values) -> Values:
    return F.softmax(logits, dim=-1, dtype=torch.float32)


def _log_probs(logits: Values) -> Values:
    return F.log_softmax(logits, dim=-1, dtype=torch.float32)
