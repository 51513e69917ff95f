"""Policies without a model: `reference` plays each task's own solution, `noop` does nothing.

They check an environment before money is spent on it: `reference` should pass every task and `noop` none. The agent
loop gives each question the next action of the environment's solution (`composer_stages.envs.base.HasSolutions`). Where
there is none the policy is idle: the rollout ends and is graded as it is, without a malformed action.
"""

from typing import Any, Self

from composer_stages import envs
from composer_stages.errors import BadInput, UsageError
from composer_stages.policy.base import IDLE, PolicyConfig, Sample, Turn
from composer_stages.runs.kinds import NOOP, REFERENCE
from composer_stages.runs.ledger import Budget
from composer_stages.runs.run import AnswerFolders, Listener

OTHER_NAMES = {"gold": REFERENCE, "oracle": REFERENCE, "solution": REFERENCE, "nop": NOOP, "no-op": NOOP, "none": NOOP}
"""Their names in other tools. They are refused here: the hub takes seconds to answer that it has no such model."""


class ScriptedPolicy:
    """Implements Policy: answers with the solution's next action, or ends the rollout."""

    capture_level, batch_size = "text", 32

    def __init__(self, config: PolicyConfig) -> None:
        if config.tool_calls != "none":
            raise UsageError("policy.tool-calls-of-scripted-policy", model=config.model, tool_calls=config.tool_calls)
        self.config = config
        self.plays_solutions = config.model == REFERENCE

    @classmethod
    def open(cls, config: PolicyConfig, *, cache: AnswerFolders, budget: Budget, listener: Listener) -> Self:
        """Open the policy that `config.model` names."""
        del cache, budget, listener
        return cls(config)

    def sample(self, turns: list[Turn]) -> list[Sample]:
        """Return one answer per turn; an idle one where the solution has no further action."""
        actions = [turn.solution if self.plays_solutions else None for turn in turns]
        return [Sample(finish_reason=IDLE) if action is None else Sample(text=action) for action in actions]

    def facts(self) -> dict[str, Any]:
        """Return the manifest's entry."""
        return {"model": self.config.model}


def check(config: PolicyConfig, env: str) -> None:
    """Raise `BadInput` for another tool's name of them, `UsageError` for `reference` where there are no solutions.

    Nothing is asked of a server or the hub.
    """
    meant = OTHER_NAMES.get(config.model)
    if meant and config.base_url is None and not config.folder.is_dir():
        raise BadInput("policy.scripted-policy-name", model=config.model, meant=meant)
    if config.model == REFERENCE and config.scripted and not envs.has_solutions(env):
        raise UsageError(
            "policy.environment-without-solutions", env=env, reference=REFERENCE, public=envs.PUBLIC, noop=NOOP
        )
