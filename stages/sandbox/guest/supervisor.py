"""Process 1 of a sandbox: runs one job at a time, watches it, ends everything it left behind, and reports.

As process 1 of its pid namespace it cannot be killed or stopped from inside. It is not dumpable, so that the jobs,
which have its uid, can neither trace it nor open its descriptors.
"""

from __future__ import annotations

import marshal
import os
import select
import time

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, NoReturn

    from composer_stages.sandbox.guest import candidate, processes, protocol
    from composer_stages.sandbox.guest.capture import Capture, WipedCapture
    from composer_stages.sandbox.guest.protocol import HEAD, READY, REASONS, read_request, write_all
    from composer_stages.sandbox.guest.watchdog import Watchdog
else:
    import candidate
    import processes
    import protocol
    from capture import Capture, WipedCapture
    from protocol import HEAD, READY, REASONS, read_request, write_all
    from watchdog import Watchdog

LOOK_INTERVAL_S = 0.015
DRAIN_CHUNKS = 64
TIME_OUT, KILLED = 124, 137
WATCHED = ("/tmp", "/dev/shm", "/home/agent", "/dev/pts", "/dev/pts/ptmx")  # noqa: S108 (folders of the sandbox's own)
DEVICES = tuple(f"/dev/{name}" for name in ("null", "zero", "full", "random", "urandom", "tty"))
COUNTERS = ("/proc/self/net/snmp", "/proc/self/net/dev")


def serve(descriptor: int) -> None:
    """Answer jobs until the channel, an inherited descriptor, ends."""
    channel = os.dup(descriptor)  # a low number, below those that a candidate's process closes; not inheritable
    os.close(descriptor)
    processes.protect_supervisor()
    settings = read_request(channel)
    counts_sockets = settings["counts_sockets"]
    watchdog = None
    if os.getpid() == 1:
        watchdog = Watchdog(settings["work"], settings["limits"], counts_sockets=counts_sockets)
    # Before the first job: what every later state is compared with is that of a fresh sandbox.
    fresh, devices = (sandbox_state(), {path: status(path) for path in DEVICES}) if watchdog else (None, {})
    write_all(channel, READY)
    while (request := read_request(channel)) is not None:
        job = SupervisedJob(channel, request, settings, watchdog)
        head = job.run(request["wall_s"])
        # Before the reply: once the host has it, it may send the next candidate.
        restore_devices(devices)
        write_all(channel, head)
        write_all(channel, job.capture.kept())
        job.capture.wipe()
        if request["kind"] == "call" and fresh is not None and left_traces(fresh, job.pid):
            return  # no candidate finds what another one left behind; the host opens a fresh sandbox


def command(request: dict[str, Any], settings: dict[str, Any], write_end: int) -> NoReturn:
    """Become `bash -c` in the work folder, with both outputs on the pipe."""
    os.chdir(settings["work"])
    os.dup2(write_end, 1)
    os.dup2(write_end, 2)
    arguments = [b"bash", b"-c", request["command"]]
    os.execve("/bin/bash", arguments, settings["env"])  # noqa: S606 (there is a shell: it is what is started)


def call(content: bytearray, settings: dict[str, Any], write_end: int) -> NoReturn:
    """Become a candidate's function: its answers go to the pipe, what it prints goes nowhere."""
    os.chdir(settings["work"])
    for stream in (0, 1, 2):  # opened anew: the flags of an open file are shared with whoever inherits it
        os.dup2(os.open("/dev/null", os.O_RDWR), stream)
    os.dup2(write_end, 3)
    # The supervisor's channel and pipes are inherited by the fork: closed here, before any code of the candidate runs.
    os.closerange(4, processes.OPEN_FILES)
    source, file, function, arguments = marshal.loads(content)  # noqa: S302 (written by the host)
    candidate.answer_all(source, file, function, arguments, 3)


