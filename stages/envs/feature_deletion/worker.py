"""Many test runs on one tree in one sandbox: pytest is imported once a call, every run is a forked child."""

import email.parser
import json
import os
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from configparser import ConfigParser
from configparser import Error as ConfigError
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import cache
from importlib import metadata
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from stages.envs import folders
from stages.envs.repo import grading, trees
from stages.envs.repo.grading import PASSING
from stages.errors import BadInput, InfrastructureError, UsageError
from stages.runs.records import Row
from stages.sandbox import Limits, open_sandbox
from stages.sandbox.bubblewrap import TESTBED

# ---- tools
# The test runner that a sandbox sees: pytest and what it needs, bound from this environment, and nothing else.
#
# setuptools, pip and an installed copy of the package stay invisible, since they may hold the code that a task
# removed.

RUNNER = ("pytest", "pluggy", "iniconfig", "packaging", "pygments")
COVERAGE = ("pytest-cov", "coverage")
INSTALL = "pip install 'composer-post-training[feature-deletion]'"


@cache
def visible(distributions: tuple[str, ...]) -> tuple[Path, ...]:
    """The files and folders of installed distributions, where they lie."""
    return tuple(path for name in distributions for path in _top_level(name))


def _top_level(name: str) -> list[Path]:
    try:
        files = metadata.files(name) or []
    except metadata.PackageNotFoundError:
        raise UsageError(f"Feature deletion runs tests with {name}, which is not installed: {INSTALL}.") from None
    site = _site(name)
    first = {file.parts[0] for file in files} - {"..", "__pycache__"}
    return [site / part for part in sorted(first) if not part.endswith(".pth") and (site / part).exists()]


def _site(name: str) -> Path:
    return Path(str(metadata.distribution(name).locate_file(".")))


def readonly(requirements: Path | None = None, *, coverage: bool = False) -> tuple[Path, ...]:
    """What to bind: our plugin, the runner, coverage when asked for, and a folder of further requirements."""
    further = (requirements,) if requirements else ()
    return (grading.GUEST, *visible(RUNNER), *(visible(COVERAGE) if coverage else ()), *further)


def environment(sandbox: str, requirements: Path | None = None, tree: Path | None = None) -> dict[str, str]:
    """Variables under which `python3 -m pytest` finds the runner first, then the package, which is not installed.

    Without a sandbox everything that is installed here is visible, so the package comes first there.
    """
    root = TESTBED if sandbox == "bubblewrap" else str(tree)
    package, runner = [root, f"{root}/src"], [str(_site("pytest")), str(grading.GUEST)]
    folders = [*runner, *package] if sandbox == "bubblewrap" else [*package, *runner]
    return {
        **grading.WITHOUT_PLUGINS,
        "PYTHONPATH": ":".join([*folders, *([str(requirements)] if requirements else [])]),
        "PYTEST_ADDOPTS": " ".join(["-p", "no:cacheprovider", *plugins(requirements)]),
        "COVERAGE_CORE": "ctrace",
    }


def plugins(requirements: Path | None) -> list[str]:
    """Options that load the pytest plugins among the requirements, since none is loaded by itself."""
    if requirements is None:
        return []
    found = [entry for one in metadata.distributions(path=[str(requirements)]) for entry in one.entry_points]
    return [word for entry in found if entry.group == "pytest11" for word in ("-p", entry.value)]


def install(requirements: Sequence[str], folder: Path) -> Path:
    """Put wheels of requirements, and of theirs, into a folder; nothing of them is run."""
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--only-binary", ":all:", "--target", str(folder)]
    done = subprocess.run([*command, *requirements], capture_output=True, text=True)
    if done.returncode:
        reason = (done.stderr.strip().splitlines() or ["no reason given"])[-1]
        raise UsageError(f"The requirements {', '.join(requirements)} could not be installed: {reason}")
    return folder


