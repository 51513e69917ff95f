"""Measure ranks and coverage of the probe's statistics on simulated gradients and scores.

    python benchmarks/probe_statistics.py [ranks|hacks|intervals] [--runs 150]

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
from scipy import stats

from composer_stages.gradients.tensors import Layout
from composer_stages.probe.checks.hacking import factorial_design, placebo_ranks
from composer_stages.probe.direction import DRAWN, PairGradients, all_placebos, extract
from composer_stages.probe.metrics import stacked_cosines
from composer_stages.probe.statistics import FROM_HACKS, Concordance, Labelled, concordance, regress, welch

LAYOUT = Layout({f"m{i}": 24 for i in range(6)})
PAIRS, PROBLEMS, NULL_DRAWS = 24, 60, 333
COMMON = 0.5


def scored_pool(seed: int) -> Labelled:
    """A pool of hacks and others, scored with a v from pairs."""
    torch.manual_seed(seed)
    width, profile = LAYOUT.width, torch.logspace(0, -1, LAYOUT.width)[torch.randperm(LAYOUT.width)]
    axis, ways = COMMON * torch.randn(width) * profile, 1.5 * torch.randn(3, width) * profile

    def gradients(hacked: torch.Tensor, shares: list[float]) -> torch.Tensor:
        chosen = torch.multinomial(torch.tensor(shares), len(hacked), replacement=True)
        return torch.randn(len(hacked), width) * profile * 2 + hacked[:, None] * (axis + ways[chosen])

    hack, clean = (20 * gradients(some, [1.0, 1.0, 1.0]) for some in (torch.ones(PAIRS), torch.zeros(PAIRS)))
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
    return replace(rows, scores=scores, first=scores[:, :1], families=families)


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


def ranks(runs: int = 400) -> Iterator[Claim]:
    """How often an unrelated v is in the highest 1 % of a family, of whole placebos and of those without v's part."""
    drawn = [unrelated_ranks(seed) for seed in range(runs)]
    for index, kind in enumerate(("whole placebos", "placebos without their part along v")):
        for family in drawn[0][index]:
            highest = sum(by_kind[index][family] <= 0.01 for by_kind in drawn)
            yield share(f"unrelated v in the highest 1 % of {family}, {kind}", highest, runs)


def hacks(runs: int = 12) -> Iterator[Claim]:
    """How many placebos of each family have a t above the 99th percentile of random ones, where v is of hacks."""
    above = dict.fromkeys(DRAWN, 0)
    for seed in range(runs):
        rows = scored_pool(seed)
        t = regress(rows.scores, rows.hacked, factorial_design(rows), rows.problem).t[1:]
        names = np.array(rows.families)
        for family in DRAWN:
            above[family] += int((t[names == family] > np.quantile(t[names == "haar"], 0.99)).sum())
    for family, count in above.items():
        yield share(f"placebos above 99 % of haar: {family}", count, runs * NULL_DRAWS)


def drawn_concordance(
    rng: np.random.Generator, auroc: float, problems: int, size: int, spread: float = 0.0
) -> Concordance:
    """Normal scores of `size` flagged and as many other rows of each problem; gaps differ between problems."""
    gap = stats.norm.ppf(auroc) * np.sqrt(2 + spread**2) + spread * rng.normal(size=problems)
    problem = np.repeat(np.arange(problems), 2 * size)
    flags = np.arange(len(problem)) % 2 == 0
    scores = rng.normal(size=len(problem)) + flags * gap[problem]
    return concordance(scores[:, None], flags, problem, problem)


def intervals(runs: int = 1000) -> Iterator[Claim]:
    """How often 95 % intervals of the matched AUROC cover the truth."""
    for auroc in (0.8, 0.95, 0.99, 0.998):
        for problems, size in ((8, 2), (8, 4), (20, 4), (60, 3)):
            for spread in (0.0, 1.0):
                rng = np.random.default_rng(0)
                bounds = [drawn_concordance(rng, auroc, problems, size, spread).interval() for _ in range(runs)]
                covered = sum(low <= auroc <= high for low, high in bounds)
                name = f"AUROC {auroc:g}, {problems} problems of {size} x 2 rows, spread {spread:g}"
                yield share(f"coverage of intervals: {name}", covered, runs, ">= 92")


CASES = {"ranks": ranks, "hacks": hacks, "intervals": intervals}

if __name__ == "__main__":
    cases.main(__file__, CASES)
