"""Compare the items of two arms: paired by seed, task and sample, lost outcomes bounded, subsets tested.

A lost outcome leaves the comparison together with its counterpart; the bounds impute lost outcomes at their worst: as
if every lost rollout of one arm had failed and every lost one of the other had passed.

An evaluation may be decided at planned looks while it is running (`levels`, `parts`). Looking often and stopping at the
first small p finds something in nothing. The looks of O'Brien and Fleming (Biometrics 1979) are hard to pass early and
nearly the full test at the last: the sum of outcomes is compared with one bound at every look. The intervals at these
levels are repeated confidence intervals (Jennison and Turnbull, JRSS B 1989): all of them hold the truth together with
probability 1 - alpha, so one may stop at any look, for any reason, and continue after a decision, and the interval at
hand keeps its level. Looks are spaced equally over tasks. Where outcomes cluster in families or training seeds, early
looks hold more information than their share of tasks, so looks are more alike than the bound assumes, and the bound is
conservative.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from typing import Literal

import numpy as np

from stages.envs.base import SamplingUnit
from stages.evaluation import paired
from stages.evaluation.arms import Item, known, sampling_unit, unit
from stages.evaluation.stats import ALPHA, FlipTest, PairedDifference, paired_difference

Lost = Literal["left out", "against", "for"]
"""Assumption on rollouts without an outcome: none, or the worst or the best for the treatment."""
GRID = 101
"""Points of the density of a normal path; the bound is right to 1e-4."""
MIN_TASKS = 6
"""Of a subset: five tasks of one sign give 2 * 2**-5 = .0625 and cannot reach p < .05."""


@dataclass(frozen=True)
class PairedOutcomes:
    """Both arms as [S, T], NaN where nothing is known, with each task's family and unit and each seed's collection.

    A collection is named by the pair sets of both arms' trainings, "" where neither learnt from pairs.
    """

    treatment_ST: np.ndarray
    baseline_ST: np.ndarray
    families: tuple[str, ...]
    units: tuple[str, ...]
    seeds: tuple[int, ...]
    collections: tuple[str, ...]


@dataclass(frozen=True)
class Subset:
    """A part of the experiment: its difference, and p after Holm's correction over all secondary questions."""

    kind: str
    name: str
    estimate: float
    num_tasks: int
    p_value: float
    p_holm: float = 1.0
    alpha: float = ALPHA

    @property
    def gains(self) -> bool:
        """Return whether the part shows a gain at its level `alpha`."""
        return self.estimate > 0 and self.p_holm < self.alpha


def outcomes(treatment: list[Item], baseline: list[Item], field: str, lost: Lost = "left out") -> PairedOutcomes | None:
    """Return the outcomes known in both arms; None when there are none. A task without a family is its own family."""
    assumed = {"left out": (None, None), "against": (0.0, 1.0), "for": (1.0, 0.0)}[lost]
    ours, theirs = ({unit(item): item for item in arm} for arm in (treatment, baseline))
    # One cell for each seed and task: samples are averaged, so that a task counts once however often it was played.
    cells: dict[tuple[int, str], list[tuple[float, float]]] = {}
    families: dict[str, str] = {}
    units: dict[str, str] = {}
    pair_sets: dict[int, tuple[str, str]] = {}
    # Sorted, because the order of tasks is the order of units, from which the random signs are drawn.
    for key in sorted(ours.keys() & theirs.keys()):
        our, their = (
            float(item[field]) if known(item, field) else otherwise
            for item, otherwise in zip((ours[key], theirs[key]), assumed, strict=True)
        )
        if our is not None and their is not None:
            cells.setdefault(key[:2], []).append((our, their))
            families[key[1]] = ours[key]["family"] or key[1]
            units[key[1]] = sampling_unit(ours[key])
            pair_sets[key[0]] = (ours[key].get("pair_set") or "", theirs[key].get("pair_set") or "")
    if not cells:
        return None
    seeds, tasks = sorted({seed for seed, _ in cells}), list(families)
    both = np.full((2, len(seeds), len(tasks)), np.nan)
    seed_at, task_at = {s: i for i, s in enumerate(seeds)}, {t: i for i, t in enumerate(tasks)}
    for (seed, task), pairs in cells.items():
        # Not np.mean, which takes 25 us for a few numbers, and there are as many cells as items.
        both[:, seed_at[seed], task_at[task]] = [sum(side) / len(side) for side in zip(*pairs, strict=True)]
    collections = tuple(" ".join(filter(None, dict.fromkeys(pair_sets[seed]))) for seed in seeds)
    names = tuple(families.values()), tuple(units.values())
    return PairedOutcomes(both[0], both[1], *names, tuple(seeds), collections)


