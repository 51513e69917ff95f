"""What runs an upstream function's golden cases: the functions that channels call, between tensors and reductions.

`RUNNERS` maps upstream's function name to a runner; `not_run` gives the reason for a case that is left out. Options
come from the case's args, never from its name.
"""

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from composer_stages.losses import distillation, preference
from composer_stages.losses.distillation import (
    EopdOptions,
    EopdTokens,
    TaidSchedule,
    Taught,
    advance,
    divergence,
    entries,
    entropies,
    importance_weights,
    trust_region_logits,
    update_average,
    with_tail,
)
from composer_stages.losses.preference import FORMS, PairLogProbs, dpo_losses, simpo_loss
from composer_stages.losses.prime_rl import DefaultOptions, PackedTokens, default_loss
from composer_stages.losses.tokens import Head, Predictors, over_tokens, token_log_probs
from parity import trl_grpo
from parity.golden_case import Case, Outcome, Runner

IGNORED = -100
NOT_RUN = {
    "CTKD": "TAID's repository compares with it; its learned temperature is a model, not a loss",
    "DKD": "TAID's repository compares with it; no channel of ours uses it",
    "ULDLoss.forward": "GOLD's loss across tokenizers; our teachers share the student's tokenizer",
    "compute_forward_kl_topk": "verl's forward KL on an engine's top-k log-probs; no numbers were recorded for it",
    "GRPOTrainer advantages": "TRL computes advantages, within a method that generates",
    "GRPOTrainer vllm_importance_sampling_ratio": "TRL computes the correction, within a method that generates",
    "SDPOTrainer._compute_policy_loss": "the policy loss of TRL's SDPO trainer; trainings here use GRPOTrainer's",
    "SDPOTrainer.compute_loss": "a blend with the policy loss of TRL's SDPO trainer",
    "kl_penalty": "verl's single-sample estimators of KL; no channel uses them",
    "distillation_loss": "verl's distillation through such an estimator; no channel uses it",
    **dict.fromkeys(
        ("ipo_loss_fn", "ref_kl_loss_fn", "ce_loss_fn", "opd_loss_fn", "sft_loss_fn"),
        "PRIME-RL runs it itself; the integration runs default_loss",
    ),
    "compute_loss": "PRIME-RL's own sum over components and sequences",
    "default_loss_fn[before 2026-05-19]": "an older form of default_loss",
    "IWOPDTrainer.generalized_jsd_loss": "IW-OPD's union of two supports; no channel uses it",
    "IWOPDTrainer._compute_iw_opd_loss": "IW-OPD's weighted sampled tokens; no channel uses them",
    "IWOPDTrainer._compute_local_sparse_top_1_divergence_loss": "IW-OPD's divergence on one token; no channel uses it",
    **dict.fromkeys(
        ("ForwardKL", "ReverseKL", "JS", "SkewForwardKL", "SkewReverseKL", "TVD", "AdaptiveKL"),
        "a baseline of TAID's repository; no channel uses it",
    ),
}
"""Upstream function -> why none of its cases is run."""
SIMPO = ("simpo_loss", "get_batch_loss_metrics")
NOT_SET: dict[tuple[str, tuple[str, ...]], tuple[Any, str]] = {
    ("logits_are_probs", ()): (False, "probabilities for logits: no trainer of upstream sets it"),
    ("full_logit_distillation", ()): (True, "the loss of sampled tokens, which no channel uses"),
    ("use_thinking_machines_loss", ()): (False, "the value is -A log p, where channel opd's is -A r of equal gradient"),
    ("kl_discount_factor", ()): (0.0, "the teacher's later log-probs as a return: not a setting here"),
    ("soft_kd_student_full_vocab", ()): (False, "the student's log-probs of the whole vocabulary: not a setting here"),
    ("ld_alpha", ()): (None, "LD-DPO: not a setting here"),
    ("use_weighting", ()): (False, "WPO: not a setting here"),
    ("f_divergence_type", ()): ("reverse_kl", "not a setting here"),
    ("sft_weight", ()): (0.0, "SimPO beside cross-entropy: two channels here"),
    ("alpha", ("trl.CPOTrainer.cpo_loss",)): (0.0, "AlphaPO: not a setting here"),
    ("loss_type", SIMPO): ("sigmoid", "SimPO's hinge: not a setting here"),
    ("label_smoothing", SIMPO): (0.0, "not a setting here"),
}
"""Option (and the functions that it is meant in) -> the one value whose cases are run, and why others are not."""


