"""Where tasks and packages come from: made on demand from a package, or read from a run of `composer tasks`."""

import tempfile
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cached_property, lru_cache
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Protocol, Self

import orjson

from stages.envs import folders
from stages.envs.base import Split
from stages.envs.feature_deletion import leaks, rows, selection, worker
from stages.envs.feature_deletion.package import Package, unpack
from stages.envs.feature_deletion.selection import KEEP, WEIGHTS, Difficulty, Kind, Removal
from stages.envs.feature_deletion.twins import ContradictionSearch
from stages.envs.feature_deletion.worker import PATIENCE_S, Baseline, Job, TestReport, TestWorker, file_of, measure
from stages.envs.repo import trees
from stages.envs.repo.grading import TestLists, by_name, is_test
from stages.errors import BadInput, InfrastructureError, UsageError
from stages.runs import parquet
from stages.runs.records import TASK, Row

# ---- candidate
# One removal on its way to a task: which test runs it asks for, and what their reports make of it.

TRIVIAL = ("return None", "return True", "return False", "return 0", "return ''", "return []", "return {first}")
NO_CONTRADICTION = "no test can be contradicted"
Scope = Literal["full", "covering"]


class Origin(Protocol):
    """The package that a candidate is removed from; `texts`: its code, `tests`: its test files, by path."""

    package: Package
    texts: dict[str, str]
    tests: list[str]

    @property
    def baseline(self) -> Baseline:
        """The tests before anything is removed."""

    @property
    def survey(self) -> leaks.Survey:
        """Copies of the package's code around the task's tree."""

    def text(self, path: str) -> str:
        """A file of the package."""

    def within(self, removal: Removal, writes: dict[str, str]) -> list[str]:
        """Where the delivered tree still holds removed code."""


class Candidate:
    """One removal on its way to a task: gives test jobs and takes their reports; `reason` says why it is no task.

    In order: `look_within`; `removed` and `learn`; `restored` and `confirm`; `contradict`, until it gives no job;
    `trivial` and `compare`; `finish`.
    """

    def __init__(self, origin: Origin, removal: Removal, scope: Scope) -> None:
        self.origin, self.removal, self.scope, self.baseline = origin, removal, scope, origin.baseline
        self.writes = removal.writes(origin.texts)
        self.reason: str | None = None
        self.failing: list[str] = []
        self.hanging: frozenset[str] = frozenset()
        self.search: ContradictionSearch | None = None

    def look_within(self) -> None:
        """Reject it where the delivered tree still holds the removed code."""
        self._leak(self.origin.within(self.removal, self.writes))

    def look_around(self) -> None:
        """Reject it where the sandbox shows the removed code elsewhere. The first call searches, so it comes last."""
        self._leak(self.origin.survey.of(self.removal))

    def _leak(self, places: list[str]) -> None:
        if places:
            self.reason = f"leak: {places[0]} holds the removed code"

    def removed(self) -> Job:
        """The tests with the code removed."""
        return self.job(self._affected(), self.writes)

    def _affected(self) -> set[str]:
        return set(self.baseline.stable) if self.scope == "full" else self.removal.covering(self.baseline.lines)

    def job(self, node_ids: set[str], writes: Mapping[str, str], *options: str) -> Job:
        """A run of some tests, with further options of pytest."""
        files = sorted({file_of(node_id) for node_id in node_ids})
        return Job(
            (*self.baseline.options, *options, *files),
            writes,
            tuple(sorted(node_ids)),
            self.baseline.timeout_s,
            patience_s=PATIENCE_S,
            slow=self.baseline.patience,
        )

    def learn(self, done: TestReport) -> None:
        """Which tests fail without the code. Those that hang are set aside: neither list has them."""
        fresh = done.broken.keys() - self.baseline.broken.keys()
        self.hanging = done.hanging
        self.failing = sorted(self._affected() - done.passed - done.hanging)
        if done.timed_out or (done.hanging and not self.failing):
            self.reason = ": ".join(("without the code the tests hang", *sorted(done.hanging)[:1]))
        elif fresh or done.status < 0:
            self.reason = "without the code the tests cannot be collected"
        elif not self.failing:
            self.reason = "no test notices"
        elif not self._lists().pass_to_pass:
            self.reason = "every test fails"

    def _lists(self) -> TestLists:
        stable = by_name(dict.fromkeys(self.baseline.stable - self.hanging, "passed"))
        failing = set(by_name(dict.fromkeys(self.failing, "failed")))
        return TestLists(tuple(sorted(failing)), tuple(sorted(set(stable) - failing)))

    def restored(self) -> Job:
        """The failing tests with the original code."""
        return self.job(set(self.failing), {})

    def confirm(self, done: TestReport) -> None:
        """They must pass again."""
        if set(self.failing) - done.passed:
            self.reason = "the restored code fails"
            return
        names = [part.qualname.rpartition(".")[2].strip("_") for part in self.removal.parts]
        self.search = ContradictionSearch(self.failing, names, self.origin.text, self.origin.tests)

    def contradict(self) -> Job | None:
        """The next way to contradict its tests, on the original code; None when enough was found or nothing is left."""
        if self.search is None:
            return None
        tests, edits = self.search.next_round()
        return self.job(tests, edits) if tests else None

    def contradicted(self, done: TestReport) -> None:
        """What came of it."""
        if self.search is not None:
            self.search.learn(done)

    def trivial(self) -> list[Job]:
        """The failing tests with each trivial body, up to the first that fails."""
        if self.search is None or not self.search.proven:
            return []
        texts = self.origin.texts
        return [self.job(set(self.failing), self.removal.with_body(texts, body), "--maxfail=1") for body in TRIVIAL]

    def compare(self, done: Sequence[TestReport]) -> None:
        """A task that one of them solves is none."""
        for body, report in zip(TRIVIAL, done, strict=False):
            if not set(self.failing) - report.passed:
                self.reason = f"a trivial body solves it: {body.format(first='its first argument')}"
                return

    def finish(self) -> tuple[Row | None, str | None]:
        """The accepted row, or the reason why there is none."""
        proven = self.search.proven if self.search else []
        if self.reason is None and not proven:
            self.reason = NO_CONTRADICTION
        if self.reason is None:
            self.look_around()
        if self.reason is not None:
            return None, self.reason
        hanging = sorted(self.hanging)
        row = rows.build(self.origin.package, self.removal, self.writes, self._lists(), self.baseline, proven, hanging)
        return row, None


