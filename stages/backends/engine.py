"""Workers that do jobs: a function of a module, called with each of many jobs, at least once, in no fixed order."""

import multiprocessing
import os
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any, Protocol, TypeVar

from stages.errors import InfrastructureError, UsageError

Job = TypeVar("Job")
Done = TypeVar("Done")
TRIES = 5
"""How often a job is begun whose workers die: one that takes all memory would else be begun for ever."""
ENGINES = ("processes", "ray")
WORDS = "processes:N, ray, ray://HOST:PORT"


class Engine(Protocol):
    """Where workers are. A job that is lost with its worker is begun again by another; so it has to be repeatable."""

    workers: int
    """How many jobs are done at once."""

    def map(self, function: Callable[[Job], Done], jobs: Iterable[Job]) -> Iterator[tuple[Job, Done]]:
        """Each job with what the function returned for it, as they are done.

        The next job is drawn when a worker is free for it. `function` belongs to a module, jobs and results can be
        pickled, and it does not raise. Raises `InfrastructureError` where workers die of a job, or all are gone.
        """

    def close(self) -> None:
        """Let go of the workers; called when no more jobs come."""


def find(word: str) -> Engine:
    """The engine that a word stands for; `UsageError` for another word, or where the engine is not installed."""
    check(word)
    kind, _, rest = word.partition(":")
    if kind == "processes":
        return Processes(int(rest))
    from stages.backends.ray_cluster import RayCluster

    return RayCluster(word if rest else None)


def check(word: str) -> None:
    """`UsageError` for a word that no engine stands for."""
    kind, _, rest = word.partition(":")
    processes = kind == "processes" and rest.isdigit() and int(rest) > 0
    if not (processes or word == "ray" or (kind == "ray" and len(rest) > len("//"))):
        raise UsageError(f"There is no engine {word!r}. Give one of: {WORDS}.")


# ---- processes
# Workers on this machine: processes that ignore signals, since whoever started them says when to stop.

WAKE_S = 0.2


@dataclass(eq=False)
class _Worker:
    process: BaseProcess
    pipe: Connection
    number: int = 0
    job: Any = None


class Processes:
    """So many processes, each with its share of the cores. They wait for the next jobs until `close`."""

    def __init__(self, workers: int) -> None:
        self.workers = workers
        self._idle: list[_Worker] = []

    def close(self) -> None:
        """End the processes."""
        for worker in self._idle:
            worker.pipe.close()
        for worker in self._idle:
            worker.process.join()
        self._idle.clear()

    def map(self, function: Callable[[Job], Done], jobs: Iterable[Job]) -> Iterator[tuple[Job, Done]]:
        """As every engine does."""
        waiting, again, lost = enumerate(jobs), list[tuple[int, Job]](), Counter[int]()
        busy: dict[Connection, _Worker] = {}
        try:
            while True:
                while len(busy) < self.workers and (drawn := again.pop() if again else next(waiting, None)) is not None:
                    worker = self._idle.pop() if self._idle else self._start()
                    worker.number, worker.job = drawn
                    busy[worker.pipe] = worker
                    with suppress(BrokenPipeError):  # found dead below
                        worker.pipe.send((function, worker.job))
                if not busy:
                    return
                for pipe in wait(list(busy), WAKE_S):
                    worker = busy.pop(pipe)  # type: ignore[call-overload]  # wait() gives back what it was given
                    try:
                        done = worker.pipe.recv()
                    except (EOFError, ConnectionResetError):
                        worker.process.join()
                        lost[worker.number] += 1
                        _give_up(lost[worker.number], worker.process.exitcode)
                        again.append((worker.number, worker.job))
                    else:
                        self._idle.append(worker)
                        yield worker.job, done
        finally:
            for worker in busy.values():
                worker.process.kill()
                worker.process.join()

    def _start(self) -> _Worker:
        here, there = multiprocessing.Pipe()
        threads = max(1, len(os.sched_getaffinity(0)) // self.workers)
        process = multiprocessing.get_context("spawn").Process(
            target=_serve, args=(there, os.getpid(), threads), daemon=True
        )
        process.start()
        there.close()
        return _Worker(process, here)


def _give_up(deaths: int, code: int | None) -> None:
    if deaths >= TRIES:
        raise InfrastructureError(
            f"{TRIES} workers died of one and the same job, the last with exit code {code}. What was finished is "
            "saved; go on with --resume, and fewer workers where they ran out of memory."
        )


def _serve(pipe: Connection, parent: int, threads: int) -> None:
    """Jobs until no more come."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    os.environ.setdefault("OMP_NUM_THREADS", str(threads))
    threading.Thread(target=_end_with, args=(parent,), daemon=True).start()
    with suppress(EOFError):
        while True:
            function, job = pipe.recv()
            pipe.send(function(job))


def _end_with(parent: int) -> None:
    """Whoever is killed takes its workers along: what they finished is on disk."""
    while os.getppid() == parent:
        time.sleep(1)
    os._exit(1)
