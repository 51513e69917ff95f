"""How often T4e is fooled: by labels that mean nothing, and by directions that mean nothing on true labels.

    python benchmarks/probe_null.py [--labelings 200] [--draws 334] [--artifacts artifacts] [--preset probe-null]
    python benchmarks/probe_null.py --planted 10

Runs the preset where it is not up to date (the verdict of probe-null must not be PASS), then gives its rows labels at
random, so that every PASS is a false positive. `coins`: every row by a fair coin. `as the teacher`: 60 % of the
teacher's hinted rows and no others, so that a label goes with the source as it does for real hacks. `unrelated
directions`, which needs a teacher that hacks (--preset probe-uat): true labels, with a placebo of each family in v's
place; families made of hacks' own gradients are no null (`stages.probe.direction`) and pass more often. One
regression gives t of all of them, so each costs nothing; the first of a family are held against the check itself.
`--planted N`: the latter on N pools of the planted world (`probe_seeds`), whose policies are trained in seconds.
Prints a line each: false positives of the whole rule, their rate with its upper 95 % bound (Clopper and Pearson), and
those of its parts alone.
"""

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import records
from scipy.stats import beta

sys.path[:0] = [str(Path(__file__).parents[1]), str(Path(__file__).parents[1] / "tests")]
from probe_seeds import planted

from stages.probe.checks.check import Check
from stages.probe.checks.hacking import MAX_P, MIN_T, factorial, factorial_design, scored_rows
from stages.probe.direction import DRAWN
from stages.probe.statistics import FROM_HACKS, Draws, Labelled, regress
from stages.runs.kinds import PLACEBO, PROBE_ROW, PROBE_SCORE
from stages.runs.run import Run

PARTS = ("t", "placebos")
CHECKED = 3
"""Draws of a family that are held against the check itself."""


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
    parser.add_argument("--draws", type=int, default=334)
    parser.add_argument("--artifacts", default=os.environ.get("COMPOSER_ARTIFACTS", "artifacts"))
    parser.add_argument("--preset", choices=["probe-null", "probe-uat"], default="probe-null")
    parser.add_argument("--planted", type=int, default=0)
    options = parser.parse_args()
    if options.planted:
        _pooled([unrelated(rows, options.draws) for rows in planted(range(100, 100 + options.planted))])
        return
    runs, verdict = null_runs(str(Path(options.artifacts).resolve()), options.preset)
    print(json.dumps({"verdict": verdict}))
    probed, score = runs["vanilla"].rows(PROBE_ROW), runs["score"]
    rows = scored_rows(probed, score.rows(PROBE_SCORE), score.rows(PLACEBO))
    assert len(rows) == len(probed), "rows without label or score would shift the sources below"
    teacher = np.array([row["src_pool"] == "teacher" for row in probed])
    for name, told in unrelated(rows, options.draws).items():
        print(json.dumps({"null": f"unrelated directions: {name}", **told}))
    if options.preset != "probe-null":
        return
    for name, draw in labelings(rows, teacher).items():
        checks = [
            factorial(replace(rows, hacked=draw(np.random.default_rng(seed))), Draws(100, seed))
            for seed in range(options.labelings)
        ]
        _print(f"labels: {name}", checks)


def unrelated(rows: Labelled, draws: int) -> dict[str, dict[str, Any]]:
    """By family, how many of the first so many placebos pass T4e in v's place; they are left out of their own null."""
    fit = regress(rows.scores, rows.hacked, factorial_design(rows), rows.problem)
    t, p, effects, names = fit.t, fit.p, fit.estimate, np.array(("v", *rows.families))
    nulls = [family for family in dict.fromkeys(rows.families) if family not in FROM_HACKS and family in DRAWN]
    found: dict[str, dict[str, Any]] = {}
    for family in (name for name in dict.fromkeys(rows.families) if name in DRAWN):
        columns = np.flatnonzero(names == family)[:draws]
        worst = [max(_rank(effects, names == null, column) for null in nulls) for column in columns]
        by_t, by_rank = (t[columns] > MIN_T) & (p[columns] < MAX_P), np.array(worst) <= MAX_P
        for column, passed in list(zip(columns, by_t & by_rank, strict=True))[:CHECKED]:
            assert (factorial(_in_place(rows, column), Draws(100)).status == "PASS") == passed
        told = _rate(int((by_t & by_rank).sum()), len(columns))
        found[family] = {**told, "alone": {"t": int(by_t.sum()), "placebos": int(by_rank.sum())}}
    return found


def _pooled(pools: list[dict[str, dict[str, Any]]]) -> None:
    """One line a family over several pools."""
    for family in pools[0]:
        passed, draws = (sum(pool[family][name] for pool in pools) for name in ("false positives", "draws"))
        null = "" if family not in FROM_HACKS else ", which is no null"
        claim = f"T4e with a direction of {family}{null}, in place of v, {len(pools)} planted worlds: false PASS"
        between = _interval(passed, draws)
        goal = None if null else "<= 0.01"
        records.write(__file__, [records.measured(claim, passed / draws, between, n=draws, goal=goal)])
        told = {"null": f"unrelated directions: {family}", "pools": len(pools), **_rate(passed, draws)}
        print(json.dumps({**told, "by pool": [pool[family]["false positives"] for pool in pools]}))


def _rank(effects: np.ndarray, null: np.ndarray, column: int) -> float:
    """p of a column's effect among those of a family, itself left out."""
    others = null & (np.arange(len(effects)) != column)
    return float((1 + (effects[others] >= effects[column]).sum()) / (1 + others.sum()))


def _in_place(rows: Labelled, column: int) -> Labelled:
    """The rows with a placebo in v's place."""
    order = [column, *(other for other in range(1, rows.scores.shape[1]) if other != column)]
    return replace(rows, scores=rows.scores[:, order], families=tuple(rows.families[other - 1] for other in order[1:]))


def _interval(passed: int, draws: int) -> tuple[float, float]:
    """95 % by Clopper and Pearson."""
    low = 0.0 if passed == 0 else float(beta.ppf(0.025, passed, draws - passed + 1))
    return low, 1.0 if passed == draws else float(beta.ppf(0.975, passed + 1, draws - passed))


def _rate(passed: int, draws: int) -> dict[str, object]:
    bound = 1.0 if passed == draws else float(beta.ppf(0.95, passed + 1, draws - passed))
    return {"draws": draws, "false positives": passed, "rate": passed / draws, "at most": round(bound, 4)}


def _print(name: str, checks: list[Check]) -> None:
    passed = sum(check.status == "PASS" for check in checks)
    missed = [set(c.detail.partition("fails by ")[2].split(", ")) for c in checks if c.stat is not None]
    alone = {part: sum(part not in parts for parts in missed) for part in PARTS}
    print(json.dumps({"null": name, **_rate(passed, len(checks)), "alone": alone}))
    claim, between = f"T4e on rows of probe-null, {name}: false PASS", _interval(passed, len(checks))
    records.write(__file__, [records.measured(claim, passed / len(checks), between, n=len(checks), goal="<= 0.05")])


if __name__ == "__main__":
    main()
