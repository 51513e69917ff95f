"""Settings of the probe's loops: the sources of a pool, a replay, and a GRPO trajectory. Imports no torch."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from pydantic import Field

from stages import envs
from stages.envs.config import EnvStageConfig
from stages.errors import BadInput
from stages.policy.base import PolicyConfig
from stages.probe.adapters.names import DescentConfig
from stages.probe.checks.prompts import HINTED, Contract
from stages.runs import store
from stages.runs.settings import Given, Settings, StageConfig, with_default

ReplayArm = Literal[
    "vanilla",
    "projected",
    "projected_random",
    "two_sided",
    "lora_vanilla",
    "lora_projected",
    "lora_projected_random",
    "lora_two_sided",
]
GrpoArm = Literal[ReplayArm, "teacher_off", "lora_teacher_off"]


class SourceConfig(Settings):
    """One policy that answers a pool's problems, under one kind of prompt."""

    name: Literal["teacher", "teacher_nohint", "base", "student"]
    policy: PolicyConfig
    lora: str = ""
    """A PEFT LoRA that is put into the policy's model: a folder, or a hub id."""
    options: dict[str, Any] = Field(default={})
    """Options of the environment for this source: with the hint, or without."""
    samples: int = Field(default=8, gt=0)
    """Answers to every problem."""
    role: Literal["rh", "plain"] = HINTED
    """Whether the prompt gives the loophole away."""

    def identity(self) -> dict[str, Any]:
        """Return the settings; a LoRA's folder enters by the bytes in it."""
        folder = Path(self.lora).expanduser()
        content = {"lora_content": store.folder_sha256(folder)} if self.lora and folder.is_dir() else {}
        return super().identity() | content


class GivenConfig(Settings):
    """Rollouts in a run given by --from: the source that wrote them, and their kind of prompt."""

    name: Literal["teacher", "teacher_nohint", "base", "student"]
    role: Literal["rh", "plain"] = HINTED


class RecordedConfig(Settings):
    """Rows of an earlier pool, read from a folder of `*.jsonl.gz`."""

    folder: str
    model: str
    """The model that wrote the rows."""
    eos_id: int
    pad_ids: list[int] = Field(default=[])

    def identity(self) -> dict[str, Any]:
        """Return the settings; the folder enters by the bytes in it."""
        return {**super().identity(), "content": store.folder_sha256(Path(self.folder).expanduser())}

    def check(self, cache: Path) -> list[str]:
        """Return how many files of recorded rows there are; `BadInput` without any."""
        del cache
        files = sorted(Path(self.folder).expanduser().glob("*.jsonl.gz"))
        if not files:
            raise BadInput(f"{self.folder} holds no *.jsonl.gz files of recorded rows.")
        return [f"recorded rows: {len(files)} files in {self.folder}"]


class PoolConfig(EnvStageConfig):
    """Which sources answer which problems, and how often."""

    sources: Given[list[SourceConfig], Sequence[SourceConfig | Mapping[str, Any]]] = with_default(
        [
            SourceConfig(name="teacher", policy=PolicyConfig(model="kata:loophole"), options={"hint": True}),
            SourceConfig(name="teacher_nohint", policy=PolicyConfig(model="kata:loophole"), samples=4, role="plain"),
            SourceConfig(name="base", policy=PolicyConfig(model="kata:honest"), options={"hint": True}, samples=4),
        ]
    )
    problems: int = Field(default=60, gt=0)
    max_problems: int = Field(default=80, gt=0)
    """Problems are added up to this number while the buckets are too small."""
    max_steps: int = Field(default=8, gt=0)
    """Actions after which a rollout ends."""
    contract: Contract = Contract(hint=envs.attached("kata", "hint"), system=envs.attached("kata", "system"))
    """What the prompts must contain, by default those of kata. For another environment, name its hint and system."""
    recorded: Given[RecordedConfig | None, RecordedConfig | Mapping[str, Any] | None] = with_default(None)
    given: Given[list[GivenConfig], Sequence[GivenConfig | Mapping[str, Any]]] = with_default([])
    """One entry for each run of rollouts that is given by --from, in that order."""
    tokenizer: Given[PolicyConfig | None, PolicyConfig | Mapping[str, Any] | str | None] = with_default(None)
    """The model whose tokenizer rendered the given rollouts; None for the first of `sources`."""

    def check(self, cache: Path) -> list[str]:
        """Return what was checked: of recorded rows their files alone, since nothing is played or sampled then."""
        return super().check(cache) if self.recorded is None else self.recorded.check(cache)


