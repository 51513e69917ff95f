"""The arguments of TRL's trainer: our settings, the user's `trl.KEY=VALUE`, and peft's configuration of an adapter."""

import os
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import fields
from pathlib import Path
from typing import Any, get_type_hints

import torch
from peft import LoraConfig
from pydantic import TypeAdapter, ValidationError
from transformers import Trainer, get_scheduler
from trl.trainer.grpo_config import GRPOConfig

from composer_stages.errors import UsageError, refusal
from composer_stages.policy import adapters
from composer_stages.runs.reporting import PROJECT
from composer_stages.training.collapse import kept_checkpoints
from composer_stages.training.config import OURS, TRL_FIELDS, AdapterSettings, Optimisation
from composer_stages.training.plan import SMALL_RATE, TrainPlan

# TRL's own fields are given as `trl.KEY=VALUE` and checked before a model is loaded, by TRL and against its types.

CHOICES = {
    "loss_type": ("grpo", "dapo", "dr_grpo", "bnpo", "cispo", "sapo", "luspo", "vespo"),
    "scale_rewards": ("group", "batch", "none"),
    "importance_sampling_level": ("token", "sequence"),
    "multi_objective_aggregation": ("sum_then_normalize", "normalize_then_sum"),
}
"""Values that TRL 1.16 checks only in the first step (trainer/grpo_trainer.py)."""


REFUSALS = (ValueError, TypeError, AttributeError, ImportError, NotImplementedError, OSError)
"""What GRPOConfig raises for values that it cannot use."""
TRUNCATED = {"vllm_importance_sampling_mode": "token_truncate"}
"""How TRL corrects for the policy of a server unless asked otherwise: weights of tokens, cut off above."""


def _built(values: Mapping[str, Any]) -> GRPOConfig:
    """Return TRL's configuration of these fields; one of `REFUSALS` also for what the first step would raise."""
    config = GRPOConfig(**values)
    optimiser = torch.optim.SGD([torch.zeros(1)], lr=config.learning_rate)
    kwargs: Any = config.lr_scheduler_kwargs
    warmup = config.get_warmup_steps(config.max_steps)
    get_scheduler(config.lr_scheduler_type, optimiser, warmup, config.max_steps, kwargs)
    made: Any = None
    with suppress(ValueError):  # of optimisers that are made for a model, which is not loaded yet
        made = Trainer.get_optimizer_cls_and_kwargs(config)
    if made and made[0].__module__.startswith("torch."):
        made[0]([torch.zeros(1)], weight_decay=config.weight_decay, **made[1])
    return config


def trl_refusal(user_fields: Mapping[str, Any], error: Exception) -> UsageError:
    """Return TRL's refusal of a user's fields as ours."""
    refused = ", ".join(f"trl.{key} = {value!r}" for key, value in user_fields.items())
    return UsageError("training.trl-refuses", refused=refused, error=str(error).strip().splitlines()[0])


def checked_config(defaults: Mapping[str, Any], user_fields: Mapping[str, Any]) -> GRPOConfig:
    """Return TRL's configuration of our fields and the user's; `UsageError` for a user's field that TRL cannot use."""
    if "parallelism_config" in user_fields or os.environ.get("ACCELERATE_USE_PARALLELISM_CONFIG", "").lower() == "true":
        raise UsageError("training.parallelism-config")
    names = [field.name for field in fields(GRPOConfig) if field.init]
    for key in user_fields:
        if key not in names:
            raise UsageError("training.no-trl-field", key=key, fields=[f"trl.{name}" for name in names])
    try:
        config = _built({**defaults, **user_fields})
    except REFUSALS as error:
        if not user_fields:
            raise
        # Name the fields that TRL refuses by themselves, or all where only their combination is wrong.
        alone = {}
        for key, value in user_fields.items():
            try:
                _built({**defaults, key: value})
            except REFUSALS:
                alone[key] = value
        raise trl_refusal(alone or user_fields, error) from None
    # A dataclass checks no types: "0.1" for a number would fail in the first step, or silently mean something else.
    hints = get_type_hints(GRPOConfig)
    for key in user_fields:
        try:
            TypeAdapter(hints[key]).validate_python(getattr(config, key), strict=True)
        except ValidationError as error:
            reason = refusal(error.errors(include_url=False)[0])
            raise UsageError("training.trl-field-type", key=key, field_value=user_fields[key], reason=reason) from None
    for key, (least, most) in TRL_FIELDS["bounds"].items():
        number = getattr(config, key)
        if key in user_fields and isinstance(number, (int, float)) and not least <= number <= most:
            raise UsageError("training.trl-field-outside", key=key, number=number, least=least, most=most)
    for key, words in CHOICES.items():
        if getattr(config, key) not in words:
            name = OURS.get(key, f"trl.{key}")
            raise UsageError("training.trl-choice-unknown", name=name, choice=getattr(config, key), choices=words)
    return config