# ---- task_generator
# From candidates to accepted tasks: remove, test, restore, test again, look for leaks, contradict a test.

BATCH = 8
BATCH_S = 60.0
"""About so long may the first runs of a batch take: nothing is kept, and nothing said, before its end."""


@dataclass(frozen=True)
class Made:
    """What became of one candidate: an accepted row, or the reason why not."""

    removal: Removal
    row: Row | None
    reason: str | None = None


class TaskGenerator:
    """Makes tasks from one package in one sandbox; a context manager.

    `requirements`: the folder with what the package's tests import beside it. `baseline`: as another generator for the
    same package measured it. `BadInput` from `baseline`, and so from `candidates` and `make`, when no test of the
    package passes twice.
    """

    def __init__(
        self, package: Package, sandbox: str, requirements: Path | None = None, baseline: Baseline | None = None
    ) -> None:
        self._measured = baseline
        self.package, self.sandbox, self.requirements = package, sandbox, requirements
        with ExitStack() as stack:
            self.worker = stack.enter_context(TestWorker(sandbox, package.root, requirements))
            self._stack = stack.pop_all()
        self._files = {path: file for path in trees.walk(package.root) if (file := trees.read(package.root, path))}
        self.texts = selection.sources(self._files)
        self.tests = [path for path in self._files if path.endswith(".py") and is_test(path)]

    @cached_property
    def baseline(self) -> Baseline:
        """The tests before anything is removed."""
        return self._measured or measure(self.worker)

    @property
    def batch(self) -> int:
        """So many candidates are tried together."""
        return max(1, min(BATCH, int(BATCH_S / max(self.baseline.duration_s, 0.001))))

    @cached_property
    def survey(self) -> leaks.Survey:
        """Copies of the package's code around the task's tree."""
        return leaks.survey(self.sandbox, self.texts, self.requirements)

    @cached_property
    def _tree(self) -> leaks.Tree:
        return leaks.Tree(self._files)

    def candidates(
        self, seed: int, split: Split | None, kinds: Sequence[Kind], difficulties: Sequence[Difficulty]
    ) -> list[Removal]:
        """What to try, in order."""
        return selection.candidates(
            self.texts, self.baseline.lines, seed=seed, split=split, kinds=kinds, difficulties=difficulties
        )

    def make(self, candidates: Sequence[Removal], scope: Scope = "full") -> Iterator[Made]:
        """What became of each, in order. `scope` says which tests decide what still passes.

        full     - all of them, run with the code removed
        covering - those that execute a removed line are run; the others cannot notice and count as passing
        """
        for start in range(0, len(candidates), self.batch):
            chosen = candidates[start : start + self.batch]
            yield from self._batch([Candidate(self, removal, scope) for removal in chosen])

    def _batch(self, batch: Sequence[Candidate]) -> list[Made]:
        for candidate in batch:
            candidate.look_within()
        for job, learn in ((Candidate.removed, Candidate.learn), (Candidate.restored, Candidate.confirm)):
            left = _left(batch)
            for candidate, done in zip(left, self.worker.run([job(candidate) for candidate in left]), strict=True):
                learn(candidate, done)
        self._contradict(_left(batch))
        for candidate in _left(batch):
            candidate.compare(self.worker.run(candidate.trivial()))
        return [Made(candidate.removal, *candidate.finish()) for candidate in batch]

    def _contradict(self, batch: Sequence[Candidate]) -> None:
        """A way to contradict each in every round, until each has one that fails with the original code."""
        while trying := [(candidate, job) for candidate in batch if (job := candidate.contradict())]:
            for (candidate, _), done in zip(trying, self.worker.run([job for _, job in trying]), strict=True):
                candidate.contradicted(done)

    def text(self, path: str) -> str:
        """A file of the package as text."""
        return self._files[path].data.decode(errors="replace")

    def within(self, removal: Removal, writes: dict[str, str]) -> list[str]:
        """Where the delivered tree still holds removed code."""
        return self._tree.copies(removal, writes)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.close()


