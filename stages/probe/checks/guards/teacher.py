"""The teacher is another model than the base, in every adapted module and in its answers.

The checks and their bounds are this project's own.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from jaxtyping import Float
from torch import Tensor, nn

from stages.probe.adapters.targets import target_linears
from stages.probe.checks.check import Check, judged
from stages.probe.gradients.merge import has_path
from stages.probe.pool.tokens import TokenRow
from stages.runs.records import Row

if TYPE_CHECKING:
    from transformers import PreTrainedModel

MIN_KL, MAX_ROUNDING = 1e-3, 0.3


def teacher_differs(
    teacher: "PreTrainedModel", base: "PreTrainedModel", rows: Sequence[TokenRow], hack_gap: float | None
) -> Check:
    """Every adapted weight changed, the two differ on the teacher's answers by KL > 1e-3 nats a token, and in hacks.

    `rows` are answers of the teacher, `hack_gap` its hack rate less the base model's, None where it is unknown.
    """
    ours, theirs = target_linears(teacher), target_linears(base)
    changed = sum(_changed(ours[name], theirs[name]) for name in ours)
    kl = float(torch.stack([answer_kl(teacher, base, row) for row in rows]).mean())
    holds = changed == len(ours) and kl > MIN_KL and (hack_gap is None or hack_gap > 0)
    gap = "" if hack_gap is None else f", hacks {hack_gap:+.2f} more often"
    detail = f"{changed} of {len(ours)} modules changed{gap}"
    return Check("teacher", "T1", judged(holds), kl, f"KL > {MIN_KL:g}, all weights changed", detail)


def _changed(teacher: nn.Linear, base: nn.Linear) -> bool:
    """Another weight, or a path of its own beside it."""
    return has_path(teacher) or bool((teacher.weight != base.weight).any())


@torch.no_grad()
def answer_kl(teacher: "PreTrainedModel", base: "PreTrainedModel", row: TokenRow) -> Float[Tensor, ""]:
    """KL(teacher || base) in nats, the mean over the tokens of an answer."""
    start, ids = len(row.prompt_ids), [[*row.prompt_ids, *row.completion_ids]]
    logits = [
        model(torch.tensor(ids, device=next(model.parameters()).device)).logits[0, start - 1 : -1]
        for model in (teacher, base)
    ]
    ours, theirs = (torch.log_softmax(values.float().cpu(), -1) for values in logits)
    return (ours.exp() * (ours - theirs)).sum(-1).mean()


def merge_is_sound(report: Row, expected: int) -> Check:
    """A LoRA teacher: all `expected` modules changed, every change above zero, and not lost in rounding.

    `report` is that of `gradients.merge.apply_lora`.
    """
    deltas, losses = report["delta_norms"], report["rounding_losses"]
    lost = max(losses.values(), default=1.0)
    holds = (
        len(deltas) == expected
        and all(norm > 0 for norm in deltas.values())
        and (lost < MAX_ROUNDING or not report["merged"])
    )
    detail = f"{len(deltas)} of {expected} modules, {'merged' if report['merged'] else 'kept beside the weights'}"
    return Check("merge", "T1", judged(holds), lost, f"rounding loss < {MAX_ROUNDING}", detail)
