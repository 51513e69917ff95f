"""Golden cases of the generalised Jensen-Shannon family: OPSD, and TRL's GKD, GOLD, IW-OPD and chunked divergence."""

import torch

from parity.case import Case, Outcome, Runner
from parity.kernels.hidden_divergence import hidden_divergence
from parity.kernels.iw_opd import iw_opd, sparse_top_1_jsd, top_k_jsd
from parity.kernels.jsd import generalized_jsd, sampled_token_reverse_kl
from stages.losses.hidden import Head
from stages.losses.sdpo import update_average

JSD_OPTIONS = ("beta", "temperature", "reduction", "top_k", "token_clip", "logits_are_probs", "add_tail")


def _jsd_options(case: Case) -> dict:
    options = {name: case.args[name] for name in JSD_OPTIONS if name in case.args}
    if "num_items_in_batch" in case.args:
        options["num_items"] = case.args["num_items_in_batch"]
    return options | {"chunk_tokens": case.chunk_tokens}


def _logits(case: Case) -> tuple:
    return case.inputs["student_logits"], case.inputs["teacher_logits"], case.optional("labels")


def _opsd(case: Case) -> Outcome:
    return Outcome(generalized_jsd(*_logits(case), **_jsd_options(case)))


def _gkd(case: Case) -> Outcome:
    return Outcome(generalized_jsd(*_logits(case), min_divisor=1, **_jsd_options(case)))


def _iw_opd_jsd(case: Case) -> Outcome:
    return Outcome(top_k_jsd(*_logits(case), **_jsd_options(case)))


def _shifted(case: Case) -> tuple:
    student, teacher, labels = _logits(case)
    return student[:, :-1], teacher[:, :-1], labels[:, 1:]


def _gkd_batch(case: Case) -> Outcome:
    """GKD never passes its temperature to the divergence."""
    return Outcome(generalized_jsd(*_shifted(case), min_divisor=1, **_jsd_options(case) | {"temperature": 1.0}))


def _gold_batch(case: Case) -> Outcome:
    return Outcome(generalized_jsd(*_shifted(case), min_divisor=1, **_jsd_options(case)))


def _opsd_batch(case: Case) -> Outcome:
    own, other = case.args["student_prompt_length"], case.args["teacher_prompt_length"]
    student, teacher, labels = _logits(case)
    student, teacher, labels = student[:, own - 1 : -1], teacher[:, other - 1 : -1], labels[:, own:]
    if case.args["use_thinking_machines_loss"]:
        ids = case.inputs["student_input_ids"][:, own:]
        return Outcome(sampled_token_reverse_kl(student, teacher, ids, labels, temperature=case.args["temperature"]))
    options = {"top_k": case.args["top_k_loss"], "token_clip": case.args.get("jsd_token_clip")}
    return Outcome(generalized_jsd(student, teacher, labels, **_jsd_options(case) | options))


def _update_ema(case: Case) -> Outcome:
    """The first step only copies the student."""
    steps = list(case.inputs["student_weights_after_each_step"])
    average, after = steps[0].clone(), [steps[0]]
    for student in steps[1:]:
        update_average([average], [student], 1.0 - case.args["ema_decay"])
        after.append(average.clone())
    return Outcome(state={"ema_after_each_step": torch.stack(after)})


def _iw_opd(case: Case) -> Outcome:
    names = ("student_logits", "completion_tokens", "labels", "teacher_actual_logprobs", "rollout_logprobs")
    result = iw_opd(
        *(case.optional(name) for name in names),
        temperature=case.args["temperature"],
        gamma=case.args["iw_opd_gamma"],
        epsilon=case.args["iw_opd_epsilon"],
        num_items=case.args["num_items_in_batch"],
    )
    return Outcome(result.loss, result.metrics())


def _sparse_top_1(case: Case) -> Outcome:
    student, teacher, labels = _logits(case)
    options = {
        "beta": case.args["beta"],
        "temperature": case.args["temperature"],
        "num_items": case.args.get("num_items_in_batch"),
    }
    mode, add_tail = case.args["reverse_kl_top_1_mode"], case.args["loss_add_tail"]
    return Outcome(
        sparse_top_1_jsd(
            student, teacher, case.inputs["completion_tokens"], labels, mode=mode, add_tail=add_tail, **options
        )
    )


def _head(case: Case, side: str) -> Head:
    return Head(
        case.inputs[f"{side}_lm_head_weight"],
        case.optional(f"{side}_lm_head_bias"),
        case.args.get(f"{side}_logit_scale", 1.0),
        case.args.get(f"{side}_final_logit_softcapping"),
    )


def _chunked_divergence(case: Case) -> Outcome:
    result = hidden_divergence(
        case.inputs["student_hidden_states"],
        case.inputs["teacher_hidden_states"],
        _head(case, "student"),
        _head(case, "teacher"),
        case.inputs["completion_mask"],
        beta=case.args["beta"],
        temperature=case.args["temperature"],
        num_items=case.args["num_items_in_batch"],
        chunk_tokens=case.chunk_tokens,
    )
    return Outcome(result.loss, {"entropy_sum": result.entropy_sum, "n_valid": result.num_tokens})


RUNNERS: dict[str, Runner] = {
    "generalized_jsd_loss": _opsd,
    "generalized_jsd_loss[token_clip version]": _opsd,
    "OPSDTrainer.compute_loss": _opsd_batch,
    "OPSDTrainer.compute_loss[token_clip version]": _opsd_batch,
    "_update_ema": _update_ema,
    "GKDTrainer.generalized_jsd_loss": _gkd,
    "GKDTrainer.compute_loss": _gkd_batch,
    "GOLDTrainer.generalized_jsd_loss": _gkd,
    "GOLDTrainer.compute_loss": _gold_batch,
    "IWOPDTrainer.generalized_jsd_loss": _iw_opd_jsd,
    "IWOPDTrainer._compute_iw_opd_loss": _iw_opd,
    "IWOPDTrainer._compute_local_sparse_top_1_divergence_loss": _sparse_top_1,
    "_chunked_divergence_loss": _chunked_divergence,
}
