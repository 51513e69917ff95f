"""Environments for mini-swe-agent: its environment protocol around any Composer environment with bash commands.

    environment = MiniSweEnvironment(KataEnv(), task)
    DefaultAgent(model, environment, ...).run(task.prompt)
    environment.grade()

Contract read from SWE-agent/mini-swe-agent 2.4.6, `minisweagent/__init__.py`, `environments/local.py` and
`agents/default.py`. Of it only the exception that ends a rollout is imported; litellm is not.
"""

import os
import platform
from typing import Any

from pydantic import BaseModel

from composer_stages.envs import boundary
from composer_stages.envs.base import Environment, Grade, Task
from composer_stages.envs.bash import FENCE, SUBMIT, ActionError, fenced, parse_bash
from composer_stages.errors import UsageError
from composer_stages.words import Sentence

FINAL = "COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"
"""First line of the output of a successful command by which mini-swe-agent's prompts tell a model to submit."""


def message(command: str) -> str:
    """Return the message of one command; raise `ActionError` where one of its lines would end the block early."""
    text = fenced(command)
    if command.strip() and parse_bash(text) != command.strip("\n"):
        raise ActionError("integrations.fence-in-command", fence=FENCE)
    return text


class EnvironmentInfo(BaseModel):
    """The fields of the environment that a trajectory records and templates may name."""

    environment: str
    sandbox: str
    task_id: str
    cwd: str = ""


class MiniSweEnvironment:
    """One rollout of one task. `opening` holds our own opening messages, for callers without templates."""

    def __init__(self, environment: Environment, task: Task) -> None:
        self._environment = environment
        self.config = EnvironmentInfo(environment=environment.name, sandbox=environment.sandbox, task_id=task.task_id)
        self.opening = environment.reset(task)

    def execute(self, action: dict[str, Any], cwd: str = "", *, timeout: int | None = None) -> dict[str, Any]:
        """Run `action["command"]`; raises mini-swe-agent's `Submitted` when the rollout ends.

        Commands start in the workspace and have the environment's own time limit, so `cwd` and `timeout` cannot be
        chosen.
        """
        if cwd or timeout:
            raise UsageError("integrations.cwd-or-timeout-given", environment=self.config.environment)
        try:
            observation = self._environment.step(message(action.get("command", "")))
        except ActionError as error:
            return {"output": "", "returncode": -1, "exception_info": str(error)}
        # mini-swe-agent's prompts submit by a command that prints FINAL; our environments have their own submission.
        if observation.stop is None and observation.returncode == 0 and observation.content.lstrip().startswith(FINAL):
            observation = self._environment.step(message(SUBMIT))
        if observation.stop is not None:
            # The last message of the trajectory. Its submission is empty: what is graded is the workspace itself.
            status = "Submitted" if observation.stop == "submitted" else observation.stop
            extra = {"exit_status": status, "submission": ""}
            raise _submitted()({"role": "exit", "content": "", "extra": extra})
        stopped = Sentence("integrations.command-timed-out") if observation.timed_out else ""
        return {
            "output": observation.content,
            "returncode": -1 if observation.returncode is None else observation.returncode,  # as where nothing ran
            "exception_info": observation.parse_error or stopped,
        }

    def get_template_vars(self, **more: Any) -> dict[str, Any]:
        """Return the variables of templates, none of them environment variables of this process."""
        return {**self.config.model_dump(), **platform.uname()._asdict(), **more}

    def serialize(self) -> dict[str, Any]:
        """Return the environment's part of a trajectory."""
        kind = f"{type(self).__module__}.{type(self).__qualname__}"
        return {"info": {"config": {"environment": self.config.model_dump(), "environment_type": kind}}}

    def grade(self) -> Grade:
        """Return the verdict on the rollout, which mini-swe-agent itself has no place for."""
        return boundary.check_grade(self._environment.grade(), self._environment)

    def cleanup(self) -> None:
        """Free the workspace."""
        self._environment.close()


def _submitted() -> type[Exception]:
    os.environ.setdefault("MSWEA_SILENT_STARTUP", "1")  # importing it prints a banner
    try:
        from minisweagent.exceptions import Submitted
    except ImportError as error:
        raise UsageError("integrations.no-mini-swe-agent", error=str(error)) from error
    return Submitted
