"""Traces that a job leaves for a later one in the same sandbox, apart from its files."""

from __future__ import annotations

import os

WATCHED = ("/tmp", "/dev/shm", "/home/agent", "/dev/pts", "/dev/pts/ptmx")  # noqa: S108 (folders of the sandbox's own)
DEVICES = tuple(f"/dev/{name}" for name in ("null", "zero", "full", "random", "urandom", "tty"))
COUNTERS = ("/proc/self/net/snmp", "/proc/self/net/dev")


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


def restore_devices(before: dict[str, tuple[int, int, int, int]]) -> None:
    """Restore modes and times of the devices to those `before`, by path.

    The devices are the host's own, and where its root runs the sandbox a job may change them. No mount that is
    read-only would let a device be used (bwrap adds nodev to it).
    """
    for path, (mode, accessed, modified, _) in before.items():
        if status(path)[:3] != (mode, accessed, modified):
            try:
                os.chmod(path, mode & 0o7777)
                os.utime(path, ns=(accessed, modified))
            except PermissionError:  # not root on the host, so that no job could change it either
                continue


def status(path: str) -> tuple[int, int, int, int]:
    """Return mode, and times of access, modification and change in ns."""
    found = os.stat(path)
    return found.st_mode, found.st_atime_ns, found.st_mtime_ns, found.st_ctime_ns


def _content(path: str) -> bytes:
    with open(path, "rb", buffering=0) as file:
        return file.read()
