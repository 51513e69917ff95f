"""What several processes cannot do in one training, refused before anything is loaded."""

from collections.abc import Mapping
from typing import Any

from stages.errors import UsageError
from stages.training.config import Config
from stages.training.settings import Adapter, Optimisation

PER_PASS = ("entropy_coef", "use_adaptive_entropy")
"""Fields of TRL's that add a mean over the tokens of each pass (TRL 1.16, trainer/grpo_trainer.py `_compute_loss`)."""


def check(size: Optimisation, trl: Mapping[str, Any], count: int) -> None:
    """`UsageError` where a step of `count` processes would not be the step of one, or its rollouts cannot be shared."""
    if count == 1:
        return
    if size.loss_type == "bnpo":
        raise UsageError(
            f'optimisation.loss_type is "bnpo", a mean over the tokens of each pass: {count} processes would take '
            'another step than one. Take "dapo", whose mean is over the tokens of the whole step.'
        )
    if per_pass := [name for name in PER_PASS if trl.get(name)]:
        raise UsageError(
            f"trl.{per_pass[0]} adds a mean over the tokens of each pass: {count} processes would take another step "
            "than one. Leave it out, or train in one process."
        )
    if size.prompts_per_step % count:
        raise UsageError(
            f"optimisation.prompts_per_step is {size.prompts_per_step}, and {count} processes cannot share that "
            f"without splitting a group. Take a multiple of {count}."
        )
    rollouts = size.prompts_per_step // count * size.generations
    if size.micro_batch and rollouts % min(size.micro_batch, rollouts):
        raise UsageError(
            f"optimisation.micro_batch is {size.micro_batch}, but each of {count} processes has {rollouts} rollouts a "
            f"step. Take a divisor of {rollouts}."
        )


STEPPED_BY_SHARES = ("adamw_torch", "adamw_torch_fused", "sgd")
"""Optimisers that were seen to take the same step from shares (tests/stages/training/test_sharding.py)."""


def check_sharding(config: Config, adapter: Adapter, count: int, *, direction: bool) -> None:
    """`UsageError` for what needs all weights or all gradients in one place, where `count` processes share them.

    adapter: with nothing left open. direction: whether one is taken out of the training.
    """
    if count == 1 or config.distribution.sharding == "none":
        return
    copied = "sdpo" in config.weights.active() and config.hints.teacher != "current"
    optimiser = config.trl.get("optim", STEPPED_BY_SHARES[0])
    needing = {
        f"adapter.rank={adapter.rank}: an adapter is small, and its base is not cut; take 0": bool(adapter.rank),
        f"hints.teacher={config.hints.teacher}, which copies all weights; take current": copied,
        "optimisation.gradient_cosine_every, which compares whole gradients; take 0": bool(
            config.optimisation.gradient_cosine_every
        ),
        "a direction, which is taken out of whole gradients; leave out its run": direction,
        f"trl.optim={optimiser}; take {', '.join(STEPPED_BY_SHARES)}": optimiser not in STEPPED_BY_SHARES,
    }
    for what, asked in needing.items():
        if asked:
            raise UsageError(f"distribution.sharding=fsdp2 does not go with {what}.")