class ReplayConfig(StageConfig):
    """The arm, the number of steps, and how the student moves."""

    arm: ReplayArm = "vanilla"
    student: PolicyConfig = PolicyConfig(model="kata:honest")
    steps: int = Field(default=20, gt=0)
    """The pool's problems are divided among so many steps, in order."""
    teach: list[str] = Field(default=["teacher"])
    """Sources whose rows move the student; the others are only measured."""
    descent: DescentConfig = DescentConfig()
    first_tokens: int = Field(default=128, gt=0)
    """Number of first completion tokens on which the cosine is taken a second time."""
    max_tokens: int = Field(default=8192, gt=0, json_schema_extra={"affects_results": False})
    """Padded tokens of one backward pass."""
    drift: bool = True
    """Whether to measure the move toward v in weight space; takes four bytes of disk for each adapted weight."""
    keep: Literal["rows", "sums"] = "rows"
    """`sums` keeps no row's gradient: for those too large to keep. What is left to `score` is v, without placebos."""
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    """Type in which gradients are stored."""
    checkpointing: bool = Field(default=False, json_schema_extra={"affects_results": False})
    """Keep one activation a layer: less memory, one more forward pass."""

    def label(self) -> str:
        """Return the arm and the seed."""
        return f"{self.arm}-seed{self.seed}".replace("_", "-")


class GrpoConfig(EnvStageConfig):
    """The arm and generator, and the number of seeds, steps and answers."""

    arm: GrpoArm = "vanilla"
    generator: Literal["pi_theta", "mixed_is", "mixed_awr", "interp"] = "interp"
    student: PolicyConfig = PolicyConfig(model="kata:honest")
    teacher: PolicyConfig = PolicyConfig(model="kata:loophole")
    options: dict[str, Any] = Field(default={"hint": True, "reward": "visible"})
    """Options of the environment with the hint, for training and hack rates; the default opens kata's loophole."""
    plain_options: dict[str, Any] = Field(default={"reward": "visible"})
    """Options of the environment without it, for the rate of solutions."""
    alpha: float | None = Field(default=None, ge=0, le=1)
    """Place of the `interp` student between base, 0, and teacher, 1; found by bisection when not set."""
    direction_at: Literal["start", "given"] = "start"
    """`start`: v is extracted again, from the same pairs, on the student of the first step; `given`: v as it was."""
    drift_every: int = Field(default=0, ge=0)
    """Extract v again every so many steps to measure how far it turns; 0 for never."""
    seeds: list[int] = Field(default=[0, 1, 2], min_length=1)
    steps: int = Field(default=15, gt=0)
    problems: int = Field(default=8, gt=0)
    """Groups in a step."""
    samples: int = Field(default=8, ge=2)
    """Answers in a group."""
    max_steps: int = Field(default=8, gt=0)
    """Actions after which a rollout ends."""
    descent: DescentConfig = DescentConfig(learning_rate=0.02)
    eval_problems: int = Field(default=16, ge=0)
    """Held-out problems after the last step of each seed, and before the first, once for all; 0 for none."""
    eval_temperature: float = Field(default=0.7, ge=0)
    max_tokens: int = Field(default=8192, gt=0, json_schema_extra={"affects_results": False})
    """Padded tokens of one backward pass."""
    checkpointing: bool = Field(default=False, json_schema_extra={"affects_results": False})
    """Keep one activation a layer: less memory, one more forward pass."""

    def label(self) -> str:
        """Return arm and generator."""
        return f"{self.arm}-{self.generator}".replace("_", "-")

    @property
    def mixed(self) -> bool:
        """Whether half of each group is the teacher's; the arm teacher_off is the control without."""
        return self.generator.startswith("mixed") and not self.arm.endswith("teacher_off")
