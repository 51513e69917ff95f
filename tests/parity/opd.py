"""Golden cases of on-policy distillation: verl, tinker-cookbook, and the entropy-aware form (EOPD)."""

from dataclasses import replace

import torch

from parity.case import Case, Outcome, Runner
from parity.kernels.opd import Datum, PpoOptions, distillation_loss, kl_estimate, reverse_kl_advantages
from stages.losses.eopd import EopdOptions, SoftTargets, entropies, eopd_loss, soft_targets
from stages.losses.reduction import Logits, ResponseMask, Scalar, TokenIds, token_log_probs


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


def _kl_penalty(case: Case) -> Outcome:
    return Outcome(kl_estimate(case.inputs["logprob"], case.inputs["ref_logprob"], case.args["kl_penalty"]))


def _distillation(case: Case) -> Outcome:
    bounds = (case.args[name] for name in ("clip_ratio_low", "clip_ratio_high", "clip_ratio_c", "loss_agg_mode"))
    loss, metrics = distillation_loss(
        case.inputs["log_probs"],
        case.inputs["teacher_logprobs"],
        case.inputs["response_mask"],
        case.optional("old_log_probs"),
        estimator=case.args["loss_mode"],
        use_policy_gradient=case.args["use_policy_gradient"],
        largest=case.args["loss_max_clamp"],
        options=PpoOptions(*bounds),
        rollout_weights=case.optional("rollout_is_weights"),
    )
    return Outcome(loss, metrics)


def _tinker(case: Case) -> Outcome:
    """The teacher's first entry is null: nothing precedes the first token. Every datum belongs to dataset 0."""
    teacher = [torch.tensor(values[1:]) for values in case.inputs["teacher_logprobs"]]
    columns = case.inputs["sampled_logprobs"], teacher, case.inputs["mask"], case.inputs["advantages_in"]
    data = [Datum(*row) for row in zip(*columns, strict=True)]
    options = {"coef": case.args["kl_penalty_coef"], "discount": case.args["kl_discount_factor"]}
    advantages, mean_kl = reverse_kl_advantages(data, **options)
    return Outcome(
        metrics={"teacher_kl": mean_kl, "teacher_kl/dataset_0": mean_kl}, state={"advantages_out": advantages}
    )


def _eopd_options(case: Case) -> EopdOptions:
    names = ("clip_ratio_low", "clip_ratio_high", "soft_kd_loss_coef", "soft_kd_entropy_threshold", "loss_agg_mode")
    return EopdOptions(*(case.args[name] for name in names))


def _eopd(case: Case) -> Outcome:
    soft = [case.optional(name) for name in ("teacher_entropy", "teacher_topk_log_probs", "student_topk_log_probs")]
    targets = None if soft[1] is None or soft[2] is None else SoftTargets(*soft)
    loss, metrics = eopd_loss(
        case.inputs["log_prob"],
        case.inputs["old_log_prob"],
        case.inputs["ref_log_prob"],
        case.inputs["response_mask"],
        targets,
        _eopd_options(case),
    )
    return Outcome(loss, metrics)


def _eopd_from_sequences(case: Case) -> Outcome:
    names = ("student_logits", "teacher_logits", "input_ids", "response_mask")
    student, teacher, ids, mask = (case.inputs[name] for name in names)
    loss, metrics, soft = eopd_from_sequences(
        student,
        teacher,
        ids,
        mask,
        _eopd_options(case),
        top_k=case.args["topk_logits"],
        student_full_vocabulary=case.args["soft_kd_student_full_vocab"],
        temperature=case.args["temperature"],
    )
    width = mask.shape[1]
    sampled = {
        f"{side}_log_prob": token_log_probs(
            logits[:, -width - 1 : -1], ids[:, -width:], temperature=case.args["temperature"]
        )
        for side, logits in (("student", student), ("teacher", teacher))
    }
    return Outcome(loss, metrics | sampled | {"teacher_entropy": soft.teacher_entropy})


RUNNERS: dict[str, Runner] = {
    "kl_penalty": _kl_penalty,
    "distillation_loss": _distillation,
    "incorporate_kl_penalty": _tinker,
    "compute_policy_loss_on_policy_distill": _eopd,
    "dp_actor forward + compute_policy_loss_on_policy_distill": _eopd_from_sequences,
}
