"""Several stages at once, each in a process of its own. Progress stays visible; signals reach all of them.

As many run as there are cores, and of those that load a model as there are GPUs (`composer_stages.backends.devices`):
each gets its own through CUDA_VISIBLE_DEVICES, and the others wait.

Children live in sessions of their own, so that a terminal's Ctrl-C reaches only this process, which passes it on: they
drain at the first signal, and are killed `END_S` after the second. A child whose parent is gone stops when it next
reports, with everything finished on disk. They are forked by a server that has imported what their stages name in
`preload`, which can take longer than a small stage itself.

`composer_stages.backends.engine` also runs processes, for the units of one stage: its workers ignore signals, report no
progress and are replaced when they die, so the two share nothing but `multiprocessing`.
"""

import multiprocessing
import os
import pickle
import signal
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import redirect_stdout, suppress
from dataclasses import dataclass, field
from functools import partial
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess

from composer_cli.call import Arguments, StageJob, announce_start, ending
from composer_cli.console import Console, Listener, Watch
from composer_stages.backends import devices, resources
from composer_stages.errors import Breakdown, ComposerError
from composer_stages.runs import runner
from composer_stages.runs.runner import Result
from composer_stages.runs.stage import load_stage
from composer_stages.stopping import Dropped, Interrupted, handling, on_signals, stopped_by

END_S = 2.0
"""Seconds that processes have to end after the second signal, of `composer_stages.stopping.GRACE_S` of this process."""


@dataclass(frozen=True)
class WaitingEntry:
    """An entry of a chain, and how it becomes a job once the results of what it reads are there."""

    title: str
    stage: str
    reads: Sequence[str]
    gpus: int
    """How many it takes, where there are any."""
    job: Callable[[Mapping[str, Result]], StageJob]


@dataclass
class StageProcess:
    """A job in its process. `ready` once the stage itself runs, and only then can it be interrupted."""

    job: StageJob
    process: BaseProcess
    pipe: Connection
    listener: Listener
    gpus: tuple[str, ...] = ()
    started: float = field(default_factory=time.monotonic)
    ready: bool = False
    signalled: bool = False
    """Whether it got the first signal."""


def execute(
    waiting: Sequence[WaitingEntry],
    results: Mapping[str, Result],
    arguments: Arguments,
    console: Console,
    require: Callable[[str, Result], None],
) -> dict[str, Result]:
    """Run all entries, at most one a core and a GPU, to the end of each; then raise the first error there was, if any.

    results: of earlier entries. Once `require` raises for a result, or a signal asks to stop, nothing more is begun.
    """
    neighbours = ParallelEntries(waiting, results, arguments, console, require)
    with console.watching() as watch, on_signals() as caught, stopped_by(threading.Event()):
        neighbours.run(watch, caught)
    if caught:
        raise Interrupted(caught[0])
    if neighbours.errors:
        raise neighbours.errors[0]
    return {entry.title: neighbours.results[entry.title] for entry in waiting}


