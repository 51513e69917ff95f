"""Golden cases of GRPO. The policy loss is TRL's own method, run on a plain holder of the attributes that it reads.

A case that differs here says that the installed TRL is not the one that recorded the numbers.
"""

from collections import defaultdict
from dataclasses import fields
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from parity.golden_case import Case, Outcome

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


def policy_loss(case: Case) -> Outcome:
    """Run TRL's GRPO loss; the recorded log-probs stand for the forward pass."""
    holder = _holder(case)
    loss = type(holder)._compute_loss(holder, None, _batch(case))
    metrics = {key: values[-1] for logged in holder._metrics.values() for key, values in logged.items()}
    return Outcome(loss, metrics, {"entropy_coef_after": holder.entropy_coef})
