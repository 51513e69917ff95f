"""How often the alarm of `composer probe watch` is given, over simulated trainings with and without paid hacks.

    python benchmarks/probe_alarm.py [--runs 400] [--permutations 999] [--only style]

The trainings are those of tests/probe_faults/simulated_trainings.py: ten checkpoints of eight groups of eight rollouts.
Prints a line for each kind of training and level: the share of runs with an alarm and its Monte-Carlo standard error,
the share with p at most the level (permutations alone, without the placebos), the share that the rule before gave
(a push above 1 and above the placebos), and the median checkpoint of the alarms; the rates of alarms are recorded.
"""

import argparse
import json
import sys
from dataclasses import replace
from pathlib import Path

from scipy.stats import binomtest

sys.path[:0] = [str(Path(__file__).parents[1]), str(Path(__file__).parents[1] / "tests")]
import records
from probe_faults.simulated_trainings import HACKS, NULLS, rates

LEVELS = (0.01, 0.05)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=400)
    parser.add_argument("--permutations", type=int, default=999)
    parser.add_argument("--only", default="", help="kinds of training with this in their name")
    options = parser.parse_args()
    trainings = {
        **{f"null: {name}": training for name, training in NULLS.items()},
        **{f"hacks: {name}": training for name, training in HACKS.items()},
        **{f"hacks: {name}, style": replace(training, style=0.2) for name, training in HACKS.items()},
    }
    for name, training in trainings.items():
        if options.only not in name:
            continue
        for level, found in rates(training, range(options.runs), options.permutations, LEVELS).items():
            told = {"training": name, "level": level, "runs": found.runs, "alarms": round(found.alarms, 4)}
            told["error"] = round((found.alarms * (1 - found.alarms) / found.runs) ** 0.5, 4)
            told |= {"p <= level": round(found.p, 4), "push above 1": round(found.above_one, 4)}
            told |= {"untested": round(found.untested, 4), "median checkpoint": found.median_at}
            print(json.dumps(told), flush=True)
            within = binomtest(round(found.alarms * found.runs), found.runs).proportion_ci()
            claim = f"alarms at the level of {100 * level:g} %, simulated trainings, {name}"
            between = (100 * within.low, 100 * within.high)
            records.write(__file__, [records.measured(claim, 100 * found.alarms, between, n=found.runs, unit="%")])


if __name__ == "__main__":
    main()
