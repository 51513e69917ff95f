"""Several stages at once, each in a process of its own. Progress stays visible; signals reach all of them once.

Children live in sessions of their own, so that a terminal's Ctrl-C reaches only this process, which passes it on: the
first drains, the second stops. A child whose parent is gone stops when it next reports, with everything finished on
disk. They are forked by a server that has imported what their stages name in `preload`, which can take longer than a
small stage itself.
"""

import multiprocessing
import os
import pickle
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stdout, suppress
from dataclasses import dataclass, field
from functools import partial
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess

from composer_cli.console import Console, Listener, Watch, stopping
from composer_cli.launch import Job, RunOptions, ending, planned
from stages.backends.resources import limit_threads
from stages.errors import ComposerError
from stages.runs.artifact import Interrupted
from stages.runs.runner import Result
from stages.runs.signals import interrupted
from stages.runs.stage import load_stage


@dataclass
class Worker:
    """A job in its process. `ready` once the stage itself runs, and only then can it be interrupted."""

    job: Job
    process: BaseProcess
    pipe: Connection
    listener: Listener
    started: float = field(default_factory=time.monotonic)
    ready: bool = False
    interrupts: int = 0


@dataclass(frozen=True)
class Waiting:
    """An entry of a chain, and how it becomes a job once the results of what it reads are there."""

    title: str
    stage: str
    reads: Sequence[str]
    job: Callable[[Mapping[str, Result]], Job]


def execute(
    waiting: Sequence[Waiting],
    results: Mapping[str, Result],
    run_options: RunOptions,
    console: Console,
    require: Callable[[str, Result], None],
) -> dict[str, Result]:
    """Run all of them, at most one a core, to the end of each; then raise the first error there was, if any.

    results: of earlier entries. Once `require` raises for a result, or one asked to stop, nothing more is begun.
    """
    several = Several(waiting, results, run_options, console, require)
    with console.watching() as watch, _counting_interrupts(console) as interrupts:
        several.go_on(watch, interrupts)
    if interrupts:
        raise interrupted(interrupts[0])
    if several.errors:
        raise several.errors[0]
    return {one.title: several.results[one.title] for one in waiting}


