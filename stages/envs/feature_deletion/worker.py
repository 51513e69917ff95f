"""Run a package's tests many times in one sandbox, and measure how they behave before anything is removed.

`TestWorker` imports pytest once a call (guest/worker.py); every run is a forked child. The sandbox sees pytest and what
it needs, bound from this environment, and nothing else: setuptools, pip and an installed copy of the package stay
invisible, since they may hold the code that a task removed. `measure_baseline` finds which tests pass every time, and
which lines each of them executes.
"""

import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, TimeoutError as FutureTimeout
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

from composer_stages.envs import folders
from composer_stages.envs.feature_deletion.package import import_hint
from composer_stages.envs.repo import runner, trees
from composer_stages.envs.repo.guest.composer_rules import PASSING
from composer_stages.errors import BadInput, InfrastructureError, UsageError
from composer_stages.runs.activity import activity
from composer_stages.sandbox import CommandResult, Limits
from composer_stages.words import Sentence

GUEST = Path(__file__).parent / "guest"
LIMITS = Limits(wall_s=600, cpu_s=600, memory_mb=4096, processes=256, file_mb=256, disk_mb=2048, output_bytes=256 << 20)
CHECK_S = 0.2
"""Seconds between two calls of `check` while tests run."""
START_S = 30.0
"""Seconds that a call may take in addition to its jobs."""
OPTIONS = (
    *("--rootdir=.", "--assert=plain", "--continue-on-collection-errors", "-q", "--tb=native"),
    *("-p", "no:cacheprovider", "-o", "addopts=", "-o", "required_plugins=", "-o", "xfail_strict=false"),
)
"""Without assertion rewriting, which triples the time of a run and does not change an outcome."""
NO_CONFIGURATION = ("-c", os.devnull)
FIRST_TIMEOUT_S = 900.0
FIRST_HANG_S = 120.0
HANG_S = 5.0
"""Seconds for one test after code was removed, plus ten times its duration before where that was slow."""
COMPILED_FROM = (".c", ".cc", ".cpp", ".pyx", ".rs")
"""Endings of the sources of extension modules."""
MISSING = re.compile(r"No module named '([\w.]+)'")


def install(requirements: Sequence[str], folder: Path) -> None:
    """Install wheels of requirements and their dependencies into a folder; no code of them is run."""
    # Only wheels: pip would run the build backend of an sdist on this machine, outside of the sandbox.
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--only-binary", ":all:", "--target", str(folder)]
    with activity(f"installing {', '.join(requirements)}"):
        done = subprocess.run([*command, *requirements], capture_output=True, text=True)
    if done.returncode:
        reason = (done.stderr.strip().splitlines() or ["no reason given"])[-1]
        raise UsageError(
            "envs.feature_deletion.requirements-not-installed", requirements=list(requirements), reason=reason
        )


@dataclass(frozen=True)
class TestRunJob:
    """One run of pytest.

    arguments: pytest's. writes: files (path -> text) that differ from the tree. keep: the node ids to run, None for
    all. timeout_s: seconds of wall time. coverage: whether to record the lines that each test executes. hang_s: seconds
    after which a test is considered to hang; hang_s_by_test: node id -> its own such limit, "" for collection.
    """

    __test__ = False  # pytest collects classes named Test*

    arguments: tuple[str, ...]
    writes: Mapping[str, str] = field(default_factory=dict)
    keep: tuple[str, ...] | None = None
    timeout_s: float = 300.0
    coverage: bool = False
    hang_s: float = 300.0
    hang_s_by_test: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class TestRunReport:
    """The report of one run.

    outcomes: node id -> outcome. broken: files that could not be collected -> the reason. config_file: the one that
    pytest used, or "". status: pytest's exit status, -1 where it did not end by itself. lines: file -> node id -> the
    lines that the test executed; empty without coverage. hanging: the tests that were killed and left out. slow:
    node id -> seconds of tests that took long, "" for collection.
    """

    __test__ = False  # pytest collects classes named Test*

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
        """Node ids that passed, or failed as expected."""
        return {name for name, outcome in self.outcomes.items() if outcome in PASSING}


