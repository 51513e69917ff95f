"""A control group for each sandbox: the kernel's limit of memory, with page tables and memory file systems.

The watchdog checks every few milliseconds and reports why it ends a command; the kernel never lets the group grow
beyond its limit between two checks. Where no group can be made only the watchdog limits memory. Source: Linux
Documentation/admin-guide/cgroup-v2.rst and cgroup-v1/memory.rst.
"""

import itertools
import os
import subprocess
import time
from collections.abc import Iterator
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import NamedTuple

from composer_stages.sandbox.contract import Limits

MB = 1 << 20
HEADROOM_MB = 64
"""Memory for the supervisor and the kernel's own objects, above the limit of commands."""
FILES = {
    1: ("memory.limit_in_bytes", "memory.memsw.limit_in_bytes", "memory.oom_control"),
    2: ("memory.max", "memory.swap.max", "memory.events"),
}
"""Version of the interface -> files of the limit, of the limit of swap, and of the counted events."""
PATIENCE_S = 0.2
_number = itertools.count()


class GroupParent(NamedTuple):
    """A group below which others can be made, and the version of the interface that it has."""

    folder: Path
    version: int


class MemoryGroup:
    """One control group with a limit in MiB below `parent`. `OSError` where the kernel permits none."""

    def __init__(self, parent: GroupParent, memory_mb: int) -> None:
        self.version = parent.version
        self.folder = parent.folder / f"composer-{os.getpid()}-{next(_number)}"
        self.folder.mkdir()
        limit, swap, self.events = FILES[parent.version]
        try:
            (self.folder / limit).write_text(str(memory_mb * MB))
        except OSError:
            self.close()
            raise
        with suppress(OSError):  # a kernel without accounting of swap lacks the file
            # Version 1 counts memory and swap together here, version 2 swap alone: either way none is left to swap to.
            (self.folder / swap).write_text(str(memory_mb * MB if parent.version == 1 else 0))

    def enter(self, pid: int) -> None:
        """Move a process, and what it starts from then on, into the group. `OSError` where that is not permitted."""
        # The kernel waits about 10 ms for all processors before it moves a process: whoever starts one moves it while
        # it is loading.
        (self.folder / "cgroup.procs").write_text(str(pid))

    def killed(self) -> int:
        """Return the number of processes that the kernel has killed in this group for lack of memory."""
        with suppress(OSError):
            for line in (self.folder / self.events).read_text().splitlines():
                if line.startswith("oom_kill "):
                    return int(line.split()[1])
        return 0

    def close(self) -> None:
        """Remove the group once its processes have ended; `find_group_parent` removes those of dead processes."""
        # rmdir fails with EBUSY until the kernel has reaped the last process, a moment after its exit.
        deadline = time.monotonic() + PATIENCE_S
        while self.folder.exists() and not _removed(self.folder) and time.monotonic() < deadline:
            time.sleep(0.002)


def open_group(limits: Limits) -> MemoryGroup | None:
    """Create a group for a sandbox with these limits; return None where none can be made."""
    with suppress(OSError):
        if (parent := find_group_parent()) is not None:
            return MemoryGroup(parent, limits.memory_mb + HEADROOM_MB)
    return None


@cache
def find_group_parent() -> GroupParent | None:
    """Find the first parent below which a group can be made, limited and entered; cached for this process."""
    for parent in group_parents():
        with suppress(OSError):
            # Groups of killed hosts go first; the kernel keeps a group that still has processes.
            for folder in parent.folder.glob("composer-*-*"):
                if not Path(f"/proc/{folder.name.split('-')[1]}").exists():
                    _removed(folder)
            # Limited and entered in earnest: a group may be made where its files may not be written.
            group = MemoryGroup(parent, HEADROOM_MB)
            try:
                with subprocess.Popen(["cat"], stdin=subprocess.PIPE, stdout=subprocess.DEVNULL) as process:
                    group.enter(process.pid)
                return parent
            finally:
                group.close()
    return None


def group_parents(root: Path = Path("/")) -> Iterator[GroupParent]:
    """Yield groups below which others with a limit of memory could be made, the nearest first.

    `root` contains proc and sys. Version 1: the group of this process. Version 2 lets no group that has processes have
    children with limits, so there it is the nearest ancestor that controls memory; a group that has a limit is never
    left.
    """
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return
    for line in lines:
        number, controllers, path = line.split(":", 2)
        group_path = Path(path.lstrip("/"))
        if "memory" in controllers.split(","):
            mount = root / "sys/fs/cgroup/memory"
            # In a container the path may be the host's; its own group is then what is mounted.
            mounted = mount / group_path if (mount / group_path).is_dir() else mount
            if os.access(mounted, os.W_OK):
                yield GroupParent(mounted, 1)
        elif number == "0" and not controllers:
            mount = root / "sys/fs/cgroup"
            for group in (mount / group_path, *(mount / ancestor for ancestor in group_path.parents)):
                if "memory" in _words(group / "cgroup.subtree_control") and os.access(group, os.W_OK):
                    yield GroupParent(group, 2)
                if _words(group / "memory.max") not in ([], ["max"]):
                    break


def _words(path: Path) -> list[str]:
    try:
        return path.read_text().split()
    except OSError:
        return []


def _removed(folder: Path) -> bool:
    with suppress(OSError):
        folder.rmdir()
    return not folder.exists()