def trl_config(
    folder: str,
    settings: Optimisation,
    *,
    temperature: float,
    max_completion: int,
    device: str,
    processes: int = 1,
    more: Mapping[str, Any] | None = None,
    **ours: Any,
) -> GRPOConfig:
    """Return TRL's configuration for our settings: constant learning rate, checkpoints to resume from.

    max_completion: tokens of a whole rollout after its prompt. processes: that share the rollouts of a step. more:
    further fields of TRL's, by users; `UsageError` for those that do not exist, are ours, or hold what TRL refuses.
    ours: other fields, by TRL's names.
    """
    rollouts = settings.prompts_per_step * settings.generations // processes
    micro = min(settings.micro_batch or rollouts, rollouts)
    defaults: dict[str, Any] = {
        "output_dir": folder,
        "max_steps": settings.steps,
        "per_device_train_batch_size": micro,
        "gradient_accumulation_steps": rollouts // micro,
        "num_generations": settings.generations,
        "learning_rate": SMALL_RATE if settings.learning_rate is None else settings.learning_rate,
        "max_grad_norm": settings.max_grad_norm,
        "beta": settings.beta,
        "loss_type": settings.loss_type,
        "temperature": temperature,
        "max_completion_length": max_completion,
        "gradient_checkpointing": bool(settings.gradient_checkpointing),
        "use_cpu": device == "cpu",
        "bf16": False,  # TRL's own default is bfloat16 autocast
        "save_steps": settings.save_every,
        "save_total_limit": kept_checkpoints(settings.save_every) if settings.stop_on_collapse else 2,
        "report_to": [],
        "project": PROJECT,
        "dataloader_pin_memory": device != "cpu",
        **TRL_FIELDS["constant"],
        **ours,
    }
    config = checked_config(defaults, more or {})
    # A training that is resumed begins with new rollouts, so checkpoints come where the next step plays anyway.
    config.save_steps = -(-settings.save_every // config.num_iterations) * config.num_iterations
    return config


def trl_arguments(plan: TrainPlan, folder: Path, mixed: bool = False) -> GRPOConfig:
    """Return TRL's configuration of a training; `mixed`: float32 weights compute under bfloat16 autocast."""
    config = plan.config
    return trl_config(
        str(folder),
        config.optimisation,
        temperature=config.policy.temperature,
        max_completion=plan.max_completion,
        device=plan.device,
        processes=plan.processes,
        seed=config.seed % 2**32,  # numpy's generator, which TRL seeds too, takes no others
        bf16=mixed,
        report_to=list(config.report_to),
        run_name=config.label(),
        more=(TRUNCATED if config.policy.served else {}) | config.trl,
    )


def lora(settings: AdapterSettings, model: Any) -> LoraConfig | None:
    """Return peft's configuration for our settings; None where all weights are trained.

    `UsageError` for a target that names no Linear of the model.
    """
    if not settings.rank:
        return None
    # peft would leave an unknown name out without a word as long as another one matches.
    linears = adapters.linears(model)
    for target in settings.targets:
        if not any(name == target or name.endswith(f".{target}") for name in linears):
            available = ", ".join(sorted({name.rpartition(".")[2] for name in linears}))
            raise UsageError("training.no-target-linear", target=target, available=available)
    return LoraConfig(
        task_type="CAUSAL_LM",
        r=settings.rank,
        lora_alpha=settings.alpha,
        target_modules=list(settings.targets) or adapters.targets(model),
        lora_dropout=settings.dropout,
        use_rslora=settings.rslora,
        use_dora=settings.dora,
    )
