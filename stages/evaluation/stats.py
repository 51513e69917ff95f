"""Statistics of one experiment: the paired difference of two arms and the rate of one, with interval and p-value.

Families random (the default): the mean over tasks of families like these; families are the units. Families fixed (a
benchmark's repositories): the mean over tasks like these in these very families; tasks are the units, and a second
interval, normally too wide to decide anything, covers other families.

The deciding interval holds the means that `paired.rejects` does not reject. CR2 is reported with it: Bell and
McCaffrey, Survey Methodology 2002; degrees of freedom as in Pustejovsky and Tipton, JBES 2018, for a mean over
clusters. All rates and differences are fractions of one, not points. Axis names: S training seeds, T tasks, U units.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from stages.errors import UsageError
from stages.evaluation import paired
from stages.evaluation.flips import STEPS, Flips, UnitSums

ALPHA = 0.05
POWER = 0.80
TOLERANCE = 1e-9


@dataclass(frozen=True)
class PairedDifference:
    """Treatment minus baseline over the same tasks and training seeds.

    `p_value`, `low` and `high` are those of the deciding test. `cr2_low` and `cr2_high` are another interval over the
    same units. `mde` is the true difference that would be found in 80 % of such experiments. `elsewhere` is the
    interval for other families where those played are fixed, else None. `wins` and `losses` are tasks that rose, fell.
    """

    estimate: float
    low: float
    high: float
    method: str
    num_tasks: int
    num_families: int
    num_seeds: int
    wins: int
    losses: int
    p_value: float
    cr2_low: float
    cr2_high: float
    mde: float
    elsewhere: tuple[float, float] | None = None

    @property
    def significant(self) -> bool:
        """Return whether the interval excludes zero."""
        return self.low > 0 or self.high < 0


def paired_difference(
    treatment_ST: np.ndarray,
    baseline_ST: np.ndarray,
    families: Sequence[str],
    *,
    fixed: bool = False,
    alpha: float = ALPHA,
    seed: int = 0,
) -> PairedDifference:
    """Compare two arms of outcomes (means over samples, 0..1; NaN where there is none; every task has one).

    `alpha`: the two-sided level of every interval, lower than 5 % at one of several looks.
    """
    if not len(families) or treatment_ST.shape != baseline_ST.shape or treatment_ST.shape[1:] != (len(families),):
        shapes = f"{list(treatment_ST.shape)} and {list(baseline_ST.shape)} outcomes and {len(families)} families"
        raise UsageError(
            "A comparison needs outcomes of both arms by training seed and task, and each task's family; "
            f"it got {shapes}."
        )
    family_T = np.unique(np.asarray(families, dtype=str), return_inverse=True)[1]
    unit_T = np.arange(len(families)) if fixed else family_T
    test = FlipTest(paired.pair(treatment_ST[None], baseline_ST[None], unit_T), seed)
    low, high = test.interval(alpha)
    error, degrees = cr2(test.units)
    half = quantile(1 - alpha / 2, degrees) * error if error > TOLERANCE else 2.0  # no spread was observed: no interval
    d_T = np.nanmean(treatment_ST - baseline_ST, 0)
    over = "tasks, their families fixed" if fixed else "families"
    seeds = f", {len(treatment_ST)} training seeds on top" if len(treatment_ST) >= paired.MIN_SEEDS else ""
    elsewhere = None
    if fixed:
        elsewhere = FlipTest(paired.pair(treatment_ST[None], baseline_ST[None], family_T), seed).interval(alpha)
    return PairedDifference(
        estimate=test.units.mean,
        low=low,
        high=high,
        method=f"studentised sign flips over {over}{seeds}",
        num_tasks=len(families),
        num_families=int(family_T.max()) + 1,
        num_seeds=len(treatment_ST),
        wins=int((d_T > TOLERANCE).sum()),
        losses=int((d_T < -TOLERANCE).sum()),
        p_value=test.p(0.0),
        cr2_low=max(test.units.mean - half, -1.0),
        cr2_high=min(test.units.mean + half, 1.0),
        mde=test.detectable(error, degrees, alpha),
        elsewhere=elsewhere,
    )


class FlipTest:
    """`paired.rejects` for one experiment, as p-values and intervals."""

    def __init__(self, one: paired.Paired, seed: int = 0) -> None:
        self.one, self.units = one, UnitSums(one.sums_XU[0], one.sizes_U)
        self.flips = Flips(self.units, seed)

    def interval(self, alpha: float) -> tuple[float, float]:
        """Return the interval of differences that are not rejected, by bisection from the estimate to -1 and to 1."""
        limits = []
        for bound in (-1.0, 1.0):
            inside, outside = bound, bound
            if self.rejects(bound, alpha):
                inside = self.units.mean
                for _ in range(STEPS):
                    middle = (inside + outside) / 2
                    inside, outside = (inside, middle) if self.rejects(middle, alpha) else (middle, outside)
            limits.append(float(inside))
        # A p-value may rise again beyond a limit, so that 0 is not rejected though it lies outside: the interval then
        # reaches 0, and never contradicts the decision.
        low, high = limits
        return (low, high) if self.rejects(0.0, alpha) else (min(low, 0.0), max(high, 0.0))

    def rejects(self, mean: float, alpha: float) -> bool:
        """Return whether the true difference is shown not to be `mean`."""
        means_X, possible_X = paired.units_mean(self.one, mean, alpha)
        return bool(possible_X[0]) and self._p_units(means_X) < alpha

    def _p_units(self, means_X: np.ndarray) -> float:
        from scipy.stats import norm

        rare = 2 * norm.sf(abs(paired.score(self.one, means_X)[0]))
        return max(self.flips.p(float(means_X[0])), float(rare))

    def p(self, mean: float) -> float:
        """Return the smallest level at which `mean` is rejected."""
        if self.one.seed_error_X is None:
            return self._p_units(np.array([mean]))
        # With seeds on top, `units_mean` depends on the level itself, so the level is found by bisection.
        low, high = 0.0, 1.0
        for _ in range(STEPS):
            middle = (low + high) / 2
            low, high = (low, middle) if self.rejects(mean, middle) else (middle, high)
        return high

    def detectable(self, error: float, degrees: float, alpha: float = ALPHA) -> float:
        """Return the true difference found with 80 % power under these standard errors, at most 1."""
        # The variances of units and seeds add; Student's t takes the fewer degrees of freedom, those of the seeds.
        if self.one.seed_error_X is not None:
            error = float(np.hypot(error * np.sqrt(self.one.share_X[0]), self.one.seed_error_X[0]))
            degrees = min(degrees, self.one.num_seeds - 1)
        found = (quantile(1 - alpha / 2, degrees) + quantile(POWER, degrees)) * error
        return float(min(found, 1.0)) if error > TOLERANCE else 1.0


def cr2(units: UnitSums) -> tuple[float, float]:
    """Return the bias-reduced standard error of a mean over units and its degrees of freedom; (0, 1) for one unit."""
    # For a mean over clusters, CR2's matrix (I - H)^(-1/2) is the number 1 / sqrt(1 - share) for each unit.
    share_U = units.sizes_U / units.sizes_U.sum()
    if len(share_U) < 2:
        return 0.0, 1.0
    rest_U = units.sums_U - units.sizes_U * units.mean
    variance = (rest_U**2 / (1 - share_U)).sum() / units.sizes_U.sum() ** 2
    scale_U = 1 / np.sqrt(1 - share_U)
    # sum of squares of diag(share) - share share', scaled, without the matrix: there may be thousands of units
    off = ((share_U * scale_U) ** 2).sum() ** 2 - ((share_U * scale_U) ** 4).sum()
    return float(np.sqrt(variance)), float(share_U.sum() ** 2 / ((share_U**2).sum() + off))


def quantile(probability: float, degrees: float) -> float:
    """Return a quantile of Student's t."""
    from scipy.stats import t

    return float(t.ppf(probability, max(degrees, 1.0)))


