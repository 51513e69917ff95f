"""The settings of `evaluate`."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from composer_stages import envs
from composer_stages.envs.base import Task
from composer_stages.envs.config import HeldOutEnvConfig
from composer_stages.evaluation.config import Planning
from composer_stages.policy.base import PolicyConfig
from composer_stages.rollouts.config import PlayingConfig
from composer_stages.runs.settings import BASIC, Option, basic_of
from composer_stages.terms import SamplingUnit


class Config(PlayingConfig):
    """Settings of what to evaluate on, and which arms to compare."""

    env: Annotated[HeldOutEnvConfig, basic_of("name", "options"), Option("NAME")] = HeldOutEnvConfig()
    tasks: Annotated[int, BASIC] = Field(default=200, gt=0, le=100_000)
    """Number of held-out tasks."""
    samples: Annotated[int, BASIC] = Field(default=1, gt=0)
    """Rollouts of every task and arm."""
    temperature: Annotated[float, BASIC] = Field(default=1.0, ge=0)
    """1 evaluates the policy as it was trained; 0 decodes greedily."""
    baseline: Annotated[str, BASIC] = "A"
    """Trainings of a single arm are compared with their start where no other arms are named."""
    treatment: Annotated[str, BASIC] = "B"
    control: Annotated[str | None, BASIC] = "C"
    """The arm that only imitates the chosen actions."""
    with_start: Annotated[bool, BASIC] = True
    """Also evaluate the model that training started from."""
    greedy: Annotated[bool, BASIC] = False
    """Also play every arm at temperature 0, as NAME@0 and once a task: whether a gain is shown there too."""
    policies: dict[str, PolicyConfig] = Field(default={})
    """Arms that were not trained here, by name: a model behind a server, or a folder."""
    looks: Annotated[int, BASIC] = Field(default=1, gt=0, le=10)
    """Planned looks: the tasks are played in so many parts, and no more of them once all is decided."""
    units: Literal["auto", "sampled", "fixed"] = "auto"
    """Whether the units that tasks are drawn in (kata's operations, SWE-bench's repositories, else families) are a
    sample of possible ones, or all there are. `auto`: as the environment declares."""

    planning: Annotated[Planning, basic_of("gain", "seeds")] = Field(
        default=Planning(), json_schema_extra={"affects_results": False}
    )

    @model_validator(mode="after")
    def _check(self) -> "Config":
        if self.baseline == self.treatment:
            raise ValueError(f"baseline and treatment are both {self.baseline!r}. Name two arms")
        if self.greedy and self.temperature == 0:
            raise ValueError("greedy adds temperature 0, which is the temperature already. Leave out greedy")
        return self

    def identity(self) -> dict[str, Any]:
        """Return the settings; without later ones at their defaults, so that earlier evaluations stay what they are."""
        settings = super().identity()
        return settings if self.greedy else {key: value for key, value in settings.items() if key != "greedy"}

    def uses_gpu(self) -> bool:
        """Return true: the trainings that are given bring models along."""
        return True

    def label(self) -> str:
        """Return the environment and the compared arms."""
        return f"{self.env.label()}-{self.treatment}-vs-{self.baseline}"

    def remarks(self, tasks: Sequence[Task]) -> list[str]:
        """Return that these tasks cannot show anything, where they are of too few units, and what helps."""
        from composer_stages.evaluation.inference import fewest_units, levels  # numpy, for which no help should wait
        from composer_stages.evaluation.words import SENTENCES

        unit, fewest = self.sampling(), fewest_units(levels(self.looks)[-1])
        num = len({task.task_id if unit.fixed else unit.of(task.task_id, task.family) for task in tasks})
        return [] if num >= fewest else [SENTENCES.text("few_units", num, unit, fewest)]

    def sampling(self) -> SamplingUnit:
        """Return the sampling unit of the environment's tasks, as the setting `units` declares it."""
        unit = envs.sampling_unit(self.env.name)
        return unit if self.units == "auto" else replace(unit, fixed=self.units == "fixed")
