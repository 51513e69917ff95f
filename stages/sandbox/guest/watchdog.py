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
MAPPED_PER_TABLE_BYTE = 512  # 8 bytes of a page table map a page of 4 KiB
PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
SCRATCH = ("/tmp", "/dev/shm", "/home/agent")  # noqa: S108 (folders of the sandbox's own, mode 0700)


class Watchdog:
    """Names the limit that the running command broke."""

    def __init__(self, work: str, limits: dict[str, Any]) -> None:
        self.max_threads = limits["processes"]
        self.max_bytes = limits["memory_mb"] * MB
        # One that is a place of the work folder lies on its disk, and counts there.
        self.scratch = [folder for folder in SCRATCH if os.stat(folder).st_dev != os.stat(work).st_dev]
        self.disk = DiskQuota(work, limits["disk_mb"] * MB)

    def look(self) -> str | None:
        """Return the first limit that is broken now, or None. Called every few milliseconds."""
        tasks = list(running_tasks())
        if sum(threads for _, threads, _, _ in tasks) > self.max_threads:
            return "processes"
        used = 0
        for folder in self.scratch:  # memory file systems, with their inodes: no process's resident memory shows them
            disk = os.statvfs(folder)
            used += (disk.f_blocks - disk.f_bfree) * disk.f_frsize + (disk.f_files - disk.f_ffree) * INODE_BYTES
        # Page tables, which resident memory does not show either, can only be large where the address space is: else
        # their size, which costs a file each, is not asked.
        if sum(virtual for *_, virtual in tasks) // MAPPED_PER_TABLE_BYTE > self.max_bytes // 32:
            used += sum(counted_bytes(f"/proc/{pid}/status", b"VmPTE:", 0) for pid, *_ in tasks)
        # Resident bytes count a page that forked processes share once for each of them. Their shares (Pss) do not, but
        # take the kernel a walk over all pages, so that they are asked for only where it matters.
        if used + sum(resident for _, _, resident, _ in tasks) > self.max_bytes:
            shares = (counted_bytes(f"/proc/{pid}/smaps_rollup", b"Pss:", own) for pid, _, own, _ in tasks)
            if used + sum(shares) > self.max_bytes:
                return "memory"
        return "disk" if self.disk.broken(pid for pid, _, resident, _ in tasks if resident) else None


def running_tasks() -> Iterator[Task]:
    """Yield pid, threads, resident and virtual bytes of every process of the namespace but the supervisor."""
    for name in os.listdir("/proc"):
        if name.isdigit() and name != "1":
            # The command's name, in brackets, may itself hold brackets and spaces: the fields begin behind the last
            # one.
            fields = _read(f"/proc/{name}/stat").rpartition(b")")[2].split()
            if fields:
                yield int(name), int(fields[17]), int(fields[21]) * PAGE_BYTES, int(fields[20])


def counted_bytes(path: str, field: bytes, otherwise: int) -> int:
    """Return the bytes in a field that a file of /proc counts in kB; `otherwise` where the kernel has no such field."""
    for line in _read(path).splitlines():
        if line.startswith(field):
            return int(line.split()[1]) * 1024
    return otherwise


def _read(path: str) -> bytes:
    """Return a file of /proc; empty when its process is gone."""
    try:
        with open(path, "rb", buffering=0) as file:
            return file.read()
    except OSError:
        return b""
