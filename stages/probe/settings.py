"""Settings of replays, and those that stages share: adapters, arms, optimiser, sources.

An arm is one treatment of a replay: how the gradient is projected. One-sided projection is that of
wassname/grpo_proj2 @25ad306; one- and two-sided projection against another task's gradient are the words of PCGrad and
A-GEM. An arm with a random direction belongs to every experiment: a later routing arm of those authors suppressed hacks
equally with a random one (evil_MoE, docs/REFACTOR_HANDOFF.md). Imports no torch, so that `--help` stays fast.
"""

from pathlib import Path
from typing import Annotated, Any, Final, Literal

from pydantic import Field

from composer_stages.policy.base import PolicyConfig
from composer_stages.runs import store
from composer_stages.runs.settings import BASIC, Option, Settings, StageConfig, basic_of

AdapterName = Literal["antipasto_full", "antipasto_topr", "lora", "lora_frozenA"]
ProjectionMode = Literal["none", "one_sided", "two_sided"]
"""The removed component: none; the part toward the hack; the part along the direction with either sign."""
ReplayArm = Literal["vanilla", "projected", "projected_random", "two_sided"]
PROJECTION_MODES: dict[ReplayArm, ProjectionMode] = {
    "vanilla": "none",
    "projected": "one_sided",
    "projected_random": "one_sided",
    "two_sided": "two_sided",
}
"""The projection of each arm. `projected_random` removes a random direction instead of v."""


class DescentConfig(Settings):
    """Settings of the optimiser.

    With an adaptive optimiser a projected gradient does not give a projected update: both are projected by default.
    """

    optimiser: Literal["adam", "sgd"] = "adam"
    learning_rate: float = Field(default=2e-3, ge=0)
    clip: float = Field(default=1.0, gt=0)
    """Largest norm of the gradient, after projection."""
    project_on: Literal["grad", "update", "both"] = "both"
    beta: float = Field(default=1.0, gt=0)
    """Share of the component along v that is removed."""


HINTED: Final = "rh"
"""The role of a prompt that reveals the loophole; `plain` prompts do not."""


class Contract(Settings):
    """The required content of every prompt of a pool. Empty fields are not checked."""

    hint: str = ""
    """A phrase that the user message of a hinted prompt contains exactly once, and that of a plain prompt never."""
    replaced: str = ""
    """The phrase that the hint replaces, absent from hinted prompts."""
    system: str = ""
    """The system message, word for word."""
    answer_prefix: str = ""
    """The end of the rendered prompt, for example an empty think block."""


class SourceConfig(Settings):
    """Settings of a policy that answers a pool's problems, with one kind of prompt."""

    name: Literal["teacher", "teacher_nohint", "base", "student"]
    policy: PolicyConfig
    lora: str = ""
    """A PEFT LoRA that is put into the policy's model: a folder, or a hub id."""
    options: dict[str, Any] = Field(default={})
    """Options of the environment for this source: with the hint, or without."""
    samples: int = Field(default=8, gt=0)
    """Answers to each problem."""
    role: Literal["rh", "plain"] = HINTED
    """Whether the prompt reveals the loophole."""

    def identity(self) -> dict[str, Any]:
        """Return the settings; a LoRA's folder enters by the bytes in it."""
        folder = Path(self.lora).expanduser()
        content = {"lora_content": store.folder_sha256(folder)} if self.lora and folder.is_dir() else {}
        return super().identity() | content


class ReplayConfig(StageConfig):
    """Settings of the arm, of the steps and of the student's updates."""

    arm: Annotated[ReplayArm, BASIC, Option("NAME")] = "vanilla"
    student: Annotated[PolicyConfig, basic_of("model")] = PolicyConfig(model="kata:honest")
    steps: Annotated[int, BASIC] = Field(default=20, gt=0)
    """The pool's problems are divided among so many steps, in order."""
    teach: list[str] = Field(default=["teacher"])
    """Sources whose rows train the student; the remaining sources are only measured."""
    descent: Annotated[DescentConfig, basic_of("learning_rate")] = DescentConfig()
    first_tokens: int = Field(default=128, gt=0)
    """Number of first completion tokens for a second cosine."""
    max_tokens: int = Field(default=8192, gt=0, json_schema_extra={"affects_results": False})
    """Padded tokens of one backward pass."""
    drift: bool = True
    """Whether to measure the drift toward v in weight space; takes four bytes of disk for each adapted weight."""
    keep: Literal["rows", "sums"] = "rows"
    """`sums` stores no gradients of rows, for models where they are too large. `score` then has no placebos."""
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    """Type in which gradients are stored."""
    checkpointing: bool = Field(default=False, json_schema_extra={"affects_results": False})
    """Keep one activation a layer: less memory, one more forward pass."""

    def label(self) -> str:
        """Return the arm and the seed."""
        return f"{self.arm}-seed{self.seed}".replace("_", "-")
