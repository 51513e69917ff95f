"""A taskset for verifiers' own evaluation loop that plays a Composer environment behind an OpenEnv server.

verifiers imports a taskset by a plain name, so put a module on its path and name it (`vf-eval composer_served ...`):

    from composer_post_training.verifiers import *  # composer_served.py
    from composer_post_training.verifiers import __all__

Its interpreter needs verifiers, orjson and filelock, and no openenv, which cannot be installed together with verifiers.

Contract read from PrimeIntellect-ai/verifiers 0.4.0, `verifiers/v1/{taskset,env,session}.py`.
"""

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path

from composer_stages.envs.base import Task
from composer_stages.errors import InfrastructureError, UsageError
from composer_stages.integrations.openenv_client import ServedEnvironment

try:
    import verifiers.v1 as vf
except ImportError as error:
    raise UsageError("integrations.no-verifiers", error=str(error)) from error

__all__ = ["ServedEnv", "ServedTaskset"]


class ServedData(vf.TaskData):
    """The index of a task among the tasks of a server."""

    url: str
    asked: str
    place: int


class ServedConfig(vf.TasksetConfig):
    """`url`: of the server; `asked`: the file of its arguments, which holds its tasks."""

    url: str = ""
    asked: str = ""


class ServedTask(vf.Task[ServedData]):
    """One task."""


class ServedEnvConfig(vf.EnvConfig):
    """The agent that plays."""

    player: vf.AgentConfig = vf.AgentConfig()


class ServedEnv(vf.Env[ServedEnvConfig]):
    """Plays a rollout with our environment as the user; its grade is the reward."""

    async def run(self, task: ServedTask, agents: vf.Agents) -> None:
        """Play one rollout; where the environment cannot grade it, the rollout fails instead of being scored 0."""
        tasks = [Task(**row) for row in json.loads(Path(task.data.asked).read_text())["tasks"]]
        served = ServedEnvironment(task.data.url, tasks[0].env, "behind the server", tasks)
        try:
            # In threads: verifiers plays all rollouts in one event loop, and an environment's call may take minutes.
            opening = await asyncio.to_thread(served.reset, tasks[task.data.place])
            text = "\n\n".join(str(message["content"]) for message in opening)
            async with agents.player.interaction(task) as interaction:
                segment = await interaction.turn(text)
                while not segment.terminated:
                    observation = await asyncio.to_thread(served.step, segment.last_reply)
                    if observation.stop or served.graded is not None:
                        break
                    segment = await interaction.turn(observation.content)
            grade = await asyncio.to_thread(served.grade)
        finally:
            await asyncio.to_thread(served.close)
        if grade.reward is None:
            raise InfrastructureError("integrations.rollout-not-graded", error=grade.error)
        interaction.trace.record_reward("environment", grade.reward)


class ServedTaskset(vf.Taskset[ServedTask, ServedConfig]):
    """The tasks that the server was started with."""

    def load(self) -> Iterator[ServedTask]:
        """Yield each task once, in the server's order."""
        for index, row in enumerate(json.loads(Path(self.config.asked).read_text())["tasks"]):
            data = ServedData(
                name=row["task_id"], prompt=None, url=self.config.url, asked=self.config.asked, place=index
            )
            yield ServedTask(data, self.config.task)