class Several:
    """Entries that wait for what they read, work, and have ended."""

    def __init__(
        self,
        waiting: Sequence[Waiting],
        results: Mapping[str, Result],
        run_options: RunOptions,
        console: Console,
        require: Callable[[str, Result], None],
    ) -> None:
        self.results, self.errors = dict(results), list[BaseException]()
        self._run_options, self._console, self._require = run_options, console, require
        self._waiting, self._working = list(waiting), dict[Connection, Worker]()
        self._ending, self._over = list[BaseProcess](), False
        self._threads = int(os.environ.get("OMP_NUM_THREADS") or max(1, cores() // len(waiting)))
        self._preload = list(dict.fromkeys(p for one in waiting for p in load_stage(one.stage).preload))

    def go_on(self, watch: Watch, interrupts: Sequence[int]) -> None:
        """Until nothing works, and nothing can be begun."""
        self._begin(watch, interrupts)
        while self._working:
            for pipe in wait(list(self._working), timeout=0.2):
                worker = self._working[pipe]  # type: ignore[index]  # wait() gives back what it was given
                if (end := _hear(worker)) is not None:
                    del self._working[worker.pipe]
                    self._ending.append(worker.process)
                    watch.ended(worker.job.title)
                    self._console.tell(f"{worker.job.title}: {_last_words(worker, end)}")
                    self._ended(worker.job.title, end)
            self._begin(watch, interrupts)
            _pass_on(interrupts, self._working.values())
        for process in self._ending:
            process.join()

    def _begin(self, watch: Watch, interrupts: Sequence[int]) -> None:
        """Begin what is ready, in order, as there is room for it; what was done before is done at once."""
        while not (interrupts or self._over or len(self._working) >= cores()):
            ready = [one for one in self._waiting if self.results.keys() >= set(one.reads)]
            if not ready:
                return
            self._waiting.remove(ready[0])
            try:
                self._begin_one(ready[0].job(self.results), watch)
            except ComposerError as error:
                self.errors.append(error)

    def _begin_one(self, job: Job, watch: Watch) -> None:
        if (done := job.standing(self._run_options)) is not None:
            self._console.tell(f"{job.title}: {done.reason}")
            self._ended(job.title, done)
            return
        self._console.tell(f"{job.title}: starts{job.place}, {planned(job.plan())}")
        listener = watch.listener(job.title, partial(job.folder, self._run_options))
        worker = _start(job, self._run_options, listener, self._threads, self._preload)
        self._working[worker.pipe] = worker

    def _ended(self, title: str, end: Result | BaseException) -> None:
        if isinstance(end, BaseException):
            self.errors.append(end)
            return
        self.results[title] = end
        try:
            self._require(title, end)
        except ComposerError as error:
            self.errors.append(error)
            self._over = True


def cores() -> int:
    """Processor cores this process may use."""
    return len(os.sched_getaffinity(0))


def _start(job: Job, run_options: RunOptions, listener: Listener, threads: int, preload: Sequence[str]) -> Worker:
    """A child that ignores Ctrl-C until its stage handles it, with its share of the cores."""
    here, there = multiprocessing.Pipe()
    forking = multiprocessing.get_context("forkserver")
    forking.set_forkserver_preload([*preload])
    process = forking.Process(target=_work, args=(there, job, run_options, threads), daemon=True)
    handler = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        process.start()
    finally:
        signal.signal(signal.SIGINT, handler)
    there.close()
    return Worker(job, process, here, listener)


def _work(pipe: Connection, job: Job, run_options: RunOptions, threads: int) -> None:
    limit_threads(threads)
    one_at_a_time = threading.Lock()

    def listener(*progress: object) -> None:
        try:
            with one_at_a_time:
                pipe.send(progress)
        except BrokenPipeError:
            raise Interrupted from None  # whoever started this is gone

    os.setsid()
    try:
        with redirect_stdout(sys.stderr):
            end: Result | BaseException = job.run(run_options, listener)
    except BaseException as error:
        end = error
    _report(pipe, end)


def _report(pipe: Connection, end: Result | BaseException) -> None:
    with suppress(BrokenPipeError):
        pipe.send(end if _can_travel(end) else RuntimeError(f"{end!r}. {' '.join(getattr(end, '__notes__', ()))}"))


def _can_travel(end: Result | BaseException) -> bool:
    """Whether pickling keeps it: exceptions with constructors of their own often do not come back."""
    try:
        pickle.loads(pickle.dumps(end))  # noqa: S301 (its own bytes, to see whether they come through)
    except Exception:
        return False
    return True


def _hear(worker: Worker) -> Result | BaseException | None:
    """One message of a worker: None for progress, else how it ended."""
    try:
        message = worker.pipe.recv()
    except EOFError:
        worker.process.join()
        code = worker.process.exitcode
        return ComposerError(
            f"{worker.job.title} died (exit code {code}). What it finished is saved; go on with --resume."
        )
    if not isinstance(message, tuple):
        return message  # not joined here: it takes time to exit, and signals for the others would wait for that
    worker.ready = True
    worker.listener(*message)
    return None


def _last_words(worker: Worker, end: Result | BaseException) -> str:
    if isinstance(end, Result):
        return ending(end, time.monotonic() - worker.started)
    return "interrupted" if isinstance(end, (Interrupted, KeyboardInterrupt)) else f"stopped: {end}"


def _pass_on(interrupts: Sequence[int], workers: Iterable[Worker]) -> None:
    """Every worker that is ready gets as many interrupts as there were; one that is not yet is ended by the second."""
    for worker in workers:
        if len(interrupts) > 1 and not worker.ready:
            worker.process.terminate()
        while worker.ready and worker.interrupts < len(interrupts):
            with suppress(ProcessLookupError):  # it has just ended, and its last message is on its way
                os.kill(worker.process.pid or 0, interrupts[worker.interrupts])
            worker.interrupts += 1


@contextmanager
def _counting_interrupts(console: Console) -> Iterator[list[int]]:
    """A list that gains its number with every Ctrl-C, and with the first SIGTERM."""
    seen: list[int] = []

    def count(signum: int, frame: object) -> None:
        if not seen:
            console.tell(stopping(signum))
        if signum == signal.SIGINT or not seen:
            seen.append(signum)

    previous = {number: signal.signal(number, count) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield seen
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
