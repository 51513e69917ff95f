"""What a package's tests do before anything is removed: which pass every time, and which lines each executes."""

import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from stages.envs.feature_deletion.worker import Job, TestReport, TestWorker
from stages.errors import BadInput

OPTIONS = (
    *("--rootdir=.", "--assert=plain", "--continue-on-collection-errors", "-q", "--tb=native"),
    *("-p", "no:cacheprovider", "-o", "addopts=", "-o", "required_plugins=", "-o", "xfail_strict=false"),
)
"""Assertion rewriting triples the time of a run and tells a grader nothing."""
NO_CONFIGURATION = ("-c", os.devnull)
FIRST_TIMEOUT_S = 900.0
MISSING = re.compile(r"No module named '([\w.]+)'")
WAY_OUT = "--set env.requirements='[{}]' (for `composer tasks`: --set requirements='[{}]')"


@dataclass(frozen=True)
class Baseline:
    """How the tests of an unchanged package behave.

    stable: node ids of the tests that passed twice. files: the test files they are in. options: pytest's, for every
    further run. broken: test files that cannot be collected -> the reason; their tests play no part. duration_s: wall
    time of one run of all tests. lines: file -> line -> node ids of the stable tests that execute it.
    """

    stable: frozenset[str]
    files: tuple[str, ...]
    options: tuple[str, ...]
    broken: Mapping[str, str]
    duration_s: float
    lines: Mapping[str, Mapping[int, frozenset[str]]]

    @property
    def timeout_s(self) -> float:
        """Seconds allowed to one run of some tests after something was removed: it may hang."""
        return 3.0 + 10.0 * self.duration_s


def measure(worker: TestWorker) -> Baseline:
    """Run all tests twice, the second time with a coverage context for each; `BadInput` when none passes twice."""
    options, first = _first_run(worker)
    files = tuple(sorted({file_of(node_id) for node_id in first.passed}))
    again = worker.run([Job((*options, *files), keep=tuple(first.passed), timeout_s=FIRST_TIMEOUT_S, coverage=True)])[0]
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
    )


def file_of(node_id: str) -> str:
    """The test file of a node id."""
    return node_id.partition("::")[0]


def _first_run(worker: TestWorker) -> tuple[tuple[str, ...], TestReport]:
    """As the package configures its tests; if nothing passes so, without its configuration and from its top."""
    tried = []
    for configuration, places in (((), ()), (NO_CONFIGURATION, (".",))):
        done = worker.run([Job((*OPTIONS, *configuration, *places), timeout_s=FIRST_TIMEOUT_S)])[0]
        if done.passed:
            return (*OPTIONS, *(configuration or _configuration(done, worker))), done
        tried.append(done)
    raise BadInput(_nothing_passes(tried[-1], own_modules(worker.tree)))


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


def as_list(modules: Iterable[str]) -> str:
    """The names at the top, as the items of a list in TOML."""
    return ", ".join(f'"{name}"' for name in sorted({module.partition(".")[0] for module in modules}))


def _last_line(reason: str) -> str:
    return (reason.strip().splitlines() or ["?"])[-1].removeprefix("E ").strip()


def _nothing_passes(done: TestReport, own: set[str]) -> str:
    absent = missing(done.broken.values())
    if built := [name for name in absent if name.partition(".")[0] in own]:
        return (
            f"No test of the package passes: {built[0]}, a part of it, does not exist before it is built. Give its "
            "sdist if that part is generated, or a folder in which it was built in place if it is compiled."
        )
    if absent:
        names = as_list(absent)
        return f"No test of the package passes: {names} cannot be imported. Add {WAY_OUT.format(names, names)}."
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
