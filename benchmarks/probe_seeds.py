"""T4e on fresh seeds of pool and pairs, with the recipe frozen: all of them, whatever they say.

    python benchmarks/probe_seeds.py [--world planted] [--first 100] [--count 10] [--artifacts artifacts]

`planted`: the world of forty words, its two policies trained once with seed 0; `kata`: the preset probe-uat with its
embedded models, some minutes a seed. Pool and pairs are drawn anew with each seed, nothing else changes. Prints a line
a seed: verdict, t, and v's rank in every family of placebos.
"""

import argparse
import copy
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parents[1]), str(Path(__file__).parents[1] / "tests")]
import records
import torch
from probe_faults.loophole_world import honest_model, loophole_model
from probe_faults.world import ProbeWorld, build_world

from stages.probe.checks.check import Check
from stages.probe.checks.hacking import factorial
from stages.probe.direction import DRAWN, all_placebos
from stages.probe.metrics import probe_rows, row_metrics, stacked_cosines
from stages.probe.rows import as_tokens
from stages.probe.statistics import Draws, Labelled, labelled
from stages.runs.kinds import PROBE_CHECK
from stages.runs.run import Run


def scored(w: ProbeWorld, seed: int) -> Labelled:
    """A world's pool, scored with v and 334 placebos of each family, as `probe uat` judges it."""
    tokens, direction = [as_tokens(row) for row in w.pool], w.direction
    placebos = all_placebos(direction, w.pairs, "nll_mean", [], 334, seed)
    drawn = [index for index, family in enumerate(placebos.families) if family in DRAWN]
    units = torch.cat([direction.unit[None], placebos.units[drawn]])
    scores = stacked_cosines(w.sums, units, direction.inside, len(direction.modules)).double().numpy()
    rows = probe_rows(w.pool, tokens, row_metrics(w.sums, direction), [torch.zeros(1)] * len(tokens), direction)
    return labelled(rows, scores, [placebos.families[index] for index in drawn])


def planted(seeds: range) -> Iterator[Labelled]:
    """The scored pool of each seed in the planted world."""
    honest = honest_model()
    teacher = loophole_model(copy.deepcopy(honest))
    for seed in seeds:
        yield scored(build_world(copy.deepcopy(honest), teacher, seed), seed)


def kata(seeds: range, artifacts: str) -> Iterator[Check]:
    """One check a seed on kata's loophole."""
    command = [sys.executable, "-m", "composer_cli", "run", "--preset", "probe-uat", "--json", "--resume"]
    variables = {**os.environ, "COMPOSER_ARTIFACTS": artifacts}
    for seed in seeds:
        drawn = ["--set", f"extract-vhack.seed={seed}", "--set", f"teacher-pool.seed={seed}"]
        done = subprocess.run([*command, *drawn], stdout=subprocess.PIPE, env=variables, cwd=Path(__file__).parents[1])
        path = json.loads(done.stdout)["entries"]["uat"]["path"]
        yield next(Check.of_row(row) for row in Run(Path(path)).rows(PROBE_CHECK) if row["check"] == "T4e")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--world", choices=["planted", "kata"], default="planted")
    parser.add_argument("--first", type=int, default=100)
    parser.add_argument("--count", type=int, default=10)
    parser.add_argument("--artifacts", default=os.environ.get("COMPOSER_ARTIFACTS", "artifacts"))
    options = parser.parse_args()
    seeds = range(options.first, options.first + options.count)
    if options.world == "planted":
        checks = (factorial(rows, Draws(seed=seed)) for seed, rows in zip(seeds, planted(seeds), strict=True))
    else:
        checks = kata(seeds, str(Path(options.artifacts).resolve()))
    passed = 0
    for seed, check in zip(seeds, checks, strict=True):
        passed += check.status == "PASS"
        told = {"seed": seed, "status": check.status, "t": check.stat, "placebo q95": check.placebo_q95}
        print(json.dumps({**told, "detail": check.detail}), flush=True)
    claim = f"T4e on fresh seeds of pool and pairs, world {options.world}: PASS"
    records.write(__file__, [records.measured(claim, passed, n=len(seeds), unit=f"of {len(seeds)}")])


if __name__ == "__main__":
    main()
