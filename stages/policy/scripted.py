"""Policies without a model: `reference` plays each task's own solution, `noop` does nothing.

They check an environment before money is spent on it: `reference` should pass every task and `noop` none. The agent
loop gives each question the next action of the environment's solution (`stages.envs.base.HasSolutions`).
"""

from pathlib import Path
from typing import Any, Self

from stages import envs
from stages.errors import UsageError
from stages.policy.base import NOOP, REFERENCE, PolicyConfig, Sample, Turn
from stages.runs.artifact import Listener
from stages.runs.ledger import Budget


class ScriptedPolicy:
    """Implements Policy: answers with the solution's next action, or with an empty text that is no action."""

    capture_level, batch_size = "text", 32

    def __init__(self, config: PolicyConfig) -> None:
        if config.tool_calls != "none":
            raise UsageError(
                f"The policy {config.model} plays actions as text, and policy.tool_calls is {config.tool_calls}. "
                "Leave it out."
            )
        self.config = config
        self.plays_solutions = config.model == REFERENCE

    @classmethod
    def open(cls, config: PolicyConfig, *, cache: Path, budget: Budget, listener: Listener) -> Self:
        """Open the policy that `config.model` names."""
        del cache, budget, listener
        return cls(config)

    def sample(self, turns: list[Turn]) -> list[Sample]:
        """Return one answer per turn; an empty one where the solution has no further action."""
        return [Sample(text=(turn.solution or "") if self.plays_solutions else "") for turn in turns]

    def facts(self) -> dict[str, Any]:
        """Return the manifest's entry."""
        return {"model": self.config.model}


def check(config: PolicyConfig, env: str) -> None:
    """Raise UsageError where the policy `reference` is to play an environment without solutions."""
    if config.model == REFERENCE and config.scripted and not envs.has_solutions(env):
        raise UsageError(
            f"The environment {env!r} has no solutions for the policy {REFERENCE!r} to play: it has no method "
            f"`solution` (stages.envs.base.HasSolutions). `--policy {NOOP}` needs none."
        )
