"""Runs that are disturbed at random moments, by signals or by their disk, and continued until they are complete.

A run is carried out in a process of its own, whose streams lead to a file and whose exit code is that of a command.
"""

import ctypes
import errno
import json
import multiprocessing
import os
import random
import re
import resource
import signal
import sys
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, field, replace
from multiprocessing import forkserver
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import pytest
from needs import NEEDS

from composer_cli.app import main
from composer_cli.printing import sentence_and_code
from composer_stages import STAGES
from composer_stages.runs import ledger, runner
from composer_stages.runs.catalog import assign_inputs
from composer_stages.runs.run import Run
from composer_stages.runs.settings import StageConfig
from composer_stages.runs.stage import load_stage
from support import power_cut

WAYS = (
    *("train on a server", "train with a queue", "composer run", "processes:2", "a worker of processes:2"),
    *("ray", "a worker of ray", "two processes at one run"),
)
"""Ways to run stages, besides each for itself."""
PARTS = (*STAGES, *WAYS)
TESTS = Path(__file__).resolve().parents[1]
SIGNALS = (signal.SIGKILL, signal.SIGTERM, signal.SIGHUP, signal.SIGSTOP, signal.SIGQUIT)
FULL, READ_ONLY, POWER = "full", "read-only", "power cut"
HARD = {signal.SIGKILL, signal.SIGQUIT, POWER}
"""After these a process does nothing more."""
PATIENCE_S = 900
"""A stage that takes 35 s of CPU waits 250 s on a machine with other work."""
STOPPED_S = 0.2
ENDS_S = 2.0
"""Seconds after which a worker has noticed that the process that started it is gone."""
OTHER = {"manifest.json", "ledger.jsonl", ".lock"}
"""Files that say when and how often a run was begun, and in what order calls were paid for."""
TIMED = {"metrics.jsonl", "report.txt", "report-lines.json"}
"""Files that hold measured seconds where the stage measures some: compared but for those stages."""
TIMED_STEP = ".diag.json"
"""How the names of files end that say how long a step took."""
MEASURING = {"collect", "replay-teachers", "evaluate", "train", "frameworks", "probe-replay"}
WRITTEN = 2
"""At a kill up to so many times the calls of `concurrency` have no durable answer: the next call is sent while the
answer before it is being written."""
SEED = int(os.environ.get("COMPOSER_CRASH_SEED", "0"))
"""Of the random moments."""
Disturbance = signal.Signals | str


@dataclass(frozen=True)
class Work:
    """A stage with what it reads and its settings. in_flight: paid calls that may be on their way at once."""

    stage: str
    config: StageConfig
    reads: Sequence[Run] = ()
    in_flight: int = 0
    max_cost: float | None = None
    on: str | None = None
    environment: Mapping[str, str] = field(default_factory=dict)

    def carry_out(self, root: Path) -> None:
        """Begin or go on, to the end."""
        given = assign_inputs(load_stage(self.stage), self.reads)
        runner.execute(self.stage, given, self.config, root=root, resume=True, max_cost=self.max_cost, on=self.on)


@dataclass(frozen=True)
class Command:
    """Words of the command line, without the artifacts folder."""

    words: Sequence[str]
    in_flight: int = 0
    environment: Mapping[str, str] = field(default_factory=dict)

    def carry_out(self, root: Path) -> None:
        """Begin or go on, to the end."""
        main([*self.words, "--artifacts", str(root), "--resume"])


Launch = Work | Command


def preload(*modules: str) -> None:
    """Let the server that forks processes import this module and these first, so that each starts in milliseconds."""
    places = [str(TESTS.parent), str(TESTS), *os.environ.get("PYTHONPATH", "").split(os.pathsep)]
    os.environ["PYTHONPATH"] = os.pathsep.join(dict.fromkeys(filter(None, places)))  # of the server (Python 3.11)
    multiprocessing.set_forkserver_preload([__name__, *modules])
    if NEEDS["compiler"].found():
        os.environ["LD_PRELOAD"] = str(power_cut.library())
        forkserver._forkserver._stop()  # type: ignore[attr-defined] # one that runs already began without the library
    forkserver.ensure_running()
    os.environ.pop("LD_PRELOAD", None)


