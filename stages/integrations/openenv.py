"""Environments as an OpenEnv server: a client sends the model's message, verbatim, and gets the messages that follow.

    uvicorn.run(app(KataEnv, KataEnv().tasks("train", 25, 0), max_steps=8, sessions=16))

Sessions exist on `/ws` only: over plain HTTP OpenEnv makes a new environment for every request, so that a step would
act in no workspace, or in the server's own. Those routes are not served, and a step before reset is refused.

Contract read from huggingface/OpenEnv 0.10.0, `openenv/core/env_server/{interfaces,types,http_server}.py`. Needs `pip
install openenv`.

`python -m composer_stages.integrations.openenv FILE` is such a server as a program, for an interpreter that has
openenv, which need not be Composer's own. FILE is JSON: {"env", "options", "tasks", "max_steps", "sessions"}. The
address is the first line on stdout; the server ends when its standard input does.
"""

import json
import socket
import sys
import threading
import uuid
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import uvicorn

from composer_stages import envs
from composer_stages.envs import boundary
from composer_stages.envs.base import Environment, Grade, Task
from composer_stages.errors import InfrastructureError, UsageError
from composer_stages.messages import Message

try:
    from openenv.core.env_server.http_server import create_fastapi_app
    from openenv.core.env_server.interfaces import Environment as Served
    from openenv.core.env_server.types import Action, Observation, State
except ImportError as error:
    raise UsageError("integrations.no-openenv", error=str(error)) from error


class TextAction(Action):
    """One message of the agent, verbatim; with `end` no message is sent, and the episode ends and is graded."""

    text: str
    end: bool = False


class TurnObservation(Observation):
    """The opening messages after a reset, else the answer to an action; `stop` is the reason why an episode is over.

    `reward` is null until then, and after it where grading was not possible; `metadata` then holds all fields of the
    grade. `metadata["observation"]` holds all fields of the environment's own observation of the step.
    """

    messages: list[Message]
    returncode: int | None = None
    parse_error: str | None = None
    stop: str | None = None


class EpisodeState(State):
    """The position of the session in its episode."""

    task_id: str | None = None


class Session(Served[TextAction, TurnObservation, EpisodeState]):
    """An environment behind one WebSocket, which plays episodes in sequence."""

    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self, environment: Environment, tasks: Sequence[Task], max_steps: int) -> None:
        super().__init__()
        self._environment, self._tasks, self._max_steps = environment, tasks, max_steps
        self._state, self._over = EpisodeState(), "no episode has begun"

    def reset(
        self, seed: int | None = None, episode_id: str | None = None, index: int | None = None, **more: Any
    ) -> TurnObservation:
        """Begin the task at `index`; without one, `seed` chooses among all."""
        del more
        number = (seed or 0) % len(self._tasks) if index is None else index
        if not 0 <= number < len(self._tasks):
            raise UsageError("integrations.no-task-at-index", number=number, num_tasks=len(self._tasks))
        task = self._tasks[number]
        opening = self._environment.reset(task)
        self._state, self._over = EpisodeState(episode_id=episode_id or uuid.uuid4().hex, task_id=task.task_id), ""
        return TurnObservation(messages=opening)

    def step(self, action: TextAction, timeout_s: float | None = None, **more: Any) -> TurnObservation:
        """Carry out one message; the environment has limits of its own, so `timeout_s` is not needed."""
        del timeout_s, more
        if self._over:
            raise UsageError("integrations.no-open-episode", over=self._over)
        self._over = "the last episode broke off"
        if action.end:
            self._over = "the episode has ended (ended)"
            return self._graded(TurnObservation(messages=[], stop="ended"))
        observation = self._environment.step(action.text)
        self._state.step_count += 1
        stop = observation.stop or ("max_steps" if self._state.step_count >= self._max_steps else None)
        self._over = f"the episode has ended ({stop})" if stop else ""
        messages = [] if observation.stop else [{"role": "user", "content": observation.content}]
        result = TurnObservation(
            messages=messages, returncode=observation.returncode, parse_error=observation.parse_error, stop=stop
        )
        result.metadata = {"observation": asdict(observation)}
        return self._graded(result) if stop else result

    def _graded(self, result: TurnObservation) -> TurnObservation:
        # An episode that cannot be graded has no reward and names the error; an exception would end the session.
        try:
            grade = boundary.check_grade(self._environment.grade(), self._environment)
        except InfrastructureError as error:
            grade = Grade(reward=None, error_type=type(error).__name__, error=str(error))
        result.done, result.reward, result.metadata = True, grade.reward, {**result.metadata, **asdict(grade)}
        return result

    @property
    def state(self) -> EpisodeState:
        """Return the episode's id, its task, and the number of actions so far."""
        return self._state

    def close(self) -> None:
        """Free the workspace; the client has disconnected."""
        self._over = "the session is closed"
        self._environment.close()


def app(make: Callable[[], Environment], tasks: Sequence[Task], *, max_steps: int, sessions: int = 1) -> Any:
    """Return the FastAPI application: an environment a session, at most `sessions` at once; no stateless routes."""
    return create_fastapi_app(
        lambda: Session(make(), tasks, max_steps),
        TextAction,
        TurnObservation,
        max_concurrent_envs=sessions,
        state_cls=EpisodeState,
        mode="production",
    )


def main() -> None:
    """Serve until the process that started this one closes its standard input, or is gone."""
    arguments = json.loads(Path(sys.argv[1]).read_text())
    served = app(
        lambda: envs.load(arguments["env"], arguments["options"]),
        [Task(**task) for task in arguments["tasks"]],
        max_steps=arguments["max_steps"],
        sessions=arguments["sessions"],
    )
    listener = socket.create_server(("127.0.0.1", 0))
    # A client thinks for minutes between two steps and answers no ping meanwhile; it ends when its connection does.
    server = uvicorn.Server(uvicorn.Config(served, log_level="warning", ws_ping_interval=None))
    threading.Thread(target=_end_with_input, args=(server,), daemon=True).start()
    print(f"http://127.0.0.1:{listener.getsockname()[1]}", flush=True)
    server.run([listener])


def _end_with_input(server: uvicorn.Server) -> None:
    sys.stdin.read()
    server.should_exit = True


if __name__ == "__main__":
    main()
