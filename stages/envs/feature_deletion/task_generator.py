"""Make tasks from a package by removing definitions, and serve them: made on demand, or read from a run.

`TaskGenerator.make` turns removals into accepted tasks: remove the code and run the tests, restore it and run them
again, contradict a test for the impossible variant. `TaskSource` gives an environment its rows and their package; what
it needs of a package (the unpacked copy, its requirements) is made once in a process.
"""

import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any, Literal

import orjson

from composer_stages.envs import folders
from composer_stages.envs.base import Split
from composer_stages.envs.feature_deletion import rows, selection, worker
from composer_stages.envs.feature_deletion.definitions import Definition, Edit, apply_edits
from composer_stages.envs.feature_deletion.package import Package, unpack
from composer_stages.envs.feature_deletion.selection import KEEP, WEIGHTS, Difficulty, Kind, Removal, covering_tests
from composer_stages.envs.feature_deletion.twins import QuotedTest, quoted_test
from composer_stages.envs.feature_deletion.worker import (
    HANG_S,
    Baseline,
    TestRunJob,
    TestRunReport,
    TestWorker,
    measure_baseline,
)
from composer_stages.envs.repo import trees
from composer_stages.envs.repo.guest.composer_rules import statuses_by_name
from composer_stages.errors import BadInput, UsageError
from composer_stages.runs import tables
from composer_stages.runs.kinds import TASK, Row
from composer_stages.swebench.lists import TestLists
from composer_stages.words import Sentence

TRIVIAL = ("return None", "return True", "return False", "return 0", "return ''", "return []", "return {first}")
MOST_QUOTED = 6
"""Tests of a candidate that are contradicted, of which the first that the original code then fails makes the twin."""
BATCH = 8
BATCH_S = 60.0
"""Rough limit on the first runs of a batch: nothing is kept or reported before a batch ends."""
Scope = Literal["full", "covering"]


@dataclass(frozen=True)
class TriedRemoval:
    """An accepted row made of one removal, or the reason of its rejection."""

    removal: Removal
    row: Row | None
    reason: str | None = None


class TaskGenerator(ExitStack):
    """Makes tasks from one package in one sandbox, which is closed with the generator.

    `requirements`: the folder with what the package's tests import. `baseline`: as another generator for the same
    package measured it. `check` is called while tests run and ends them by raising; `tell` gets the step that begins.
    `BadInput` from `baseline`, and so from `candidates` and `make`, when no test of the package passes twice.
    """

    def __init__(
        self,
        package: Package,
        sandbox: str,
        requirements: Path | None = None,
        baseline: Baseline | None = None,
        *,
        check: Callable[[], None] = lambda: None,
        tell: Callable[[str], None] = lambda step: None,
    ) -> None:
        super().__init__()
        self._measured, self._tell = baseline, tell
        self.package, self.sandbox, self.requirements = package, sandbox, requirements
        self._files = {path: file for path in trees.walk(package.root) if (file := trees.read(package.root, path))}
        self._shingles = PackageShingles(self._files)
        self.texts = selection.read_sources(package.root)
        # Last, since no `with` block closes an object whose constructor raised.
        self.worker = self.enter_context(TestWorker(sandbox, package.root, requirements, check))

    @cached_property
    def baseline(self) -> Baseline:
        """The tests before anything is removed."""
        return self._measured or measure_baseline(self.worker, self._tell)

    @property
    def duration_s(self) -> float | None:
        """Return the seconds that all tests take; None before they were measured."""
        return self.baseline.duration_s if "baseline" in self.__dict__ or self._measured else None

    @property
    def batch(self) -> int:
        """Return the number of candidates that are tried together."""
        return max(1, min(BATCH, int(BATCH_S / max(self.baseline.duration_s, 0.001))))

    def candidates(
        self, seed: int, split: Split | None, kinds: Sequence[Kind], difficulties: Sequence[Difficulty]
    ) -> list[Removal]:
        """Return the removals to try, in order."""
        return selection.draw_removals(
            self.texts, self.baseline.lines, seed=seed, split=split, kinds=kinds, difficulties=difficulties
        )

    def make(self, candidates: Sequence[Removal], scope: Scope = "full") -> Iterator[TriedRemoval]:
        """Yield the result of each removal, in order. `scope` decides which tests are run with the code removed.

        full     - all of them
        covering - those that execute a removed line; the others cannot notice and count as passing
        """
        for start in range(0, len(candidates), self.batch):
            batch = [CandidateTask(self, removal, scope) for removal in candidates[start : start + self.batch]]
            yield from self._make_batch(batch)

    def _make_batch(self, batch: Sequence["CandidateTask"]) -> list[TriedRemoval]:
        """Try candidates together, so that every step is one call of the worker: each call imports pytest anew."""
        # 1. No file that is delivered still holds the code. Before any test, since it needs no sandbox.
        for candidate in batch:
            if copies := self._shingles.copies(candidate.removal, candidate.writes):
                candidate.reason = Sentence("envs.feature_deletion.code-leaks", path=copies[0])
        # 2. Some tests fail without the code.
        self._tell(f"{len(batch)} candidates: running tests without the code")
        trying = [candidate for candidate in batch if candidate.reason is None]
        jobs = [candidate.job(candidate.affected, candidate.writes) for candidate in trying]
        for candidate, report in zip(trying, self.worker.run(jobs), strict=True):
            candidate.take_removed(report)
        # 3. They pass again with the original code, run alone: none is flaky or needs another test before it.
        trying = [candidate for candidate in trying if candidate.reason is None]
        self._tell(f"{len(trying)} candidates: running their tests with the code restored")
        jobs = [candidate.job(set(candidate.failing), {}) for candidate in trying]
        for candidate, report in zip(trying, self.worker.run(jobs), strict=True):
            if set(candidate.failing) - report.passed:
                candidate.reason = Sentence("envs.feature_deletion.restored-code-fails")
        # 4. The original code fails a test of which one expectation was changed: that makes the impossible variant.
        trying = [candidate for candidate in trying if candidate.reason is None]
        self._tell(f"{len(trying)} candidates: contradicting their tests")
        contradicted = [(candidate, job) for candidate in trying if (job := candidate.contradict(self._files))]
        reports = self.worker.run([job for _, job in contradicted])
        for (candidate, _), report in zip(contradicted, reports, strict=True):
            candidate.take_contradicted(report)
        # 5. No trivial body passes.
        self._tell(f"{len(trying)} candidates: trying trivial bodies")
        for candidate in trying:
            candidate.reject_trivial(self.worker)
        return [TriedRemoval(candidate.removal, *candidate.finish()) for candidate in batch]


