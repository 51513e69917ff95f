"""How long tests may take when an answer is graded: measured on this machine, so that no task holds a time."""

import threading
import time
from dataclasses import replace
from functools import lru_cache
from pathlib import Path

from stages.envs import folders
from stages.envs.feature_deletion import tools
from stages.envs.feature_deletion.package import Package
from stages.envs.repo import trees
from stages.envs.repo.outcomes import LIMITS, TestRuntime, run_pytest
from stages.sandbox import open_sandbox

FIRST_TIMEOUT_S = 900.0
LEAST_S, TIMES = 30.0, 10.0
"""Code that is slower than the original, on a machine that is busier than before, is still graded."""
_lock = threading.Lock()


def runtime(sandbox: str, requirements: Path | None, timeout_s: float) -> TestRuntime:
    """Runs a package's tests in a sandbox of their own."""
    limits = replace(LIMITS, wall_s=timeout_s)
    readonly = tools.readonly(requirements)
    return TestRuntime(
        lambda folder: open_sandbox(
            sandbox, folder, limits=limits, readonly=readonly, env=tools.environment(sandbox, requirements, folder)
        )
    )


def measured_s(sandbox: str, package: Package, tests: tuple[str, ...], requirements: Path | None) -> float:
    """Seconds allowed to the tests (options and files of pytest), by a run on the original code in this process."""
    with _lock:
        return LEAST_S + TIMES * _duration_s(sandbox, package, tests, requirements)


@lru_cache(maxsize=64)
def _duration_s(sandbox: str, package: Package, tests: tuple[str, ...], requirements: Path | None) -> float:
    with trees.scratch() as copy:
        folders.copy(package.root, copy)
        started = time.monotonic()
        run_pytest(runtime(sandbox, requirements, FIRST_TIMEOUT_S), copy, list(tests))
        return time.monotonic() - started
