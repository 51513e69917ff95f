"""The settings of `extract-pairs`."""

from typing import Literal

from pydantic import Field

from composer_stages.runs.settings import Settings, StageConfig


class SignalConfig(Settings):
    """Settings of the test of pairs by their own actions."""

    rollouts: int = Field(default=0, ge=0, le=1000)
    """Continuations of each action of a pair by the policy that collected the rollouts; 0 plays none. An action that
    ends the rollout is played once, and every action is where the policy's temperature is 0."""


class Config(StageConfig):
    """Settings of the comparison of actions and of the test of pairs."""

    compare: Literal["outcome", "canonical"] = "outcome"
    """`outcome` runs actions whose canonical forms differ and compares their outcomes; `canonical` compares text."""
    sandbox: str = "bubblewrap"
    """Where actions are executed."""
    student: str | None = None
    """The model whose actions are judged in imported groups of several models; without it, each in turn."""
    outcome: Literal["respect", "ignore"] = "respect"
    """`respect` drops pairs that teach against the grader: those of a majority against an action after
    which a rollout passed. Where both actions were continued (`signal.rollouts`), the pass rates measured there decide
    instead, about every pair. `ignore` keeps all; imported groups have rules of their own."""
    signal: SignalConfig = SignalConfig()
    min_pairs_per_rollout: float | None = Field(default=None, ge=0.0, json_schema_extra={"affects_results": False})
    """Least mean number of pairs a rollout for the run to pass. By default a tenth of the mean number of steps, and not
    more than 5."""

    def uses_gpu(self) -> bool:
        """Return whether the policy that collected the rollouts continues them."""
        return self.signal.rollouts > 0

    def label(self) -> str:
        """Return how actions are compared."""
        return f"by-{self.compare}"
