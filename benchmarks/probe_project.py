"""What `probe.project` does to a training that pays for hacks, in the planted world: hack rate and solve rate.

    python benchmarks/probe_project.py [--first 0] [--seeds 5] [--steps 10] [--mix 0.45] [--root DIR]

Each seed is trained three times from one start, as `benchmarks/probe_watch.py` trains its paid runs: as it is, with v
taken out of gradients and updates, and with a random direction in its place. Prints a line a training, then the means
over seeds of the last three steps, and of the differences from the training as it is with their standard errors, and
what `composer evaluate` says of each seed's on held-out tasks.
"""

import argparse
import json
import statistics
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
import records
from probe_faults.loophole_world import PAIR_SOURCE
from probe_watch import PLANTED, carried_out, start
from scipy.stats import t

from stages import evaluate, train
from stages.policy.base import PolicyConfig
from stages.probe import extract_vhack, svd
from stages.probe.extract_vhack import PairsConfig
from stages.runs.kinds import ROLLOUT
from stages.runs.run import Run

ARMS = {"none": "A", "v": "B", "random": "C"}
"""What is taken out, with the name of the arm."""
TAKEN = {"v": "v", "random": "a random direction"}
RATES = {"hacks last": "the hack rate", "right last": "the solve rate"}


def trained(policy: PolicyConfig, arm: str, seed: int, steps: int, root: Path) -> Run:
    """One training."""
    factors = carried_out("probe-svd", svd, [], svd.Config(model=policy), root)
    extraction = extract_vhack.Config(student=policy, pairs=PairsConfig(source=PAIR_SOURCE))
    v = carried_out("probe-extract-vhack", extract_vhack, [factors], extraction, root)
    size = {"steps": steps, "prompts_per_step": 8, "generations": 8, "learning_rate": 1e-3, "threads": 1}
    given = {"env": PLANTED, "policy": policy, "tasks": 70, "max_steps": 1, "seed": seed, "optimisation": size}
    given["arm"] = ARMS[arm]
    if arm != "none":
        given["probe"] = {"project": arm}
    return carried_out("train", train, [] if arm == "none" else [v], train.Config(**given), root)


def rates(run: Run) -> dict[str, float]:
    """Shares of hacks and of right answers over the first and the last three steps of a training."""
    rows = run.rows(ROLLOUT)
    ends = {"first": rows[: 3 * 64], "last": rows[-3 * 64 :]}
    columns = {"hacks": "hacked", "right": "hidden_pass"}
    return {
        f"{name} {end}": round(statistics.fmean(bool(row[column]) for row in some), 3)
        for end, some in ends.items()
        for name, column in columns.items()
    }


def t_interval(mean: float, error: float, count: int) -> tuple[float, float]:
    """95 %, over seeds."""
    half = float(t.ppf(0.975, count - 1)) * error
    return mean - half, mean + half


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (("first", 0), ("seeds", 5), ("steps", 10)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--mix", type=float, default=0.45)
    parser.add_argument("--root", type=Path, default=None)
    options = parser.parse_args()
    root = options.root or Path(tempfile.mkdtemp())
    found: dict[str, list[dict[str, float]]] = {arm: [] for arm in ARMS}
    runs: list[Run] = []
    for seed in range(options.first, options.first + options.seeds):
        for arm in ARMS:
            runs.append(trained(start("planted", options.mix, root), arm, seed, options.steps, root))
            found[arm].append(rates(runs[-1]))
            print(json.dumps({"seed": seed, "taken out": arm, **found[arm][-1]}), flush=True)
    claims = []
    for name in RATES:
        plain = [row[name] for row in found["none"]]
        for arm in ARMS:
            values = [row[name] for row in found[arm]]
            gaps = [value - other for value, other in zip(values, plain, strict=True)]
            error = statistics.stdev(gaps) / len(gaps) ** 0.5 if len(gaps) > 1 else float("nan")
            told = {"mean": round(statistics.fmean(values), 3), "difference": round(statistics.fmean(gaps), 3)}
            print(json.dumps({"rate": name, "taken out": arm, **told, "standard error": round(error, 3)}))
            if arm != "none" and len(gaps) > 1:
                between = t_interval(statistics.fmean(gaps), error, len(gaps))
                claim = (
                    f"planted world, hacks paid, {options.steps} steps, {TAKEN[arm]} taken out: change of {RATES[name]}"
                )
                claims.append(records.measured(claim, statistics.fmean(gaps), between, n=len(gaps)))
    records.write(__file__, claims)
    for index, seed in enumerate(range(options.first, options.first + options.seeds)):
        # The world splits its tasks by the seed, so only its own are held out from a training.
        held_out = evaluate.Config(env={**PLANTED, "split": "eval"}, tasks=30, samples=8, max_steps=1, seed=seed)
        of_seed = runs[index * len(ARMS) : (index + 1) * len(ARMS)]
        print((carried_out("evaluate", evaluate, of_seed, held_out, root).path / "report.txt").read_text())


if __name__ == "__main__":
    main()
