"""Our environments behind an OpenEnv server of ours: the server started, and episodes played through it.

The server runs in a process of its own, under an interpreter that has openenv; here only its WebSocket messages are
spoken (huggingface/OpenEnv 0.10.0, `openenv/core/env_server/types.py`), so that openenv need not be installed here.
"""

import asyncio
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

from stages.envs.base import Grade, Observation, Split, Task, Work
from stages.errors import InfrastructureError, UsageError
from stages.messages import Message
from stages.sandbox.bubblewrap import find_bwrap

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
    """The address of a server of an environment on loopback, until the block ends.

    folder: where its log and what it is told are written. python: an interpreter with openenv, else the one that
    COMPOSER_OPENENV names, else this one. `UsageError` where it does not start.
    """
    folder.mkdir(parents=True, exist_ok=True)
    told = {"env": env, "options": dict(options), "max_steps": max_steps, "sessions": sessions}
    asked, log = folder / "openenv.json", folder / "openenv.log"
    asked.write_text(json.dumps({**told, "tasks": [asdict(task) for task in tasks]}))
    interpreter = python or os.environ.get(INTERPRETER) or sys.executable
    command = [interpreter, "-m", "stages.integrations.openenv_server", str(asked)]
    variables = _variables()
    with log.open("wb") as out:
        try:
            process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=out,
                env=variables,
            )
        except OSError as error:
            raise UsageError(
                f"No OpenEnv server can be started with {interpreter!r} ({error}). Name {_needed()}"
            ) from None
    assert process.stdin is not None and process.stdout is not None  # noqa: S101
    try:
        address = process.stdout.readline().decode().strip()
        if not address:
            last = (log.read_text(errors="replace").strip().splitlines() or ["it said nothing"])[-1]
            raise UsageError(f"The OpenEnv server did not start under {interpreter} ({last}). Name {_needed()}")
        yield address
    finally:
        with suppress(OSError):
            process.stdin.close()
        try:
            process.wait(END_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        process.stdout.close()


def _variables() -> dict[str, str]:
    """This process's, with our code on its path, and our bubblewrap behind whatever programs there are."""
    found = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])}
    with suppress(UsageError):
        found["PATH"] = os.pathsep.join([found.get("PATH", os.defpath), str(Path(find_bwrap()).parent)])
    return found


def _needed() -> str:
    return f"a Python that has openenv, orjson and filelock: {INTERPRETER}=PYTHON."


class ServedEnvironment:
    """Implements Environment: every call goes to a session of an OpenEnv server.

    `tasks` are those that the server was started with, in that order; `sandbox` is what works behind the server.
    """

    def __init__(self, url: str, name: str, sandbox: str, tasks: Sequence[Task]) -> None:
        self.name, self.sandbox = name, sandbox
        self._url, self._tasks = f"{url.replace('http', 'ws', 1)}/ws", list(tasks)
        self._place = {task.task_id: index for index, task in enumerate(tasks)}
        self._session: _Session | None = None
        self._grade: Grade | None = None

    def tasks(self, split: Split, count: int, seed: int) -> list[Task]:
        """The first of the server's tasks that are of a split; it draws none anew."""
        del seed
        return [task for task in self._tasks if task.split == split][:count]

    def reset(self, task: Task) -> list[Message]:
        """Begin a task in a session of its own."""
        self.close()
        self._grade = None
        self._session = _Session(self._url)
        messages: list[Message] = self._asked("reset", {"index": self._place[task.task_id]})["observation"]["messages"]
        return messages

    def step(self, text: str) -> Observation:
        """Send one message of the agent. Where only the steps ran out, the caller says so."""
        said = self._asked("step", {"text": text})
        told = said["observation"]["metadata"]["observation"]
        if said["done"]:
            self._grade = _grade(said["observation"]["metadata"])
        return Observation(**{**told, "commands": tuple(told["commands"]), "results": tuple(told["results"])})

    @property
    def over(self) -> bool:
        """Whether the server has graded the episode."""
        return self._grade is not None

    def grade(self) -> Grade:
        """The server's grade; an episode that goes on there is ended."""
        if self._grade is None:
            self._grade = _grade(self._asked("step", {"text": "", "end": True})["observation"]["metadata"])
        return self._grade

    def _asked(self, kind: str, data: dict[str, Any]) -> dict[str, Any]:
        if self._session is None:
            raise InfrastructureError("There is no episode at the OpenEnv server: reset comes first.")
        return self._session.ask({"type": kind, "data": data})

    def close(self) -> None:
        """End the session; safe to call twice."""
        session, self._session = self._session, None
        if session is not None:
            session.close()


def _grade(metadata: Mapping[str, Any]) -> Grade:
    told = {key: value for key, value in metadata.items() if key != "observation"}
    return Grade(**{**told, "work": Work(**told["work"])})


class _Session:
    """One WebSocket, for one thread at a time."""

    def __init__(self, url: str) -> None:
        self._url, self._loop = url, asyncio.new_event_loop()
        self._client: aiohttp.ClientSession | None = None
        self._socket: aiohttp.ClientWebSocketResponse | None = None
        try:
            self._loop.run_until_complete(self._open())
        except (aiohttp.ClientError, OSError) as error:
            self.close()
            raise InfrastructureError(f"The OpenEnv server at {url} cannot be reached: {error}.") from None

    async def _open(self) -> None:
        self._client = aiohttp.ClientSession()
        self._socket = await self._client.ws_connect(self._url, max_msg_size=0)

    def ask(self, message: dict[str, Any]) -> dict[str, Any]:
        """What the server answers; `InfrastructureError` where it answers with an error, or not at all."""
        try:
            answer = self._loop.run_until_complete(self._answer(message))
        except (aiohttp.ClientError, OSError, TypeError, TimeoutError) as error:
            raise InfrastructureError(f"The OpenEnv server at {self._url} was lost: {error}.") from None
        if answer["type"] == "error":
            raise InfrastructureError(f"The OpenEnv server answers with an error: {answer['data']['message']}")
        data: dict[str, Any] = answer["data"]
        return data

    async def _answer(self, message: dict[str, Any]) -> dict[str, Any]:
        assert self._socket is not None  # noqa: S101
        await self._socket.send_json(message)
        answer: dict[str, Any] = await self._socket.receive_json(timeout=ANSWER_S)
        return answer

    def close(self) -> None:
        """Close the connection, at which the server frees the environment."""
        with suppress(aiohttp.ClientError, OSError):
            self._loop.run_until_complete(self._close())
        self._loop.close()

    async def _close(self) -> None:
        if self._socket is not None:
            await self._socket.close()
        if self._client is not None:
            await self._client.close()
        await asyncio.sleep(0)  # what the transport does last is only scheduled