class TestWorker(ExitStack):
    """A sandbox on a private copy of a tree, for one thread at a time.

    `close`, or the end of a `with` block, ends the sandbox and deletes the copy. `check` is called several times a
    second while tests run, which may take minutes; what it raises ends the sandbox and is raised by `run`.
    """

    __test__ = False  # pytest collects classes named Test*

    def __init__(
        self, sandbox: str, root: Path, requirements: Path | None = None, check: Callable[[], None] = lambda: None
    ) -> None:
        super().__init__()
        self._check = check
        # A stack of its own, since no `with` block closes an object whose constructor raised.
        with ExitStack() as stack:
            self.tree = stack.enter_context(trees.scratch())
            self._jobs = stack.enter_context(trees.scratch())
            folders.copy(root, self.tree)
            # The jobs are outside of the tree and read-only, so that no test changes a job that is still to come.
            readonly = (GUEST, self._jobs)
            opened = runner.open_package_sandbox(
                sandbox, self.tree, LIMITS, requirements, coverage=True, readonly=readonly
            )
            self._sandbox = stack.enter_context(opened)
            self.push(stack.pop_all())

    def run(self, jobs: Sequence[TestRunJob]) -> list[TestRunReport]:
        """Return the reports in order. When the worker dies on several jobs, each gets a worker of its own.

        `InfrastructureError` when it dies on one job.
        """
        if not jobs:
            return []
        try:
            return self._run_jobs(jobs)
        except InfrastructureError:
            if len(jobs) == 1:
                raise
            # Without removed code a test may kill the process that forks all jobs; the others must not be lost with it.
            return [self._run_jobs([job])[0] for job in jobs]

    def first_failure(self) -> str:
        """Return the error of the first test that fails in a run of all, on one line; empty without one."""
        words = ("python3", "-P", "-m", "pytest", *OPTIONS, "--tb=short", "-x")
        result = self._run_checked(shlex.join(words), FIRST_HANG_S)
        errors = (line[1:].strip() for line in result.output.splitlines() if line.startswith("E "))
        return next(errors, "")[:200].rstrip(".")

    def _run_checked(self, command: str, timeout_s: float) -> CommandResult:
        """Run a command in the sandbox, and end the sandbox as soon as `check` raises."""
        with ThreadPoolExecutor(1) as waiting:
            running = waiting.submit(self._sandbox.run, command, wall_s=timeout_s)
            while True:
                try:
                    return running.result(timeout=CHECK_S)
                except FutureTimeout:
                    if running.done():  # its own error, which `result` raises again
                        continue
                try:
                    self._check()
                except BaseException:
                    self._sandbox.close()  # the thread sees a lost sandbox and ends
                    raise

    def _run_jobs(self, jobs: Sequence[TestRunJob]) -> list[TestRunReport]:
        """Return the reports of one call of the worker; `InfrastructureError` when it ends without a report."""
        (self._jobs / "jobs.json").write_text(json.dumps([vars(job) for job in jobs]))
        timeout_s = START_S + sum(job.timeout_s for job in jobs)
        command = f"exec python3 -P {GUEST}/worker.py {self._jobs}/jobs.json"
        result = self._run_checked(command, timeout_s)
        try:
            # stderr is part of the output, so a warning may precede the report.
            report = json.loads(result.output[result.output.index("{") :])
        except ValueError:
            reason = result.killed_for or ("time" if result.timed_out else f"exit {result.returncode}")
            raise InfrastructureError(
                "envs.feature_deletion.worker-without-report", reason=reason, output=result.output[-500:].strip()
            ) from None
        return [
            TestRunReport(**{**of_job, "broken": dict(of_job["broken"]), "hanging": frozenset(of_job["hanging"])})
            for of_job in report["results"]
        ]


@dataclass(frozen=True)
class Baseline:
    """How the tests of an unchanged package behave.

    stable: node ids of the tests that passed twice. files: the test files they are in. options: pytest's, for every
    further run. broken: test files that cannot be collected -> the reason; their tests play no part. duration_s: wall
    time of one run of all tests. lines: file -> line -> node ids of the stable tests that execute it. hanging: tests
    that did not end and are set aside. hang_s_by_test: node id -> seconds, for tests that need more than HANG_S.
    """

    stable: frozenset[str]
    files: tuple[str, ...]
    options: tuple[str, ...]
    broken: Mapping[str, str]
    duration_s: float
    lines: Mapping[str, Mapping[int, frozenset[str]]]
    hanging: frozenset[str]
    hang_s_by_test: Mapping[str, float]