class SupervisedJob:
    """One child and what it writes."""

    def __init__(
        self, channel: int, request: dict[str, Any], settings: dict[str, Any], watchdog: Watchdog | None
    ) -> None:
        self.channel, self.watchdog = channel, watchdog
        limits = settings["limits"]
        self.capture: Capture | WipedCapture
        if request["kind"] == "command":
            self.capture = Capture(limits["output_bytes"])
            self.pid, self.pipe = processes.start(lambda pipe: command(request, settings, pipe), limits)
        else:
            self.capture = WipedCapture(limits["output_bytes"])
            content = protocol.read_into(channel, request["size"])
            self.pid, self.pipe = processes.start(lambda pipe: call(content, settings, pipe), limits)
            content[:] = bytes(len(content))  # in place: no later fork finds this candidate's source in its memory

    def run(self, wall_s: float) -> bytes:
        """Wait for the child's exit, its time or a broken limit, end its processes, return the reply's head."""
        pidfd = os.pidfd_open(self.pid)
        if self.watchdog:
            self.watchdog.disk.begin()
        reason = self._wait(pidfd, time.monotonic() + wall_s)
        ended_with = os.waitstatus_to_exitcode(processes.end_all(self.pid))
        # What the job wrote before it ended and is still in the pipe.
        self._read(DRAIN_CHUNKS)
        os.close(pidfd)
        os.close(self.pipe)
        if self.watchdog and self.watchdog.disk.end(broken=reason == "disk"):
            reason = "disk"
        timed_out = reason == "time"
        code = TIME_OUT if timed_out else KILLED if reason else 128 - ended_with if ended_with < 0 else ended_with
        why = REASONS.index(None if timed_out else reason)
        return HEAD.pack(code, timed_out, why, self.capture.total, len(self.capture.kept()))

    def _wait(self, pidfd: int, deadline: float) -> str | None:
        """Wait for the child; return None when it exited, otherwise why it has to be ended."""
        poll = select.poll()
        for descriptor in (self.channel, pidfd, self.pipe):
            poll.register(descriptor, select.POLLIN)
        next_look = time.monotonic() + LOOK_INTERVAL_S if self.watchdog else deadline
        while (now := time.monotonic()) < deadline:
            if self.watchdog and now >= next_look:
                if reason := self.watchdog.look():
                    return reason
                next_look = time.monotonic() + LOOK_INTERVAL_S
            ready = dict(poll.poll(1000 * max(0.0, min(deadline, next_look) - time.monotonic())))
            # The host sends nothing while a job runs: the channel is only readable once it is closed.
            if self.channel in ready:
                processes.end_all(self.pid)
                os._exit(1)
            if self.pipe in ready and not self._read(1):
                poll.unregister(self.pipe)
            if pidfd in ready:
                return None
        return "time"

    def _read(self, chunks: int) -> bool:
        """Read up to `chunks` chunks that the pipe holds now; return False at its end."""
        for _ in range(chunks):
            try:
                if not self.capture.take(self.pipe):
                    return False
            except BlockingIOError:
                return True
        return True


# Traces that a job leaves for a later one in the same sandbox, apart from its files.


def sandbox_state() -> list[object]:
    """Return times and modes of the writable folders, and the counters of the network.

    A folder's times and mode show files that were there and are gone, and can hold a message themselves.
    """
    return [*map(status, WATCHED), *map(_content, COUNTERS)]


def left_traces(fresh: list[object], pid: int) -> bool:
    """Return whether the state differs from the fresh one, or the job `pid` started a process or thread."""
    # The fifth field of loadavg is the last pid of this namespace; pids are counted up, so a candidate could tell
    # another something by the number of processes that it starts.
    return sandbox_state() != fresh or int(_content("/proc/loadavg").split()[4]) != pid


def restore_devices(state_by_path: dict[str, tuple[int, int, int, int]]) -> None:
    """Restore the modes and times of the devices in `state_by_path`.

    The devices are the host's own, and where its root runs the sandbox a job may change them. No mount that is
    read-only would let a device be used (bwrap adds nodev to it).
    """
    for path, (mode, accessed, modified, _) in state_by_path.items():
        if status(path)[:3] != (mode, accessed, modified):
            try:
                os.chmod(path, mode & 0o7777)
                os.utime(path, ns=(accessed, modified))
            except PermissionError:  # not root on the host, so that no job could change it either
                continue


def status(path: str) -> tuple[int, int, int, int]:
    """Return mode, and times of access, modification and change in ns."""
    result = os.stat(path)
    return result.st_mode, result.st_atime_ns, result.st_mtime_ns, result.st_ctime_ns


def _content(path: str) -> bytes:
    with open(path, "rb", buffering=0) as file:
        return file.read()
