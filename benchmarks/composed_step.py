"""Our composed step beside what its parts cost: model and batches of train_step.py, in turn, medians of processor time.

    python benchmarks/composed_step.py [--rounds 9]

What a channel adds is a step of GRPO with it less a step of GRPO. `added`: GRPO and what each channel adds, once with
DPO and SDPO, once with all channels, TAID and EOPD towards a teacher of the same size. `apart`: DPO in a step of its
own instead, and SDPO as it adds to GRPO, whose rollouts it needs. 16 pairs, 16 hinted turns, 64 rollouts.

Also how long the pairs of a step take to be dealt from 100,000 of them.
"""

import argparse
import statistics
import tempfile
import time
from typing import Any

import records
import torch
from train_step import PAIRS, Step, measure, new_model, ours_dpo, ours_grpo, random_pairs

from stages.training.channels import CHANNELS
from stages.training.channels.hints import HintedTurn, HintSource
from stages.training.channels.pairs import PairSource, TokenPair
from stages.training.channels.rollouts import RolloutSource, own_rollout
from stages.training.config import Hints
from stages.training.scoring import Tree
from stages.training.step import Batch

MANY = 100_000


def rows_of(source: PairSource) -> Any:
    """The rows of all sources; a hinted turn is an answer again, behind a prompt with 16 tokens more."""

    def rows(rollouts: list[Any], step: int) -> Batch:
        samples = [rollout.steps[0].sample for rollout in rollouts[:16]]
        hinted = [
            HintedTurn(Tree(s.prompt_ids, (s.completion_ids,)), Tree(s.prompt_ids + [300] * 16, (s.completion_ids,)))
            for s in samples
        ]
        own = [rollout for rollout in map(own_rollout, rollouts) if rollout is not None]
        return Batch({"pairs": source.rows([], 0), "hinted": hinted, "rollouts": own})

    return rows


def dealt() -> tuple[float, float]:
    """Seconds to deal a step's pairs from many: the first step, which draws the order of a whole round; the median."""
    source = PairSource([TokenPair(str(i), Tree([1], ([2], [3]))) for i in range(MANY)], per_step=PAIRS, seed=0)
    times = []
    for step in range(1000):
        started = time.perf_counter()
        source.rows([], step)
        times.append(time.perf_counter() - started)
    return times[0], statistics.median(times)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=9)
    rounds = parser.parse_args().rounds
    torch.set_num_threads(1)
    pairs, every = random_pairs(), list(CHANNELS)
    source = PairSource(pairs, per_step=PAIRS, seed=0)
    source.cache_reference(new_model())
    teacher = new_model().eval().requires_grad_(False)

    with tempfile.TemporaryDirectory() as folder:

        def step(*names: str) -> Step:
            hinted = HintSource(Hints(), None, None, lambda step, found: None)
            sources = [source, hinted, RolloutSource(teacher)]
            return ours_grpo(folder, names, rows_of(source), sources, shared=True)

        steps = {"grpo": step(), "dpo alone": ours_dpo(pairs)} | {f"grpo + {name}": step(name) for name in every}
        times = measure(steps | {"grpo + dpo + sdpo": step("dpo", "sdpo"), "grpo + all": step(*every)}, rounds)
    for name, seconds in times.items():
        print(f"{name:<20}{1000 * statistics.median(seconds):>9.1f} ms")

    def added(*names: str) -> list[float]:
        """Of each round, a step of GRPO and what each channel adds to it."""
        parts = zip(times["grpo"], *(times[f"grpo + {name}"] for name in names), strict=True)
        return [grpo + sum(with_one - grpo for with_one in others) for grpo, *others in parts]

    apart = [grpo_sdpo + dpo for grpo_sdpo, dpo in zip(times["grpo + sdpo"], times["dpo alone"], strict=True)]
    of_added = "processor time beside GRPO and what each channel adds"
    compared = [
        (f"GRPO with DPO and SDPO in one step: {of_added}", "grpo + dpo + sdpo", added("dpo", "sdpo"), None),
        (
            "GRPO with DPO and SDPO in one step: processor time, DPO in a step of its own",
            "grpo + dpo + sdpo",
            apart,
            None,
        ),
        (f"GRPO with all {len(every)} channels in one step: {of_added}", "grpo + all", added(*every), "<= 0.8"),
    ]
    claims = []
    for claim, together, parts, goal in compared:
        claims.append(records.measured(claim, *records.ratio(times[together], parts), n=rounds, goal=goal))
        print(f"{claim}: {claims[-1].value:.2f}")
    first, each = dealt()
    print(f"{PAIRS} pairs of {MANY:,} dealt in {1000 * each:.3f} ms, in {1000 * first:.1f} ms at the first step")
    claims.append(records.measured(f"{PAIRS} pairs of {MANY:,} dealt to a step", 1000 * each, unit="ms", n=1000))
    records.write(__file__, claims)


if __name__ == "__main__":
    main()
