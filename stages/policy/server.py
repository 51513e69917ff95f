"""A model server as a child process: started, awaited, restarted when it dies, and ended with the run.

The server never outlives this process: a small second process waits for ours to end, however that happens, and then
ends the server's process group.

`ScoringLock` keeps scoring requests from overlapping with sampling requests where vLLM cannot take both.
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
from stages.runs.run import Listener

MAX_RESTARTS = 3
START_S = 1800.0
"""Longest wait for a server to load its model, in seconds."""
POLL_S = 0.5
GRACE_S = 15.0
"""Seconds between SIGTERM and SIGKILL."""
TAIL = 5
"""Lines of the log that an error message shows."""
KEEPER = 'cat >/dev/null; kill -s TERM -- "-$0"; sleep "$1"; kill -s KILL -- "-$0"'
"""Waits until the kernel closes our end of the pipe, which happens when this process ends; $0 is a process group."""


class ModelServer:
    """One server on a free port of this machine; `command` makes its arguments from the port.

    check: called while waiting, and raises to give up. Methods raise `InfrastructureError` where the server does not
    come to answer.
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
        if not port:
            # Another program may take the port before the server binds it; then `start` reports the server's log.
            with socket.socket() as listening:
                listening.bind(("127.0.0.1", 0))
                port = int(listening.getsockname()[1])
        self._port, self.url = port, f"http://127.0.0.1:{port}/v1"  # root of the OpenAI-compatible server
        self._process: subprocess.Popen[bytes] | None = None
        self._keeper: subprocess.Popen[bytes] | None = None

    def alive(self) -> bool:
        """Return whether the server's process runs."""
        return self._process is not None and self._process.poll() is None

    @property
    def pid(self) -> int:
        """Return the id of the server's process, which leads its own process group; 0 before the start."""
        return self._process.pid if self._process else 0

    def start(self) -> None:
        """Start the server and return when it answers."""
        self.log.parent.mkdir(parents=True, exist_ok=True)
        log = os.open(self.log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        try:
            # A session of its own: Ctrl-C in the terminal reaches this process alone, which then ends the whole group.
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
        try:
            self._wait()
        except BaseException:
            self.stop()
            raise

    def revive(self) -> None:
        """Restart a server that died, at most MAX_RESTARTS times."""
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
        """End the server and all processes of its group."""
        if self._process is not None:
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGTERM)
            deadline = time.monotonic() + GRACE_S
            while time.monotonic() < deadline:
                self._process.poll()  # a dead leader that was not waited for would count as a member of its group
                try:
                    os.killpg(self._process.pid, 0)
                except (ProcessLookupError, PermissionError):
                    break
                time.sleep(0.05)
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
        if self._keeper is not None and self._keeper.stdin is not None:
            self._keeper.kill()
            self._keeper.stdin.close()
            self._keeper.wait()
        self._process = self._keeper = None

    def _wait(self) -> None:
        started = time.monotonic()
        while True:
            # An error of the connection is the usual answer of a server that still loads its model.
            with suppress(urllib.error.URLError, OSError):
                got = urllib.request.urlopen(f"{self.url}/models", timeout=5)  # noqa: S310 (our own address)
                with got:
                    if got.status == 200:
                        return
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

    def _tail(self) -> str:
        lines = (store.read_bytes(self.log) or b"").decode(errors="replace").splitlines()
        return " / ".join(line.strip() for line in lines[-TAIL:] if line.strip()) or "(empty)"


LOOPBACK = ("127.0.0.1", "localhost", "::1")


class ScoringLock:
    """A lock of one server: sampling requests overlap, a scoring request is alone.

    On a CPU, vLLM 0.32 with adapters enabled crashes when a request for prompt log-probs is batched with any other:
    `punica_cpu.add_lora_logits` counts one row per request where there is one per token.
    """

    def __init__(self) -> None:
        self._turn, self._idle, self._under_way = asyncio.Lock(), asyncio.Event(), 0
        self._idle.set()

    @asynccontextmanager
    async def sampling(self) -> AsyncIterator[None]:
        """Hold the server together with other sampling requests."""
        # Taking `_turn` first keeps sampling requests from overtaking a scoring request that waits for `_idle`.
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
        """Hold the server exclusively."""
        async with self._turn:
            await self._idle.wait()
            yield


SCORING_LOCKS: dict[str, ScoringLock] = {}


def scoring_lock(base_url: str, device: str) -> ScoringLock | None:
    """Return the lock of a server, one per process and server; None for a server that takes all requests at once.

    device: where models run on this machine.
    """
    parts = urlsplit(base_url)
    # What a server on another machine runs on is not known; one with a GPU must not be slowed down.
    if device != "cpu" or parts.hostname not in LOOPBACK:
        return None
    return SCORING_LOCKS.setdefault(parts.netloc, ScoringLock())
