"""Names of adapters, projections and arms, and what follows from a name; without torch, so that `--help` stays fast.

An arm is one treatment of a replay or a GRPO trajectory: how the gradient is projected, on which adapter. One-sided
projection is that of wassname/grpo_proj2 @25ad306; one- and two-sided projection against another task's gradient are
the words of PCGrad and A-GEM. An arm with a random direction belongs to every experiment: a later routing arm of those
authors suppressed hacks equally with a random one (evil_MoE, docs/REFACTOR_HANDOFF.md).
"""

from typing import Literal

from pydantic import Field

from stages.errors import UsageError
from stages.runs.settings import Settings

AdapterName = Literal[
    "antipasto_full", "antipasto_topr", "antipasto_paper", "lora", "lora_frozenA", "lora_random_B", "lora_warmup"
]
SPECTRAL = ("antipasto_full", "antipasto_topr", "antipasto_paper")
"""The adapters that work in singular coordinates, and so need a decomposition."""
LORA_EXTRACT = {
    "lora": "B_only",
    "lora_frozenA": "frozenA",
    "lora_random_B": "random_B_minus_init",
    "lora_warmup": "warmup",
}
"""How a LoRA comes to have gradients at its start, by adapter: what a direction's metadata calls `lora_extract`."""

ProjectionMode = Literal["none", "one_sided", "two_sided", "reverse"]
"""What is taken out: nothing; a part toward the hack; any part along the direction; twice a part toward the hack."""
LORA_PREFIX = "lora_"
"""Prefix of an arm on a LoRA adapter."""
PROJECTION_MODES: dict[str, ProjectionMode] = {
    "vanilla": "none",
    "teacher_off": "none",
    "projected": "one_sided",
    "projected_random": "one_sided",
    "two_sided": "two_sided",
}
PROJECTION_MODES |= {LORA_PREFIX + arm: mode for arm, mode in PROJECTION_MODES.items()}
"""How an arm projects, with and without the LoRA prefix. `projected_random` removes a random direction instead of v."""


class DescentConfig(Settings):
    """How the optimiser moves theta.

    On an adaptive optimiser a projected gradient does not give a projected update: both are projected by default.
    """

    optimiser: Literal["adam", "sgd"] = "adam"
    learning_rate: float = Field(default=2e-3, ge=0)
    clip: float = Field(default=1.0, gt=0)
    """Largest norm of the gradient, after projection."""
    project_on: Literal["grad", "update", "both"] = "both"
    beta: float = Field(default=1.0, gt=0)
    """Share of the part along v that is taken out."""


def check_arm(arm: str, adapter: str) -> None:
    """`UsageError` when the arm names another adapter than the direction was extracted in."""
    # The adapters' names begin with "lora" (one is "lora" itself), those of arms on a LoRA with "lora_".
    if arm.startswith(LORA_PREFIX) != adapter.startswith("lora"):
        other = f"{LORA_PREFIX}{arm}" if adapter.startswith("lora") else arm.removeprefix(LORA_PREFIX)
        raise UsageError(f"The direction was extracted in the adapter {adapter}, so the arm is {other}, not {arm}.")
