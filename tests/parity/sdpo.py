"""Golden cases of SDPO: lasgroup's reference implementation, and TRL's SDPO and SDFT."""

from typing import TypedDict

import torch
from torch import Tensor

from parity import grpo
from parity.case import Case, Outcome, Runner
from stages.errors import UsageError
from stages.losses.reduction import Scalar, TokenMask, TokenValues, aggregate, aggregation_weights, token_log_probs
from stages.losses.sdpo import (
    Mass,
    distribution_loss,
    importance_weights,
    self_distillation_loss,
    trust_region_logits,
    update_average,
)


def mean_of_sequence_means(losses: TokenValues, mask: TokenMask) -> Scalar:
    """Mean over ALL sequences of their token mean: one without tokens adds 0 and counts. Source: TRL 1.16 SDPO.

    Serves the parity check only.
    """
    return ((losses * mask).sum(-1) / mask.sum(-1).clamp(min=1.0)).mean()


def sampled_token_loss(student: TokenValues, teacher: TokenValues, *, alpha: float = 1.0) -> TokenValues:
    """sg[lS - lT] lS on the sampled token. Raises UsageError unless alpha is 1: only the reverse KL has this form.

    Serves the parity check only.
    """
    if alpha != 1.0:
        raise UsageError(f"alpha is {alpha}; distillation on the sampled token needs alpha 1")
    return (student - teacher).detach() * student


class Aggregation(TypedDict):
    """Options of `aggregation_weights` that no case records."""

    min_tokens: float
    norm_by_sequences: bool


AGGREGATION: Aggregation = {"min_tokens": 1.0, "norm_by_sequences": False}
"""Those of lasgroup's SDPO."""


def _mask(case: Case, name: str = "response_mask") -> Tensor:
    mask, rows = case.inputs[name], case.optional("self_distillation_mask")
    return mask if rows is None else mask * rows.unsqueeze(1)


def _factor(case: Case, student: Tensor | None) -> Tensor | float:
    """Importance weights of both kinds; without old log-probs the policy has not moved and its weight is 1."""
    clip, old, rollout = case.args["is_clip"], case.optional("old_log_probs"), case.optional("rollout_is_weights")
    factor = 1.0 if rollout is None else rollout
    if clip is None or old is None:
        return factor
    if student is None:
        raise KeyError("the importance clip needs student_log_probs, which the case does not have")
    return factor * importance_weights(student, old, clip)


def _from_log_probs(case: Case) -> Outcome:
    if not case.args["full_logit_distillation"]:
        names = ("student_log_probs", "teacher_log_probs")
        losses = sampled_token_loss(*(case.inputs[name] for name in names), alpha=case.args["alpha"])
    elif case.args["distillation_topk"] is None:
        losses = distribution_loss(
            case.inputs["student_all_log_probs"], case.inputs["teacher_all_log_probs"], alpha=case.args["alpha"]
        )
    else:
        mass: Mass = "tail" if case.args["distillation_add_tail"] else "renormalised"
        pair = case.inputs["student_topk_log_probs"], case.inputs["teacher_topk_log_probs"]
        losses = distribution_loss(*pair, alpha=case.args["alpha"], mass=mass)
    losses = losses * _factor(case, case.optional("student_log_probs"))
    return Outcome(aggregate(losses, _mask(case), case.args["loss_agg_mode"], **AGGREGATION))


def _from_logits(case: Case) -> Outcome:
    width = case.inputs["response_mask"].shape[1]
    student, teacher = (case.inputs[name][:, -width - 1 : -1] for name in ("student_logits", "teacher_logits"))
    temperature, alpha, mode = (case.args[name] for name in ("temperature", "alpha", "loss_agg_mode"))
    log_probs = token_log_probs(student, case.inputs["responses"], temperature=temperature)
    factor = _factor(case, log_probs)
    if not case.args["full_logit_distillation"]:
        other = token_log_probs(teacher, case.inputs["responses"], temperature=temperature)
        losses = sampled_token_loss(log_probs, other, alpha=alpha) * factor
        return Outcome(aggregate(losses, _mask(case), mode, **AGGREGATION))
    loss, _ = self_distillation_loss(
        student,
        teacher,
        aggregation_weights(_mask(case), mode, dtype=student.dtype, **AGGREGATION) * factor,
        alpha=alpha,
        top_k=case.args["distillation_topk"],
        add_tail=case.args["distillation_add_tail"],
        temperature=temperature,
        chunk_tokens=case.chunk_tokens,
        skip_masked=mode.startswith("token"),
    )
    return Outcome(loss)


