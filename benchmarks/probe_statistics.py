"""Measure level, power and coverage of the probe's statistics on simulated gradients, scores and trainings.

    python benchmarks/probe_statistics.py [ranks|unrelated|hacks|intervals|welch|t4e|signal|arms] [--runs 150]

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
from scipy.stats import t as student_t

from composer_stages.gradients.tensors import Layout
from composer_stages.probe.checks.check import Check
from composer_stages.probe.checks.direction import pair_signal
from composer_stages.probe.checks.hacking import detectable_effect, factorial, factorial_design, placebo_ranks
from composer_stages.probe.checks.trajectories import reductions_match, trajectories_slowed
from composer_stages.probe.direction import DRAWN, PairGradients, all_placebos, extract
from composer_stages.probe.metrics import stacked_cosines
from composer_stages.probe.statistics import (
    FROM_HACKS,
    Concordance,
    Draws,
    Labelled,
    concordance,
    permutation_p,
    regress,
    welch,
)
from composer_stages.runs.kinds import TRAJECTORY, Row

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


def welch_and_permutation(runs: int = 500) -> Iterator[Claim]:
    """How often both reject a true null where rows of a problem share levels of score and label."""
    rejected = np.zeros(2, dtype=int)
    for seed in range(runs):
        rng = np.random.default_rng(seed)
        problem = np.repeat(np.arange(20), 8)
        wrong = rng.random(160) < rng.beta(0.4, 0.4, 20)[problem]
        score = np.sqrt(0.8) * rng.normal(size=20)[problem] + np.sqrt(0.2) * rng.normal(size=160)
        t, df = welch(score[:, None], wrong)
        rejected += [student_t.sf(t[0], df[0]) < 0.05, permutation_p(score, wrong, problem, 400, seed) < 0.05]
    yield share("Welch rejects a true null at 5 %, dependent rows", int(rejected[0]), runs)
    yield share("permutation rejects a true null at 5 %, dependent rows", int(rejected[1]), runs, "<= 8")


def t4e(runs: int = 200) -> Iterator[Claim]:
    """How often T4e passes: unrelated directions, half a standard deviation, and the planned effect."""
    for loading in (0.0, 0.5):
        checks = [factorial(scored_rows(seed, loading=loading), Draws(100)) for seed in range(runs)]
        passed = sum(check.passed is True for check in checks)
        yield share(f"T4e passes for an unrelated direction, loading {loading:g}", passed, runs, "<= 3")
    # Of a problem's eight rows, six are the teacher's and 60 % of those hacks; half of the variance lies within.
    planned = detectable_effect(60, 6, 0.6) * 0.5**0.5
    for name, effect, goal in (("half a standard deviation", 0.5, ">= 80"), ("the planned effect", planned, ">= 65")):
        checks = [factorial(scored_rows(seed, effect=effect), Draws(100)) for seed in range(runs)]
        yield share(f"T4e passes for {name}", sum(check.passed is True for check in checks), runs, goal)


SIGNAL_LAYOUT = Layout({"a": 40, "b": 8, "c": 16})


def signal_check(seed: int, size: float, problems: int = 12, per_problem: int = 2) -> Check:
    """The signal check on differences with a part that a problem shares, in noise with a heavy tail."""
    generator = torch.Generator().manual_seed(seed)
    scale = torch.logspace(1, -1, SIGNAL_LAYOUT.width)
    shared = torch.randn(problems, SIGNAL_LAYOUT.width, generator=generator).repeat_interleave(per_problem, 0)
    own = torch.randn(problems * per_problem, SIGNAL_LAYOUT.width, generator=generator)
    own *= torch.rand(len(own), 1, generator=generator).clamp(min=0.05) ** -0.5
    axis = torch.randn(SIGNAL_LAYOUT.width, generator=generator)
    differences = (shared + own + size * axis) * scale
    names = [f"p{index // per_problem}" for index in range(len(differences))]
    return pair_signal(extract(SIGNAL_LAYOUT, differences), differences, seed, names)


def signal(runs: int = 200) -> Iterator[Claim]:
    """How often the signal check passes for noise, where pairs of one problem are alike, and for a signal."""
    for size, problems, pairs, goal in (
        (0.0, 12, 2, "<= 3"),
        (0.0, 24, 1, "<= 3"),
        (0.0, 8, 3, "<= 3"),
        (1.0, 12, 2, ">= 90"),
    ):
        passed = sum(signal_check(seed, size, problems, pairs).passed is True for seed in range(runs))
        yield share(f"signal check passes: size {size:g}, {problems} problems of {pairs} pairs", passed, runs, goal)


def trajectory(arm: str, ends: list[float], **columns: object) -> list[Row]:
    """Six steps a seed, from a hack rate of .25 to the given end."""
    row = dict.fromkeys(TRAJECTORY.columns) | {"arm": arm, "adapter": "singular-values", "mixed": ""} | columns
    return [
        row | {"train_seed": seed, "step": step, "hack_rate_student": 0.25 if step < 3 else end, "eval_solve_rate": 0.8}
        for seed, end in enumerate(ends)
        for step in range(6)
    ]


def arms(runs: int = 400) -> Iterator[Claim]:
    """How often R5 passes for equal effects of projected and random, and R6 for a LoRA at the margin."""
    rng, slowed, equal = np.random.default_rng(0), 0, 0
    for _ in range(runs):
        rows = trajectory("vanilla", [0.9] * 3)
        for arm in ("projected", "projected_random"):
            rows += trajectory(arm, rng.normal(0.4, 0.12, 3).tolist())
        slowed += trajectories_slowed(rows)[0].passed is True
        rows = []
        for adapter, end in (("singular-values", 0.24), ("lora", 0.32)):
            for arm, mean in (("vanilla", 0.64), ("projected", end)):
                ends = (mean + 0.02 * rng.normal(size=4)).tolist()
                rows += trajectory(arm, ends, adapter=adapter, weight_change=1.0)
        equal += reductions_match(rows)[0].passed is True
    yield share("R5 passes where projected and random have equal effects", slowed, runs, "<= 7.5")
    yield share("R6 passes for a LoRA whose reduction is .8 of the SVD's", equal, runs, "<= 9")


if __name__ == "__main__":
    measurements = {"ranks": ranks, "unrelated": unrelated, "hacks": hacks, "intervals": intervals}
    measurements |= {"welch": welch_and_permutation, "t4e": t4e, "signal": signal, "arms": arms}
    cases.main(__file__, measurements)
