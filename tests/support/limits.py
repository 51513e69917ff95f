"""Limits that the kernel holds this process to."""

import os
import resource
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def file_size_limit(num_bytes: int) -> Iterator[None]:
    """Fail every write beyond so many bytes of a file with EFBIG, in this process and those that it starts."""
    _, hard = before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@contextmanager
def open_files_limit(more: int) -> Iterator[None]:
    """Fail with EMFILE where this process opens more files than those that are open and so many."""
    _, hard = before = resource.getrlimit(resource.RLIMIT_NOFILE)
    highest = max(map(int, os.listdir("/proc/self/fd")))  # the limit is one of numbers, of which the lowest are free
    held = [os.open(os.devnull, os.O_RDONLY)]
    while held[-1] < highest:
        held.append(os.open(os.devnull, os.O_RDONLY))
    resource.setrlimit(resource.RLIMIT_NOFILE, (held[-1] + 1 + more, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
        for descriptor in held:
            os.close(descriptor)