def not_run(recorded: Mapping[str, Any]) -> str | None:
    """The reason for leaving a case out: its function, or an option that nothing here can set; None to run it."""
    fn, args = recorded["fn"], recorded["args"]
    if fn in NOT_RUN:
        return NOT_RUN[fn]
    for (option, functions), (value, reason) in NOT_SET.items():
        if option in args and args[option] != value and (not functions or fn in functions):
            return f"{option}: {reason}"
    if args.get("reduction") == "none":
        return "reduction: the divergence of each vocabulary entry is not returned here"
    if args.get("distillation_mode") == "sampled_token":
        return "distillation_mode: the loss of sampled tokens, which no channel uses"
    if args.get("loss_agg_mode", "token-mean") != "token-mean":
        return "loss_agg_mode: channels take the mean over tokens"
    if fn == "DPOTrainer._compute_loss" and (len(args["loss_type"]) != 1 or args["loss_type"][0] not in FORMS):
        return "loss_type: not a setting here"
    return None


# The generalised Jensen-Shannon family: OPSD; TRL's GKD and GOLD, and TRL's chunked divergence.


def _divergence(case: Case, *, least_divisor: int = 1, shifted: bool = False, **changed: Any) -> Outcome:
    """Sum or mean over the positions whose label is not -100 (all without labels).

    least_divisor: of a mean over no position. shifted: logits predict the next position's label. changed: options that
    upstream's caller gives other values than the case's.
    """
    args = {**case.args, **changed}
    student, teacher, labels = case.inputs["student_logits"], case.inputs["teacher_logits"], case.optional("labels")
    if (own := args.get("student_prompt_length")) is not None:
        other = args["teacher_prompt_length"]
        student, teacher, labels = student[:, own - 1 : -1], teacher[:, other - 1 : -1], labels[:, own:]
    if shifted:
        student, teacher, labels = student[:, :-1], teacher[:, :-1], labels[:, 1:]
    active = torch.ones_like(student[..., 0], dtype=torch.bool) if labels is None else labels != IGNORED
    top_k = args.get("top_k", args.get("top_k_loss"))
    options = {
        "beta": args["beta"],
        "temperature": args["temperature"],
        "top_k": top_k,
        "top_k_of": "teacher",
        "outside": "renormalised",
        "largest": args.get("token_clip", args.get("jsd_token_clip")),
    }
    total, _ = over_tokens(
        lambda own, other: divergence(own, other, **options).unsqueeze(-1),
        *(Predictors(logits.flatten(0, 1)) for logits in (student, teacher)),
        active.flatten().to(student.dtype),
        chunk_tokens=case.chunk_tokens,
    )
    items, reduction = args.get("num_items_in_batch"), args.get("reduction", "batchmean")
    if items is not None:
        return Outcome(total / items)
    if reduction == "sum":
        return Outcome(total)
    if reduction == "mean":
        return Outcome(total / (active.sum() * (top_k or student.shape[-1])))
    return Outcome(total / (len(student) if labels is None else active.sum().clamp_min(least_divisor)))


