"""What a package's tests do before anything is removed: which pass every time, and which lines each executes."""

import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from stages.envs.feature_deletion.requirement_hints import hint
from stages.envs.feature_deletion.worker import Job, TestReport, TestWorker
from stages.errors import BadInput

OPTIONS = (
    *("--rootdir=.", "--assert=plain", "--continue-on-collection-errors", "-q", "--tb=native"),
    *("-p", "no:cacheprovider", "-o", "addopts=", "-o", "required_plugins=", "-o", "xfail_strict=false"),
)
"""Assertion rewriting triples the time of a run and tells a grader nothing."""
NO_CONFIGURATION = ("-c", os.devnull)
FIRST_TIMEOUT_S = 900.0
FIRST_PATIENCE_S = 120.0
PATIENCE_S = 5.0
"""For one test after something was removed, and ten times what a slow one took before."""
MISSING = re.compile(r"No module named '([\w.]+)'")


@dataclass(frozen=True)
class Baseline:
    """How the tests of an unchanged package behave.

    stable: node ids of the tests that passed twice. files: the test files they are in. options: pytest's, for every
    further run. broken: test files that cannot be collected -> the reason; their tests play no part. duration_s: wall
    time of one run of all tests. lines: file -> line -> node ids of the stable tests that execute it. hanging: tests
    that did not end and are set aside. patience: node id -> seconds, for tests that need more than PATIENCE_S.
    """

    stable: frozenset[str]
    files: tuple[str, ...]
    options: tuple[str, ...]
    broken: Mapping[str, str]
    duration_s: float
    lines: Mapping[str, Mapping[int, frozenset[str]]]
    hanging: frozenset[str]
    patience: Mapping[str, float]

    @property
    def timeout_s(self) -> float:
        """Seconds allowed to one run of some tests after something was removed, however many of them hang."""
        return 30.0 + 10.0 * self.duration_s


def measure(worker: TestWorker) -> Baseline:
    """Run all tests twice, the second time with a coverage context for each; `BadInput` when none passes twice."""
    options, first = _first_run(worker)
    files = tuple(sorted({file_of(node_id) for node_id in first.passed}))
    again = worker.run([_first_job((*options, *files), keep=tuple(first.passed), coverage=True)])[0]
    slow = {test: max(first.slow.get(test, 0.0), again.slow.get(test, 0.0)) for test in {**first.slow, **again.slow}}
    stable = first.passed & again.passed
    if not stable:
        raise BadInput(
            "No test of the package passes twice in a row. Choose a package whose tests give the same result every "
            "time."
        )
    return Baseline(
        stable=frozenset(stable),
        files=tuple(sorted({file_of(node_id) for node_id in stable})),
        options=options,
        broken={path: _last_line(reason) for path, reason in {**first.broken, **again.broken}.items()},
        duration_s=first.duration_s,
        lines=_by_line(again, stable),
        hanging=first.hanging | again.hanging,
        patience={test: PATIENCE_S + 10.0 * seconds for test, seconds in slow.items()},
    )


def _first_job(arguments: tuple[str, ...], *, keep: tuple[str, ...] | None = None, coverage: bool = False) -> Job:
    """A run of tests of which nothing is known yet."""
    slow = {"": FIRST_TIMEOUT_S}
    return Job(
        arguments, keep=keep, timeout_s=FIRST_TIMEOUT_S, coverage=coverage, patience_s=FIRST_PATIENCE_S, slow=slow
    )


def file_of(node_id: str) -> str:
    """The test file of a node id."""
    return node_id.partition("::")[0]


def _first_run(worker: TestWorker) -> tuple[tuple[str, ...], TestReport]:
    """As the package configures its tests; if nothing passes so, without its configuration and from its top."""
    tried = []
    for configuration, places in (((), ()), (NO_CONFIGURATION, (".",))):
        done = worker.run([_first_job((*OPTIONS, *configuration, *places))])[0]
        if done.passed:
            aside = [f"--deselect={test}" for test in sorted(done.hanging)]
            return (*OPTIONS, *(configuration or _configuration(done, worker)), *aside), done
        tried.append(done)
    raise BadInput(_nothing_passes(tried[-1], worker.tree))


def _configuration(done: TestReport, worker: TestWorker) -> tuple[str, str]:
    """The file that pytest found its configuration in, named so that runs of single files use it too."""
    name = os.path.basename(done.config_file)
    return ("-c", name) if name and (worker.tree / name).is_file() else NO_CONFIGURATION


def own_modules(root: Path) -> set[str]:
    """The names at the top of the package's import roots."""
    return {path.stem for folder in (root, root / "src") if folder.is_dir() for path in folder.iterdir()}


def missing(reasons: Iterable[str]) -> list[str]:
    """Modules that could not be imported, as reasons name them."""
    return sorted({name for reason in reasons for name in MISSING.findall(reason)})


def _last_line(reason: str) -> str:
    return (reason.strip().splitlines() or ["?"])[-1].removeprefix("E ").strip()


def _nothing_passes(done: TestReport, root: Path) -> str:
    absent, own = missing(done.broken.values()), own_modules(root)
    if built := [name for name in absent if name.partition(".")[0] in own]:
        return (
            f"No test of the package passes: {built[0]}, a part of it, does not exist before it is built. Give its "
            "sdist if that part is generated, or a folder in which it was built in place if it is compiled."
        )
    if absent:
        return f"No test of the package passes: {', '.join(absent)} cannot be imported. {hint(absent, root)}"
    if done.timed_out:
        return (
            f"The tests of the package did not end within {FIRST_TIMEOUT_S:.0f} s. Choose a package with faster tests."
        )
    if done.broken:
        path, reason = next(iter(done.broken.items()))
        return f"No test of the package passes; {path} cannot be collected: {_last_line(reason)}"
    if done.outcomes:
        return f"No test of the package passes: {len(done.outcomes)} ran, and all of them failed or were skipped."
    return (
        "The package holds no tests that pytest finds. "
        "Many sdists ship none: give a checkout of its repository instead."
    )


def _by_line(done: TestReport, stable: set[str]) -> dict[str, dict[int, frozenset[str]]]:
    by_path: dict[str, dict[int, set[str]]] = {}
    for path, tests in done.lines.items():
        by_line = by_path.setdefault(path, {})
        for test, lines in tests.items():
            if test in stable:
                for line in lines:
                    by_line.setdefault(line, set()).add(test)
    return {path: {line: frozenset(tests) for line, tests in lines.items()} for path, lines in by_path.items()}
