"""Engines: pools of worker processes, of this machine or of a Ray cluster, that call a function with each of many jobs.

Every job is done at least once, in no fixed order. `find_engine` resolves the words after `--on`.
"""

import logging
import multiprocessing
import os
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any, Protocol, TypeVar

from composer_stages.backends import devices, resources
from composer_stages.errors import InfrastructureError, UsageError

JobT = TypeVar("JobT")
ResultT = TypeVar("ResultT")
TRIES = 5
"""Attempts at a job whose workers die: a job that takes all memory would otherwise be repeated for ever."""
WAKE_S = 0.2
"""Seconds that a wait for results lasts at most, so that signals are handled."""
ENGINES = ("processes", "ray")
WORDS = "processes:N, ray, ray://HOST:PORT"


class Engine(Protocol):
    """A pool of workers. A job that is lost with its worker is repeated by another, so a job has to be repeatable."""

    workers: int
    """The number of jobs that run at the same time."""
    device: str
    """Where the workers run, in words: "cpu", "GPU 0, 1"."""

    def map(
        self, function: Callable[[JobT], ResultT], jobs: Iterable[JobT], waiting: Callable[[], None] = lambda: None
    ) -> Iterator[tuple[JobT, ResultT]]:
        """Yield each job with the result of the function, in the order in which they finish.

        The next job is drawn when a worker is free for it; `waiting` is called again and again until then. `function`
        is importable from a module and does not raise; jobs and results can be pickled. Raises `InfrastructureError`
        when workers die of a job, or all are gone.
        """

    def close(self) -> None:
        """Release the workers; called when no more jobs follow."""


def find_engine(word: str, gpus: int = 0) -> Engine:
    """Return the engine of this name; `UsageError` for another word, or when the engine is not installed.

    gpus: how many each worker takes, where there are any.
    """
    check_engine(word)
    kind, _, argument = word.partition(":")
    return ProcessEngine(int(argument), gpus) if kind == "processes" else RayEngine(word if argument else None, gpus)


def check_engine(word: str) -> None:
    """Raise `UsageError` for the name of an unknown engine."""
    kind, _, argument = word.partition(":")
    processes = kind == "processes" and argument.isdigit() and int(argument) > 0
    if not (processes or word == "ray" or (kind == "ray" and len(argument) > len("//"))):
        raise UsageError("backends.no-engine", word=word, words=WORDS)


@dataclass(eq=False)
class _Worker:
    process: BaseProcess
    pipe: Connection
    gpus: tuple[str, ...]
    number: int = 0
    job: Any = None