def rate_interval(values_T: np.ndarray, unit_T: np.ndarray) -> tuple[float, float]:
    """Return the 95 % interval of one arm's rate: sign flips over units, joined with Wilson's interval.

    values_T: means of tasks. unit_T: the unit of each task, numbered from 0.
    """
    units = UnitSums(np.bincount(unit_T, values_T), np.bincount(unit_T).astype(float))
    low, high = Flips(units).interval(ALPHA, (0.0, 1.0))
    # Sign flips take deviations to be symmetric, which they are not near 0 and 1: with all outcomes equal they give an
    # interval of no width. Wilson's holds there, at the number of tasks that clustering leaves.
    deviations_T = values_T - units.mean
    deviations_U = np.bincount(unit_T, deviations_T)
    effect = paired.design_effect(deviations_U[None], deviations_T[None], units.sizes_U)[0]
    least, most = wilson(units.mean, len(values_T) / effect)
    return min(low, least), max(high, most)


def wilson(rate: float, num_tasks: float) -> tuple[float, float]:
    """Return the 95 % Wilson score interval of a rate among a number of tasks that need not be whole."""
    z = 1.959963984540054
    middle, n = rate + z**2 / (2 * num_tasks), 1 + z**2 / num_tasks
    half = z * np.sqrt(rate * (1 - rate) / num_tasks + z**2 / (4 * num_tasks**2))
    return max(float((middle - half) / n), 0.0), min(float((middle + half) / n), 1.0)
