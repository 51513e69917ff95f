"""What a job leaves that a later one in the same sandbox could notice, beside its files."""

from __future__ import annotations

import os

WATCHED = ("/tmp", "/dev/shm", "/home/agent", "/dev/pts", "/dev/pts/ptmx")  # noqa: S108 (folders of the sandbox's own)
DEVICES = tuple(f"/dev/{name}" for name in ("null", "zero", "full", "random", "urandom", "tty"))
COUNTERS = ("/proc/self/net/snmp", "/proc/self/net/dev")


class Traces:
    """The state of a fresh sandbox, and whether it still is what it was."""

    def __init__(self) -> None:
        self._fresh = self._now()

    def left_by(self, pid: int) -> bool:
        """Whether anything is other than it was, or the job `pid` started a process or thread: pids are counted up."""
        return self._now() != self._fresh or last_pid() != pid

    def _now(self) -> list[object]:
        """A folder's times and mode tell of files that were there and are gone, and hold a message themselves."""
        return [*map(_status, WATCHED), *map(_content, COUNTERS)]


class Devices:
    """The devices are the host's own. Where its root runs the sandbox a job may change their modes and times."""

    def __init__(self) -> None:
        self._before = {path: _status(path) for path in DEVICES}

    def restore(self) -> None:
        """Put them back; no mount that is read-only lets a device be used (bwrap adds nodev to it)."""
        for path, before in self._before.items():
            if _status(path)[:3] != before[:3]:
                try:
                    os.chmod(path, before[0] & 0o7777)
                    os.utime(path, ns=before[1:3])
                except PermissionError:
                    continue


def last_pid() -> int:
    """The pid that was given last in this namespace."""
    return int(_content("/proc/loadavg").split()[4])


def _status(path: str) -> tuple[int, int, int, int]:
    status = os.stat(path)
    return status.st_mode, status.st_atime_ns, status.st_mtime_ns, status.st_ctime_ns


def _content(path: str) -> bytes:
    with open(path, "rb", buffering=0) as file:
        return file.read()
