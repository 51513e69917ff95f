"""How fast feature deletion makes tasks from a package, and whether every one of them can be graded.

python benchmarks/feature_deletion.py SDIST... [-n TASKS] [--scope full|covering] [--verify]

Tasks a minute by the clock, and by the CPU seconds that all runs took: on a busy machine only the latter says what one
process with a core to itself does. The first measurement of the tests and the search of the sandbox for copies are
shown apart; they are paid once a package. `--verify` grades every task three times: as delivered, with the original
code, and its impossible twin with the original code.
"""

import argparse
import os
import tempfile
import time
from collections import Counter
from pathlib import Path

import records
from records import EXTRA, needed

from stages.envs.bash import fenced
from stages.envs.feature_deletion import leaks, rows
from stages.envs.feature_deletion.env import FeatureDeletionEnv, task
from stages.envs.feature_deletion.package import unpack
from stages.envs.feature_deletion.selection import KEEP, WEIGHTS
from stages.envs.feature_deletion.task_generator import TaskGenerator, TriedRemoval, with_source
from stages.runs.kinds import Row

APPLY = "cat > /tmp/patch <<'END-OF-PATCH'\n{patch}END-OF-PATCH\ngit apply --whitespace=nowarn /tmp/patch"


def main() -> None:
    """Print one line a package."""
    needed("pytest", "pytest_cov", by=EXTRA.format("feature-deletion"))
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("packages", nargs="+")
    parser.add_argument("-n", type=int, default=20)
    parser.add_argument("--scope", choices=("full", "covering"), default="covering")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--verify", action="store_true")
    chosen = parser.parse_args()
    for package in chosen.packages:
        made = measure(package, chosen.n, chosen.scope, chosen.seed)
        if chosen.verify:
            verify(package, [one.row for one in made if one.row])


def measure(source: str, count: int, scope: str, seed: int) -> list[TriedRemoval]:
    """Make `count` tasks and say how long it took."""
    with tempfile.TemporaryDirectory() as folder:
        package = unpack(Path(source), Path(folder))
        with TaskGenerator(package, "bubblewrap") as generator:
            started = time.perf_counter()
            candidates = generator.candidates(seed, None, tuple(WEIGHTS), tuple(KEEP))
            tests_s = time.perf_counter() - started
            found = leaks.survey_copies(generator.sandbox, generator.texts, generator.requirements)
            search_s = time.perf_counter() - started - tests_s
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
        f"clock, {60 * accepted / cpu_s:.0f} by CPU; before: tests {tests_s:.1f} s, search {search_s:.1f} s, "
        f"{len(found.hidden)} files hidden; load {os.getloadavg()[0]:.1f}",
        flush=True,
    )
    what, goal = f"{package.label}, {scope}", ">= 60" if package.label.startswith("toolz") else None
    rates = [("the clock", spent_s), ("processor time", cpu_s)]
    claims = [
        records.measured(f"{what}: tasks a minute by {by}", 60 * accepted / took, n=accepted, goal=goal)
        for by, took in rates
    ]
    records.write(__file__, claims)
    return made


def verify(source: str, made: list[Row]) -> None:
    """Grade every task as delivered, with the original code, and its twin with the original code."""
    env, counts, started = FeatureDeletionEnv(package=source), Counter(), time.perf_counter()
    try:
        for row in (with_source(row, source, ()) for row in made):
            counts["unresolved without a patch"] += _graded(env, row, "") == 0.0
            counts["resolved with the original code"] += _graded(env, row, row["patch"]) == 1.0
            counts["twin unresolved with the original code"] += _graded(env, rows.twin(row), row["patch"]) == 0.0
    finally:
        env.close()
    print(f"{'':<22} of {len(made)}: {dict(counts)}, {time.perf_counter() - started:.0f} s", flush=True)
    claims = [
        records.measured(f"tasks of {Path(source).name}: {what}", counts[what] / len(made), n=len(made), goal="= 1")
        for what in counts
    ]
    records.write(__file__, claims)


def _graded(env: FeatureDeletionEnv, row: Row, patch: str) -> float | None:
    env.reset(task(row))
    if patch:
        observation = env.step(fenced(APPLY.format(patch=patch)))
        assert observation.returncode == 0, observation.content
    return env.grade().reward


if __name__ == "__main__":
    main()
