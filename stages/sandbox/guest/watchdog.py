"""Looks at what every process of this pid namespace uses together, which no rlimit bounds.

The work folder is a bind mount of the host's and has no quota of its own. A scan sees named files in folders that may
be listed. Deleted files that a process holds open are looked for when the disk has lost more than the limit; what
cannot be looked into at all then counts as everything that the disk lost.
"""

from __future__ import annotations

import os
import stat
import time

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from typing import Any

    Task = tuple[int, int, int, int]  # pid, threads, resident bytes, virtual bytes

INODE_BYTES = 1024  # what an empty file costs at least
BATCH = 128  # entries between two looks at the clock
INTERVAL_S = 0.1
SLICE_S = 0.005
RARITY = 5  # a scan that took t seconds is repeated after RARITY * t at the earliest


class DiskQuota:
    """Scans the folder in slices of a few milliseconds, so that the other limits are not left unwatched meanwhile."""

    def __init__(self, folder: str, limit_bytes: int) -> None:
        self.folder = folder
        self.limit_bytes = limit_bytes
        self._free_before = free_bytes(folder)
        self._scan: Iterator[int] | None = None
        self._closed: list[str] = []
        self._used = self._before = 0
        self._ended = self._due = self._cost_s = 0.0
        for _ in self._scanning():
            pass

    def begin(self) -> None:
        """Start watching a command. A folder that is too large already may shrink but not grow."""
        self._before = self._used
        self._scan = None
        self._due = max(time.monotonic() + INTERVAL_S, self._ended + RARITY * self._cost_s)

    def broken(self, pids: Iterable[int]) -> bool:
        """Continue the scan, or start one that is due; return whether the folder is known to be too large."""
        now = time.monotonic()
        if self._scan is None:
            if now < self._due:
                return False
            self._scan = self._scanning()
        while (total := next(self._scan, None)) is not None:
            if self._too_large(total):
                return True
            if time.monotonic() - now > SLICE_S:
                return False
        self._scan = None
        # Deleted files that a process holds open have no name. They are looked for, at a stat per open file, only when
        # the disk has lost more than the limit; where a process or folder hides its files, all that the disk lost
        # counts.
        lost, unnamed = self._free_before - free_bytes(self.folder), 0
        if lost > self.limit_bytes:
            files = {inode: size for pid in pids for inode, size in unlinked_files(pid, self._closed)}
            unnamed = lost if self._closed else sum(files.values())
        return self._too_large(self._used + unnamed)

    def end(self, *, broken: bool) -> bool:
        """Scan once more after the command, unless a scan was long and recent; return whether it is too large."""
        if not broken and time.monotonic() - self._ended < RARITY * self._cost_s:
            return False
        self._scan = None
        for _ in self._scanning():
            pass
        return broken or self._too_large(self._used)

    def _scanning(self) -> Iterator[int]:
        """Yield the running totals of a scan; at its end, record the result and when the next one is due."""
        started, used = time.monotonic(), 0
        self._closed = []
        for used in scan(self.folder, self._closed):
            yield used
        self._used, self._ended = used, time.monotonic()
        self._cost_s = self._ended - started
        # A large folder is scanned less often, so that scans take at most a sixth of the processor's time.
        self._due = self._ended + max(INTERVAL_S, RARITY * self._cost_s)

    def _too_large(self, used: int) -> bool:
        # A folder that was too large before the command may stay so: an agent has to be able to clean it up.
        return used > self.limit_bytes and used > self._before


def scan(folder: str, closed: list[str]) -> Iterator[int]:
    """Yield running totals in bytes of everything below a folder, the sum last. Adds unlisted folders to `closed`."""
    used, pending = 0, [folder]
    linked: set[int] = set()
    while pending:
        for count, status, path in entries(pending.pop(), closed):
            if stat.S_ISDIR(status.st_mode):
                pending.append(path)
            if status.st_nlink > 1 and not stat.S_ISDIR(status.st_mode):
                # A file with several names counts once, or hard links would look like a full disk.
                if status.st_ino in linked:
                    continue
                linked.add(status.st_ino)
            used += status.st_blocks * 512 + INODE_BYTES
            if count % BATCH == 0:
                yield used
    yield used


