"""The settings of playing rollouts: limits of a rollout, concurrency, and the settings of a stage that plays."""

from typing import Annotated

from pydantic import Field, model_validator

from composer_stages import envs
from composer_stages.envs.config import EnvStageConfig
from composer_stages.rollouts.history import HISTORY_PATTERN, SUMMARISE
from composer_stages.runs.reporting import Backends
from composer_stages.runs.settings import BASIC, Settings
from composer_stages.words import Sentence


class RolloutLimits(Settings):
    """Limits of one rollout besides its steps. A rollout that reaches a limit is graded as it is."""

    wall_s: float | None = Field(default=None, gt=0)
    """Wall time of a rollout; a request in flight is then abandoned, a running command is awaited."""
    context_tokens: int | None = Field(default=None, gt=0)
    """Longest prompt and answer together, as counted by the server or a tokenizer, else by UTF-8 bytes as a bound."""
    cost_usd: float | None = Field(default=None, gt=0)
    """What a rollout may cost; the answer that reaches the limit is the last. Without prices and without a limit of
    the run, all rollouts together may cost as much."""

    def notes(self, steps: int) -> tuple[str, ...]:
        """Return the limits in words, for a plan."""
        return (Sentence("rollouts.limits-of-rollout", steps=steps, **self.model_dump()),)


class InFlight(Settings):
    """Limits of concurrency."""

    rollouts: int = Field(default=64, gt=0, json_schema_extra={"affects_results": False})
    """Rollouts played at once where the policy is on a server; as many again may wait for a grader. A model in this
    process plays batches instead."""
    commands: int = Field(default=8, gt=0, json_schema_extra={"affects_results": False})
    """Commands and workspace set-ups at once."""
    gradings: int = Field(default=4, gt=0, json_schema_extra={"affects_results": False})
    """Gradings at once."""

    def notes(self) -> tuple[str, ...]:
        """Return the concurrency in words, for a plan."""
        return (
            Sentence("rollouts.concurrency", rollouts=self.rollouts, commands=self.commands, gradings=self.gradings),
        )


NO_LIMITS, IN_FLIGHT = RolloutLimits(), InFlight()


class PlayingConfig(EnvStageConfig):
    """The configuration of a stage that plays rollouts."""

    max_steps: Annotated[int, BASIC] = Field(default=8, gt=0)
    """Actions after which a rollout ends."""
    limits: RolloutLimits = RolloutLimits()
    history: str = Field(default="full", pattern=HISTORY_PATTERN)
    """What the policy is shown of the past: `full`; `last 5`: of all observations the last five; or `summarise`: from
    near the context limit on, its own summary and everything since."""
    in_flight: InFlight = Field(default=InFlight(), json_schema_extra={"affects_results": False})
    report_to: Backends = Field(default=(), json_schema_extra={"affects_results": False})
    """Where the run is logged besides its own files: tensorboard, trackio, wandb, one or several."""

    def most_steps(self) -> int:
        """Return the steps of a rollout at most: `max_steps`, or the answers that the environment takes."""
        return envs.most_steps(self.env.name, self.env.options, self.max_steps)

    @model_validator(mode="after")
    def _check_history(self) -> "PlayingConfig":
        if self.history == SUMMARISE and self.limits.context_tokens is None:
            raise ValueError(Sentence("rollouts.no-context-limit"))
        return self