class CandidateTask:
    """The state of one removal in `TaskGenerator._make_batch`; `reason` is why it is rejected.

    affected: the tests to run without the code. failing: those of them that failed. quoted: a test for the description,
    if possible one whose contradiction the original code fails, which is then `twin`.
    """

    def __init__(self, generator: TaskGenerator, removal: Removal, scope: Scope) -> None:
        self.generator, self.removal, self.baseline = generator, removal, generator.baseline
        self.writes = removal.writes(generator.texts)
        self.reason: str | None = None
        self.affected = set(self.baseline.stable)
        if scope == "covering":
            self.affected = set().union(*(covering_tests(part, self.baseline.lines) for part in removal.parts))
        self.failing: list[str] = []
        self.quoted: QuotedTest | None = None
        self.twin: QuotedTest | None = None
        self._contradicted: dict[str, QuotedTest] = {}
        self._hanging: frozenset[str] = frozenset()

    def job(self, node_ids: set[str], writes: Mapping[str, str], *options: str) -> TestRunJob:
        """Return a run of tests with files (path -> text) that differ from the package's."""
        # pytest runs nothing where an argument names a test that is not collected, so whole files are given: without
        # the code a parameter list may differ.
        files = sorted({node_id.partition("::")[0] for node_id in node_ids})
        return TestRunJob(
            (*self.baseline.options, *options, *files),
            writes,
            tuple(sorted(node_ids)),
            # However many of the tests hang.
            timeout_s=30.0 + 10.0 * self.baseline.duration_s,
            hang_s=HANG_S,
            hang_s_by_test=self.baseline.hang_s_by_test,
        )

    def take_removed(self, report: TestRunReport) -> None:
        """Record which tests fail without the code; tests that hang are in neither list."""
        fresh = report.broken.keys() - self.baseline.broken.keys()
        self._hanging = report.hanging
        self.failing = sorted(self.affected - report.passed - report.hanging)
        if report.timed_out or (report.hanging and not self.failing):
            self.reason = ": ".join(("without the code the tests hang", *sorted(report.hanging)[:1]))
        elif fresh or report.status < 0:
            # The code runs at import (6 of 97 functions of toolz), so nothing shows which tests need it.
            self.reason = Sentence("envs.feature_deletion.collection-fails")
        elif not self.failing:
            self.reason = "no test notices"
        elif not self._lists().pass_to_pass:
            self.reason = "every test fails"

    def _lists(self) -> TestLists:
        """Return the tests that fail without the code, and the others that passed twice before."""
        # Several node ids can share one of SWE-bench's names, which fails where one of them does.
        stable = statuses_by_name(dict.fromkeys(self.baseline.stable - self._hanging, "passed"))
        failing = set(statuses_by_name(dict.fromkeys(self.failing, "failed")))
        return TestLists(tuple(sorted(failing)), tuple(sorted(set(stable) - failing)))

    def contradict(self, files: Mapping[str, trees.TreeFile]) -> TestRunJob | None:
        """Return a run of the failing tests with contradictions in a few functions; None where there is none."""
        names = [part.qualname.rpartition(".")[2].strip("_").lower() for part in self.removal.parts]
        # Parametrised cases share one function. Tests that have the name of a removed definition come first.
        functions = list(dict.fromkeys(node_id.partition("[")[0] for node_id in self.failing))
        functions.sort(key=lambda function: not any(name in function.lower() for name in names))
        edits: dict[str, list[Edit]] = {}
        for function in functions:
            path, *parts = function.split("::")
            quoted = quoted_test(path, files[path].data.decode(errors="replace"), parts) if path in files else None
            if quoted is not None and len(self._contradicted) < MOST_QUOTED:
                self.quoted = self.quoted or quoted
                if quoted.edit is not None:
                    self._contradicted[function] = quoted
                    edits.setdefault(path, []).append(quoted.edit)
        if not edits:
            return None
        writes = {
            path: apply_edits(files[path].data.decode(errors="replace"), file_edits)
            for path, file_edits in edits.items()
        }
        return self.job({name for name in self.failing if name.partition("[")[0] in self._contradicted}, writes)

    def take_contradicted(self, report: TestRunReport) -> None:
        """Record the first contradiction that the original code fails."""
        failed = {name.partition("[")[0] for name, outcome in report.outcomes.items() if outcome == "failed"}
        if not report.timed_out and not report.broken:
            self.twin = next((test for function, test in self._contradicted.items() if function in failed), None)
        self.quoted = self.twin or self.quoted

    def reject_trivial(self, worker: TestWorker) -> None:
        """Reject the removal where the failing tests pass with a trivial body; each run ends at its first failure."""
        texts, failing = self.generator.texts, set(self.failing)
        jobs = [self.job(failing, self.removal.writes(texts, body), "--maxfail=1") for body in TRIVIAL]
        for body, report in zip(TRIVIAL, worker.run(jobs), strict=True):
            if not failing - report.passed:
                self.reason = Sentence(
                    "envs.feature_deletion.trivial-body-passes", body=body.format(first="its first argument")
                )
                return

    def finish(self) -> tuple[Row | None, str | None]:
        """Return the accepted row, or the reason why there is none."""
        if self.reason is not None:
            return None, self.reason
        package, hanging = self.generator.package, sorted(self._hanging)
        tests = (self.quoted, self.twin)
        return rows.build(package, self.removal, self.writes, self._lists(), self.baseline, *tests, hanging), None


