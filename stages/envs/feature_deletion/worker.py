"""Many test runs on one tree in one sandbox: pytest is imported once a call, every run is a forked child."""

import json
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Self

from stages.envs import folders
from stages.envs.feature_deletion import tools
from stages.envs.repo import trees
from stages.envs.repo.outcomes import PASSING
from stages.errors import InfrastructureError
from stages.runs.records import Row
from stages.sandbox import Limits, open_sandbox

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
            visible = [GUEST, self._jobs, *tools.readonly(requirements, coverage=True)]
            env = tools.environment(sandbox, requirements, self.tree)
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