def _chunked_divergence(case: Case) -> Outcome:
    def predictors(side: str) -> Predictors:
        head = Head(
            case.inputs[f"{side}_lm_head_weight"],
            case.optional(f"{side}_lm_head_bias"),
            case.args.get(f"{side}_logit_scale", 1.0),
            case.args.get(f"{side}_final_logit_softcapping"),
        )
        return Predictors(case.inputs[f"{side}_hidden_states"].flatten(0, 1), head)

    def kernel(own: Tensor, other: Tensor) -> Tensor:
        found = divergence(own, other, beta=case.args["beta"], temperature=case.args["temperature"])
        return torch.stack([found, entropies(own.detach(), case.args["temperature"])], dim=-1)

    active = (case.inputs["completion_mask"] != 0).flatten()
    student, teacher = predictors("student"), predictors("teacher")
    total, table = over_tokens(kernel, student, teacher, active.to(student.rows.dtype), chunk_tokens=case.chunk_tokens)
    count, items = int(active.sum()), case.args["num_items_in_batch"]
    metrics = {"entropy_sum": table[:, 1].sum(), "n_valid": count}
    return Outcome(total / (max(count, 1) if items is None else items), metrics)


def _update_ema(case: Case) -> Outcome:
    """The first step only copies the student."""
    steps = list(case.inputs["student_weights_after_each_step"])
    average, after = steps[0].clone(), [steps[0]]
    for student in steps[1:]:
        update_average([average], [student], 1.0 - case.args["ema_decay"])
        after.append(average.clone())
    return Outcome(state={"ema_after_each_step": torch.stack(after)})


# SDPO: lasgroup's reference implementation, and TRL's SDPO and SDFT.


def _mask(case: Case, name: str) -> Tensor:
    mask, rows = case.inputs[name], case.optional("self_distillation_mask")
    return mask if rows is None else mask * rows.unsqueeze(1)


def _factor(case: Case, student: Tensor | None) -> Tensor | float:
    """Importance weights of both kinds; without old log-probs the policy has not moved and its weight is 1."""
    clip, old, rollout = case.args["is_clip"], case.optional("old_log_probs"), case.optional("rollout_is_weights")
    factor = 1.0 if rollout is None else rollout
    return factor if clip is None or old is None else factor * importance_weights(student, old, clip)


def _sdpo_from_log_probs(case: Case) -> Outcome:
    """What `divergence` does with log-probs that it has on a support."""
    alpha, outside = case.args["alpha"], case.args["distillation_add_tail"]
    if case.args["distillation_topk"] is None:
        sides = case.inputs["student_all_log_probs"], case.inputs["teacher_all_log_probs"]
        losses = entries(*sides, alpha).sum(-1)
    else:
        sides = case.inputs["student_topk_log_probs"], case.inputs["teacher_topk_log_probs"]
        losses = entries(*map(with_tail, sides), alpha).sum(-1) if outside else divergence(*sides, beta=alpha)
    losses, mask = losses * _factor(case, case.optional("student_log_probs")), _mask(case, "response_mask")
    return Outcome((torch.where(mask != 0, losses, 0.0) * mask).sum() / mask.sum().clamp_min(1))


def _sdpo(case: Case, student: Tensor, teacher: Tensor, weights: Tensor, **options: Any) -> tuple[Tensor, Tensor]:
    """The channel's loss from logits [b, t, v], and the divergence a token [b, t]."""
    outside = "tail" if case.args["distillation_add_tail"] else "renormalised"
    total, per_token = distillation.divergence_sum(
        Predictors(student.flatten(0, 1)),
        Taught(Predictors(teacher.flatten(0, 1))),
        weights.flatten().to(student.dtype),
        outside=outside,
        chunk_tokens=case.chunk_tokens,
        **options,
    )
    return total, per_token.view(weights.shape)


