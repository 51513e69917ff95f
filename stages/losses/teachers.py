"""Teachers made from the student: moving averages of its weights, and a trust region in logit space."""

from collections.abc import Sequence

import torch
from torch import Tensor

from stages.losses.shapes import Values


@torch.no_grad()
def update_average(teacher: Sequence[Tensor], student: Sequence[Tensor], student_share: float) -> None:
    """In place: teacher = (1 - student_share) * teacher + student_share * student; a share of 0 leaves it alone.

    OPSD: the teacher starts as a copy of the student at the first step's end (that call only copies), student_share is
    1 - ema_decay, with ema_decay 0.999. SDPO: once per policy update, skipped if no gradient was finite, student_share
    0.05.
    Source: siyan-zhao/OPSD 401b849 opsd_trainer.py _update_ema; lasgroup/SDPO 0e6d510 dp_actor.py:132-151
    _update_teacher.
    """
    if student_share == 0.0:
        return
    for average, weight in zip(teacher, student, strict=True):
        average.mul_(1.0 - student_share).add_(weight.to(average.device), alpha=student_share)


def trust_region_logits(reference_logits: Values, student_logits: Values, student_share: float) -> Values:
    """lerp(reference, student, student_share), entry by entry. Source: lasgroup/SDPO 0e6d510 dp_actor.py:52-64."""
    return torch.lerp(reference_logits, student_logits, student_share)