def _update_teacher(case: Case) -> Outcome:
    teacher, after = case.inputs["teacher_init"].clone(), []
    for student in case.inputs["student_weights"]:
        update_average([teacher], [student], case.args["teacher_update_rate"])
        after.append(teacher.clone())
    return Outcome(state={"teacher_after_each_update": torch.stack(after)})


def _trust_region(case: Case) -> Outcome:
    logits = trust_region_logits(case.inputs["ref_logits"], case.inputs["student_logits"], case.args["mix_coef"])
    return Outcome(state={"teacher_logits": logits})


def _trl_distillation(case: Case) -> Outcome:
    """TRL's reduction: mean over sequences of token means; the logged value is the token mean of the same losses."""
    mask = case.inputs["loss_mask"] if "loss_mask" in case.inputs else _mask(case, "completion_mask")
    if mask.sum() == 0:
        return Outcome(case.inputs["student_logits"].sum() * 0.0, {"distillation_loss": 0.0})
    losses = _trl_token_losses(case, mask)
    loss = losses[0]
    mean = (losses[1] * mask).sum() / mask.sum().clamp(min=1.0)
    return Outcome(loss, {"distillation_loss": mean})


def _trl_token_losses(case: Case, mask: Tensor) -> tuple[Tensor, Tensor]:
    """The reduced loss, and the losses of the tokens without gradient."""
    student, teacher, ids = (case.inputs[name] for name in ("student_logits", "teacher_logits", "completion_ids"))
    clip, old = case.args["distillation_is_clip"], case.optional("old_per_token_logps")
    log_probs = token_log_probs(student, ids)
    factor = torch.ones_like(log_probs) if clip is None or old is None else importance_weights(log_probs, old, clip)
    if case.args["distillation_mode"] == "sampled_token":
        losses = (
            sampled_token_loss(log_probs, token_log_probs(teacher, ids), alpha=case.args["distillation_alpha"]) * factor
        )
        return mean_of_sequence_means(losses, mask), losses.detach()
    weights = factor * mask / mask.sum(-1, keepdim=True).clamp(min=1.0) / len(mask)
    loss, losses = self_distillation_loss(
        student,
        teacher,
        weights,
        alpha=case.args["distillation_alpha"],
        top_k=case.args["distillation_topk"] if case.args["distillation_mode"] == "topk_logits" else None,
        add_tail=case.args["distillation_add_tail"],
        chunk_tokens=case.chunk_tokens,
        skip_masked=False,
    )
    return loss, losses * factor


def _trl_blend(case: Case) -> Outcome:
    share = case.args["distillation_weight"]
    loss = 0.0
    if share != 1.0:
        loss = (1 - share) * grpo.sdpo_policy_loss(case)
    if share != 0.0:
        loss = loss + share * _trl_distillation(case).loss
    return Outcome(loss / case.args["gradient_accumulation_steps"])


RUNNERS: dict[str, Runner] = {
    "compute_self_distillation_loss": _from_log_probs,
    "dp_actor forward + compute_self_distillation_loss": _from_logits,
    "_update_teacher (ema)": _update_teacher,
    "TrustRegionTeacher.forward": _trust_region,
    "SDPOTrainer._compute_self_distillation_loss": _trl_distillation,
    "SDFTTrainer._compute_self_distillation_loss": _trl_distillation,
    "SDPOTrainer._compute_policy_loss": lambda case: Outcome(grpo.sdpo_policy_loss(case)),
    "SDPOTrainer.compute_loss": _trl_blend,
}