def _sdpo_from_logits(case: Case) -> Outcome:
    mask = _mask(case, "response_mask")
    width = mask.shape[1]
    student, teacher = (case.inputs[name][:, -width - 1 : -1] for name in ("student_logits", "teacher_logits"))
    temperature = case.args["temperature"]
    log_probs = token_log_probs(student, case.inputs["responses"], temperature=temperature)
    weights = mask.to(student.dtype) / mask.sum().clamp_min(1) * _factor(case, log_probs)
    options = {"beta": case.args["alpha"], "top_k": case.args["distillation_topk"], "temperature": temperature}
    return Outcome(_sdpo(case, student, teacher, weights, **options)[0])


def _update_teacher(case: Case) -> Outcome:
    teacher, after = case.inputs["teacher_init"].clone(), []
    for student in case.inputs["student_weights"]:
        update_average([teacher], [student], case.args["teacher_update_rate"])
        after.append(teacher.clone())
    return Outcome(state={"teacher_after_each_update": torch.stack(after)})


def _trust_region(case: Case) -> Outcome:
    logits = trust_region_logits(case.inputs["ref_logits"], case.inputs["student_logits"], case.args["mix_coef"])
    return Outcome(state={"teacher_logits": logits})


def _trl_sdpo(case: Case) -> Outcome:
    """TRL's reduction: mean over sequences of token means; the logged value is the token mean of the same losses."""
    mask = case.inputs["loss_mask"] if "loss_mask" in case.inputs else _mask(case, "completion_mask")
    student, teacher, ids = (case.inputs[name] for name in ("student_logits", "teacher_logits", "completion_ids"))
    clip, old = case.args["distillation_is_clip"], case.optional("old_per_token_logps")
    log_probs = token_log_probs(student, ids)
    factor = torch.ones_like(log_probs) if clip is None or old is None else importance_weights(log_probs, old, clip)
    weights = factor * mask / mask.sum(-1, keepdim=True).clamp(min=1.0) / len(mask)
    top_k = case.args["distillation_topk"] if case.args["distillation_mode"] == "topk_logits" else None
    loss, per_token = _sdpo(case, student, teacher, weights, beta=case.args["distillation_alpha"], top_k=top_k)
    mean = (per_token * factor * mask).sum() / mask.sum().clamp(min=1.0)
    return Outcome(loss, {"distillation_loss": mean})


# TAID: the loss, the scheduler, and the wrapper with the language-model loss.


def _taid_mean(case: Case, student: Tensor, teacher: Tensor, mask: Tensor, t: Tensor) -> Tensor:
    rows = (Predictors(logits.flatten(0, 1)) for logits in (student, teacher))
    weights = mask.flatten().float()
    return distillation.taid(*rows, weights, t, chunk_tokens=case.chunk_tokens) / weights.sum()


def _taid(case: Case) -> Outcome:
    logits = (case.inputs[name] for name in ("logits", "teacher_logits", "mask"))
    return Outcome(_taid_mean(case, *logits, torch.tensor(case.args["t"])))


def _schedule(case: Case) -> TaidSchedule:
    names = ("t_start", "t_end", "alpha", "beta", "disable_adaptive")
    return TaidSchedule(**{name: case.args[name] for name in names})


def _update_t(case: Case) -> Outcome:
    schedule = _schedule(case)
    state, states, deltas = schedule.start(), [], []
    for loss, step in zip(case.inputs["losses"], case.inputs["global_steps"], strict=True):
        state, delta = advance(schedule, state, loss, step, case.args["num_train_steps"])
        states.append(state)
        deltas.append(delta)
    after = {"t_after": "t", "momentum_after": "momentum", "prev_loss_after": "prev_loss"}
    return Outcome(
        state={name: [getattr(s, key) for s in states] for name, key in after.items()} | {"delta_t_returned": deltas}
    )