class ProcessEngine:
    """Worker processes on this machine, each with its share of the cores. They wait for further jobs until `close`.

    Workers ignore signals: the process that started them decides when they stop. gpus: how many each worker takes; with
    fewer GPUs than that there are fewer workers. Without GPUs, and with gpus=0, a worker sees what this process sees.
    """

    def __init__(self, workers: int, gpus: int = 0, pool: devices.Pool | None = None) -> None:
        self._pool = devices.Pool() if pool is None else pool
        self._pool.check("A worker", gpus)
        self._gpus = self._pool.needs(gpus)
        self.workers = min(workers, len(self._pool.names) // self._gpus) if self._gpus else workers
        self.device = devices.used(self.workers * self._gpus, self._pool.names)
        self._idle: list[_Worker] = []

    def close(self) -> None:
        """End the processes."""
        for worker in self._idle:  # all pipes first, so that the processes end at the same time
            worker.pipe.close()
        for worker in self._idle:
            worker.process.join()
            self._pool.give_back(worker.gpus)
        self._idle.clear()

    def map(
        self, function: Callable[[JobT], ResultT], jobs: Iterable[JobT], waiting: Callable[[], None] = lambda: None
    ) -> Iterator[tuple[JobT, ResultT]]:
        """As `Engine.map`."""
        ahead, again, deaths = enumerate(jobs), list[tuple[int, JobT]](), Counter[int]()
        busy: dict[Connection, _Worker] = {}
        try:
            while True:
                while len(busy) < self.workers and (drawn := again.pop() if again else next(ahead, None)) is not None:
                    worker = self._idle.pop() if self._idle else self._start()
                    worker.number, worker.job = drawn
                    busy[worker.pipe] = worker
                    with suppress(BrokenPipeError):  # the worker died; `recv` finds out below
                        worker.pipe.send((function, worker.job))
                if not busy:
                    return
                waiting()
                # The pipe of a worker that died is ready, too, and `recv` raises.
                for pipe in wait(list(busy), WAKE_S):
                    worker = busy.pop(pipe)  # type: ignore[call-overload]  # wait() returns what it was given
                    try:
                        result = worker.pipe.recv()
                    except (EOFError, ConnectionResetError):
                        worker.process.join()
                        self._pool.give_back(worker.gpus)
                        deaths[worker.number] += 1
                        if deaths[worker.number] >= TRIES:
                            raise InfrastructureError(
                                "backends.workers-died", tries=TRIES, exitcode=worker.process.exitcode
                            ) from None
                        again.append((worker.number, worker.job))
                    else:
                        self._idle.append(worker)  # before the yield: the caller may not come back for more
                        yield worker.job, result
        finally:
            for worker in busy.values():
                worker.process.kill()
                worker.process.join()
                self._pool.give_back(worker.gpus)

    def _start(self) -> _Worker:
        # spawn, not fork: the parent has threads (torch, DuckDB, pyarrow), whose locks a fork would copy as held.
        pipe, worker_pipe = multiprocessing.Pipe()
        threads = max(1, resources.cores() // self.workers)
        gpus = self._pool.take(self._gpus) or ()  # there are enough: a worker that ends gives its own back
        process = multiprocessing.get_context("spawn").Process(
            target=_serve, args=(worker_pipe, os.getpid(), threads, gpus), daemon=True
        )
        process.start()
        worker_pipe.close()  # else this process would hold the other end open, and never see that the worker died
        return _Worker(process, pipe, gpus)


def _serve(pipe: Connection, parent: int, threads: int, gpus: tuple[str, ...]) -> None:
    """Do jobs in a worker until the pipe is closed or the parent is gone."""
    os.environ.update(devices.restricted(gpus) if gpus else {})  # before any job imports torch
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    os.environ.setdefault("OMP_NUM_THREADS", str(threads))

    def end_with_parent() -> None:
        # A parent that is killed closes no pipe that a sibling inherited. What was finished is on disk.
        while os.getppid() == parent:
            time.sleep(1)
        os._exit(1)

    threading.Thread(target=end_with_parent, daemon=True).start()
    with suppress(EOFError):
        while True:
            function, job = pipe.recv()
            pipe.send(function(job))


class RayEngine:
    """Workers on a Ray cluster, one a core: plain tasks, which Ray repeats where a node or a process dies.

    The cluster of the address; without one, that of RAY_ADDRESS, or one that is started on this machine. gpus: how many
    each task takes of a cluster that has any; Ray then sets their CUDA_VISIBLE_DEVICES. Others wait. Ray Data is
    not used: its reader's actors are not begun again when their node dies (Ray 2.60, `read_parquet`).
    """

    def __init__(self, address: str | None = None, gpus: int = 0) -> None:
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # Ray would send statistics to its makers
        try:
            import ray
        except ImportError:
            raise UsageError("backends.ray-missing") from None
        self._ray: Any = ray
        if not ray.is_initialized():
            try:
                with _own_handler(signal.SIGTERM):
                    ray.init(address, log_to_driver=False, logging_level=logging.ERROR)
            except (ConnectionError, RuntimeError, ValueError) as error:
                where = address or os.environ.get("RAY_ADDRESS", "of this machine")
                raise InfrastructureError(
                    "backends.ray-unreachable", where=where, error=str(error).splitlines()[0]
                ) from None
        cluster = ray.cluster_resources()
        self._gpus = gpus if cluster.get("GPU", 0) else 0
        self.workers = max(1, int(cluster.get("CPU", 1)))
        self.device = "cpu"
        if self._gpus:
            # A task is placed on one node, so what is left over on two nodes is of no use to it.
            nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
            self.workers = sum(int(min(node.get("GPU", 0) // gpus, node.get("CPU", 0))) for node in nodes)
            self.device = f"{self.workers * gpus} of Ray's GPUs"
            if not self.workers:
                raise UsageError("backends.no-node-for-worker", gpus=gpus)

    def close(self) -> None:
        """Do nothing: the connection to the cluster stays open for further stages of this process."""

    def map(
        self, function: Callable[[JobT], ResultT], jobs: Iterable[JobT], waiting: Callable[[], None] = lambda: None
    ) -> Iterator[tuple[JobT, ResultT]]:
        """As `Engine.map`."""
        task = self._ray.remote(num_cpus=1, num_gpus=self._gpus, max_retries=TRIES - 1)(function)
        ahead, working = iter(jobs), dict[Any, JobT]()
        try:
            while True:
                while len(working) < self.workers and (job := next(ahead, None)) is not None:
                    working[task.remote(job)] = job
                if not working:
                    return
                waiting()
                for ready in self._ray.wait(list(working), timeout=WAKE_S)[0]:
                    result = self._ray.get(ready)  # raises for a job whose worker died `TRIES` times
                    yield working.pop(ready), result
        except self._ray.exceptions.RayError as error:
            raise InfrastructureError("backends.ray-job-lost", error=str(error).splitlines()[0]) from error
        finally:
            for reference in working:
                self._ray.cancel(reference, force=True)


@contextmanager
def _own_handler(number: signal.Signals) -> Iterator[None]:
    """Keep this process's handler of a signal: Ray's (2.60) ends the process at once, whatever it works on."""
    handler = signal.getsignal(number)
    yield
    if threading.current_thread() is threading.main_thread():  # elsewhere neither Ray nor we can set one
        signal.signal(number, handler)