class TaskSource:
    """The tasks of one environment's options."""

    def __init__(self, sandbox: str, package: str, tasks: str, difficulty: str, requirements: tuple[str, ...]) -> None:
        self._sandbox, self._package, self._tasks = sandbox, package, tasks
        self._difficulties = parse_difficulties(difficulty)
        self._requirements = requirements

    def rows(self, split: Split, count: int, seed: int) -> list[Row]:
        """Return at most `count` rows of a split, read from a run or made now; `UsageError` when there is none."""
        if not self._package and not self._tasks:
            raise UsageError("envs.feature_deletion.no-source-named")
        rows: list[Row] = []
        if self._tasks:
            table = list(tables.scan_table(Path(self._tasks) / "tasks.parquet", TASK).rows())
            rows = [orjson.loads(row["data_json"]) for row in table if row["split"] == split]
        else:
            package, requirements = unpacked_package(Path(self._package)), installed_requirements(self._requirements)
            with TaskGenerator(package, self._sandbox, requirements) as generator:
                removals = generator.candidates(seed, split, tuple(WEIGHTS), self._difficulties)
                for tried in generator.make(removals):
                    rows += [with_source(tried.row, self._package, self._requirements)] if tried.row else []
                    if len(rows) >= count:
                        break
        if not rows:
            raise UsageError("envs.feature_deletion.no-task-in-split", source=self._tasks or self._package, split=split)
        return rows[:count]

    def package(self, row: Mapping[str, Any]) -> Package:
        """Return the package that a row was made from; `BadInput` when it has changed since."""
        path = Path(self._package or row["source"])
        package = unpacked_package(path)
        if package.sha256 != row["package_sha256"]:
            raise BadInput("envs.feature_deletion.package-changed", path=path, package=row["package"])
        return package


