"""Composer environments behind an OpenEnv server: start the server, and play episodes through it.

The server runs in a separate process, under an interpreter that has openenv; here only its WebSocket messages are
spoken (huggingface/OpenEnv 0.10.0, `openenv/core/env_server/types.py`), so that openenv need not be installed here.
"""

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

import aiohttp

from composer_stages.envs.base import Grade, Observation, Split, Task, Work
from composer_stages.errors import InfrastructureError, UsageError
from composer_stages.messages import Message
from composer_stages.policy import background
from composer_stages.sandbox.bubblewrap import find_bwrap

INTERPRETER = "COMPOSER_OPENENV"
ANSWER_S, END_S = 900.0, 10.0
"""Seconds for one answer, which may be a grading, and for the server to end."""
ROOT = Path(__file__).parents[2]


@contextmanager
def running(
    env: str,
    options: Mapping[str, Any],
    tasks: Sequence[Task],
    *,
    max_steps: int,
    sessions: int,
    folder: Path,
    python: str = "",
) -> Iterator[str]:
    """Run a server of an environment on loopback until the block ends; yield its address.

    folder: where its log and its arguments are written. python: an interpreter with openenv, else the one that
    COMPOSER_OPENENV names, else this one. `UsageError` when it does not start.
    """
    folder.mkdir(parents=True, exist_ok=True)
    arguments = {"env": env, "options": dict(options), "max_steps": max_steps, "sessions": sessions}
    file, log = folder / "openenv.json", folder / "openenv.log"
    file.write_text(json.dumps({**arguments, "tasks": [asdict(task) for task in tasks]}))
    interpreter = python or os.environ.get(INTERPRETER) or sys.executable
    command = [interpreter, "-m", "composer_stages.integrations.openenv", str(file)]
    # Our code is on the server's path, and our bubblewrap behind the programs that its PATH has.
    path = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    variables = {**os.environ, "PYTHONPATH": os.pathsep.join(path)}
    with suppress(UsageError):
        bwrap = Path(find_bwrap())
        variables["PATH"] = os.pathsep.join([variables.get("PATH", os.defpath), str(bwrap.parent)])
    with log.open("wb") as out:
        try:
            process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=out, env=variables
            )
        except OSError as error:
            raise UsageError("integrations.openenv-not-executable", interpreter=interpreter, error=str(error)) from None
    assert process.stdin is not None and process.stdout is not None  # noqa: S101
    try:
        address = process.stdout.readline().decode().strip()
        if not address:
            last = (log.read_text(errors="replace").strip().splitlines() or ["it said nothing"])[-1]
            raise UsageError("integrations.openenv-not-started", interpreter=interpreter, reason=last)
        yield address
    finally:
        with suppress(OSError):  # the server may have ended by itself
            process.stdin.close()
        try:
            process.wait(END_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        process.stdout.close()


class ServedEnvironment:
    """Implements Environment: every call goes to a session of an OpenEnv server.

    `tasks` are those that the server was started with, in that order; `sandbox` is the one behind the server.
    """

    def __init__(self, url: str, name: str, sandbox: str, tasks: Sequence[Task]) -> None:
        self.name, self.sandbox = name, sandbox
        # The WebSocket is OpenEnv's only route that keeps an environment between two requests.
        self._url, self._tasks = f"{url.replace('http', 'ws', 1)}/ws", list(tasks)
        self._place = {task.task_id: index for index, task in enumerate(tasks)}
        self._session: _Session | None = None
        self.graded: Grade | None = None
        """The server's grade, once the episode is over there."""

    def tasks(self, split: Split, count: int, seed: int) -> list[Task]:
        """Return the first `count` of the server's tasks of a split; the server cannot draw other tasks."""
        del seed
        return [task for task in self._tasks if task.split == split][:count]

    def reset(self, task: Task) -> list[Message]:
        """Begin a task in a new session."""
        self.close()  # the server frees the workspace of an episode when its connection closes
        self.graded = None
        self._session = _Session(self._url)
        messages: list[Message] = self._ask("reset", {"index": self._place[task.task_id]})["observation"]["messages"]
        return messages

    def step(self, text: str) -> Observation:
        """Send one message of the agent; after the last allowed step, `graded` is set instead of a stop."""
        answer = self._ask("step", {"text": text})
        metadata = answer["observation"]["metadata"]
        if answer["done"]:
            self.graded = _grade(metadata)
        fields = metadata["observation"]
        # JSON made lists of the tuples.
        return Observation(**{**fields, "commands": tuple(fields["commands"]), "results": tuple(fields["results"])})

    def grade(self) -> Grade:
        """Return the server's grade; an episode that is still open is ended first."""
        if self.graded is None:
            self.graded = _grade(self._ask("step", {"text": "", "end": True})["observation"]["metadata"])
        return self.graded

    def _ask(self, kind: str, data: dict[str, Any]) -> dict[str, Any]:
        if self._session is None:
            raise InfrastructureError("integrations.step-before-reset")
        return self._session.ask({"type": kind, "data": data})

    def close(self) -> None:
        """End the session; safe to call twice."""
        session, self._session = self._session, None
        if session is not None:
            session.close()


def _grade(metadata: Mapping[str, Any]) -> Grade:
    fields = {key: value for key, value in metadata.items() if key != "observation"}
    return Grade(**{**fields, "work": Work(**fields["work"])})


class _Session:
    """One WebSocket for one thread at a time, on the event loop of all server requests."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._client: aiohttp.ClientSession | None = None
        self._socket: aiohttp.ClientWebSocketResponse | None = None
        try:
            background.run(self._open())
        except (aiohttp.ClientError, OSError) as error:
            self.close()
            raise InfrastructureError("integrations.openenv-unreachable", url=url, error=str(error)) from None

    async def _open(self) -> None:
        self._client = aiohttp.ClientSession()  # needs a running loop
        # max_msg_size=0: no limit. The default is 4 MiB, and an observation may hold a longer log.
        self._socket = await self._client.ws_connect(self._url, max_msg_size=0)

    def ask(self, message: dict[str, Any]) -> dict[str, Any]:
        """Return the data of the server's answer; `InfrastructureError` for an error, or no answer at all."""
        assert self._socket is not None  # noqa: S101
        try:
            background.run(self._socket.send_json(message))
            answer: dict[str, Any] = background.run(self._socket.receive_json(timeout=ANSWER_S))
        except (aiohttp.ClientError, OSError, TypeError, TimeoutError) as error:
            raise InfrastructureError("integrations.openenv-lost", url=self._url, error=str(error)) from None
        if answer["type"] == "error":
            raise InfrastructureError("integrations.openenv-error", answer=answer["data"]["message"])
        data: dict[str, Any] = answer["data"]
        return data

    def close(self) -> None:
        """Close the connection, at which the server frees the environment."""
        with suppress(aiohttp.ClientError, OSError):
            if self._socket is not None:
                background.run(self._socket.close())
            if self._client is not None:
                background.run(self._client.close())
