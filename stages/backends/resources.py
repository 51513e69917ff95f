"""Memory that was freed goes back to the system, where the C library's allocator would keep it in holes.

glibc raises the size from which a block is mapped by itself, and unmapped when it is freed, to 32 MB once blocks of
that size come and go. Smaller ones then share a heap, where a block that stays, such as a layer's input kept for the
backward pass, is put into the hole of one that went, which the next of that size does not fit any more: the heap grows
with every layer, mostly of holes. Source: glibc malloc/malloc.c, "M_MMAP_THRESHOLD"; mallopt(3).
"""

import ctypes
import os
import sys

LARGE = 2**20
"""Bytes from which a block is mapped by itself. The system clears such a block whenever it is taken, which costs little
beside the products of large matrices that fill it, and much beside what small models compute."""
M_MMAP_THRESHOLD = -3
VARIABLE = "MALLOC_MMAP_THRESHOLD_"
"""glibc's own setting, which stays as it is where somebody gave it."""


def set_mmap_threshold() -> bool:
    """Give blocks of `LARGE` bytes back to the system as they are freed, for as long as this process lives.

    Whether there is a C library that knows how (glibc does) and nobody chose otherwise.
    """
    choose = getattr(ctypes.CDLL(None), "mallopt", None)
    return choose is not None and VARIABLE not in os.environ and bool(choose(M_MMAP_THRESHOLD, LARGE))


# ---- threads
# How many threads a process computes with.


def limit_threads(count: int) -> None:
    """Let libraries compute with so many threads, those that are imported already and those that will be."""
    os.environ["OMP_NUM_THREADS"] = str(count)
    if torch := sys.modules.get("torch"):
        torch.set_num_threads(count)
