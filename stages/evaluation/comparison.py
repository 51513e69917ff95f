"""Items of two arms as a comparison: paired by seed, task and sample, lost outcomes bounded, subsets tested.

An outcome that was lost leaves the comparison together with its counterpart; the bounds are what it could have done at
worst: as if every lost rollout of one arm had failed and every lost one of the other had passed.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from typing import Literal

import numpy as np

from stages.evaluation import paired
from stages.evaluation.arms import Item, known, unit
from stages.evaluation.stats import ALPHA, PairedDifference, Test, paired_difference

Lost = Literal["left out", "against", "for"]
"""What is assumed of rollouts without an outcome: nothing, or all that speaks against or for the treatment."""
MIN_TASKS = 6
"""Of a subset: five tasks of one sign give 2 * 2**-5 = .0625 and cannot reach p < .05."""


@dataclass(frozen=True)
class Outcomes:
    """Both arms as [S, T], NaN where nothing is known, with the family of each task."""

    treatment_ST: np.ndarray
    baseline_ST: np.ndarray
    families: tuple[str, ...]
    seeds: tuple[int, ...]


@dataclass(frozen=True)
class Subset:
    """A part of the experiment: its difference, and p after Holm's correction over all secondary questions."""

    kind: str
    name: str
    estimate: float
    num_tasks: int
    p_value: float
    p_holm: float = 1.0

    @property
    def gains(self) -> bool:
        """Whether the part shows a gain."""
        return self.estimate > 0 and self.p_holm < ALPHA


def outcomes(treatment: list[Item], baseline: list[Item], field: str, lost: Lost = "left out") -> Outcomes | None:
    """The outcomes that both arms know; None when there are none. A task without a family is one of its own."""
    assumed = {"left out": (None, None), "against": (0.0, 1.0), "for": (1.0, 0.0)}[lost]
    ours, theirs = ({unit(item): item for item in arm} for arm in (treatment, baseline))
    cells: dict[tuple[int, str], list[tuple[float, float]]] = {}
    families: dict[str, str] = {}
    for key in sorted(ours.keys() & theirs.keys()):
        our, their = _value(ours[key], field, assumed[0]), _value(theirs[key], field, assumed[1])
        if our is not None and their is not None:
            cells.setdefault(key[:2], []).append((our, their))
            families[key[1]] = ours[key]["family"] or key[1]
    if not cells:
        return None
    seeds, tasks = sorted({seed for seed, _ in cells}), list(families)
    both = np.full((2, len(seeds), len(tasks)), np.nan)
    seed_at, task_at = {s: i for i, s in enumerate(seeds)}, {t: i for i, t in enumerate(tasks)}
    for (seed, task), pairs in cells.items():
        both[:, seed_at[seed], task_at[task]] = np.mean(pairs, axis=0)
    return Outcomes(both[0], both[1], tuple(families.values()), tuple(seeds))


def _value(item: Item, field: str, otherwise: float | None) -> float | None:
    return float(item[field]) if known(item, field) else otherwise


def compare(
    treatment: list[Item],
    baseline: list[Item],
    field: str = "passed",
    *,
    fixed: bool = False,
    lost: Lost = "left out",
    alpha: float = ALPHA,
) -> PairedDifference | None:
    """The paired difference of a yes-or-no field; None when no item is known in both arms."""
    found = outcomes(treatment, baseline, field, lost)
    if found is None:
        return None
    return paired_difference(found.treatment_ST, found.baseline_ST, found.families, fixed=fixed, alpha=alpha)


def gain_by_seed(treatment: list[Item], baseline: list[Item]) -> dict[str, float]:
    """The difference in pass@1 of each training seed."""
    found = outcomes(treatment, baseline, "passed")
    if found is None:
        return {}
    gains = np.nanmean(found.treatment_ST - found.baseline_ST, 1)
    return {str(seed): float(gain) for seed, gain in zip(found.seeds, gains, strict=True)}


def by_family(treatment: list[Item], baseline: list[Item]) -> list[Subset]:
    """The gain in each family that has enough tasks; within a family, tasks are the units."""
    found = outcomes(treatment, baseline, "passed")
    subsets: list[Subset] = []
    if found is None:
        return subsets
    for family in sorted(set(found.families)):
        at = [index for index, name in enumerate(found.families) if name == family]
        if len(at) >= MIN_TASKS:
            arms = (found.treatment_ST[None][:, :, at], found.baseline_ST[None][:, :, at])
            test = Test(paired.pair(*arms, np.arange(len(at))))
            subsets.append(Subset("family", family, test.units.mean, len(at), test.p(0.0)))
    return subsets


def holm(p_values: Sequence[float]) -> list[float]:
    """Holm's adjusted p-values (Scandinavian Journal of Statistics 1979), in the order given."""
    adjusted, worst = [1.0] * len(p_values), 0.0
    for rank, index in enumerate(sorted(range(len(p_values)), key=lambda i: p_values[i])):
        worst = max(worst, min(1.0, p_values[index] * (len(p_values) - rank)))
        adjusted[index] = worst
    return adjusted


# ---- looks
# Planned looks at an evaluation that is still going on, so that it can end when it is decided.
#
# Looking often and stopping at the first small p finds something in nothing. The looks of O'Brien and Fleming
# (Biometrics 1979) are hard to pass early and nearly the full test at the last: the sum of outcomes is compared with
# one bound at every look. The intervals at these levels are repeated confidence intervals (Jennison and Turnbull, JRSS
# B 1989): all of them hold the truth together with probability 1 - alpha, so one may stop at any look, for any reason,
# and go on after a decision, and the interval at hand is as good as it says. Looks are spaced equally over tasks.
# Where
# outcomes cluster in families or training seeds, early looks know more than their share of tasks, so looks are more
# alike than the bound assumes, and it errs on the safe side.

GRID = 101
"""Points of a normal path's density; the bound is right to 1e-4."""


@cache
def levels(num_looks: int, alpha: float = ALPHA) -> tuple[float, ...]:
    """The two-sided level of each look; a test that passes at any of them has level `alpha` over all."""
    from scipy.optimize import brentq
    from scipy.stats import norm

    if num_looks == 1:
        return (alpha,)
    bound = brentq(lambda c: crossing(c * np.sqrt(num_looks), num_looks) - alpha, 1.0, 4.0, xtol=1e-6)
    return tuple(float(2 * norm.sf(bound * np.sqrt(num_looks / look))) for look in range(1, num_looks + 1))


def crossing(bound: float, num_looks: int) -> float:
    """How probable it is that a walk of standard normal steps ever leaves [-bound, bound]."""
    from scipy.stats import norm

    at, weight = (nodes * bound for nodes in np.polynomial.legendre.leggauss(GRID))
    step = norm.pdf(at[:, None] - at[None]) * weight[None]
    density = norm.pdf(at)
    for _ in range(num_looks - 1):
        density = step @ density
    return float(1 - density @ weight)


def parts(num_tasks: int, num_looks: int) -> list[range]:
    """The tasks that each look adds: as equal in number as whole tasks allow, none of them empty."""
    ends = [round(num_tasks * look / num_looks) for look in range(num_looks + 1)]
    return [range(start, end) for start, end in pairwise(ends) if end > start]
