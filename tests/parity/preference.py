"""Golden cases of the preference losses: SimPO, TRL's CPO and TRL's DPO."""

import torch
from torch import Tensor
from torch.nn import functional as F

from parity.case import Case, Outcome, Runner
from parity.kernels.preference import BatchOptions, DpoBatch, DpoOptions, cpo_loss, dpo_batch_loss, label_log_probs
from stages.losses.dpo import PairLosses, simpo_loss

IGNORED = -100
SIMPO = ("beta", "gamma_beta_ratio", "label_smoothing", "loss_type")
CPO = ("beta", "simpo_gamma", "label_smoothing", "alpha", "loss_type")


def _per_pair(pairs: PairLosses) -> Outcome:
    rewards = {"chosen_rewards": pairs.chosen_rewards, "rejected_rewards": pairs.rejected_rewards}
    return Outcome(pairs.losses, rewards | {"loss_mean": pairs.losses.mean()})


def _pair_metrics(pairs: PairLosses) -> dict[str, Tensor]:
    """Return means over pairs under upstream's keys."""
    return {
        "rewards/chosen": pairs.chosen_rewards.mean(),
        "rewards/rejected": pairs.rejected_rewards.mean(),
        "rewards/accuracies": (pairs.chosen_rewards > pairs.rejected_rewards).float().mean(),
        "rewards/margins": (pairs.chosen_rewards - pairs.rejected_rewards).mean(),
    }


def _simpo(case: Case) -> Outcome:
    sides = case.inputs["policy_chosen_logps"], case.inputs["policy_rejected_logps"]
    return _per_pair(simpo_loss(*sides, **{name: case.args[name] for name in SIMPO}))


def _cpo(case: Case) -> Outcome:
    sides = case.inputs["policy_chosen_logps"], case.inputs["policy_rejected_logps"]
    return _per_pair(cpo_loss(*sides, **{name: case.args[name] for name in CPO}))


def _batch_logps(case: Case) -> Outcome:
    options = {"average": case.args["average_log_prob"], "ignored": case.args["label_pad_token_id"]}
    return Outcome(label_log_probs(case.inputs["logits"], case.inputs["labels"], **options))


def _padded(labels: Tensor, width: int) -> Tensor:
    return F.pad(labels, (0, width - labels.shape[1]), value=IGNORED)


def _simpo_batch(case: Case) -> Outcome:
    logits = case.inputs["concatenated_logits"]
    labels = [_padded(case.inputs[f"{side}_labels"], logits.shape[1]) for side in ("chosen", "rejected")]
    chosen, rejected = label_log_probs(logits, torch.cat(labels)).chunk(2)
    pairs = simpo_loss(chosen, rejected, **{name: case.args[name] for name in SIMPO})
    with_sft = case.args["sft_weight"] > 0.0
    sides = list(logits.detach().chunk(2))
    if with_sft:  # upstream logs the chosen logits after cutting the last position off for the language-model loss
        sides[0] = sides[0][:, :-1]
    metrics = _pair_metrics(pairs) | {
        "logps/chosen": chosen.mean(),
        "logps/rejected": rejected.mean(),
        "logits/chosen": sides[0].mean(),
        "logits/rejected": sides[1].mean(),
    }
    if not with_sft:
        return Outcome(pairs.losses.mean(), metrics)
    sft = F.cross_entropy(logits[: len(chosen), :-1].flatten(0, 1), labels[0][:, 1:].flatten())
    return Outcome(case.args["sft_weight"] * sft + pairs.losses.mean(), metrics | {"sft_loss": sft})


def _dpo(case: Case) -> Outcome:
    names = ("per_token_logps", "ref_per_token_logps", "completion_mask", "log_sum_sq_probs")
    pair = DpoOptions(
        beta=case.args["beta"],
        label_smoothing=case.args["label_smoothing"],
        f_divergence=case.args["f_divergence_type"],
        f_alpha=case.args["f_alpha_divergence_coef"],
        discopop_tau=case.args["discopop_tau"],
    )
    types, weights = case.args["loss_type"], case.args["loss_weights"]
    types = [types] if isinstance(types, str) else types
    options = BatchOptions(types, weights, case.args["ld_alpha"], case.args["use_weighting"], pair)
    return Outcome(*dpo_batch_loss(DpoBatch(*(case.optional(name) for name in names)), options))


RUNNERS: dict[str, Runner] = {
    "simpo_loss": _simpo,
    "get_batch_logps": _batch_logps,
    "get_batch_loss_metrics": _simpo_batch,
    "trl.CPOTrainer.cpo_loss": _cpo,
    "DPOTrainer._compute_loss": _dpo,
}
