"""Golden cases of GRPO. The policy loss is TRL's own method, run on a plain holder of the attributes that it reads.

A case that differs here says that the installed TRL is not the one that recorded the numbers. Advantages and the
sampling correction are inlined in a method of TRL's that generates, so those cases check our advantages.py.
"""

from collections import defaultdict
from dataclasses import fields
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from parity.case import Case, Outcome, Runner
from parity.kernels.advantages import group_advantages, normalized_then_summed, sampling_correction, weighted_rewards

OPTIONAL_INPUTS = (
    "tool_mask",
    "old_per_token_logps",
    "ref_per_token_logps",
    "sampling_per_token_logps",
    "importance_sampling_ratio",
)


def _single_process() -> SimpleNamespace:
    """An accelerator of one process: every collective is the identity."""
    return SimpleNamespace(
        num_processes=1,
        sync_gradients=True,
        device=torch.device("cpu"),
        gather=lambda values: values,
        reduce=lambda values, reduction: values,
        pad_across_processes=lambda values, dim, pad_index: values,
    )


def _config(case: Case) -> SimpleNamespace:
    """TRL's defaults, overridden by the case's args. Fields only: GRPOConfig's set-up needs a training environment."""
    from trl.trainer.grpo_config import GRPOConfig

    defaults = {field.name: field.default for field in fields(GRPOConfig)}
    return SimpleNamespace(**defaults | dict(case.args))


def _holder(case: Case) -> Any:
    """A GRPOTrainer without its constructor: the class gives the methods, this the attributes that the loss reads."""
    from trl.trainer.grpo_trainer import GRPOTrainer

    config = _config(case)
    holder = GRPOTrainer.__new__(GRPOTrainer)
    attributes = {
        name: getattr(config, name)
        for name in (
            *("loss_type", "beta", "importance_sampling_level", "top_entropy_quantile", "off_policy_mask_threshold"),
            *("entropy_coef", "use_adaptive_entropy", "max_completion_length"),
        )
    }
    attributes |= {
        "args": config,
        "accelerator": _single_process(),
        "model": SimpleNamespace(training=case.args.get("mode", "train") == "train"),
        "aux_loss_enabled": False,
        "epsilon_low": config.epsilon,
        "epsilon_high": config.epsilon if config.epsilon_high is None else config.epsilon_high,
        "use_vllm": case.args.get("use_importance_sampling_ratio", False),
        "vllm_importance_sampling_correction": True,
        "current_gradient_accumulation_steps": case.args.get("gradient_accumulation_steps", 1),
        "_metrics": defaultdict(lambda: defaultdict(list)),
        "_entropy_bonus_enabled": config.entropy_coef != 0.0 or config.use_adaptive_entropy,
        "_last_world_entropy": case.args.get("last_world_entropy", float("inf")),
        "_entropy_window_stats": None,
        "_get_per_token_logps_and_entropies": lambda *_, **__: (
            case.inputs["per_token_logps"],
            case.inputs["entropies"],
            None,
        ),
    }
    holder.__dict__.update(attributes)
    return holder


def _batch(case: Case) -> dict[str, Tensor]:
    """Token ids are placeholders: the holder's forward pass returns the recorded log-probs."""
    mask = case.inputs["completion_mask"]
    ids = torch.zeros_like(mask)
    batch = {"prompt_ids": ids[:, :0], "prompt_mask": ids[:, :0], "completion_ids": ids, "completion_mask": mask}
    batch |= {name: case.inputs[name] for name in OPTIONAL_INPUTS if case.optional(name) is not None}
    if case.args["num_items_in_batch"] is not None:
        batch["num_items_in_batch"] = torch.tensor(case.args["num_items_in_batch"])
    return batch | {"advantages": case.inputs["advantages"]}


def _policy_loss(case: Case) -> Outcome:
    holder = _holder(case)
    loss = type(holder)._compute_loss(holder, None, _batch(case))
    metrics = {key: values[-1] for logged in holder._metrics.values() for key, values in logged.items()}
    return Outcome(loss, metrics, {"entropy_coef_after": holder.entropy_coef})


def sdpo_policy_loss(case: Case) -> Tensor:
    """TRL's SDPOTrainer._compute_policy_loss on a plain holder."""
    from trl.experimental.sdpo import SDPOTrainer

    holder = SDPOTrainer.__new__(SDPOTrainer)
    epsilon = case.args["epsilon"]
    holder.__dict__.update(
        loss_type=case.args["loss_type"],
        importance_sampling_level=case.args.get("importance_sampling_level", "token"),
        epsilon_low=epsilon,
        epsilon_high=case.args.get("epsilon_high", epsilon),
        max_completion_length=case.args.get("max_completion_length"),
        model=SimpleNamespace(training=True),
        accelerator=_single_process(),
        _metrics=defaultdict(lambda: defaultdict(list)),
    )
    return SDPOTrainer._compute_policy_loss(holder, dict(case.inputs), case.inputs["student_logits"])


def _advantages(case: Case) -> Outcome:
    rewards = case.inputs["rewards_per_func"]
    weights = torch.tensor(case.args["reward_weights"], dtype=rewards.dtype)
    size = case.args["num_generations"]
    if case.args["multi_objective_aggregation"] == "normalize_then_sum":
        advantages, spread = normalized_then_summed(rewards, weights, size)
    else:
        advantages, spread = group_advantages(weighted_rewards(rewards, weights), size, case.args["scale_rewards"])
    return Outcome(state={"advantages": advantages, "std_rewards": spread})


def _sampling_correction(case: Case) -> Outcome:
    mask, tools = case.inputs["completion_mask"], case.optional("tool_mask")
    ratio = sampling_correction(
        case.inputs["old_per_token_logps"],
        case.inputs["sampling_per_token_logps"],
        mask if tools is None else mask * tools,
        mode=case.args["vllm_importance_sampling_mode"],
        clip_max=case.args["vllm_importance_sampling_clip_max"],
        clip_min=case.args["vllm_importance_sampling_clip_min"],
    )
    return Outcome(state={"importance_sampling_ratio": ratio})


RUNNERS: dict[str, Runner] = {
    "GRPOTrainer._compute_loss": _policy_loss,
    "GRPOTrainer advantages": _advantages,
    "GRPOTrainer vllm_importance_sampling_ratio": _sampling_correction,
}
