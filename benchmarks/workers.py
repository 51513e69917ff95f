"""Jobs that sleep, on 1 to 16 workers: how much of the time that sleeping alone would take is lost.

    python benchmarks/workers.py                     # processes of this machine, then a Ray cluster on it
    python benchmarks/workers.py --seconds 0.5

As many jobs for each worker, whatever their number, so that every row would take equally long. Workers are started by a
round before the clock runs. Efficiency: seconds of sleep a worker has, over seconds by the clock.
"""

import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import cases
from records import Claim, measured

from stages.backends.engine import Engine, ProcessEngine, RayEngine

WORKERS = (1, 2, 4, 8, 16)
EACH = 20
"""Jobs for each worker."""


def nap(seconds: float) -> float:
    """A command that takes its time and nothing else."""
    time.sleep(seconds)
    return seconds


@contextmanager
def processes(workers: int) -> Iterator[Engine]:
    """Processes of this machine."""
    engine = ProcessEngine(workers)
    try:
        yield engine
    finally:
        engine.close()


@contextmanager
def on_ray(workers: int) -> Iterator[Engine]:
    """A cluster that is told of so many cores, which sleeping jobs do not need."""
    cases.needed("ray", by=cases.EXTRA.format("ray"))
    import ray

    ray.init(num_cpus=workers, include_dashboard=False, log_to_driver=False)
    try:
        yield RayEngine()
    finally:
        ray.shutdown()


def efficiency(start: Callable[[int], Any], workers: int, seconds: float, rounds: int) -> tuple[float, float]:
    """Median efficiency, and milliseconds beyond the sleep for each job of a worker."""
    with start(workers) as engine:
        list(engine.map(nap, [0.2] * workers))
        clock = []
        for _ in range(rounds):
            began = time.monotonic()
            list(engine.map(nap, [seconds] * (workers * EACH)))
            clock.append(time.monotonic() - began)
    wall = statistics.median(clock)
    return seconds * EACH / wall, 1000 * (wall - seconds * EACH) / EACH


def sleeping(seconds: float = 1.0, rounds: int = 3) -> Iterator[Claim]:
    """Efficiency of each engine and number of workers. seconds: how long a job sleeps."""
    for name, start in (("processes", processes), ("ray", on_ray)):
        for workers in WORKERS:
            share, overhead = efficiency(start, workers, seconds, rounds)
            print(f"{name}, {workers} workers: {overhead:.1f} ms a job beyond its sleep", flush=True)
            claim = f"{workers} workers, {name}, jobs of {seconds:g} s: efficiency"
            yield measured(claim, share, n=workers * EACH * rounds, goal=">= 0.9")


CASES = {"sleeping": sleeping}


if __name__ == "__main__":
    cases.main(__file__, CASES)