def _left(batch: Sequence[Candidate]) -> list[Candidate]:
    """Those that are not rejected yet."""
    return [candidate for candidate in batch if candidate.reason is None]


_lock = threading.Lock()


class Source:
    """The tasks of one environment's options."""

    def __init__(self, sandbox: str, package: str, tasks: str, difficulty: str, requirements: tuple[str, ...]) -> None:
        self._sandbox, self._package, self._tasks = sandbox, package, tasks
        self._difficulties = difficulties(difficulty)
        self._requirements = requirements

    def rows(self, split: Split, count: int, seed: int) -> list[Row]:
        """At most `count` rows of a split; `UsageError` when there is none."""
        if not self._package and not self._tasks:
            raise UsageError(
                "Feature deletion needs a package: --set env.package=DIR_OR_SDIST, or a run of `composer tasks` with "
                "--set env.tasks=RUN, or one of `composer curriculum` with --set env.curriculum=RUN."
            )
        found = self._read(split) if self._tasks else self._make(split, count, seed)
        if not found:
            where = self._tasks or self._package
            raise UsageError(
                f"{where} gives no task for the split {split!r}. Choose another package, split or difficulty."
            )
        return found[:count]

    def _read(self, split: Split) -> list[Row]:
        table = list(parquet.scan_table(Path(self._tasks) / "tasks.parquet", TASK).rows())
        return [orjson.loads(row["data_json"]) for row in table if row["split"] == split]

    def _make(self, split: Split, count: int, seed: int) -> list[Row]:
        made: list[Row] = []
        package, needed = unpacked(Path(self._package)), requirements(self._requirements)
        with TaskGenerator(package, self._sandbox, needed) as generator:
            for result in generator.make(generator.candidates(seed, split, tuple(WEIGHTS), self._difficulties)):
                made += [prepared(result.row, self._package, self._requirements)] if result.row else []
                if len(made) >= count:
                    break
        return made

    def package(self, row: Mapping[str, Any]) -> Package:
        """The package that a row was made from; `BadInput` when it has changed since."""
        path = Path(self._package or row["source"])
        found = unpacked(path)
        if found.sha256 != row["package_sha256"]:
            raise BadInput(
                f"{path} is not the {row['package']} that the tasks were made from. Give that one, or make new tasks."
            )
        return found


def prepared(row: Row, source: str, needed: tuple[str, ...]) -> Row:
    """A row with where its package lies and what its tests import beside it."""
    return {**row, "source": str(Path(source).expanduser().absolute()), "requirements": list(needed)}


def difficulties(wanted: str) -> tuple[Difficulty, ...]:
    """One difficulty, or all of them for "mixed"; `UsageError` for another word."""
    chosen = tuple(difficulty for difficulty in KEEP if wanted in (difficulty, "mixed"))
    if not chosen:
        raise UsageError(f"There is no difficulty {wanted!r}; choose one of {', '.join(KEEP)} or mixed.")
    return chosen


def unpacked(path: Path) -> Package:
    """A package, unpacked once in this process for all episodes; `BadInput` when there is none at the path."""
    path = path.expanduser()
    if not path.exists():
        raise BadInput(
            f"There is no package at {str(path)!r}. Give a folder or an sdist; "
            "`pip download --no-deps --no-binary NAME NAME` fetches one."
        )
    with _lock:
        return _unpacked(path.absolute(), path.stat().st_mtime_ns)[0]


@lru_cache(maxsize=16)
def _unpacked(path: Path, changed_ns: int) -> tuple[Package, "tempfile.TemporaryDirectory[str]"]:
    del changed_ns
    folder = tempfile.TemporaryDirectory(prefix="package-", dir=folders.home())
    return unpack(path, Path(folder.name)), folder


def hidden(sandbox: str, row: Mapping[str, Any], package: Package, needed: Path | None) -> tuple[Path, ...]:
    """Files of this machine that hold code of the package, for a sandbox to hide; searched for once in this process."""
    survey = leaks.survey(sandbox, _texts(package.root), needed)
    if places := [places for name, places in survey.places.items() if name.rpartition(":")[0] in row["removed"]]:
        raise InfrastructureError(
            f"The sandbox would show a copy of the code that {row['instance_id']} asks for: {places[0][0]}."
        )
    return survey.hidden


@lru_cache(maxsize=16)
def _texts(root: Path) -> dict[str, str]:
    return selection.sources({path: file for path in trees.walk(root) if (file := trees.read(root, path))})


def requirements(needed: tuple[str, ...]) -> Path | None:
    """A folder with what tests import, installed once in this process."""
    if not needed:
        return None
    with _lock:
        return Path(_installed(needed).name)


@lru_cache(maxsize=4)
def _installed(needed: tuple[str, ...]) -> "tempfile.TemporaryDirectory[str]":
    folder = tempfile.TemporaryDirectory(prefix="requirements-", dir=folders.home())
    worker.install(needed, Path(folder.name))
    return folder