def _taid_sequence(case: Case) -> Outcome:
    """Each step's loss uses t from before that step's update."""
    schedule = _schedule(case)
    state, losses, ts, deltas = schedule.start(), [], [], []
    steps = zip(*(case.inputs[name] for name in ("logits", "teacher_logits", "mask", "global_steps")), strict=True)
    for logits, teacher_logits, mask, step in steps:
        losses.append(_taid_mean(case, logits, teacher_logits, mask, state.t))
        state, delta = advance(schedule, state, losses[-1], step, case.args["num_train_steps"])
        ts.append(state.t)
        deltas.append(delta)
    return Outcome(torch.stack(losses), state={"tiki_t": ts, "delta_t": deltas})


def _taid_with_language_loss(case: Case) -> Outcome:
    student, teacher, labels = (case.inputs[name] for name in ("student_logits", "teacher_logits", "labels"))
    student, teacher, targets = student[:, :-1], teacher[:, :-1], labels[:, 1:]
    language = F.cross_entropy(student.flatten(0, 1), targets.flatten(), ignore_index=IGNORED)
    distilled = _taid_mean(case, student, teacher, (targets != IGNORED).int(), torch.tensor(0.4))
    share = case.args["distil_ratio"]
    return Outcome((1.0 - share) * language + share * distilled, {"lm_loss": language, "distil_loss": distilled})


# EOPD


def _eopd_outcome(case: Case, mask: Tensor, *columns: Tensor | None) -> Outcome:
    """Upstream adds 1e-8 to the number of tokens, in the metrics and in the second term of the loss alone."""
    names = ("clip_ratio_low", "clip_ratio_high", "soft_kd_loss_coef", "soft_kd_entropy_threshold")
    options = EopdOptions(*(case.args[name] for name in names))
    own = mask != 0
    tokens = EopdTokens(*(column if column is None else column[own] for column in columns))
    policy = EopdTokens(tokens.student, tokens.teacher, tokens.old).losses(options).sum()
    loss, count = policy / mask.sum(), mask.sum() + 1e-8
    totals = tokens.totals(options)
    metrics = {f"actor/{name}": total / (over + 1e-8) for name, (total, over) in totals.items()}
    if tokens.forward_kl is None:
        return Outcome(loss, metrics | {"actor/soft_kd_loss": 0.0})
    metrics |= {
        "actor/soft_kd_num_tokens": totals["soft_kd_avg_kl"][1],
        "actor/soft_kd_num_high_entropy": totals["high_entropy_avg_kl"][1],
    }
    return Outcome(loss + (tokens.losses(options).sum() - policy) / count, metrics)


def _eopd(case: Case) -> Outcome:
    entropy, teacher, student = (
        case.optional(name) for name in ("teacher_entropy", "teacher_topk_log_probs", "student_topk_log_probs")
    )
    log_probs = (case.inputs[name] for name in ("log_prob", "ref_log_prob", "old_log_prob"))
    soft = (None, None) if teacher is None or student is None else (entropy, entries(student, teacher, 0).sum(-1))
    return _eopd_outcome(case, case.inputs["response_mask"], *log_probs, *soft)


def _eopd_from_sequences(case: Case) -> Outcome:
    """On policy, from logits over prompt and response; the mask covers the last positions.

    Upstream's misalignment is kept: log-probs and entropy are those that predict the response (positions -t-1 to -2),
    the top-k distributions those of the response's own positions (-t to -1), which predict one token later.
    """
    names = ("student_logits", "teacher_logits", "input_ids", "response_mask")
    student, teacher, ids, mask = (case.inputs[name] for name in names)
    width, temperature = mask.shape[1], case.args["temperature"]
    log_probs, teacher_log_probs = (
        token_log_probs(logits[:, -width - 1 : -1], ids[:, -width:], temperature=temperature)
        for logits in (student, teacher)
    )
    entropy = entropies(teacher[:, -width - 1 : -1], temperature)
    forward_kl = divergence(
        student[:, -width:],
        teacher[:, -width:],
        beta=0,
        temperature=temperature,
        top_k=case.args["topk_logits"],
        top_k_of="teacher",
        outside="renormalised",
    )
    found = _eopd_outcome(case, mask, log_probs, teacher_log_probs, log_probs.detach(), entropy, forward_kl)
    sampled = {"student_log_prob": log_probs, "teacher_log_prob": teacher_log_probs, "teacher_entropy": entropy}
    return Outcome(found.loss, {**found.metrics, **sampled})


