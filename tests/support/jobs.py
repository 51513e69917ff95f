"""Jobs for workers: they sleep, say who did them, and die as often as they are told."""

import os
import signal
import time
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Nap:
    """A job. `deaths`: so often its worker is killed by it, as noted below `folder`."""

    number: int
    folder: Path
    seconds: float = 0.0
    deaths: int = 0


def nap(job: Nap) -> tuple[int, int]:
    """The job's number and the process that did it."""
    died = job.folder / str(job.number)
    with died.open("a") as file:
        file.write("x")
    if len(died.read_text()) <= job.deaths:
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(job.seconds)
    return job.number, os.getpid()


def place(job: Nap) -> tuple[str | None, float, float]:
    """The GPUs that the job's process may use, and when it began and ended."""
    began = time.monotonic()
    nap(job)
    return os.environ.get("CUDA_VISIBLE_DEVICES"), began, time.monotonic()