def _as_command(work: Launch, root: Path, said: Path) -> None:
    """Carry out a work in this process, and end with the exit code and the sentence of a command."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # SIGQUIT would leave the memory of the process on the disk
    with said.open("ab") as file:
        for stream in (1, 2):
            os.dup2(file.fileno(), stream)
    os.environ.update(work.environment)
    if power_cut.ROOT in os.environ:
        os.setpgrp()  # what it starts ends with it
    else:
        os.environ.pop("LD_PRELOAD", None)  # sandboxes do not see the library
    try:
        work.carry_out(root)
    except Exception as error:
        sentence, code = sentence_and_code(error, resumes=True)
        if sentence.startswith("Composer failed unexpectedly"):
            traceback.print_exc()
        print(sentence, file=sys.stderr, flush=True)
        sys.exit(code)


def said_of(root: Path) -> Path:
    """The file with what all attempts in this artifacts folder have printed."""
    return root.with_name(f"{root.name}.said")


def launch(work: Launch, root: Path, context: str = "forkserver", said: Path | None = None) -> BaseProcess:
    """Start the work in a process of its own, which may not have begun when this returns."""
    made: Any = multiprocessing.get_context(context)
    process: BaseProcess = made.Process(target=_as_command, args=(work, root, said or said_of(root)))
    root.parent.mkdir(parents=True, exist_ok=True)
    process.start()
    return process


def start(work: Launch, root: Path, context: str = "forkserver", said: Path | None = None) -> BaseProcess:
    """Start the work in a process of its own, which has begun a run or ended when this returns."""
    before = attempts(root)
    process = launch(work, root, context, said)
    await_attempt(root, before, [process])
    return process


def await_attempt(root: Path, before: int, processes: Sequence[BaseProcess]) -> None:
    """Return once there are more attempts than before, or none of the processes lives."""
    deadline = time.monotonic() + PATIENCE_S
    while attempts(root) == before and any(process.is_alive() for process in processes):
        assert time.monotonic() < deadline, f"nothing begins in {root}"
        time.sleep(0.002)


def finish(work: Launch, root: Path, context: str = "forkserver", said: Path | None = None) -> float:
    """Carry a work out and return how many seconds it took after its start."""
    process, began = start(work, root, context, said), time.monotonic()
    process.join(PATIENCE_S)
    assert process.exitcode == 0, f"ended with {process.exitcode}: {(said or said_of(root)).read_text()[-3000:]}"
    return time.monotonic() - began


def folders(root: Path) -> list[Path]:
    """The folders of all runs in an artifacts folder."""
    return sorted(path.parent for path in root.glob("*/2*/manifest.json"))


def attempts(root: Path) -> int:
    """How often runs were begun."""
    return sum(json.loads((folder / "manifest.json").read_bytes())["attempts"] for folder in folders(root))


def contents(root: Path) -> dict[str, Any]:
    """The content of all outputs of all runs, and the bytes of every other file that says no time."""
    found: dict[str, Any] = {}
    for folder in folders(root):
        run = Run(folder)
        assert run.manifest.status == "complete" and not run.damage("bytes"), f"{folder}: {run.damage('bytes')}"
        left_out = OTHER | (TIMED if folder.parent.name in MEASURING else set())
        name = f"{folder.parent.name}/{folder.name.partition('-')[2]}"
        found |= {f"{name}:{output}": out["content_sha256"] for output, out in run.manifest.outputs.items()}
        for path in folder.rglob("*"):
            inside = path.relative_to(folder)
            if not path.is_file() or path.suffix == ".parquet" or path.name in left_out:
                continue
            if not path.name.endswith(TIMED_STEP) and inside.parts[0] not in ("steps", "logs"):
                found[f"{name}/{inside}"] = path.read_bytes()
    return found


def open_calls(root: Path) -> int:
    """Paid calls that the ledgers of all runs and workers hold without an end: those in flight when a process died."""
    number = 0
    for path in root.rglob(ledger.NAME):
        lines = [line for line in map(_object, path.read_bytes().split(b"\n")) if line and "shard" not in line]
        number += sum("reserved" in line for line in lines) - sum("reserved" not in line for line in lines)
    return number


def _object(line: bytes) -> dict[str, Any]:
    try:
        found = json.loads(line or b"{}")
    except ValueError:  # torn by the kill
        return {}
    return found if isinstance(found, dict) else {}


@dataclass
class Outcome:
    """What was disturbed: disturbances by name, artifacts folders with a complete run, and calls in flight at kills.

    part: of `PARTS`.
    """

    part: str = ""
    disturbed: Counter[str] = field(default_factory=Counter)
    roots: list[Path] = field(default_factory=list)
    in_flight: int = 0
    hard: int = 0

    def note(self, disturbance: Disturbance) -> None:
        """Count a disturbance that reached a process."""
        self.disturbed[name_of(disturbance)] += 1
        self.hard += disturbance in HARD


def name_of(disturbance: Disturbance) -> str:
    """The name of a disturbance in a table."""
    return disturbance.name.removeprefix("SIG") if isinstance(disturbance, signal.Signals) else disturbance


def check_end(code: int | None, disturbance: Disturbance | None, said: Path, before: int) -> None:
    """Assert that a process ended as it may after the disturbance, with one sentence where it could say one."""
    told = said.read_bytes()[before:].decode(errors="replace")
    about = f"{disturbance!r} ended with {code}: {told[-3000:]}"
    assert "Traceback" not in told and "failed unexpectedly" not in told, about
    if code == 0:
        return
    if disturbance in HARD:
        assert code == -int(disturbance), about
    elif disturbance in (signal.SIGTERM, signal.SIGHUP):
        # Before the run's handlers are set, the signal ends the process as it would end any.
        assert code in (128 + int(disturbance), -int(disturbance)), about
        stopped = re.findall(r"Stopped by (\w+)\. (?:Everything finished|Nothing was finished)", told)
        assert code < 0 or stopped == [signal.Signals(disturbance).name], about
    elif disturbance in (FULL, READ_ONLY):
        full, refused = (told.count(w) for w in ("The disk is full or cannot be written", "Nothing can be written to"))
        assert (code, full, refused) in ((5, 1, 0), (2, 0, 1)), about
    else:
        raise AssertionError(about)


def disturb(
    outcome: Outcome,
    work: Launch,
    root: Path,
    disturbances: Sequence[Disturbance],
    lasts_s: float,
    seed: int,
    disk: "Disk | None" = None,
    choose: Callable[[BaseProcess, random.Random], int | None] = lambda process, moment: process.pid,
    settle: Callable[[Path], None] = lambda root: None,
) -> None:
    """Disturb a work at random moments, continue it each time, and begin it anew wherever it ends before.

    The runs are in `root/0`, `root/1` and so on. lasts_s: seconds that it takes undisturbed. choose: the id of the
    process that gets a signal; None for none yet. settle: waits after a kill until all that the process had started
    has ended.
    """
    moment, waiting = random.Random(SEED + seed), list(disturbances)
    context = "forkserver" if disk is None else "fork"
    at, latest = root / "0", None
    said = said_of(root) if disk is None else disk.folder.with_name("disk.said")
    begun, length = 0, 0
    while waiting:
        length = said.stat().st_size if said.exists() else 0
        process, latest = start(work, at, context, said), None
        while waiting and latest in (None, signal.SIGSTOP):
            process.join(moment.uniform(0, lasts_s))
            target = choose(process, moment) if process.exitcode is None else None
            if process.exitcode is not None or target is None:
                break
            latest = waiting.pop(0)
            outcome.note(latest)
            _apply(latest, target, disk)
            if target != process.pid:
                latest = signal.SIGSTOP  # a worker's death is not the end of the run
        _await_end(process, latest)
        if disk is not None:
            disk.mend()
        check_end(process.exitcode, latest, said, length)
        if latest in HARD:
            settle(at)
            outcome.in_flight += open_calls(at) - begun
        begun = open_calls(at)
        if process.exitcode == 0:
            outcome.roots.append(at)
            at, begun = root / str(len(outcome.roots)), 0
            assert len(outcome.roots) < 10 * (len(disturbances) + 1), "always ends before it can be disturbed"
    if folders(at):
        finish(work, at, context, said)
        outcome.roots.append(at)


def cut_power(
    outcome: Outcome,
    work: Launch,
    root: Path,
    cuts: int,
    seed: int,
    expected: Mapping[str, Any],
    lasts_s: float | None = None,
) -> None:
    """Cut the power before random changes of the files, and after the end; continue each time, and compare the ends.

    The runs are in `root/0`, `root/1` and so on. expected: the contents of an undisturbed run. lasts_s: the seconds
    that it takes, where the work starts processes that are to end with it: its power is cut at random moments.
    """
    moment, most = random.Random(SEED + seed), 0
    disk = power_cut.Disk(root / "0")
    while outcome.hard < cuts or folders(disk.root):
        # The first run, and the last, goes on to its end, after which everything must be durable too.
        at = moment.randint(1, most) if most and outcome.hard < cuts else None
        said, begun = said_of(disk.root), open_calls(disk.root)
        length = said.stat().st_size if said.exists() else 0
        environment = disk.environment(None if lasts_s else at)
        process = launch(replace(work, environment={**work.environment, **environment}), disk.root)
        if lasts_s and at:
            process.join(moment.uniform(0, lasts_s))
            process.kill()
        process.join(PATIENCE_S)
        changes = -1
        while changes != (changes := disk.changes):
            if lasts_s:  # what it had started ends by itself, on a busy machine after a while
                time.sleep(ENDS_S)
        assert changes or lasts_s, "the library that sees fsync is not in the process"
        outcome.in_flight += open_calls(disk.root) - begun
        left = f"change {changes} of {most}, exit code {process.exitcode}: {disk.cut(moment)}"
        outcome.note(POWER)
        check_end(process.exitcode, signal.SIGKILL if at else None, said, length)
        if process.exitcode == 0:
            most = max(most, changes)
            ends = [(run.manifest.status, run.damage("bytes")) for run in map(Run, folders(disk.root))]
            assert set(ends) == {("complete", None)}, f"{ends} after {left}"
            finish(work, disk.root)  # deletions, such as that of the scratch folder, may not have reached the disk
            assert contents(disk.root) == expected, f"another end after {left}"
            outcome.roots.append(disk.root)
            disk = power_cut.Disk(root / str(len(outcome.roots)))


def _await_end(process: BaseProcess, latest: Disturbance | None) -> None:
    process.join(PATIENCE_S)
    if process.exitcode is None:
        process.kill()
        raise AssertionError(f"still ran {PATIENCE_S} s after {latest!r}")


def _apply(disturbance: Disturbance, process: int, disk: "Disk | None") -> None:
    if disturbance == FULL and disk:
        disk.fill()
    elif disturbance == READ_ONLY and disk:
        disk.set_read_only()
    elif isinstance(disturbance, signal.Signals):
        _send(process, disturbance)
        if disturbance == signal.SIGSTOP:
            time.sleep(STOPPED_S)
            _send(process, signal.SIGCONT)


def _send(process: int, number: signal.Signals) -> None:
    with suppress(ProcessLookupError):  # it has just ended
        os.kill(process, number)


def two_at_once(
    outcome: Outcome, work: Work, root: Path, signals: Sequence[signal.Signals], lasts_s: float, seed: int
) -> None:
    """Let two processes want one run, send each signal to one of them, and continue until all signals are sent."""
    moment, at, waiting = random.Random(SEED + seed), root / "0", list(signals)
    left_alone = False
    while not left_alone:
        left_alone = not waiting
        number = waiting[0] if waiting else None
        before, begun = attempts(at), open_calls(at)
        says = [at.with_name(f"{at.name}-{attempts(at)}-{name}.said") for name in "ab"]
        both = [launch(work, at, said=said) for said in says]
        await_attempt(at, before, both)
        hit = moment.choice(both)
        if number is not None:
            hit.join(moment.uniform(0, lasts_s))
            if hit.exitcode is None:
                outcome.note(waiting.pop(0))
                _apply(number, hit.pid or 0, None)
            else:
                number = None
        for process, said in zip(both, says, strict=True):
            process.join(PATIENCE_S)
            told = said.read_text()
            if process.exitcode == 2:
                assert told.count("is in use by another process") == 1 and "Traceback" not in told, told
            else:
                check_end(process.exitcode, number if process is hit else None, said, 0)
        outcome.in_flight += open_calls(at) - begun if number in HARD else 0
        if any(process.exitcode == 0 for process in both):
            outcome.roots.append(at)
            at = root / str(len(outcome.roots))
            assert len(outcome.roots) < 10 * (len(signals) + 1), "always ends before it can be disturbed"
    if folders(at):
        finish(work, at)
        outcome.roots.append(at)


def workers(process: BaseProcess, moment: random.Random) -> int | None:
    """The id of a worker of a process with `--on processes:N`; None where none has begun."""
    tasks = Path(f"/proc/{process.pid}/task")
    found = [pid for task in tasks.iterdir() for pid in (task / "children").read_text().split()]
    spawned = [pid for pid in found if b"spawn_main" in Path(f"/proc/{pid}/cmdline").read_bytes()]
    return int(moment.choice(spawned)) if spawned else None


CLONE_NEWNS, CLONE_NEWUSER = 0x00020000, 0x10000000
MS_RDONLY, MS_REMOUNT, MS_BIND, MNT_DETACH = 1, 32, 4096, 2


@dataclass
class Disk:
    """A file system in memory that only this process and its children see (see `in_own_mounts`)."""

    folder: Path
    size: int
    _bound: bool = False

    def __post_init__(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        self._call("mount", b"tmpfs", self._path, b"tmpfs", 0, f"size={self.size}".encode())

    @property
    def _path(self) -> bytes:
        return os.fsencode(self.folder)

    def fill(self) -> None:
        """Leave no byte free."""
        with (self.folder / ".ballast").open("wb", buffering=0) as file:
            for piece in (2**20, 2**12):
                try:
                    while True:
                        file.write(b"x" * piece)
                except OSError as full:
                    if full.errno != errno.ENOSPC:
                        raise

    def set_read_only(self) -> None:
        """Refuse every new write; files that are open stay as they are."""
        # Laid over itself, since a mount with a file open for writing cannot be made read-only.
        self._call("mount", self._path, self._path, None, MS_BIND, None)
        self._call("mount", None, self._path, None, MS_REMOUNT | MS_BIND | MS_RDONLY, None)
        self._bound = True

    def mend(self) -> None:
        """Give all room back, and let files be written."""
        if self._bound:
            self._call("umount2", self._path, MNT_DETACH)
        self._bound = False
        (self.folder / ".ballast").unlink(missing_ok=True)

    @staticmethod
    def _call(name: str, *arguments: Any) -> None:
        if getattr(ctypes.CDLL(None, use_errno=True), name)(*arguments):
            raise OSError(ctypes.get_errno(), f"{name}: {os.strerror(ctypes.get_errno())}")


def in_own_mounts(function: Callable[..., Any], *arguments: Any) -> Any:
    """Return what the function returns in a process whose mounts no other process sees; skip where none can be made."""
    here, there = multiprocessing.Pipe()
    process = multiprocessing.get_context("forkserver").Process(target=_isolated, args=(there, function, arguments))
    process.start()
    there.close()
    with closing(here):
        end = here.recv()
    process.join()
    if isinstance(end, PermissionError):
        pytest.skip(f"This machine lets no user make mounts ({end}), so that no disk can fail here.")
    assert isinstance(end, list), end
    return end[0]


def _isolated(pipe: Connection, function: Callable[..., Any], arguments: Sequence[Any]) -> None:
    # Only a process of one thread may leave its user namespace, and importing numpy or pyarrow has begun others.
    if child := os.fork():
        os.waitpid(child, 0)
        return
    try:
        _in_new_namespace(pipe, function, arguments)
    finally:
        os._exit(0)


def _in_new_namespace(pipe: Connection, function: Callable[..., Any], arguments: Sequence[Any]) -> None:
    user, group = os.getuid(), os.getgid()
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(CLONE_NEWUSER | CLONE_NEWNS):
        pipe.send(PermissionError(ctypes.get_errno(), os.strerror(ctypes.get_errno())))
        return
    for name, value in (("setgroups", "deny"), ("uid_map", f"{user} {user} 1"), ("gid_map", f"{group} {group} 1")):
        Path(f"/proc/self/{name}").write_text(value)
    try:
        pipe.send([function(*arguments)])
    except BaseException:
        pipe.send(traceback.format_exc())


def on_failing_disk(
    work: Launch, place: Path, disturbances: Sequence[str], lasts_s: float, seed: int, size: int = 96 * 2**20
) -> tuple[Counter[str], list[dict[str, Any]]]:
    """Disturb a work by its disk; return the disturbances by name, and the contents of every completed run."""
    disk, outcome = Disk(place / "disk", size), Outcome()
    disturb(outcome, work, disk.folder / "runs", disturbances, lasts_s, seed, disk)
    return outcome.disturbed, [contents(root) for root in outcome.roots]


def shares(parts: Sequence[str], kills: int) -> Iterator[tuple[str, list[signal.Signals]]]:
    """Yield for each part the signals that it gets: the kills dealt evenly to parts, and the signals to kills."""
    given = 0
    for place, part in enumerate(parts):
        number = kills // len(parts) + (place < kills % len(parts))
        yield part, [SIGNALS[n % len(SIGNALS)] for n in range(given, given + number)]
        given += number


def bought_twice(work: Launch, requests: Sequence[dict[str, Any]], outcome: Outcome) -> int:
    """How many calls of complete runs were asked again; asserts that only those in flight at a kill were."""
    asked = Counter(json.dumps([r["model"], r["messages"], r.get("seed")]) for r in requests)
    twice = asked.total() - len(outcome.roots) * len(asked)
    assert twice <= outcome.hard * WRITTEN * work.in_flight, "only calls in flight may be asked again"
    return twice


def row(outcome: Outcome, lasts_s: float, twice: int | None = None) -> str:
    """What was disturbed and how it ended, in a line."""
    kinds = " ".join(f"{name}:{number}" for name, number in sorted(outcome.disturbed.items()))
    paid = "no calls" if twice is None else f"{twice} calls bought twice of {outcome.in_flight} in flight"
    kills = outcome.disturbed.total()
    return f"{outcome.part:<26} {kills:>3} kills ({kinds}), {len(outcome.roots)} runs of {lasts_s:.1f} s equal, {paid}"