# Advantages from a teacher's log-probs of the sampled tokens


def _teacher_advantages(case: Case) -> Outcome:
    """What the loss does to each log-prob on policy is -advantage / tokens; the task's advantage is GRPO's to add."""
    coefficient, after, totals = case.args["kl_penalty_coef"], [], []
    names = ("sampled_logprobs", "teacher_logprobs", "mask", "advantages_in")
    for sampled, teacher, mask, advantages in zip(*(case.inputs[name] for name in names), strict=True):
        own = sampled.clone().requires_grad_()
        given = torch.tensor(teacher[1:])
        loss, found = distillation.reverse_kl_from_log_probs(own, sampled, given, mask, num_tokens=1)
        after.append(advantages - coefficient * torch.autograd.grad(loss, own)[0])
        totals.append(found["rev_kl"])
    kl = sum(total for total, _ in totals) / sum(count for _, count in totals)
    return Outcome(metrics={"teacher_kl": kl, "teacher_kl/dataset_0": kl}, state={"advantages_out": after})


# SimPO and TRL's CPO; DPO


def _simpo_rewards(case: Case, chosen: Tensor, rejected: Tensor, gamma_beta_ratio: float) -> Outcome:
    beta = case.args["beta"]
    losses = simpo_loss(chosen, rejected, beta=beta, gamma_beta_ratio=gamma_beta_ratio)
    metrics = {"chosen_rewards": beta * chosen, "rejected_rewards": beta * rejected, "loss_mean": losses.mean()}
    return Outcome(losses, metrics)


def _simpo(case: Case) -> Outcome:
    sides = case.inputs["policy_chosen_logps"], case.inputs["policy_rejected_logps"]
    return _simpo_rewards(case, *sides, case.args["gamma_beta_ratio"])


def _cpo(case: Case) -> Outcome:
    sides = case.inputs["policy_chosen_logps"], case.inputs["policy_rejected_logps"]
    return _simpo_rewards(case, *sides, case.args["simpo_gamma"] / case.args["beta"])


def _label_log_probs(logits: Tensor, labels: Tensor, average: bool) -> Tensor:
    targets = labels[:, 1:]
    mask = targets != IGNORED
    total = (token_log_probs(logits[:, :-1], targets.masked_fill(~mask, 0)) * mask).sum(-1)
    return total / mask.sum(-1) if average else total


def _batch_logps(case: Case) -> Outcome:
    return Outcome(_label_log_probs(case.inputs["logits"], case.inputs["labels"], case.args["average_log_prob"]))


def _simpo_batch(case: Case) -> Outcome:
    logits = case.inputs["concatenated_logits"]
    width = logits.shape[1]
    labels = [
        F.pad(labels, (0, width - labels.shape[1]), value=IGNORED)
        for labels in (case.inputs["chosen_labels"], case.inputs["rejected_labels"])
    ]
    chosen, rejected = _label_log_probs(logits, torch.cat(labels), average=True).chunk(2)
    found = _simpo_rewards(case, chosen, rejected, case.args["gamma_beta_ratio"])
    rewards = found.metrics["chosen_rewards"], found.metrics["rejected_rewards"]
    metrics = _pair_metrics(*rewards, chosen, rejected)
    sides = logits.detach().chunk(2)
    return Outcome(
        found.metrics["loss_mean"], metrics | {"logits/chosen": sides[0].mean(), "logits/rejected": sides[1].mean()}
    )