def entries(folder: str, closed: list[str]) -> Iterator[tuple[int, os.stat_result, str]]:
    """Yield number, status and path of each entry of one folder, which is added to `closed` if it cannot be listed."""
    try:
        with os.scandir(folder) as listing:
            for count, entry in enumerate(listing, 1):
                try:
                    yield count, entry.stat(follow_symlinks=False), entry.path
                except FileNotFoundError:
                    continue
    except (FileNotFoundError, NotADirectoryError):
        return
    except OSError:
        closed.append(folder)


def unlinked_files(pid: int, closed: list[str]) -> Iterator[tuple[int, int]]:
    """Yield inode and bytes of each deleted regular file that a process holds open."""
    folder = f"/proc/{pid}/fd"
    try:
        descriptors = os.listdir(folder)
    except PermissionError:
        closed.append(folder)
        return
    except OSError:
        return
    for descriptor in descriptors:
        try:
            status = os.stat(f"{folder}/{descriptor}")
        except OSError:
            continue
        if stat.S_ISREG(status.st_mode) and status.st_nlink == 0:
            yield status.st_ino, status.st_blocks * 512


def free_bytes(folder: str) -> int:
    """Return the bytes left on the file system of a folder."""
    status = os.statvfs(folder)
    return status.f_bfree * status.f_frsize


MB = 1 << 20
MAPPED_PER_TABLE_BYTE = 512  # 8 bytes of a page table map a page of 4 KiB
USUAL_BUFFER, MOST_DATAGRAMS = 212_992, 10  # the kernel's net.core.wmem_max and net.unix.max_dgram_qlen
PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
SCRATCH = ("/tmp", "/dev/shm", "/home/agent")  # noqa: S108 (folders of the sandbox's own, mode 0700)


class Watchdog:
    """Names the limit that the running command broke."""

    def __init__(self, work: str, limits: dict[str, Any], *, counts_sockets: bool = False) -> None:
        self.max_threads = limits["processes"]
        self.max_bytes = limits["memory_mb"] * MB
        # One that is a place of the work folder lies on its disk, and counts there.
        self.scratch = [folder for folder in SCRATCH if os.stat(folder).st_dev != os.stat(work).st_dev]
        self.disk = DiskQuota(work, limits["disk_mb"] * MB)
        # Where there is a control group, the kernel counts them.
        self.counts_sockets = counts_sockets

    def look(self) -> str | None:
        """Return the first limit that is broken now, or None. Called every few milliseconds."""
        tasks = list(running_tasks())
        if sum(threads for _, threads, _, _ in tasks) > self.max_threads:
            return "processes"
        used = 0
        for folder in self.scratch:  # memory file systems, with their inodes: no process's resident memory shows them
            disk = os.statvfs(folder)
            used += (disk.f_blocks - disk.f_bfree) * disk.f_frsize + (disk.f_files - disk.f_ffree) * INODE_BYTES
        if self.counts_sockets:
            used += socket_bytes()
        # Page tables, which resident memory does not show either, can only be large where the address space is: else
        # their size, which costs a file each, is not asked.
        if sum(virtual for *_, virtual in tasks) // MAPPED_PER_TABLE_BYTE > self.max_bytes // 32:
            used += sum(counted_bytes(f"/proc/{pid}/status", b"VmPTE:", 0) for pid, *_ in tasks)
        # Resident bytes count a page that forked processes share once for each of them. Their shares (Pss) do not, but
        # take the kernel a walk over all pages, so that they are asked for only where it matters.
        if used + sum(resident for _, _, resident, _ in tasks) > self.max_bytes:
            shares = (counted_bytes(f"/proc/{pid}/smaps_rollup", b"Pss:", resident) for pid, _, resident, _ in tasks)
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


def socket_bytes(folder: str = "/proc/self/net") -> int:
    """Return the bytes in the queues of sockets; of a local one, whose queue nothing shows, as many as it may hold."""
    largest = 2 * int(_read("/proc/sys/net/core/wmem_max") or USUAL_BUFFER)  # the kernel doubles what a program sets
    used = 0
    for line in _read(f"{folder}/unix").splitlines()[1:]:
        kind, state = line.split()[4:6]
        if kind == b"0002":  # of datagrams: several senders' buffers
            used += MOST_DATAGRAMS * largest
        elif state == b"03":  # connected
            used += largest
    for name in ("tcp", "tcp6", "udp", "udp6"):
        for line in _read(f"{folder}/{name}").splitlines()[1:]:
            used += sum(int(queued, 16) for queued in line.split()[4].split(b":"))
    return used


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
