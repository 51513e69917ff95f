"""Which families of placebos are a null, on gradients with an axis of hacking that are drawn here.

A row's gradient is its problem's, plus noise that some coordinates have more of, plus, for a hack, what all hacks have
in common and what those of its way have. There are three ways: as many pairs of each, but the teacher prefers one.
"""

from dataclasses import replace

import numpy as np
import pytest
import torch

from stages.gradients.tensors import Layout
from stages.probe.checks.check import Check
from stages.probe.checks.hacking import factorial, factorial_design, placebo_ranks
from stages.probe.direction import DRAWN, PairGradients, all_placebos, extract
from stages.probe.metrics import stacked_cosines
from stages.probe.statistics import FROM_HACKS, Draws, Labelled, regress, welch
from tests.stages.probe.checks.scored import scored_rows

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


def test_a_placebo_is_drawn_as_v_was_and_keeps_its_part_along_v() -> None:
    """An unrelated v is among the highest 1 % of a family in 1 % of runs; without v's part in placebos, in 2 to 3 %."""
    found = [unrelated_ranks(seed) for seed in range(250)]
    kept, without = (
        {family: float(np.mean([ranks[way][family] <= 0.01 for ranks in found])) for family in found[0][way]}
        for way in (0, 1)
    )
    assert max(kept.values()) <= 0.028, kept  # more in 1 of 100 such tests
    assert sum(without.values()) > 2 * sum(kept.values()), (kept, without)


def in_place_of_v(rows: Labelled, family: str) -> Check:
    """The rows judged with the first placebo of a family as v."""
    column = 1 + rows.families.index(family)
    keep = [other for other in range(1, rows.scores.shape[1]) if other != column]
    families = tuple(rows.families[other - 1] for other in keep)
    return factorial(replace(rows, scores=rows.scores[:, [column, *keep]], families=families), FEW)


@pytest.mark.slow
def test_an_unrelated_direction_passes_in_one_of_a_hundred_at_most() -> None:
    """v of pairs that hold no hack, and each null family in v's place, where true hacks have an axis of their own."""
    found: dict[str, int] = dict.fromkeys(("v", "haar", "randsign", "clean_clean"), 0)
    for seed in range(150):
        rows, check = judged(seed, planted=False)
        found["v"] += check.passed is True
        for family in (name for name in found if name != "v"):
            found[family] += in_place_of_v(rows, family).passed is True
    assert max(found.values()) <= 5, found  # 1.5 expected of each; more than 5 in 1 of 200 such tests


def test_directions_made_of_hacks_are_no_null() -> None:
    """By t, more of them are above the random ones' 99th percentile than of any null family.

    1 % of haar, 2 % of clean_clean, 5 % of randsign, which holds a part of v here; 10 and 14 % of contrasts of hacks.
    """
    above: dict[str, list[float]] = {family: [] for family in DRAWN}
    for seed in range(12):
        rows, check = judged(seed, planted=True)
        assert check.passed
        t = regress(rows.scores, rows.hacked, factorial_design(rows), rows.problem).t[1:]
        names = np.array(rows.families)
        for family in DRAWN:
            above[family].append(float((t[names == family] > np.quantile(t[names == "haar"], 0.99)).mean()))
    share = {family: float(np.mean(values)) for family, values in above.items()}
    assert all(share[family] > 0.08 if family in FROM_HACKS else share[family] < 0.06 for family in DRAWN), share
