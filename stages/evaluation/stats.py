"""Statistics of one experiment: the paired difference of two arms and the rate of one, with interval and p-value.

Units sampled (the default): the mean over tasks of units like these. Units fixed (a benchmark's repositories): the mean
over tasks like these in these very units, which are strata; a second interval, normally too wide to decide anything,
covers other units. `paired` explains units, strata, training seeds and collections.

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
from stages.plurals import counted

ALPHA = 0.05
POWER = 0.80
TOLERANCE = 1e-9


@dataclass(frozen=True)
class PairedDifference:
    """Treatment minus baseline over the same tasks and training seeds.

    `p_value`, `low` and `high` are those of the deciding test. `cr2_low` and `cr2_high` are another interval over the
    same units. `mde` is the true difference that would be found in 80 % of such experiments, None where too few units
    exist for the test to find any (`fewest_units`). `elsewhere` is the interval for other units where those played are
    fixed, else None. `unit` is the noun for a unit. `num_collections`: of pairs that the trainings learnt from, 0 where
    none did. `wins` and `losses` are tasks that rose, fell.
    """

    estimate: float
    low: float
    high: float
    method: str
    num_tasks: int
    num_units: int
    num_seeds: int
    wins: int
    losses: int
    p_value: float
    cr2_low: float
    cr2_high: float
    mde: float | None
    elsewhere: tuple[float, float] | None = None
    unit: str = "family"
    num_collections: int = 0

    @property
    def significant(self) -> bool:
        """Return whether the interval excludes zero."""
        return self.low > 0 or self.high < 0

    @property
    def units(self) -> str:
        """Return the number of units with their noun: "12 operations"."""
        return counted(self.num_units, self.unit)


def fewest_units(alpha: float = ALPHA) -> int:
    """Return the fewest units with which sign flips can reject: with U of them the smallest p-value is 2**(1 - U)."""
    return int(np.floor(1 - np.log2(alpha))) + 1


def numbered(names: Sequence[str]) -> np.ndarray:
    """Return each name's number among the sorted names."""
    return np.unique(np.asarray(names, dtype=str), return_inverse=True)[1]


