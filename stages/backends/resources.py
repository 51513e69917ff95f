"""Memory and threads of this process: what it may take, what its allocator keeps, the number of threads.

glibc raises its mmap threshold up to 32 MB as large blocks are freed. Smaller blocks then share one heap, where a block
that stays (a layer's input kept for the backward pass) takes part of a freed block's space, so that the next large
block no longer fits: the heap fragments and grows with every layer. Measured: 3,147 MiB of heap with 942 MiB in use.
Source: glibc malloc/malloc.c, "M_MMAP_THRESHOLD"; mallopt(3).
"""

import ctypes
import os
import resource
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from composer_stages.backends import ranks

if TYPE_CHECKING:
    import torch

LARGE = 2**20
"""Bytes from which a block is mapped on its own where memory is short. The kernel zeroes such a block each time, which
is cheap beside large matrix products and expensive beside the work of small models. Measured on a LoRA step of 135 M
parameters and 524 tokens: with 8 MiB the processor time of the step's parts is a sixth less, without 600,000 page
faults a forward pass, and the peak memory is 14 to 19 % more (16 % with 2 and 4 MiB)."""
KEPT = 2**30
"""Bytes up to which freed blocks are kept where memory abounds. Measured on passes of 1,024 tokens through six layers
of SmolLM2-135M's width: processor time 11.4 s in place of 15.6, a sixteenth of the page faults, peak memory 30 to 38 %
more."""
SPARE = 1.5
"""Memory abounds where this many times what a training is expected to hold is unused."""
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3
PERIOD_US = 100_000
VARIABLE = "MALLOC_MMAP_THRESHOLD_"
"""glibc's environment variable; a value set by the user wins."""


def choose_allocation(*, keep: bool) -> bool:
    """Keep freed blocks for later ones, or return those from `LARGE` bytes on to the system, while this process lives.

    Return False without glibc and where the user has set the threshold.
    """
    # getattr(): other C libraries have no mallopt().
    choose = getattr(ctypes.CDLL(None), "mallopt", None)
    if choose is None or VARIABLE in os.environ:
        return False
    # -1: the top of the heap is never given back.
    limits = {M_MMAP_THRESHOLD: KEPT if keep else LARGE, M_TRIM_THRESHOLD: -1 if keep else LARGE}
    return all(bool(choose(*limit)) for limit in limits.items())


def return_freed(beyond: int) -> bool:
    """Return freed blocks to the system, now and from now on, if this process holds more bytes than `beyond`.

    Rows of many lengths fragment a heap that keeps them without a bound: imitating 24 pairs a step took 22 GB where
    2.6 were in use. malloc_trim(3) returns whole free pages inside the heap, too.
    """
    resident = os.sysconf("SC_PAGE_SIZE") * int((_text(Path("/proc/self/statm")) or "0 0").split()[1])
    if resident <= beyond or not choose_allocation(keep=False):
        return False
    ctypes.CDLL(None).malloc_trim(0)
    return True


def limit_threads(count: int) -> None:
    """Limit the threads of numerical libraries, those already imported and those imported later."""
    os.environ["OMP_NUM_THREADS"] = str(count)  # read by a library when it is loaded, and never again
    if torch := sys.modules.get("torch"):
        torch.set_num_threads(count)


def gpu_free(device: "torch.device | str") -> int:
    """Return the bytes that new tensors may take on a GPU; 0 on a CPU.

    What the driver has free, and what torch's allocator holds unused.
    """
    import torch

    device = torch.device(device)
    if device.type != "cuda":
        return 0
    unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return torch.cuda.mem_get_info(device)[0] + unused