def _pair_metrics(
    chosen_rewards: Tensor, rejected_rewards: Tensor, chosen: Tensor, rejected: Tensor
) -> dict[str, Tensor]:
    """Means over pairs under upstream's keys."""
    return {
        "rewards/chosen": chosen_rewards.mean(),
        "rewards/rejected": rejected_rewards.mean(),
        "rewards/accuracies": (chosen_rewards > rejected_rewards).float().mean(),
        "rewards/margins": (chosen_rewards - rejected_rewards).mean(),
        "logps/chosen": chosen.mean(),
        "logps/rejected": rejected.mean(),
    }


def _dpo(case: Case) -> Outcome:
    """Token counts are of the unshifted mask, so position 0 counts although it has no log-prob, as upstream."""
    (form,), beta, weights = case.args["loss_type"], case.args["beta"], case.args["loss_weights"] or [1.0]
    chosen, rejected = case.inputs["per_token_logps"].sum(1).chunk(2)
    ref_chosen, ref_rejected = case.inputs["ref_per_token_logps"].sum(1).chunk(2)
    lengths = case.inputs["completion_mask"].sum(1).chunk(2)
    losses = dpo_losses(PairLogProbs(chosen, rejected, ref_chosen, ref_rejected, *lengths), form, beta)
    assert case.args["discopop_tau"] == preference.DISCOPOP_TAU
    rewards = beta * (chosen - ref_chosen), beta * (rejected - ref_rejected)
    return Outcome(losses.mean() * weights[0], _pair_metrics(*rewards, chosen, rejected))


# PRIME-RL


def _prime_rl(case: Case) -> Outcome:
    names = ("trainer_logprobs", "inference_logprobs", "advantages", "loss_mask")
    tokens = PackedTokens(*(case.inputs[name] for name in names), weights=case.optional("loss_weights"))
    found = default_loss(tokens, DefaultOptions(**case.args))
    return Outcome(found.loss, found.metrics)


OPSD = partial(_divergence, least_divisor=0)
RUNNERS: dict[str, Runner] = {
    "incorporate_kl_penalty": _teacher_advantages,
    "generalized_jsd_loss": OPSD,
    "generalized_jsd_loss[token_clip version]": OPSD,
    "OPSDTrainer.compute_loss": OPSD,
    "OPSDTrainer.compute_loss[token_clip version]": OPSD,
    "_update_ema": _update_ema,
    "GKDTrainer.generalized_jsd_loss": _divergence,
    "GKDTrainer.compute_loss": partial(_divergence, shifted=True, temperature=1.0),  # which GKD never passes
    "GOLDTrainer.generalized_jsd_loss": _divergence,
    "GOLDTrainer.compute_loss": partial(_divergence, shifted=True),
    "_chunked_divergence_loss": _chunked_divergence,
    "compute_self_distillation_loss": _sdpo_from_log_probs,
    "dp_actor forward + compute_self_distillation_loss": _sdpo_from_logits,
    "_update_teacher (ema)": _update_teacher,
    "TrustRegionTeacher.forward": _trust_region,
    "SDPOTrainer._compute_self_distillation_loss": _trl_sdpo,
    "SDFTTrainer._compute_self_distillation_loss": _trl_sdpo,
    "TAID.compute_loss": _taid,
    "TAID.update_t": _update_t,
    "TAID.forward[sequence]": _taid_sequence,
    "KDLoss.forward[TAID, t=0.4]": _taid_with_language_loss,
    "compute_policy_loss_on_policy_distill": _eopd,
    "dp_actor forward + compute_policy_loss_on_policy_distill": _eopd_from_sequences,
    "simpo_loss": _simpo,
    "trl.CPOTrainer.cpo_loss": _cpo,
    "get_batch_logps": _batch_logps,
    "get_batch_loss_metrics": _simpo_batch,
    "DPOTrainer._compute_loss": _dpo,
    "default_loss_fn": _prime_rl,
    "GRPOTrainer._compute_loss": trl_grpo.policy_loss,
}
