"""The host's side of one supervisor: start it, send requests, detect that it was lost."""

import json
import os
import select
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import asdict
from typing import Any, BinaryIO, NamedTuple

from composer_stages.errors import InfrastructureError
from composer_stages.sandbox.contract import Limits
from composer_stages.sandbox.guest.protocol import HEAD, READY, REASONS, pack_request
from composer_stages.sandbox.memory_group import MemoryGroup

START_PATIENCE_S = 30.0
GRACE_S = 5.0
"""How much longer than the wall limit a supervisor on a busy machine may take to answer."""
END_PATIENCE_S = 2.0
KILLED = 137


class SupervisorLost(Exception):
    """The supervisor died or did not answer in time."""


class Reply(NamedTuple):
    """The supervisor's report on one finished job."""

    returncode: int
    timed_out: bool
    killed_for: str | None
    output_bytes: int
    output: bytes


class SupervisorSession:
    """One supervisor process, started by `command` in the environment `env`, and the channel to it.

    The supervisor, once it takes jobs, and their processes are in `group`, which is removed with the session; where
    there is one `command` is bwrap's.
    """

    def __init__(
        self,
        command: AbstractContextManager[tuple[list[str], list[int]]],
        env: dict[str, str],
        limits: Limits,
        settings: dict[str, Any],
        group: MemoryGroup | None = None,
    ) -> None:
        self.limits, self.group = limits, group
        self.channel, guest_end = socket.socketpair()
        info_end, bwrap_end = os.pipe()
        with os.fdopen(info_end, "rb") as info:
            with guest_end, os.fdopen(bwrap_end, "wb"), command as (argv, descriptors), _realtime_priority():
                if group is not None:
                    argv = [argv[0], "--info-fd", str(bwrap_end), *argv[1:]]
                    descriptors = [*descriptors, bwrap_end]
                self.process = subprocess.Popen(
                    [*argv, str(guest_end.fileno())],
                    pass_fds=[*descriptors, guest_end.fileno()],
                    env=env,
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    stderr=subprocess.PIPE,
                    start_new_session=True,  # no Ctrl-C in the user's terminal reaches a job; `close` kills the group
                )
            try:
                if group is not None:
                    group.enter(_child(info))
                self._send(pack_request({**settings, "limits": asdict(limits)}))
                self._receive(len(READY), time.monotonic() + START_PATIENCE_S)
            except (SupervisorLost, OSError) as error:
                stderr = self.close()
                raise InfrastructureError("sandbox.not-started", reason=stderr or str(error)) from None

    def ask(self, request: dict[str, Any], wall_s: float, content: Any = None) -> Reply:
        """Run one job for at most `wall_s` seconds; only its process sees `content`. Raises SupervisorLost."""
        deadline = time.monotonic() + wall_s + GRACE_S
        # How many processes the kernel has killed in the group for lack of memory: no exit status tells that from any
        # other SIGKILL.
        killed_before = 0 if self.group is None else self.group.killed()
        self._send(pack_request({**request, "wall_s": wall_s}, content))
        code, timed_out, reason, total, size = HEAD.unpack(self._receive(HEAD.size, deadline))
        # The head is all that the host interprets. A taken-over supervisor may claim any size, so that nothing is
        # received or allocated before both numbers are checked.
        if size > self.limits.output_bytes or reason >= len(REASONS):
            raise SupervisorLost("its answer is malformed")
        output = self._receive(size, deadline)
        why = "memory" if self.group is not None and self.group.killed() > killed_before else REASONS[reason]
        return Reply(KILLED if why == "memory" else code, timed_out, why, total, output)

    def _send(self, frame: bytes) -> None:
        try:
            self.channel.settimeout(GRACE_S)
            self.channel.sendall(frame)
        except OSError as error:
            raise SupervisorLost(f"its channel is closed ({error})") from None

    def _receive(self, size: int, deadline: float) -> bytes:
        data = bytearray()
        while len(data) < size:
            # Anew for each piece: a supervisor that sends byte by byte must not extend the deadline. 0 would not block.
            self.channel.settimeout(max(0.001, deadline - time.monotonic()))
            try:
                chunk = self.channel.recv(size - len(data))
            except OSError as error:
                raise SupervisorLost(f"it did not answer ({error or 'time-out'})") from None
            if not chunk:
                raise SupervisorLost("it closed its channel")
            data += chunk
        return bytes(data)

    def close(self) -> str:
        """End the supervisor and everything inside; return its stderr."""
        with suppress(OSError):
            self.channel.shutdown(socket.SHUT_RDWR)  # reaches the supervisor even while a fork of ours holds a copy
        self.channel.close()
        try:
            _, stderr = self.process.communicate(timeout=END_PATIENCE_S)
        except subprocess.TimeoutExpired:
            os.killpg(self.process.pid, 9)
            _, stderr = self.process.communicate()
        if self.group is not None:
            self.group.close()
        return bytes(stderr).decode(errors="replace").strip()


def _child(info: BinaryIO) -> int:
    """Read the id of the process that bwrap started from its --info-fd. Raises SupervisorLost."""
    deadline, answer = time.monotonic() + START_PATIENCE_S, b""
    poll = select.poll()
    poll.register(info, select.POLLIN)
    while poll.poll(1000 * max(0.0, deadline - time.monotonic())):
        chunk = os.read(info.fileno(), 4096)
        answer += chunk
        if not chunk:
            break
    try:
        return int(json.loads(answer)["child-pid"])
    except (ValueError, KeyError):
        raise SupervisorLost(f"bwrap named no process ({answer!r})") from None


@contextmanager
def _realtime_priority() -> Iterator[None]:
    """Start processes of this thread with real-time priority, where the user may; jobs do not inherit it.

    Root may, and needs it: the kernel enforces no RLIMIT_NPROC on root, so that only the supervisor's watchdog stops a
    fork bomb, and among thousands of runnable processes it would be seconds before its turn comes.
    """
    # Measured: a fork bomb under a limit of 128 came to 125 processes as nobody and to 3,000 as root.
    usual, parameters = os.sched_getscheduler(0), os.sched_getparam(0)
    with suppress(PermissionError):
        os.sched_setscheduler(0, os.SCHED_RR, os.sched_param(os.sched_get_priority_min(os.SCHED_RR)))
    try:
        yield
    finally:
        os.sched_setscheduler(0, usual, parameters)
