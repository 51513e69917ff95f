"""Memory and threads of this process: the allocator's mmap threshold, and the number of computing threads.

glibc raises its mmap threshold up to 32 MB as large blocks are freed. Smaller blocks then share one heap, where a block
that stays (a layer's input kept for the backward pass) takes part of a freed block's space, so that the next large
block no longer fits: the heap fragments and grows with every layer. Measured: 3,147 MiB of heap with 942 MiB in use.
Source: glibc malloc/malloc.c, "M_MMAP_THRESHOLD"; mallopt(3).
"""

import ctypes
import os
import sys

LARGE = 2**20
"""Bytes from which a block is mapped on its own. The kernel zeroes such a block each time, which is cheap compared with
the large matrix products that fill it, and expensive compared with the work of small models."""
M_MMAP_THRESHOLD = -3
VARIABLE = "MALLOC_MMAP_THRESHOLD_"
"""glibc's environment variable; a value set by the user wins."""


def set_mmap_threshold() -> bool:
    """Return freed blocks from `LARGE` bytes on to the system, for the lifetime of this process.

    Return False without glibc and where the user has set the threshold.
    """
    # getattr(): other C libraries have no mallopt().
    choose = getattr(ctypes.CDLL(None), "mallopt", None)
    return choose is not None and VARIABLE not in os.environ and bool(choose(M_MMAP_THRESHOLD, LARGE))


def limit_threads(count: int) -> None:
    """Limit the threads of numerical libraries, those already imported and those imported later."""
    os.environ["OMP_NUM_THREADS"] = str(count)  # read by a library when it is loaded, and never again
    if torch := sys.modules.get("torch"):
        torch.set_num_threads(count)
