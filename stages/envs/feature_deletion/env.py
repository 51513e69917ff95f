"""The environment `feature-deletion`: write again what was removed from a package, until its own tests pass."""

import threading
import time
from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Literal

from composer_stages.envs import folders
from composer_stages.envs.base import Split, Task
from composer_stages.envs.feature_deletion import rows, task_generator
from composer_stages.envs.feature_deletion.package import Package
from composer_stages.envs.feature_deletion.task_generator import TaskSource
from composer_stages.envs.repo import grading, runner, session, trees
from composer_stages.envs.repo.grading import TestOutcomes, TestRuntime, run_pytest
from composer_stages.envs.repo.runner import copies_on_host
from composer_stages.envs.repo.session import RepoEnvironment
from composer_stages.envs.repo.task import Export, RepoTask, filled_tree, pytest_runner
from composer_stages.errors import UsageError
from composer_stages.runs.kinds import Row

FIRST_TIMEOUT_S = 900.0
LEAST_S, TIMES = 30.0, 10.0
"""Tests may take LEAST_S plus TIMES the duration that they have here with the original code.

The duration is measured on this machine, so that no row holds a time. A solution that is slower than the original, on a
machine that is busier than before, is still graded.
"""
FEW_LOST = 3
"""Up to this many tests that passed before the removal may fail by chance."""
_lock = threading.Lock()


class FeatureDeletionEnv(RepoEnvironment):
    """Implements Environment, ComparesOutcomes, HasSolutions and Packs.

    `package`: a folder or sdist with tests. `tasks`: a run of `composer tasks`, else tasks are made on demand.
    `difficulty`: easy, medium, hard or mixed. `twins`: serve the impossible variants instead, or "beside": every task,
    and after it its twin. `requirements`: what the package's tests import in addition to it. `max_chars`: of a longer
    output the agent sees the head and the tail.
    """

    name = "feature-deletion"

    def __init__(
        self,
        sandbox: str = "bubblewrap",
        package: str = "",
        tasks: str = "",
        difficulty: str = "mixed",
        twins: bool | Literal["beside"] = False,
        requirements: Sequence[str] = (),
        max_chars: int = 10_000,
    ) -> None:
        if twins not in (False, True, "beside"):
            raise UsageError("envs.feature_deletion.unknown-twins", twins=twins)
        self.sandbox, self.twins, self.max_chars = sandbox, twins, max_chars
        self._source = TaskSource(sandbox, package, tasks, difficulty, tuple(requirements))

    def tasks(self, split: Split, count: int, seed: int) -> list[Task]:
        """Return the first `count` tasks of a split under a seed, or as many as the package gives."""
        beside = self.twins == "beside"
        # With twins every row gives two tasks, so half of them are enough, rounded up.
        task_rows = self._source.rows(split, -(-count // 2) if beside else count, seed)
        # A row whose tests cannot be contradicted has no twin.
        if self.twins:
            pairs = [(row, rows.make_twin(row)) for row in task_rows if row["twin"]]
            task_rows = [row for pair in pairs for row in (pair if beside else pair[1:])]
        return [task(row) for row in task_rows][:count]

    def repo_task(self, task: Task) -> RepoTask:
        """Return the task with a folder that holds the package without the feature."""
        row, package = task.data, self._source.package(task.data)
        requirements = task_generator.installed_requirements(tuple(row["requirements"]))
        names = runner.packages_of(package.root)
        copies = [
            path for folder in (runner.PROGRAMS, requirements) if folder for path in copies_on_host(names, folder)
        ]

        def fill(folder: Path) -> None:
            folders.copy(package.root, folder)
            trees.apply(rows.delivered_files(row, package), folder)

        def run(folder: Path) -> TestOutcomes:
            tests = (*row["options"], *row["test_files"])
            # Under a lock: lru_cache would let every thread that asks before the first result measure at the same time.
            with _lock:
                duration_s = _original_duration_s(self.sandbox, package, tests, requirements)
            runtime = _test_runtime(self.sandbox, requirements, LEAST_S + TIMES * duration_s)
            return pytest_runner(runtime, *row["test_files"], options=row["options"])(folder)

        delivered = filled_tree(fill)
        provenance = ("package", "package_sha256", "version", "removed", "difficulty", "removal", "base_commit")
        return RepoTask(
            delivered,
            rows.test_lists(row),
            lambda folder: runner.open_package_sandbox(
                self.sandbox, folder, session.LIMITS, requirements, hidden=copies
            ),
            run,
            solution=lambda: {edit["path"]: trees.read(package.root, edit["path"]) for edit in row["edits"]},
            test_files={path: trees.read(delivered, path) for path in row["test_files"]},
            max_flaky=FEW_LOST,
            package=package.name,
            export=Export(
                arguments=("-q", *row["options"], *row["test_files"]),
                timeout_s=FIRST_TIMEOUT_S,
                requirements=tuple(row["requirements"]),
                provenance={name: row[name] for name in provenance},
            ),
            release=lambda: folders.remove(delivered),
        )


def _test_runtime(sandbox: str, requirements: Path | None, timeout_s: float) -> TestRuntime:
    """Return a runtime that runs tests in a sandbox with the requirements, for at most `timeout_s` seconds."""
    limits = replace(grading.LIMITS, wall_s=timeout_s)
    return TestRuntime(lambda folder: runner.open_package_sandbox(sandbox, folder, limits, requirements))


@lru_cache(maxsize=64)
def _original_duration_s(sandbox: str, package: Package, tests: tuple[str, ...], requirements: Path | None) -> float:
    """Measure the seconds that tests (options and files of pytest) take with the original code; cached."""
    with trees.scratch() as copy:
        folders.copy(package.root, copy)
        started = time.monotonic()
        run_pytest(_test_runtime(sandbox, requirements, FIRST_TIMEOUT_S), copy, list(tests))
        return time.monotonic() - started


def task(row: Row) -> Task:
    """Return the task of a row."""
    return Task(row["instance_id"], FeatureDeletionEnv.name, row["split"], row["family"], row["problem_statement"], row)