def with_source(row: Row, source: str, requirements: tuple[str, ...]) -> Row:
    """Return a row with the path of its package and the requirements of its tests."""
    return {**row, "source": str(Path(source).expanduser().absolute()), "requirements": list(requirements)}


def parse_difficulties(name: str) -> tuple[Difficulty, ...]:
    """Return one difficulty, or all of them for "mixed"; `UsageError` for another word."""
    chosen = tuple(difficulty for difficulty in KEEP if name in (difficulty, "mixed"))
    if not chosen:
        raise UsageError("envs.feature_deletion.unknown-difficulty", difficulty=name, difficulties=list(KEEP))
    return chosen


_lock = threading.Lock()


def unpacked_package(path: Path) -> Package:
    """Return a package, unpacked once in this process for all rollouts; `BadInput` when there is none at the path."""
    path = path.expanduser()
    if not path.exists():
        raise BadInput("envs.feature_deletion.no-package", path=str(path))
    with _lock:
        return _unpacked(path.absolute(), path.stat().st_mtime_ns)[0]


@lru_cache(maxsize=16)
def _unpacked(path: Path, changed_ns: int) -> tuple[Package, "tempfile.TemporaryDirectory[str]"]:
    """Return a package and its folder, which is deleted when the cache drops it."""
    del changed_ns  # Part of the key: a package that changed on disk is unpacked again.
    folder = tempfile.TemporaryDirectory(prefix="package-", dir=folders.home())
    return unpack(path, Path(folder.name)), folder


def installed_requirements(requirements: tuple[str, ...]) -> Path | None:
    """Return a folder with what tests import, installed once in this process; None where nothing is required."""
    if not requirements:
        return None
    with _lock:
        return Path(_installed(requirements).name)


@lru_cache(maxsize=4)
def _installed(requirements: tuple[str, ...]) -> "tempfile.TemporaryDirectory[str]":
    """Return the folder with installed requirements, which is deleted when the cache drops it."""
    folder = tempfile.TemporaryDirectory(prefix="requirements-", dir=folders.home())
    worker.install(requirements, Path(folder.name))
    return folder


# Search of the delivered tree for copies of removed code: it counts as found where one file holds half of its shingles
# (runs of three lines). Copies elsewhere on this machine are hidden by the name of the package (repo/runner.py).

WIDTH = 3
"""Lines of a shingle."""
SHARE = 0.5
SHORTEST_SHINGLE = 40
"""Bytes without blanks: three lines that are shorter together occur in any code."""
DECORATION = b" \t\f\v#*+-|"
TEXT = (".py", ".pyi", ".pyx", ".txt", ".rst", ".md", ".patch", ".diff", ".c", ".cpp", ".ipynb", ".html", ".json")


class PackageShingles:
    """The shingles of every text file of a package, computed once for the searches of all its tasks."""

    def __init__(self, files: Mapping[str, trees.TreeFile]) -> None:
        self._present = {path: _shingles(file.data) for path, file in files.items() if path.endswith(TEXT)}

    def copies(self, removal: Removal, writes: Mapping[str, str]) -> list[str]:
        """Return the files of the delivered tree that still hold code of a removed part."""
        present = self._present | {path: _shingles(text.encode()) for path, text in writes.items()}
        removed = list(filter(None, map(_body_shingles, removal.parts)))
        return [
            path for path, file in present.items() if any(len(part & file) >= SHARE * len(part) for part in removed)
        ]


def _body_shingles(definition: Definition) -> set[bytes]:
    """Return the shingles of a definition's bodies, comments included; a short body has none."""
    bodies = (_shingles("\n".join(body).encode()) for body in definition.bodies)
    return {shingle for body in bodies for shingle in body if len(shingle) >= SHORTEST_SHINGLE}


def _shingles(data: bytes) -> set[bytes]:
    """Return the shingles of a text without indentation and comment signs."""
    lines = data.replace(b"\r", b"\n").translate(None, DECORATION).split(b"\n")
    filled = [line for line in lines if line]
    return set(map(b"\n".join, zip(*(filled[i:] for i in range(WIDTH)), strict=False)))
