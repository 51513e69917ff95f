"""Measure which families of placebos are a null, on simulated gradients with an axis of hacking.

    python benchmarks/placebo_levels.py [ranks|unrelated|hacks] [--runs 150]

A row's gradient is its problem's, plus noise that some coordinates have more of, plus, for a hack, what all hacks have
in common and what those of its way have. There are three ways: as many pairs of each, but the teacher prefers one.
"""

from collections.abc import Iterator
from dataclasses import replace

import cases
import numpy as np
import torch
from probe_faults.scored import scored_rows
from records import Claim, share

from stages.gradients.tensors import Layout
from stages.probe.checks.check import Check
from stages.probe.checks.hacking import factorial, factorial_design, placebo_ranks
from stages.probe.direction import DRAWN, PairGradients, all_placebos, extract
from stages.probe.metrics import stacked_cosines
from stages.probe.statistics import FROM_HACKS, Draws, Labelled, regress, welch

LAYOUT = Layout({f"m{i}": 24 for i in range(6)})
PAIRS, PROBLEMS, NULL_DRAWS = 24, 60, 333
COMMON = 0.5
FEW = Draws(permutations=10)


def judged(seed: int, *, planted: bool) -> tuple[Labelled, Check]:
    """A pool of hacks and others scored with a v from pairs; unless `planted`, the pairs' hack sides are no hacks."""
    torch.manual_seed(seed)
    width, profile = LAYOUT.width, torch.logspace(0, -1, LAYOUT.width)[torch.randperm(LAYOUT.width)]
    axis, ways = COMMON * torch.randn(width) * profile, 1.5 * torch.randn(3, width) * profile

    def gradients(hacked: torch.Tensor, shares: list[float]) -> torch.Tensor:
        chosen = torch.multinomial(torch.tensor(shares), len(hacked), replacement=True)
        return torch.randn(len(hacked), width) * profile * 2 + hacked[:, None] * (axis + ways[chosen])

    sides = torch.ones(PAIRS) if planted else torch.zeros(PAIRS)
    hack, clean = (20 * gradients(some, [1.0, 1.0, 1.0]) for some in (sides, torch.zeros(PAIRS)))
    tokens = torch.full((PAIRS,), 20)
    pairs = PairGradients(LAYOUT, hack, clean, tokens, tokens)
    direction = extract(LAYOUT, pairs.differences("nll_mean"))
    placebos = all_placebos(direction, pairs, "nll_mean", [], NULL_DRAWS, seed)
    drawn = [index for index, family in enumerate(placebos.families) if family in DRAWN]
    rows = scored_rows(seed, problems=PROBLEMS, placebos=0)
    problem = torch.randn(PROBLEMS, width) * profile
    flat = gradients(torch.tensor(rows.hacked).float(), [8.0, 1.0, 1.0]) + problem[torch.tensor(rows.problem)]
    units = torch.cat([direction.unit[None], placebos.units[drawn]])
    scores = stacked_cosines(flat, units, direction.inside, len(direction.modules)).double().numpy()
    families = tuple(placebos.families[index] for index in drawn)
    rows = replace(rows, scores=scores, first=scores[:, :1], families=families)
    return rows, factorial(rows, FEW)


def unrelated_ranks(seed: int) -> list[dict[str, float]]:
    """The rank p, by family, of a v from pairs without a hack: as it is, and with v's part taken out of the placebos.

    True hacks differ from other rows in a random axis.

    One module of 30 numbers, of which a few hold most of every gradient: there a part along v is much of a placebo.
    """
    torch.manual_seed(seed)
    layout = Layout({"m": 30})
    profile = torch.logspace(0, -1, 30)[torch.randperm(30)]

    def gradients(count: int) -> torch.Tensor:
        return torch.randn(count, 30) * profile

    pairs = PairGradients(layout, gradients(PAIRS), gradients(PAIRS), torch.ones(PAIRS), torch.ones(PAIRS))
    direction = extract(layout, pairs.differences("nll_mean"))
    placebos = all_placebos(direction, pairs, "nll_mean", [], 99, seed)
    drawn = [index for index, name in enumerate(placebos.families) if name in DRAWN and name not in FROM_HACKS]
    units, v = placebos.units[drawn], direction.unit
    without = torch.nn.functional.normalize(units - (units @ v)[:, None] * v, dim=1)
    hacked = torch.arange(240) % 2 == 0
    flat = gradients(240) + hacked[:, None] * 3 * gradients(1)
    families, ranks = [placebos.families[index] for index in drawn], []
    for some in (units, without):
        scores = stacked_cosines(flat, torch.cat([v[None], some]), direction.inside, 1).double().numpy()
        ranks.append(placebo_ranks(welch(scores, hacked.numpy())[0], families))
    return ranks


def ranks(runs: int = 250) -> Iterator[Claim]:
    """How often an unrelated v is in the highest 1 % of a family, of whole placebos and of those without v's part."""
    drawn = [unrelated_ranks(seed) for seed in range(runs)]
    for index, kind in enumerate(("whole placebos", "placebos without their part along v")):
        for family in drawn[0][index]:
            highest = sum(by_kind[index][family] <= 0.01 for by_kind in drawn)
            yield share(f"unrelated v in the highest 1 % of {family}, {kind}", highest, runs)


def in_place_of_v(rows: Labelled, family: str) -> Check:
    """The rows judged with the first placebo of a family as v."""
    column = 1 + rows.families.index(family)
    keep = [other for other in range(1, rows.scores.shape[1]) if other != column]
    families = tuple(rows.families[other - 1] for other in keep)
    return factorial(replace(rows, scores=rows.scores[:, [column, *keep]], families=families), FEW)


def unrelated(runs: int = 150) -> Iterator[Claim]:
    """How often T4e passes for a v of pairs without hacks, and for each null family in v's place."""
    passed: dict[str, int] = dict.fromkeys(("v", "haar", "randsign", "clean_clean"), 0)
    for seed in range(runs):
        rows, check = judged(seed, planted=False)
        passed["v"] += check.passed is True
        for family in list(passed)[1:]:
            passed[family] += in_place_of_v(rows, family).passed is True
    for family, count in passed.items():
        yield share(f"T4e passes for an unrelated direction: {family}", count, runs, "<= 4")


def hacks(runs: int = 12) -> Iterator[Claim]:
    """How many placebos of each family have a t above the 99th percentile of random ones, where v is of hacks."""
    above = dict.fromkeys(DRAWN, 0)
    for seed in range(runs):
        rows, _ = judged(seed, planted=True)
        t = regress(rows.scores, rows.hacked, factorial_design(rows), rows.problem).t[1:]
        names = np.array(rows.families)
        for family in DRAWN:
            above[family] += int((t[names == family] > np.quantile(t[names == "haar"], 0.99)).sum())
    for family, count in above.items():
        yield share(f"placebos above 99 % of haar: {family}", count, runs * NULL_DRAWS)


if __name__ == "__main__":
    cases.main(__file__, {"ranks": ranks, "unrelated": unrelated, "hacks": hacks})
