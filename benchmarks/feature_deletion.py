"""How fast feature deletion makes tasks from a package, and whether every one of them can be graded.

    python benchmarks/feature_deletion.py SDIST... [--count TASKS] [--scope full|covering] [--verify]

Tasks a minute by the clock, and by the CPU seconds that all runs took: on a busy machine only the latter says what one
process with a core to itself does. The first measurement of the tests is shown apart; it is paid once a package.
`--verify` grades every task as delivered, with the original code, and its impossible twin, where it has one, with the
original code.
"""

import os
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

import cases
from records import Claim, measured

from stages.envs.bash import fenced
from stages.envs.feature_deletion import rows
from stages.envs.feature_deletion.env import FeatureDeletionEnv, task
from stages.envs.feature_deletion.package import unpack
from stages.envs.feature_deletion.selection import KEEP, WEIGHTS
from stages.envs.feature_deletion.task_generator import TaskGenerator, TriedRemoval, with_source
from stages.runs.kinds import Row

APPLY = "cat > /tmp/patch <<'END-OF-PATCH'\n{patch}END-OF-PATCH\ngit apply --whitespace=nowarn /tmp/patch"


def make(
    packages: tuple[str, ...],
    count: int = 20,
    scope: Literal["full", "covering"] = "covering",
    seed: int = 0,
    verify: bool = False,
) -> Iterator[Claim]:
    """Tasks a minute of each package, and, to verify them, the share that is graded as it should be."""
    cases.needed("pytest", "pytest_cov", by=cases.EXTRA.format("feature-deletion"))
    for package in packages:
        made, claims = measure(package, count, scope, seed)
        yield from claims
        if verify:
            yield from verified(package, [one.row for one in made if one.row])


def measure(source: str, count: int, scope: str, seed: int) -> tuple[list[TriedRemoval], list[Claim]]:
    """Make `count` tasks; return them, and how long it took."""
    with tempfile.TemporaryDirectory() as folder:
        package = unpack(Path(source), Path(folder))
        with TaskGenerator(package, "bubblewrap") as generator:
            started = time.perf_counter()
            candidates = generator.candidates(seed, None, tuple(WEIGHTS), tuple(KEEP))
            tests_s = time.perf_counter() - started
            before_s = generator.worker.cpu_s + sum(os.times()[:2])
            started, made = time.perf_counter(), []
            for one in generator.make(candidates, scope):
                made.append(one)
                if sum(other.row is not None for other in made) >= count:
                    break
            spent_s = time.perf_counter() - started
            cpu_s = generator.worker.cpu_s + sum(os.times()[:2]) - before_s
    accepted = sum(one.row is not None for one in made)
    reasons = Counter((one.reason or "").partition(":")[0] for one in made if one.reason)
    print(
        f"{package.label:<22} {len(generator.baseline.stable):>5} tests, {len(candidates)} candidates, "
        f"{accepted} of {len(made)} accepted {dict(reasons)}; {scope}: {60 * accepted / spent_s:.0f} tasks/min by the "
        f"clock, {60 * accepted / cpu_s:.0f} by CPU; before: tests {tests_s:.1f} s; "
        f"load {os.getloadavg()[0]:.1f}",
        flush=True,
    )
    what, goal = f"{package.label}, {scope}", ">= 60" if package.label.startswith("toolz") else None
    rates = [("the clock", spent_s), ("processor time", cpu_s)]
    claims = [
        measured(f"{what}: tasks a minute by {by}", 60 * accepted / took, n=accepted, goal=goal) for by, took in rates
    ]
    return made, claims


def verified(source: str, made: list[Row]) -> Iterator[Claim]:
    """Grade every task as delivered, with the original code, and its twin with the original code."""
    env, counts, started = FeatureDeletionEnv(package=source), Counter(), time.perf_counter()
    try:
        for row in (with_source(row, source, ()) for row in made):
            counts["unresolved without a patch"] += _graded(env, row, "") == 0.0
            counts["resolved with the original code"] += _graded(env, row, row["patch"]) == 1.0
            if row["twin"]:
                counts["twin resolved with the original code"] += _graded(env, rows.twin(row), row["patch"]) == 1.0
    finally:
        env.close()
    print(f"{'':<22} of {len(made)}: {dict(counts)}, {time.perf_counter() - started:.0f} s", flush=True)
    for what, count in counts.items():
        yield measured(f"tasks of {Path(source).name}: {what}", count / len(made), n=len(made), goal="= 1")


def _graded(env: FeatureDeletionEnv, row: Row, patch: str) -> float | None:
    env.reset(task(row))
    if patch:
        observation = env.step(fenced(APPLY.format(patch=patch)))
        assert observation.returncode == 0, observation.content
    return env.grade().reward


CASES = {"make": make}


if __name__ == "__main__":
    cases.main(__file__, CASES)