def paired_difference(
    treatment_ST: np.ndarray,
    baseline_ST: np.ndarray,
    units: Sequence[str],
    *,
    fixed: bool = False,
    collections: Sequence[str] = (),
    alpha: float = ALPHA,
    seed: int = 0,
    unit: str = "family",
) -> PairedDifference:
    """Compare two arms of outcomes (means over samples, 0..1; NaN where there is none; every task has one).

    units: each task's. collections: the pairs that each training seed learnt from, "" for none; empty where no seed has
    any. `alpha`: the two-sided level of every interval, lower than 5 % at one of several looks. unit: the noun.
    """
    if not len(units) or treatment_ST.shape != baseline_ST.shape or treatment_ST.shape[1:] != (len(units),):
        shapes = f"{list(treatment_ST.shape)} and {list(baseline_ST.shape)} outcomes and {len(units)} units"
        raise UsageError(
            "A comparison needs outcomes of both arms by training seed and task, and each task's unit; "
            f"it got {shapes}."
        )
    unit_T, num_collections = numbered(units), len(set(collections) - {""})
    collection_S = numbered(collections) if num_collections else None
    arms = treatment_ST[None], baseline_ST[None]
    test = FlipTest(paired.pair(*arms, unit_T, fixed=fixed, collection_S=collection_S), seed)
    low, high = test.interval(alpha)
    error, degrees = cr2(test.units)
    half = quantile(1 - alpha / 2, degrees) * error if error > TOLERANCE else 2.0  # no spread was observed: no interval
    d_T = np.nanmean(treatment_ST - baseline_ST, 0)
    elsewhere = None
    if fixed:
        elsewhere = FlipTest(paired.pair(*arms, unit_T, collection_S=collection_S), seed).interval(alpha)
    of = f"each task's difference within its {unit}" if fixed else f"each {unit}'s difference"
    method = f"paired permutation test (sign flips of {of}, {test.flips.draws}) and a score test; the larger p counts"
    if test.one.top_error_X is not None:
        level = "training seeds" if test.one.num_top == test.one.num_seeds else "collections of pairs"
        method += f"; Student's t over {test.one.num_top} {level}"
    return PairedDifference(
        estimate=test.units.mean,
        low=low,
        high=high,
        method=method,
        num_tasks=len(units),
        num_units=int(unit_T.max()) + 1,
        num_seeds=len(treatment_ST),
        wins=int((d_T > TOLERANCE).sum()),
        losses=int((d_T < -TOLERANCE).sum()),
        p_value=test.p(0.0),
        cr2_low=max(test.units.mean - half, -1.0),
        cr2_high=min(test.units.mean + half, 1.0),
        mde=test.detectable(error, degrees, alpha),
        elsewhere=elsewhere,
        unit=unit,
        num_collections=num_collections,
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
        if self.one.top_error_X is None:
            return self._p_units(np.array([mean]))
        # With a top level, `units_mean` depends on the level itself, so the level is found by bisection.
        low, high = 0.0, 1.0
        for _ in range(STEPS):
            middle = (low + high) / 2
            low, high = (low, middle) if self.rejects(mean, middle) else (middle, high)
        return high

    def detectable(self, error: float, degrees: float, alpha: float = ALPHA) -> float | None:
        """Return the true difference found with 80 % power under these standard errors, at most 1.

        None where the test cannot reject whatever is observed.
        """
        if len(self.units.sizes_U) < fewest_units(alpha):
            return None
        # The variances of units and the top level add; Student's t takes the fewer degrees of freedom, those of the
        # top level.
        if self.one.top_error_X is not None:
            error = float(np.hypot(error * np.sqrt(self.one.share_X[0]), self.one.top_error_X[0]))
            degrees = min(degrees, self.one.num_top - 1)
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


def rate_interval(
    values_ST: np.ndarray,
    unit_T: np.ndarray,
    *,
    fixed: bool = False,
    collection_S: np.ndarray | None = None,
) -> tuple[float, float]:
    """Return the 95 % interval of one arm's rate: sign flips over units, joined with Wilson's interval.

    values_ST: means of samples by training seed and task, NaN where there is none. unit_T: the unit of each task,
    numbered from 0; strata with `fixed`. From three training seeds on the interval is of other trainings, too.
    """
    values_T = np.nanmean(values_ST, 0)
    flipped_T = np.arange(len(unit_T)) if fixed else unit_T
    spread_T = paired.within_strata(values_T[None], unit_T)[0] if fixed else values_T
    units = UnitSums(np.bincount(flipped_T, spread_T), np.bincount(flipped_T).astype(float))
    low, high = Flips(units).interval(ALPHA, (0.0, 1.0))
    # Sign flips take deviations to be symmetric, which they are not near 0 and 1: with all outcomes equal they give an
    # interval of no width. Wilson's holds there, at the number of tasks that clustering leaves.
    deviations_T = values_T - units.mean
    if fixed:  # as in `paired.pair`: a stratum of equal outcomes counts as if one task differed
        squares_H = np.maximum(np.bincount(unit_T, (spread_T - units.mean) ** 2), 1)
        effect = min(squares_H.sum() / ((deviations_T**2).sum() + 1), 1.0)
    else:
        deviations_U = np.bincount(unit_T, deviations_T)
        effect = paired.design_effect(deviations_U[None], deviations_T[None], units.sizes_U)[0]
    least, most = wilson(units.mean, len(values_T) / effect)
    low, high = min(low, least), max(high, most)
    if len(values_ST) >= paired.MIN_SEEDS:
        error_X, num_top = paired.top_error(np.nanmean(values_ST, 1)[None], collection_S)
        of_top = quantile(1 - ALPHA / 2, num_top - 1) * float(error_X[0])
        # Distances of independent parts add in squares, as in `paired.units_mean`.
        low = max(units.mean - float(np.hypot(units.mean - low, of_top)), 0.0)
        high = min(units.mean + float(np.hypot(high - units.mean, of_top)), 1.0)
    return low, high


def wilson(rate: float, num_tasks: float) -> tuple[float, float]:
    """Return the 95 % Wilson score interval of a rate among a number of tasks that need not be whole."""
    z = 1.959963984540054
    middle, n = rate + z**2 / (2 * num_tasks), 1 + z**2 / num_tasks
    half = z * np.sqrt(rate * (1 - rate) / num_tasks + z**2 / (4 * num_tasks**2))
    return max(float((middle - half) / n), 0.0), min(float((middle + half) / n), 1.0)
