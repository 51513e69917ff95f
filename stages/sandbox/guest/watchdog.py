"""Looks at what every process of this pid namespace uses together, which no rlimit bounds."""

from __future__ import annotations

import os

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator
    from typing import Any

    from stages.sandbox.guest.disk import DiskQuota

    Task = tuple[int, int, int, int]  # pid, threads, resident bytes, virtual bytes
else:
    from disk import DiskQuota

MB = 1 << 20
INODE_BYTES = 1024
MAPPED_PER_TABLE_BYTE = 512
PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
SCRATCH = ("/tmp", "/dev/shm", "/home/agent")  # noqa: S108 (folders of the sandbox's own, mode 0700)


class Watchdog:
    """Names the limit that the running command broke."""

    def __init__(self, work: str, limits: dict[str, Any]) -> None:
        self.max_threads = limits["processes"]
        self.max_bytes = limits["memory_mb"] * MB
        self.disk = DiskQuota(work, limits["disk_mb"] * MB)

    def look(self) -> str | None:
        """The first limit that is broken now, or None. Called every few milliseconds."""
        tasks = list(running_tasks())
        if sum(threads for _, threads, _, _ in tasks) > self.max_threads:
            return "processes"
        if self._memory_broken(tasks):
            return "memory"
        return "disk" if self.disk.broken(pid for pid, _, resident, _ in tasks if resident) else None

    def _memory_broken(self, tasks: list[Task]) -> bool:
        used = sum(tmpfs_bytes(path) for path in SCRATCH)
        # Tables can only be large where the address space is: else their size, which costs a file each, is not asked.
        if sum(virtual for *_, virtual in tasks) // MAPPED_PER_TABLE_BYTE > self.max_bytes // 32:
            used += sum(page_table_bytes(pid) for pid, *_ in tasks)
        if used + sum(resident for _, _, resident, _ in tasks) <= self.max_bytes:
            return False
        # Resident bytes count a page that forked processes share once for each of them: ask for their shares.
        return used + sum(proportional_bytes(pid, resident) for pid, _, resident, _ in tasks) > self.max_bytes


def running_tasks() -> Iterator[Task]:
    """Pid, threads, resident and virtual bytes of every process of the namespace but the supervisor."""
    for name in os.listdir("/proc"):
        if name.isdigit() and name != "1":
            fields = _read(f"/proc/{name}/stat").rpartition(b")")[2].split()
            if fields:
                yield int(name), int(fields[17]), int(fields[21]) * PAGE_BYTES, int(fields[20])


def proportional_bytes(pid: int, resident: int) -> int:
    """The memory of a process with shared pages divided among their users; all of it where the kernel does not say."""
    for line in _read(f"/proc/{pid}/smaps_rollup").splitlines():
        if line.startswith(b"Pss:"):
            return int(line.split()[1]) * 1024
    return resident


def page_table_bytes(pid: int) -> int:
    """What the kernel keeps to map a process's pages; no process's resident memory shows it."""
    for line in _read(f"/proc/{pid}/status").splitlines():
        if line.startswith(b"VmPTE:"):
            return int(line.split()[1]) * 1024
    return 0


def tmpfs_bytes(path: str) -> int:
    """What a memory file system holds, its inodes included."""
    status = os.statvfs(path)
    return (status.f_blocks - status.f_bfree) * status.f_frsize + (status.f_files - status.f_ffree) * INODE_BYTES


def _read(path: str) -> bytes:
    """A file of /proc; empty when its process is gone."""
    try:
        with open(path, "rb", buffering=0) as file:
            return file.read()
    except OSError:
        return b""
