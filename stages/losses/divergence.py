"""Divergences between two next-token distributions given as log-probs, entry by entry, and their supports."""

import math

import torch
from torch.nn import functional as F

from stages.losses.shapes import Distribution, Values, WithTail

LARGEST_LOG_MASS = -1e-7  # a support that holds all the mass still leaves a tail of 1e-7, so that its log is finite


def widened(logits: Values) -> Values:
    """Half-precision values as float32; float32 and float64 untouched. Meant for one chunk at a time."""
    return logits.float() if logits.dtype in (torch.float16, torch.bfloat16) else logits


def elementwise_divergence(student: Distribution, teacher: Distribution, teacher_weight: float) -> Distribution:
    """Entries of the generalised Jensen-Shannon divergence; sum over the last dimension for nats per token.

    student, teacher: log-probs. teacher_weight w:
        0    pT (lT - lS)                             forward KL(T || S)
        1    pS (lS - lT)                             reverse KL(S || T)
        else w pT (lT - lM) + (1-w) pS (lS - lM),     M = w pT + (1-w) pS
    The interior vanishes as w nears 0 or 1, so the family is discontinuous there. An entry where p = 0 is 0 * -inf =
    NaN, as upstream.
    Source: siyan-zhao/OPSD 590ec26 opsd_trainer.py; the same in TRL 1.16 and, with alpha for w, lasgroup/SDPO 0e6d510
    core_algos.py.
    """
    if teacher_weight == 0:
        return F.kl_div(student, teacher, reduction="none", log_target=True)
    if teacher_weight == 1:
        return F.kl_div(teacher, student, reduction="none", log_target=True)
    mixture = torch.logaddexp(student + math.log1p(-teacher_weight), teacher + math.log(teacher_weight))
    to_teacher = F.kl_div(mixture, teacher, reduction="none", log_target=True)
    to_student = F.kl_div(mixture, student, reduction="none", log_target=True)
    return teacher_weight * to_teacher + (1 - teacher_weight) * to_student


def with_tail(log_probs: Distribution) -> WithTail:
    """Appends log(1 - sum p), the mass outside the support; without gradient where that is below 1e-7.

    Source: lasgroup/SDPO 0e6d510 core_algos.py add_tail; TRL 1.16 experimental/sdpo/loss_utils.py, experimental/iw_opd.
    """
    log_mass = torch.logsumexp(log_probs, dim=-1, keepdim=True).clamp(max=LARGEST_LOG_MASS)
    return torch.cat([log_probs, torch.log(-torch.expm1(log_mass))], dim=-1)


def renormalised(log_probs: Distribution) -> Distribution:
    """Log-probs conditional on the support: the tail is dropped."""
    return log_probs - torch.logsumexp(log_probs, dim=-1, keepdim=True)
