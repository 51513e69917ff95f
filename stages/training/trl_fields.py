"""TRL's own fields, as `trl.KEY=VALUE`: checked before a model is loaded, by TRL and against its types."""

from collections.abc import Mapping
from dataclasses import fields
from difflib import get_close_matches
from typing import Any, get_type_hints

from pydantic import TypeAdapter, ValidationError
from trl.trainer.grpo_config import GRPOConfig

from stages.errors import UsageError

OURS = {
    "output_dir": "--out",
    "resume_from_checkpoint": "--resume",
    "seed": "seed",
    "data_seed": "seed",
    "max_steps": "optimisation.steps",
    "num_train_epochs": "optimisation.steps",
    "per_device_train_batch_size": "optimisation.micro_batch",
    "gradient_accumulation_steps": "optimisation.micro_batch",
    "steps_per_generation": "optimisation.prompts_per_step",
    "generation_batch_size": "optimisation.prompts_per_step",
    "num_generations": "optimisation.generations",
    "learning_rate": "optimisation.learning_rate",
    "max_grad_norm": "optimisation.max_grad_norm",
    "beta": "optimisation.beta",
    "loss_type": "optimisation.loss_type",
    "gradient_checkpointing": "optimisation.gradient_checkpointing",
    "activation_checkpointing": "optimisation.gradient_checkpointing",
    "save_steps": "optimisation.save_every",
    "temperature": "policy.temperature",
    "top_p": "policy.temperature",
    "top_k": "policy.temperature",
    "min_p": "policy.temperature",
    "repetition_penalty": "policy.temperature",
    "max_completion_length": "policy.max_tokens",
    "use_cpu": "policy.device",
    "bf16": "policy.dtype",
    "fp16": "policy.dtype",
    "model_init_kwargs": "policy.dtype",
    "report_to": "report_to",
}
"""Fields of TRL's that a setting of ours stands for."""
KEPT = frozenset(
    (
        "shuffle_dataset",
        "remove_unused_columns",
        "dataloader_drop_last",
        "save_strategy",
        "save_total_limit",
        "save_only_model",
        "load_best_model_at_end",
        "logging_steps",
        "logging_strategy",
        "disable_tqdm",
        "log_completions",
        "do_train",
        "do_eval",
        "do_predict",
        "eval_strategy",
        "eval_on_start",
        "push_to_hub",
        "use_vllm",
        "use_transformers_continuous_batching",
        "use_transformers_paged",
        "generation_kwargs",
        "trust_remote_code",
        "auto_find_batch_size",
        "local_rank",
        "deepspeed",
        "fsdp",
        "fsdp_config",
        "parallelism_config",
        "dataloader_pin_memory",
        "log_level_replica",
    )
)
"""Fields that the rollouts, the records and resuming stand on."""
CHOICES = {
    "loss_type": ("grpo", "dapo", "dr_grpo", "bnpo", "cispo", "sapo", "luspo", "vespo"),
    "scale_rewards": ("group", "batch", "none"),
    "importance_sampling_level": ("token", "sequence"),
}
"""Words that TRL 1.16 looks at only in the first step (trainer/grpo_trainer.py)."""


def build(own: Mapping[str, Any], given: Mapping[str, Any]) -> GRPOConfig:
    """TRL's configuration from what we set and what the user gave; `UsageError` for what it cannot be."""
    _check_names(given)
    try:
        made = GRPOConfig(**{**own, **given})
    except (ValueError, TypeError, AttributeError, ImportError, NotImplementedError) as error:
        if not given:
            raise
        raise UsageError(f"TRL refuses {_culprits(own, given)}: {str(error).strip().splitlines()[0]}") from None
    hints = get_type_hints(GRPOConfig)
    for key in given:
        try:
            TypeAdapter(hints[key]).validate_python(getattr(made, key), strict=True)
        except ValidationError as error:
            reason = error.errors(include_url=False)[0]["msg"]
            raise UsageError(f"TRL cannot take trl.{key} = {given[key]!r}: {reason}.") from None
    for key, words in CHOICES.items():
        if getattr(made, key) not in words:
            name = OURS.get(key, f"trl.{key}")
            raise UsageError(f"{name} is {getattr(made, key)!r}, which TRL does not know. Take {', '.join(words)}.")
    return made


def _check_names(given: Mapping[str, Any]) -> None:
    known = [field.name for field in fields(GRPOConfig) if field.init]
    for key in given:
        if key in OURS:
            raise UsageError(f"trl.{key} is what our own setting {OURS[key]} stands for. Set that.")
        if key in KEPT:
            raise UsageError(f"trl.{key} cannot be set: rollouts, records and resuming stand on it. Leave it out.")
        if key not in known:
            near = get_close_matches(key, known, n=1, cutoff=0.0)[0]
            raise UsageError(f"TRL's GRPOConfig has no field {key}. Did you mean trl.{near}?")


def _culprits(own: Mapping[str, Any], given: Mapping[str, Any]) -> str:
    """The given fields that TRL refuses by themselves, or all where only their combination is wrong."""
    alone = []
    for key, value in given.items():
        try:
            GRPOConfig(**{**own, key: value})
        except (ValueError, TypeError, AttributeError, ImportError, NotImplementedError):
            alone.append(key)
    return ", ".join(f"trl.{key} = {given[key]!r}" for key in alone or given)