class ParallelEntries:
    """Entries of a chain that wait for what they read, work in a process, or have ended."""

    def __init__(
        self,
        waiting: Sequence[WaitingEntry],
        results: Mapping[str, Result],
        arguments: Arguments,
        console: Console,
        require: Callable[[str, Result], None],
    ) -> None:
        self.results, self.errors = dict(results), list[BaseException]()
        self._arguments, self._console, self._require = arguments, console, require
        self._waiting, self._working = list(waiting), dict[Connection, StageProcess]()
        self._ending, self._leaving, self._refused = list[StageProcess](), list[StageProcess](), False
        self._cores = resources.cores()
        self._threads = int(os.environ.get("OMP_NUM_THREADS") or max(1, self._cores // len(waiting)))
        self._pool = devices.Pool()
        # CUDA cannot be used after a fork once a module of the server has touched it, so each child imports for itself.
        preload = dict.fromkeys(p for entry in waiting for p in load_stage(entry.stage).preload)
        self._preload = [] if self._pool.names else list(preload)

    def run(self, watch: Watch, caught: Sequence[int]) -> None:
        """Begin entries and hear their processes until none works and none can be begun.

        caught: signals. The first is passed on, the second raises `Dropped` here.
        """
        try:
            self._run(watch, caught)
        except Dropped:
            self._end(caught[-1])
            raise

    def _run(self, watch: Watch, caught: Sequence[int]) -> None:
        self._begin(watch, caught)
        while self._working or self._leaving:
            for pipe in wait(list(self._working), timeout=0.2):
                worker = self._working[pipe]  # type: ignore[index]  # wait() gives back what it was given
                if (end := _receive(worker)) is None:
                    continue
                del self._working[worker.pipe]
                # Joined below: signals for the others do not wait for its exit. Its GPUs are free after it.
                (self._leaving if worker.gpus else self._ending).append(worker)
                watch.ended(worker.job.title)
                if isinstance(end, Result):
                    last_words = ending(end, time.monotonic() - worker.started)
                else:
                    is_interrupt = isinstance(end, (Interrupted, KeyboardInterrupt))
                    last_words = "interrupted" if is_interrupt else f"stopped: {end}"
                self._console.notify(f"{worker.job.title}: {last_words}")
                self._ended(worker.job.title, end)
            for worker in [worker for worker in self._leaving if not worker.process.is_alive()]:
                self._leaving.remove(worker)
                self._pool.give_back(worker.gpus)
            self._begin(watch, caught)
            for worker in self._working.values():
                if caught and worker.ready and not worker.signalled:
                    _signal(worker, caught[0])
                    worker.signalled = True
        for worker in self._ending:
            worker.process.join()

    def _end(self, number: int) -> None:
        """Let all processes end at once, and kill those that have not after `END_S`."""
        workers, deadline = [*self._working.values(), *self._leaving], time.monotonic() + END_S
        for worker in workers:
            _signal(worker, number if worker.ready else signal.SIGTERM)
        for worker in workers:
            worker.process.join(max(deadline - time.monotonic(), 0))
            worker.process.kill()

    def _begin(self, watch: Watch, caught: Sequence[int]) -> None:
        """Begin what is ready, in order, as there is room for it; what was done before has ended immediately."""
        while not (caught or self._refused or len(self._working) >= self._cores):
            if (chosen := self.choose()) is None:
                return
            entry, gpus = chosen
            try:
                job = entry.job(self.results)
                if (done := job.up_to_date(self._arguments)) is not None:
                    self._pool.give_back(gpus)
                    self._console.notify(f"{job.title}: {done.reason}")
                    self._ended(job.title, done)
                    continue
                lines = job.start_lines(self._arguments, f" on {devices.used(len(gpus), gpus)}" if gpus else "")
                listener = watch.listener(job.title, partial(job.folder, self._arguments))
                worker = self._start(job, announce_start(listener, self._console, lines), gpus)
                self._working[worker.pipe] = worker
            except ComposerError as error:
                self._pool.give_back(gpus)
                self.errors.append(error)

    def choose(self) -> tuple[WaitingEntry, tuple[str, ...]] | None:
        """Take the first entry that can begin, with its GPUs; None where there is none."""
        in_line = False
        for entry in self._waiting:
            if not self.results.keys() >= set(entry.reads):
                continue
            # Where the first waits for GPUs, those behind it wait as well: else one that needs several would wait for
            # all that need fewer.
            if in_line and self._pool.needs(entry.gpus):
                continue
            if (gpus := self._pool.take(entry.gpus)) is not None:
                self._waiting.remove(entry)
                return entry, gpus
            in_line = True
        return None

    def _start(self, job: StageJob, listener: Listener, gpus: tuple[str, ...]) -> StageProcess:
        """Start a child that ignores Ctrl-C until its stage handles it, with its share of the cores and its GPUs."""
        pipe, child_pipe = multiprocessing.Pipe()
        forking = multiprocessing.get_context("forkserver")
        forking.set_forkserver_preload([*self._preload])
        environment = {**os.environ, **(devices.restricted(gpus) if gpus else {})}
        arguments = (child_pipe, job, self._arguments, self._threads, environment)
        process = forking.Process(target=_work, args=arguments, daemon=True)
        with handling([signal.SIGINT], signal.SIG_IGN):
            process.start()
        child_pipe.close()
        return StageProcess(job, process, pipe, listener, gpus)

    def _ended(self, title: str, end: Result | BaseException) -> None:
        if isinstance(end, BaseException):
            self.errors.append(end)
            return
        self.results[title] = end
        try:
            self._require(title, end)
        except ComposerError as error:
            self.errors.append(error)
            self._refused = True


def _signal(worker: StageProcess, number: int) -> None:
    with suppress(ProcessLookupError):  # it has just ended, and its last message is on its way
        os.kill(worker.process.pid or 0, number)


def _receive(worker: StageProcess) -> Result | BaseException | None:
    """Receive one message of a child: None for progress, else its end."""
    try:
        message = worker.pipe.recv()
    except EOFError:
        worker.process.join()
        code = worker.process.exitcode
        return Breakdown("cli.entry-died", title=worker.job.title, exit_code=code)
    if not isinstance(message, tuple):
        return message
    worker.ready = True
    worker.listener(*message)
    return None


def _work(pipe: Connection, job: StageJob, arguments: Arguments, threads: int, environment: dict[str, str]) -> None:
    """Run a stage in a child and send its progress as tuples, then its end."""
    os.environ.clear()  # the server that forks children keeps the variables of its own start
    os.environ.update(environment)
    resources.limit_threads(threads)
    one_at_a_time = threading.Lock()

    def listener(*progress: object) -> None:
        try:
            with one_at_a_time:
                pipe.send(progress)
        except BrokenPipeError:
            raise Interrupted from None  # the parent is gone

    os.setsid()
    try:
        with redirect_stdout(sys.stderr):
            end: Result | BaseException = runner.execute(
                job.stage, job.inputs, job.config, listener=listener, **job.execution_arguments(arguments)
            )
    except BaseException as error:
        end = error
    try:  # exceptions with constructors of their own often do not survive pickling
        pickle.loads(pickle.dumps(end))  # noqa: S301 (its own bytes)
    except Exception:
        end = RuntimeError(f"{end!r}. {' '.join(getattr(end, '__notes__', ()))}")
    with suppress(BrokenPipeError):
        pipe.send(end)