def measure_baseline(worker: TestWorker, tell: Callable[[str], None] = lambda step: None) -> Baseline:
    """Run all tests twice, the second time with a coverage context for each; `BadInput` when none passes twice.

    tell: gets the step that begins, in words.
    """
    tell("running all tests, for the first time")
    options, first = _run_unmodified(worker)
    tell(f"running all tests again, with coverage of each; the first run took {first.duration_s:.0f} s")
    files = tuple(sorted({node_id.partition("::")[0] for node_id in first.passed}))
    # Coverage only in the second run, for the first gives the duration: contexts slow tests down, those of
    # more-itertools from 25-39 s to 154 s.
    second = worker.run([_unmeasured_job((*options, *files), keep=tuple(first.passed), coverage=True)])[0]
    slow = {test: max(first.slow.get(test, 0.0), second.slow.get(test, 0.0)) for test in {**first.slow, **second.slow}}
    stable = first.passed & second.passed
    if not stable:
        raise BadInput("envs.feature_deletion.no-stable-test")
    lines: dict[str, dict[int, set[str]]] = {}
    for path, lines_by_test in second.lines.items():
        tests_by_line = lines.setdefault(path, {})
        for test, line_numbers in lines_by_test.items():
            if test in stable:
                for line in line_numbers:
                    tests_by_line.setdefault(line, set()).add(test)
    return Baseline(
        stable=frozenset(stable),
        files=tuple(sorted({node_id.partition("::")[0] for node_id in stable})),
        options=options,
        broken={path: _last_line(reason) for path, reason in {**first.broken, **second.broken}.items()},
        duration_s=first.duration_s,
        lines={
            path: {line: frozenset(tests) for line, tests in tests_by_line.items()}
            for path, tests_by_line in lines.items()
        },
        hanging=first.hanging | second.hanging,
        hang_s_by_test={test: HANG_S + 10.0 * seconds for test, seconds in slow.items()},
    )


def _unmeasured_job(
    arguments: tuple[str, ...], *, keep: tuple[str, ...] | None = None, coverage: bool = False
) -> TestRunJob:
    """Return a run of tests whose durations are not known yet."""
    return TestRunJob(
        arguments,
        keep=keep,
        timeout_s=FIRST_TIMEOUT_S,
        coverage=coverage,
        hang_s=FIRST_HANG_S,
        hang_s_by_test={"": FIRST_TIMEOUT_S},
    )


def _run_unmodified(worker: TestWorker) -> tuple[tuple[str, ...], TestRunReport]:
    """Run all tests; return pytest's options for every further run, and the report. `BadInput` where nothing passes.

    The first attempt uses the package's configuration, the second none, and collects from the package's top. The
    configuration file that pytest found is named in the options, so that runs of single files use it too.
    """
    for configuration, places in (((), ()), (NO_CONFIGURATION, (".",))):
        report = worker.run([_unmeasured_job((*OPTIONS, *configuration, *places))])[0]
        if report.passed:
            aside = [f"--deselect={test}" for test in sorted(report.hanging)]
            name = os.path.basename(report.config_file)
            config_options = ("-c", name) if name and (worker.tree / name).is_file() else NO_CONFIGURATION
            return (*OPTIONS, *(configuration or config_options), *aside), report
    raise BadInput(_no_pass_reason(report, worker))


def _last_line(reason: str) -> str:
    """Return the last line of the reason why a file cannot be collected, without the mark that pytest gives it."""
    return (reason.strip().splitlines() or ["?"])[-1].removeprefix("E ").strip()


def missing_modules(reasons: Iterable[str]) -> list[str]:
    """Return the modules that could not be imported, from the reasons of collection errors."""
    return sorted({name for reason in reasons for name in MISSING.findall(reason)})


def _no_pass_reason(report: TestRunReport, worker: TestWorker) -> str:
    """Return why no test passes in a first run, and what to do."""
    root = worker.tree
    # pytest reports no collection where a conftest.py fails: it ends before.
    failure = "" if report.broken or report.outcomes or report.timed_out else worker.first_failure()
    absent = missing_modules([*report.broken.values(), failure])
    # A part of the package that is absent is generated or compiled by a build, which is never run here.
    local_modules = {path.stem for folder in (root, root / "src") if folder.is_dir() for path in folder.iterdir()}
    if unbuilt_modules := [name for name in absent if name.partition(".")[0] in local_modules]:
        return Sentence("envs.feature_deletion.part-not-built", module=unbuilt_modules[0])
    if absent:
        hint = import_hint(absent, root)
        return Sentence("envs.feature_deletion.modules-missing", modules=absent, hint=hint)
    if report.timed_out:
        return Sentence("envs.feature_deletion.tests-too-slow", limit_s=FIRST_TIMEOUT_S)
    if report.broken:
        path, reason = next(iter(report.broken.items()))
        return Sentence("envs.feature_deletion.file-not-collected", path=path, reason=_last_line(reason))
    if report.outcomes:
        compiled_sources = sorted(
            str(path.relative_to(root)) for path in root.rglob("*") if path.suffix in COMPILED_FROM
        )
        return Sentence(
            "envs.feature_deletion.all-tests-fail",
            num_tests=len(report.outcomes),
            reason=worker.first_failure(),
            compiled=compiled_sources[:1],
        )
    if failure:
        return Sentence("envs.feature_deletion.pytest-ends-early", reason=failure)
    return Sentence("envs.feature_deletion.no-tests")
