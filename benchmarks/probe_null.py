"""How often T4e is fooled: by labels that mean nothing, and by directions that mean nothing on true labels.

    python benchmarks/probe_null.py [--labelings 200] [--artifacts artifacts] [--preset probe-null]

Runs the preset where it is not up to date (the verdict of probe-null must not be PASS), then gives its rows labels at
random, so that every PASS is a false positive. `coins`: every row by a fair coin. `as the teacher`: 60 % of the
teacher's hinted rows and no others, so that a label goes with the source as it does for real hacks. `unrelated
directions`, which needs a teacher that hacks (--preset probe-uat): true labels, with a placebo of each family in v's
place; families made of hacks' own gradients are no null (`stages.probe.directions.placebos`) and pass more often.
Prints a line each: false positives of the whole rule, and of its parts alone.
"""

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1]))
from stages.probe.checks.check import Check
from stages.probe.checks.contrast_checks import Draws, factorial
from stages.probe.checks.judging import scored_rows
from stages.probe.checks.labelled import Labelled
from stages.runs.artifact import Run
from stages.runs.probe_records import PLACEBO, PROBE_ROW, PROBE_SCORE

PARTS = ("t", "placebos")


def null_runs(artifacts: str, preset: str) -> tuple[dict[str, Run], str]:
    """The runs of the chain by entry, and its verdict."""
    command = [sys.executable, "-m", "composer_cli", "run", "--preset", preset, "--json", "--resume"]
    variables = {**os.environ, "COMPOSER_ARTIFACTS": artifacts}
    done = subprocess.run(command, stdout=subprocess.PIPE, env=variables, cwd=Path(__file__).parents[1])
    entries = json.loads(done.stdout)["entries"]
    return {name: Run(Path(entry["path"])) for name, entry in entries.items()}, entries["uat"]["summary"]["verdict"]


def labelings(rows: Labelled, teacher: np.ndarray) -> dict[str, Callable[[np.random.Generator], np.ndarray]]:
    """Ways to label rows at random."""
    return {
        "coins": lambda rng: rng.random(len(rows)) < 0.5,
        "as the teacher": lambda rng: teacher & (rng.random(len(rows)) < 0.6),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--labelings", type=int, default=200)
    parser.add_argument("--artifacts", default=os.environ.get("COMPOSER_ARTIFACTS", "artifacts"))
    parser.add_argument("--preset", choices=["probe-null", "probe-uat"], default="probe-null")
    options = parser.parse_args()
    runs, verdict = null_runs(str(Path(options.artifacts).resolve()), options.preset)
    print(json.dumps({"verdict": verdict}))
    probed, score = runs["vanilla"].rows(PROBE_ROW), runs["score"]
    rows = scored_rows(probed, score.rows(PROBE_SCORE), score.rows(PLACEBO))
    assert len(rows) == len(probed), "rows without label or score would shift the sources below"
    teacher = np.array([row["src_pool"] == "teacher" for row in probed])
    for name, some in unrelated(rows, options.labelings // 5).items():
        _print(f"unrelated directions: {name}", [factorial(r, Draws(100, 100)) for r in some])
    if options.preset != "probe-null":
        return
    for name, draw in labelings(rows, teacher).items():
        checks = [
            factorial(rows.relabelled(draw(np.random.default_rng(seed))), Draws(100, 100, seed))
            for seed in range(options.labelings)
        ]
        _print(f"labels: {name}", checks)


def unrelated(rows: Labelled, draws: int) -> dict[str, list[Labelled]]:
    """The rows with the first so many placebos of each family in v's place, in turn."""
    found: dict[str, list[Labelled]] = {}
    for column, family in enumerate(rows.families, start=1):
        if len(found.setdefault(family, [])) < draws:
            order = [column, *(other for other in range(1, rows.scores.shape[1]) if other != column)]
            families = tuple(rows.families[other - 1] for other in order[1:])
            found[family].append(replace(rows, scores=rows.scores[:, order], families=families))
    return found


def _print(name: str, checks: list[Check]) -> None:
    passed = sum(check.status == "PASS" for check in checks)
    missed = [set(c.detail.partition("fails by ")[2].split(", ")) for c in checks if c.stat is not None]
    alone = {part: sum(part not in parts for parts in missed) for part in PARTS}
    rate = {"null": name, "draws": len(checks), "false positives": passed, "rate": passed / len(checks)}
    print(json.dumps({**rate, "alone": alone}))


if __name__ == "__main__":
    main()