GUEST = Path(__file__).parent / "guest"
LIMITS = Limits(wall_s=600, cpu_s=600, memory_mb=4096, processes=256, file_mb=256, disk_mb=2048, output_bytes=256 << 20)
START_S = 30.0
"""What a call may take beside its jobs."""


@dataclass(frozen=True)
class Job:
    """One run of pytest.

    arguments: pytest's. writes: files (path -> text) that are other than in the tree. keep: the node ids to run, None
    for all. timeout_s: seconds of wall time. coverage: whether to record the lines that each test executes. patience_s:
    seconds after which a test is taken for one that hangs; slow: node id -> more of them, "" for collection.
    """

    arguments: tuple[str, ...]
    writes: Mapping[str, str] = field(default_factory=dict)
    keep: tuple[str, ...] | None = None
    timeout_s: float = 300.0
    coverage: bool = False
    patience_s: float = 300.0
    slow: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class TestReport:
    """What one run reported.

    outcomes: node id -> outcome. broken: files that could not be collected -> the reason. config_file: the one that
    pytest used, or "". status: pytest's exit status, -1 where it did not end by itself. lines: file -> node id -> the
    lines that the test executed; empty without coverage. hanging: the tests that were killed and left out. slow:
    node id -> seconds of tests that took long, "" for collection.
    """

    __test__ = False  # pytest takes classes named Test* for tests

    outcomes: Mapping[str, str]
    broken: Mapping[str, str]
    config_file: str
    status: int
    timed_out: bool
    duration_s: float
    lines: Mapping[str, Mapping[str, Sequence[int]]]
    hanging: frozenset[str] = frozenset()
    slow: Mapping[str, float] = field(default_factory=dict)

    @property
    def passed(self) -> set[str]:
        """Node ids that passed as expected or failed as expected."""
        return {name for name, outcome in self.outcomes.items() if outcome in PASSING}


class TestWorker:
    """A sandbox on a private copy of a tree, for one thread at a time; `cpu_s` is the CPU time of all runs so far."""

    __test__ = False  # pytest takes classes named Test* for tests

    def __init__(self, sandbox: str, root: Path, requirements: Path | None = None) -> None:
        self.cpu_s = 0.0
        with ExitStack() as stack:
            self.tree = stack.enter_context(trees.scratch())
            self._jobs = stack.enter_context(trees.scratch())
            folders.copy(root, self.tree)
            visible = [GUEST, self._jobs, *readonly(requirements, coverage=True)]
            env = environment(sandbox, requirements, self.tree)
            self._sandbox = stack.enter_context(
                open_sandbox(sandbox, self.tree, limits=LIMITS, readonly=visible, env=env)
            )
            self._stack = stack.pop_all()

    def run(self, jobs: Sequence[Job]) -> list[TestReport]:
        """The reports in order. When the worker is lost over several jobs, each gets a worker of its own.

        `InfrastructureError` when it is lost over one job.
        """
        if not jobs:
            return []
        try:
            return self._together(jobs)
        except InfrastructureError:
            if len(jobs) == 1:
                raise
            return [self._together([job])[0] for job in jobs]

    def _together(self, jobs: Sequence[Job]) -> list[TestReport]:
        (self._jobs / "jobs.json").write_text(json.dumps([vars(job) for job in jobs]))
        timeout_s = START_S + sum(job.timeout_s for job in jobs)
        command = f"exec python3 -P {GUEST}/worker.py {self._jobs}/jobs.json"
        result = self._sandbox.run(command, wall_s=timeout_s)
        try:
            report = json.loads(result.output[result.output.index("{") :])
        except ValueError:
            reason = result.killed_for or ("time" if result.timed_out else f"exit {result.returncode}")
            raise InfrastructureError(
                f"The test worker did not report ({reason}): {result.output[-500:].strip()}"
            ) from None
        self.cpu_s += report["cpu_s"]
        return [_test_report(result) for result in report["results"]]

    def close(self) -> None:
        """End the sandbox and delete the copy."""
        self._stack.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _test_report(result: Row) -> TestReport:
    return TestReport(
        outcomes=result["outcomes"],
        broken=dict(result["broken"]),
        config_file=result["config_file"] or "",
        status=result["status"],
        timed_out=result["timed_out"],
        duration_s=result["duration_s"],
        lines=result.get("lines", {}),
        hanging=frozenset(result["hanging"]),
        slow=result["slow"],
    )


