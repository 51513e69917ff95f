"""Bounds the size of the work folder, which is a bind mount of the host's and has no quota of its own.

A scan sees named files in folders that may be listed. Deleted files that a process holds open are looked for when the
disk has lost more than the limit; what cannot be looked into at all then counts as everything that the disk lost.
"""

from __future__ import annotations

import os
import stat
import time

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

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
        self._used = self._before = self._seen = 0
        self._started = self._ended = self._due = self._cost_s = 0.0
        self._measure()

    def begin(self) -> None:
        """A command starts. A folder that is too large already may shrink but not grow: it can be cleaned up."""
        self._before = self._used
        self._scan = None
        self._due = max(time.monotonic() + INTERVAL_S, self._ended + RARITY * self._cost_s)

    def broken(self, pids: Iterable[int]) -> bool:
        """Continue the scan, or start one that is due. Whether the folder is known to be too large."""
        now = time.monotonic()
        if self._scan is None:
            if now < self._due:
                return False
            self._scan = self._new_scan()
        while (seen := next(self._scan, None)) is not None:
            self._seen = seen
            if self._too_large(seen):
                return True
            if time.monotonic() - now > SLICE_S:
                return False
        self._finish(self._seen)
        return self._too_large(self._used + self._unnamed(pids))

    def end(self, *, broken: bool) -> bool:
        """The command is over: a last scan, unless one was long and recent. Whether the folder is too large."""
        if not broken and time.monotonic() - self._ended < RARITY * self._cost_s:
            return False
        self._measure()
        return broken or self._too_large(self._used)

    def _measure(self) -> None:
        *_, used = self._new_scan()
        self._finish(used)

    def _new_scan(self) -> Iterator[int]:
        self._closed = []
        self._started = time.monotonic()
        return scan(self.folder, self._closed)

    def _finish(self, used: int) -> None:
        self._ended = time.monotonic()
        self._scan, self._used, self._cost_s = None, used, self._ended - self._started
        self._due = self._ended + max(INTERVAL_S, RARITY * self._cost_s)

    def _too_large(self, used: int) -> bool:
        return used > self.limit_bytes and used > self._before

    def _unnamed(self, pids: Iterable[int]) -> int:
        lost = self._free_before - free_bytes(self.folder)
        if lost <= self.limit_bytes:
            return 0
        files = {inode: size for pid in pids for inode, size in unlinked_files(pid, self._closed)}
        return lost if self._closed else sum(files.values())


def scan(folder: str, closed: list[str]) -> Iterator[int]:
    """Running totals in bytes of everything below a folder; the last one is the whole. Adds to `closed`."""
    used, pending = 0, [folder]
    linked: set[int] = set()
    while pending:
        for count, status, path in entries(pending.pop(), closed):
            if stat.S_ISDIR(status.st_mode):
                pending.append(path)
            if status.st_nlink > 1 and not stat.S_ISDIR(status.st_mode):
                if status.st_ino in linked:
                    continue
                linked.add(status.st_ino)
            used += status.st_blocks * 512 + INODE_BYTES
            if count % BATCH == 0:
                yield used
    yield used


def entries(folder: str, closed: list[str]) -> Iterator[tuple[int, os.stat_result, str]]:
    """Number, status and path of each entry of one folder, which is added to `closed` if it cannot be listed."""
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
    """Inode and bytes of each deleted regular file that a process holds open."""
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
    """Bytes left on the file system of a folder."""
    status = os.statvfs(folder)
    return status.f_bfree * status.f_frsize