def compare(
    treatment: list[Item],
    baseline: list[Item],
    field: str = "passed",
    *,
    sampling: SamplingUnit = SamplingUnit(),  # noqa: B008 (frozen)
    lost: Lost = "left out",
    alpha: float = ALPHA,
) -> PairedDifference | None:
    """Return the paired difference of a boolean field; None when no item is known in both arms."""
    found = outcomes(treatment, baseline, field, lost)
    if found is None:
        return None
    return paired_difference(
        found.treatment_ST,
        found.baseline_ST,
        found.units,
        fixed=sampling.fixed,
        collections=found.collections,
        alpha=alpha,
        unit=sampling.noun,
    )


def gain_by_seed(treatment: list[Item], baseline: list[Item]) -> dict[str, float]:
    """Return the difference in pass@1 of each training seed."""
    found = outcomes(treatment, baseline, "passed")
    if found is None:
        return {}
    gains = np.nanmean(found.treatment_ST - found.baseline_ST, 1)
    return {str(seed): float(gain) for seed, gain in zip(found.seeds, gains, strict=True)}


def by_family(treatment: list[Item], baseline: list[Item]) -> list[Subset]:
    """Return the gain in each family that has enough tasks; within a family, tasks are the units."""
    found = outcomes(treatment, baseline, "passed")
    subsets: list[Subset] = []
    if found is None:
        return subsets
    for family in sorted(set(found.families)):
        at = [index for index, name in enumerate(found.families) if name == family]
        if len(at) >= MIN_TASKS:
            arms = (found.treatment_ST[None][:, :, at], found.baseline_ST[None][:, :, at])
            test = FlipTest(paired.pair(*arms, np.arange(len(at))))
            subsets.append(Subset("family", family, test.units.mean, len(at), test.p(0.0)))
    return subsets


def holm(p_values: Sequence[float]) -> list[float]:
    """Return Holm's adjusted p-values (Scandinavian Journal of Statistics 1979), in the order given."""
    adjusted, worst = [1.0] * len(p_values), 0.0
    # The running maximum keeps the adjusted values in the order of the raw ones.
    for rank, index in enumerate(sorted(range(len(p_values)), key=lambda i: p_values[i])):
        worst = max(worst, min(1.0, p_values[index] * (len(p_values) - rank)))
        adjusted[index] = worst
    return adjusted


@cache
def levels(num_looks: int, alpha: float = ALPHA) -> tuple[float, ...]:
    """Return the two-sided level of each look; a test that may pass at any of them has level `alpha` over all."""
    from scipy.optimize import brentq
    from scipy.stats import norm

    if num_looks == 1:
        return (alpha,)
    # At look k of K the bound on the z value is c * sqrt(K / k): nearly the full test at the last look.
    bound = brentq(lambda c: crossing(c * np.sqrt(num_looks), num_looks) - alpha, 1.0, 4.0, xtol=1e-6)
    return tuple(float(2 * norm.sf(bound * np.sqrt(num_looks / look))) for look in range(1, num_looks + 1))


def crossing(bound: float, num_looks: int) -> float:
    """Return the probability that a walk of standard normal steps ever leaves [-bound, bound]."""
    from scipy.stats import norm

    # The density of the walk while it has stayed inside, at Gauss-Legendre nodes; a step convolves it with the normal
    # density, and what is left of its mass at the end has not crossed.
    at, weight = (nodes * bound for nodes in np.polynomial.legendre.leggauss(GRID))
    step = norm.pdf(at[:, None] - at[None]) * weight[None]
    density = norm.pdf(at)
    for _ in range(num_looks - 1):
        density = step @ density
    return float(1 - density @ weight)


def parts(num_tasks: int, num_looks: int) -> list[range]:
    """Return the tasks that each look adds: as equal in number as possible, none of them empty."""
    ends = [round(num_tasks * look / num_looks) for look in range(num_looks + 1)]
    return [range(start, end) for start, end in pairwise(ends) if end > start]