def peak_memory(device: "torch.device") -> int:
    """Return the most bytes that this process has held so far: of a GPU its tensors, on a CPU all of its memory."""
    import torch

    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def available(device: str, root: Path = Path("/")) -> int:
    """Return bytes: what is free on the GPU, or on the CPU this process' share of what limits allow.

    Limits are those of the machine and of the control groups of this process and their parents: containers, Slurm's,
    systemd's jobs. root: the folder of proc and sys. Version 2 keeps a limit in memory.max ("max" for none) below
    /sys/fs/cgroup, version 1 in memory.limit_in_bytes below /sys/fs/cgroup/memory, a number beyond all memory for none.
    Source: Linux Documentation/admin-guide/cgroup-v2.rst and cgroup-v1/memory.rst.
    """
    if device.startswith("cuda"):
        import torch

        return torch.cuda.mem_get_info(device)[0]
    limits = [os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")]
    for text in _group_files(root, "memory", "memory.max", "memory.limit_in_bytes"):
        limits += [int(text)] if text.isdigit() else []
    return min(limits) // ranks.local_count()


LIMITS = {"-d": (resource.RLIMIT_DATA, "VmData"), "-v": (resource.RLIMIT_AS, "VmSize")}
"""Options of `ulimit` that bound the memory of a process, with its number and the line of proc(5) that counts it."""


def within_limits() -> dict[str, int]:
    """Return the bytes that a limit leaves to this process, by its option of `ulimit`; nothing of those not set."""
    lines = dict(line.partition(":")[::2] for line in _text(Path("/proc/self/status")).splitlines())
    softs = {option: resource.getrlimit(number)[0] for option, (number, _) in LIMITS.items()}
    return {
        option: softs[option] - 1024 * int(lines[used].split()[0])
        for option, (_, used) in LIMITS.items()
        if softs[option] != resource.RLIM_INFINITY and used in lines
    }


@contextmanager
def limited_memory(more: int) -> Iterator[None]:
    """Let this process take at most so many bytes more than now, inside the block; a lower limit stays.

    What asks for more gets none, and raises `MemoryError` or an error of its own.
    """
    number, used = LIMITS["-d"]
    soft, hard = resource.getrlimit(number)
    now = next((line for line in _text(Path("/proc/self/status")).splitlines() if line.startswith(used)), None)
    if now is None:  # a system that does not count it
        yield
        return
    most = 1024 * int(now.split()[1]) + more
    resource.setrlimit(number, (most if soft == resource.RLIM_INFINITY else min(soft, most), hard))
    try:
        yield
    finally:
        resource.setrlimit(number, (soft, hard))


def cores(root: Path = Path("/")) -> int:
    """Return the cores that this process may use: of its affinity and the CPU quotas of control groups, at least 1.

    root: the folder of proc and sys. Version 2 keeps a quota and its period in cpu.max ("max 100000" for none), version
    1 in cpu.cfs_quota_us (-1 for none) and cpu.cfs_period_us; a period is 100,000 us unless somebody changed it.
    """
    counts = [len(os.sched_getaffinity(0))]
    for text in _group_files(root, "cpu", "cpu.max", "cpu.cfs_quota_us"):
        quota, *period = text.split() or [""]
        counts += [round(int(quota) / int(period[0] if period else PERIOD_US))] if quota.isdigit() else []
    return max(min(counts), 1)


def use_own_cores() -> None:
    """Limit torch's threads to `cores`, unless the user has set OMP_NUM_THREADS; torch knows no quota."""
    import torch

    if "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(min(torch.get_num_threads(), cores()))


def wait_passively() -> None:
    """Let threads of OpenMP sleep while they wait, unless the user says otherwise; before a library of it is loaded.

    Those that spin take the cores from the threads they wait for, wherever others work too. Measured with two threads
    on two cores at load 18: twelve tokens of 8 rows of SmolLM2 in 2.7 s in place of 9.8, and 18 s of processor time in
    place of 49; one thread takes 2.7 s.
    """
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")


def _group_files(root: Path, controller: str, second: str, first: str) -> Iterator[str]:
    """Yield a file of each control group of this process and of those above: `second` in version 2, else `first`."""
    for line in _text(root / "proc/self/cgroup").splitlines():
        number, controllers, path = line.split(":", 2)
        if number == "0" and not controllers:  # version 2 has one line, "0::/path"
            mount, name = root / "sys/fs/cgroup", second
        elif controller in controllers.split(","):
            mount, name = root / "sys/fs/cgroup" / controller, first
        else:
            continue
        inside = Path(path.lstrip("/"))
        # In a container the path may be the host's; its own group is then what is mounted.
        for group in (inside, *inside.parents):
            yield _text(mount / group / name).strip()


def unused(device: str, root: Path = Path("/")) -> int:
    """Return the bytes of `available` that no process of the machine, or of a control group, holds at this moment.

    What a group keeps of files that nothing has used lately is not held. Source: as for `available`.
    """
    if device.startswith("cuda"):
        return available(device)
    lines = _text(root / "proc/meminfo").splitlines()
    free = [1024 * int(line.split()[1]) for line in lines if line.startswith("MemAvailable:")]
    of_groups = (
        _group_files(root, "memory", second, first)
        for second, first in (
            ("memory.max", "memory.limit_in_bytes"),
            ("memory.current", "memory.usage_in_bytes"),
            ("memory.stat", "memory.stat"),
        )
    )
    for limit, used, counts in zip(*of_groups, strict=True):
        if limit.isdigit() and used.isdigit():
            counters = dict(line.split() for line in counts.splitlines())
            # Version 1 counts the groups below only in the first of these.
            cached = int(counters.get("total_inactive_file") or counters.get("inactive_file", 0))
            free.append(max(int(limit) - int(used) + cached, 0))
    return min([available(device, root), *(bytes_free // ranks.local_count() for bytes_free in free)])


def _text(path: Path) -> str:
    """Return the text of a kernel file; "" where it is absent."""
    return path.read_text() if path.is_file() else ""
