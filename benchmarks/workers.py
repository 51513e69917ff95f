"""Jobs that sleep, on 1 to 16 workers: how much of the time that sleeping alone would take is lost.

    python benchmarks/workers.py                     # processes of this machine, then a Ray cluster on it
    python benchmarks/workers.py --seconds 0.5

As many jobs for each worker, whatever their number, so that every row would take equally long. Workers are started by a
round before the clock runs. Efficiency: seconds of sleep a worker has, over seconds by the clock.
"""

import argparse
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import records
from records import EXTRA, needed

needed("ray", by=EXTRA.format("ray"))

import ray

from stages.backends.engine import Engine, ProcessEngine, RayEngine
from stages.layout import markdown_table

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
    """A cluster that believes in so many cores, which sleeping jobs do not need."""
    ray.init(num_cpus=workers, include_dashboard=False, log_to_driver=False)
    try:
        yield RayEngine()
    finally:
        ray.shutdown()


def measured(start: Callable[[int], Any], workers: int, seconds: float, rounds: int) -> tuple[float, float]:
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


def main() -> None:
    """Print a row for each engine and number of workers."""
    words = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    words.add_argument("--seconds", type=float, default=1.0, help="how long a job sleeps")
    words.add_argument("--rounds", type=int, default=3)
    given = words.parse_args()
    rows = []
    for name, start in (("processes", processes), ("ray", on_ray)):
        for workers in WORKERS:
            efficiency, overhead = measured(start, workers, given.seconds, given.rounds)
            rows.append((name, workers, f"{efficiency:.3f}", f"{overhead:.1f}"))
            print(*rows[-1], flush=True)
            claim = f"{workers} workers, {name}, jobs of {given.seconds:g} s: efficiency"
            jobs = workers * EACH * given.rounds
            records.write(__file__, [records.measured(claim, efficiency, n=jobs, goal=">= 0.9")])
    print(markdown_table(rows, ("engine", "workers", "efficiency", "ms a job beyond its sleep")))


if __name__ == "__main__":
    main()