# ---- requirement_hints
# Which distributions bring modules that tests could not import: what packaging metadata says, and no guess.
#
# A distribution may be called otherwise than its module (`attrs` holds `attr`), and one that has the module's name
# may be
# a stranger's. Known are the distributions that are installed here, and those that the package itself declares.

WAY_OUT = "--set env.requirements='[{0}]' (for `composer tasks`: --set requirements='[{0}]')"
NAME = re.compile(r"\s*([A-Za-z0-9][\w.-]*)")


def hint(modules: Iterable[str], root: Path) -> str:
    """How to bring modules in: by the distributions that hold them, or by those that the package declares."""
    known, unknown = resolved(modules, root)
    said = []
    if known:
        names = ", ".join(f'"{name}"' for name in sorted(set(known.values())))
        said.append(f"Add {WAY_OUT.format(names)}.")
    if unknown:
        listed = ", ".join(sorted(declared(root))) or "nothing"
        said.append(
            f"No metadata says which distribution holds {', '.join(unknown)}; the package declares {listed}. Look the "
            f"distribution up, and add it with {WAY_OUT.format('NAME')}."
        )
    return " ".join(said)


def resolved(modules: Iterable[str], root: Path) -> tuple[dict[str, str], list[str]]:
    """Module -> distribution where metadata says it, and the modules of which it says nothing."""
    installed = metadata.packages_distributions()
    own = {_normal(name): name for name in declared(root)}
    known: dict[str, str] = {}
    tops = sorted({module.partition(".")[0] for module in modules})
    for top in tops:
        holding = sorted(set(installed.get(top, ())))
        if len(holding) == 1:
            known[top] = holding[0]
        elif _normal(top) in own and not holding:
            known[top] = own[_normal(top)]
    return known, [top for top in tops if top not in known]


def declared(root: Path) -> set[str]:
    """The distributions that a package names as its dependencies, for running or for its tests."""
    named = [*_from_pkg_info(root), *_from_pyproject(root), *_from_setup_cfg(root)]
    return {match[1] for text in named if (match := NAME.match(text))}


def _normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def _from_pkg_info(root: Path) -> list[str]:
    if not (root / "PKG-INFO").is_file():
        return []
    fields = email.parser.HeaderParser().parsestr((root / "PKG-INFO").read_text(errors="replace"))
    return [str(value) for value in fields.get_all("Requires-Dist", [])]


def _from_pyproject(root: Path) -> Iterator[str]:
    try:
        whole = tomllib.loads((root / "pyproject.toml").read_text())
    except (OSError, ValueError):
        return
    project = whole.get("project", {})
    groups: list[Any] = [project.get("dependencies", [])]
    groups += [*project.get("optional-dependencies", {}).values(), *whole.get("dependency-groups", {}).values()]
    yield from (text for group in groups for text in group if isinstance(text, str))


def _from_setup_cfg(root: Path) -> list[str]:
    parser = ConfigParser(interpolation=None)
    try:
        parser.read(root / "setup.cfg")
    except (OSError, ConfigError, UnicodeDecodeError):
        return []
    texts = [parser.get("options", key, fallback="") for key in ("install_requires", "tests_require")]
    if parser.has_section("options.extras_require"):
        texts += [value for _, value in parser.items("options.extras_require")]
    return [line for text in texts for line in text.splitlines() if line.strip()]


# ---- baseline
# What a package's tests do before anything is removed: which pass every time, and which lines each executes.

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
