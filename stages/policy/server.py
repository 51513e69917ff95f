"""A model server as a process of ours: waited for, its log kept, restarted where it dies, and ended with the run.

It never outlives this process: a second, tiny process waits for ours to end, however it ends, and then ends the server.
"""

import asyncio
import os
import signal
import socket
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from urllib.parse import urlsplit

from stages.errors import InfrastructureError
from stages.runs import store
from stages.runs.artifact import Listener

MAX_RESTARTS = 3
START_S = 1800.0
"""Longest wait for a server to load its model."""
POLL_S = 0.5
GRACE_S = 15.0
"""From the request to end until it is killed."""
TAIL = 5
"""Lines of the log that are shown where a server fails."""
KEEPER = 'cat >/dev/null; kill -s TERM -- "-$0"; sleep "$1"; kill -s KILL -- "-$0"'
"""Reads until our end of its pipe is closed, which the system does when this process is gone; $0 is a process group."""


class ModelServer:
    """One server on a free port of this machine; `command` makes its arguments from the port.

    check: called while waiting; raises where nobody wants the server any more. Methods raise `InfrastructureError`
    where it cannot be brought to answer.
    """

    def __init__(
        self,
        title: str,
        command: Callable[[int], Sequence[str]],
        environment: Mapping[str, str],
        log: Path,
        *,
        port: int = 0,
        listener: Listener,
        check: Callable[[], None] = lambda: None,
    ) -> None:
        self.title, self.log, self.restarts = title, log, 0
        self._command, self._environment, self._listener, self._check = command, environment, listener, check
        self._port = port or free_port()
        self._process: subprocess.Popen[bytes] | None = None
        self._keeper: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        """Where it is asked: the root of an OpenAI-compatible server."""
        return f"http://127.0.0.1:{self._port}/v1"

    def alive(self) -> bool:
        """Whether its process runs."""
        return self._process is not None and self._process.poll() is None

    @property
    def pid(self) -> int:
        """Of its process, which leads a group of its own; 0 before it is started."""
        return self._process.pid if self._process else 0

    def start(self) -> None:
        """Start it and return when it answers."""
        self._launch()
        try:
            self._wait()
        except BaseException:
            self.stop()
            raise

    def revive(self) -> None:
        """Start it again where it died, but not for ever."""
        if self.alive():
            return
        if self.restarts >= MAX_RESTARTS:
            raise InfrastructureError(
                f"The server of {self.title} died {MAX_RESTARTS + 1} times, so it is not started again. "
                f"The end of its log {self.log}: {self._tail()}"
            )
        self.restarts += 1
        self.stop()
        self.start()

    def stop(self) -> None:
        """End it with all its processes."""
        if self._process is not None:
            _end_group(self._process)
        if self._keeper is not None and self._keeper.stdin is not None:
            self._keeper.kill()
            self._keeper.stdin.close()
            self._keeper.wait()
        self._process = self._keeper = None

    def _launch(self) -> None:
        self.log.parent.mkdir(parents=True, exist_ok=True)
        log = os.open(self.log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        try:
            self._process = subprocess.Popen(
                list(self._command(self._port)),
                env=dict(self._environment),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        finally:
            os.close(log)
        self._keeper = subprocess.Popen(
            ["sh", "-c", KEEPER, str(self._process.pid), f"{GRACE_S:g}"],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )

    def _wait(self) -> None:
        started = time.monotonic()
        while not self._answers():
            self._check()
            waited = time.monotonic() - started
            if not self.alive():
                raise InfrastructureError(
                    f"The server of {self.title} ended before it answered. "
                    f"The end of its log {self.log}: {self._tail()}"
                )
            if waited > START_S:
                raise InfrastructureError(
                    f"The server of {self.title} did not answer within {START_S:g} s. Its log is {self.log}."
                )
            self._listener(f"s of waiting for the server of {self.title}", int(waited), int(START_S))
            time.sleep(POLL_S)

    def _answers(self) -> bool:
        with suppress(urllib.error.URLError, OSError), urllib.request.urlopen(f"{self.url}/models", timeout=5) as got:  # noqa: S310 (our own address)
            return bool(got.status == 200)
        return False

    def _tail(self) -> str:
        lines = (store.read_bytes(self.log) or b"").decode(errors="replace").splitlines()
        return " / ".join(line.strip() for line in lines[-TAIL:] if line.strip()) or "(empty)"


def free_port() -> int:
    """A port of this machine that nobody listens on."""
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        return int(listening.getsockname()[1])


def _end_group(process: subprocess.Popen[bytes]) -> None:
    """Ask all processes of a group to end, and kill those that have not after the grace."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGTERM)
    deadline = time.monotonic() + GRACE_S
    while time.monotonic() < deadline and _group_lives(process):
        time.sleep(0.05)
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _group_lives(process: subprocess.Popen[bytes]) -> bool:
    process.poll()  # a dead leader that nobody waited for would count as a member
    try:
        os.killpg(process.pid, 0)
    except (ProcessLookupError, PermissionError):
        return False
    return True


# ---- alone
# Keeps a scoring to itself on a server that samples for others meanwhile.
#
# On a CPU, vLLM 0.32 that may load adapters dies of log-probs of given tokens in a batch with any other request:
# `punica_cpu.add_lora_logits` counts one row a request, where there is one a token.

LOOPBACK = ("127.0.0.1", "localhost", "::1")


class Door:
    """Samplings overlap; a scoring waits until none is under way, and those that come meanwhile wait for it."""

    def __init__(self) -> None:
        self._turn, self._idle, self._under_way = asyncio.Lock(), asyncio.Event(), 0
        self._idle.set()

    @asynccontextmanager
    async def sampling(self) -> AsyncIterator[None]:
        """Beside other samplings."""
        async with self._turn:
            self._under_way += 1
            self._idle.clear()
        try:
            yield
        finally:
            self._under_way -= 1
            if not self._under_way:
                self._idle.set()

    @asynccontextmanager
    async def scoring(self) -> AsyncIterator[None]:
        """Alone."""
        async with self._turn:
            await self._idle.wait()
            yield


class Open:
    """A door for servers that take everything at once."""

    @asynccontextmanager
    async def sampling(self) -> AsyncIterator[None]:
        """At once."""
        yield

    scoring = sampling


DOORS: dict[str, Door] = {}


def door(base_url: str, device: str) -> Door | Open:
    """The door of a server, one for all of the process; `device` is where models run on this machine."""
    parts = urlsplit(base_url)
    if device != "cpu" or parts.hostname not in LOOPBACK:
        return Open()
    return DOORS.setdefault(parts.netloc, Door())
