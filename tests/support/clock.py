"""A wall clock that jumps under a running process: a library, preloaded, that adds a file's seconds to what it tells.

Clocks that only count up (CLOCK_MONOTONIC) are left alone, as the kernel leaves them when somebody sets the time.
"""

import os
import shutil
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import cycle
from pathlib import Path

import pytest

SOURCE = r"""
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <stdint.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/time.h>
#include <time.h>

static volatile int64_t *offset;

__attribute__((constructor)) static void begin(void) {
    int file = open(getenv("CLOCK_OFFSET"), O_RDONLY);
    void *found = mmap(0, sizeof(int64_t), PROT_READ, MAP_SHARED, file, 0);
    if (found == MAP_FAILED) abort();
    offset = found;
}

int clock_gettime(clockid_t clock, struct timespec *told) {
    static int (*real)(clockid_t, struct timespec *);
    if (!real) real = dlsym(RTLD_NEXT, "clock_gettime");
    int code = real(clock, told);
    if (!code && (clock == CLOCK_REALTIME || clock == CLOCK_REALTIME_COARSE)) told->tv_sec += *offset;
    return code;
}

int gettimeofday(struct timeval *told, void *zone) {
    static int (*real)(struct timeval *, void *);
    if (!real) real = dlsym(RTLD_NEXT, "gettimeofday");
    int code = real(told, zone);
    if (!code) told->tv_sec += *offset;
    return code;
}

time_t time(time_t *told) {
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    if (told) *told = now.tv_sec;
    return now.tv_sec;
}
"""
DAY_S = 24 * 60 * 60


class Clock:
    """The clock of processes that are started with `environment`."""

    def __init__(self, folder: Path) -> None:
        compiler = shutil.which("cc")
        if compiler is None:
            pytest.skip("The wall clock of a process can only be moved with a C compiler (cc), which is not installed.")
        library, self._offset = folder / "clock.so", folder / "offset"
        (folder / "clock.c").write_text(SOURCE)
        subprocess.run([compiler, "-shared", "-fPIC", "-O1", "-o", library, folder / "clock.c", "-ldl"], check=True)
        self.environment = {**os.environ, "LD_PRELOAD": str(library), "CLOCK_OFFSET": str(self._offset)}
        self.set(0)

    def set(self, seconds: int) -> None:
        """So much ahead of the real time, from now on, also for processes that run; below 0: behind."""
        with self._offset.open("r+b" if self._offset.exists() else "wb") as file:
            file.write(seconds.to_bytes(8, "little", signed=True))

    @contextmanager
    def jumping(self, every_s: float) -> Iterator[list[int]]:
        """A day forward, back, a day backward, back, and so on; gives the list of the jumps made."""
        over, made = threading.Event(), list[int]()

        def jump() -> None:
            for seconds in cycle((DAY_S, 0, -DAY_S, 0)):
                if over.wait(every_s):
                    return
                self.set(seconds)
                made.append(seconds)

        thread = threading.Thread(target=jump)
        thread.start()
        try:
            yield made
        finally:
            over.set()
            thread.join()
            self.set(0)
