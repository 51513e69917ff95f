"""Statistics of paired experiments: intervals, tests and minimal detectable effects.

Tasks are the unit of pairing, families of tasks the unit of independence: tasks of one family succeed and fail
together, so every interval and every decisive p-value is taken over families. All rates and differences are fractions
of one, not points. scipy does the formulas. Axis names: T tasks, F families, U distinct magnitudes.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from stages.errors import UsageError

ALPHA = 0.05
POWER = 0.80
MIN_FAMILIES = 6  # five families of one sign give 2 * 2**-5 = .0625: fewer cannot reach p < .05
NUM_RESAMPLES = 4999
NUM_FLIPS = 9999
MAX_EXACT_FLIPS = 2**13
TOLERANCE = 1e-9


@dataclass(frozen=True)
class Interval:
    """A 95 % interval, the standard error that goes with it, and how both were found."""

    low: float
    high: float
    standard_error: float
    method: str


@dataclass(frozen=True)
class PairedDifference:
    """Treatment minus baseline over the same tasks.

    `p_value` is the sign-flip test over families and decides; `p_mcnemar` is the exact test on `wins` and `losses`
    (tasks that rose, fell), which takes tasks as independent. `mde` is the true difference that would be found in 80 %
    of such experiments.
    """

    estimate: float
    low: float
    high: float
    method: str
    num_tasks: int
    num_families: int
    wins: int
    losses: int
    p_mcnemar: float
    p_value: float
    mde: float

    @property
    def significant(self) -> bool:
        """Whether the test finds a difference and the interval leaves out zero."""
        return self.p_value < ALPHA and (self.low > 0 or self.high < 0)


def wilson(num_passed: int, num_tasks: int) -> tuple[float, float]:
    """The 95 % Wilson score interval of a pass rate; (0, 1) when nothing was tried."""
    from scipy.stats import binomtest

    if num_tasks == 0:
        return 0.0, 1.0
    interval = binomtest(num_passed, num_tasks).proportion_ci(method="wilson")
    return float(interval.low), float(interval.high)


def paired_difference(differences_T: Sequence[float], families: Sequence[str], seed: int = 0) -> PairedDifference:
    """Compare two arms by the difference of each task: mean over seeds and samples, treatment minus baseline, -1..1."""
    if not len(differences_T) or len(differences_T) != len(families):
        sizes = f"{len(differences_T)} tasks and {len(families)} families"
        raise UsageError(f"A comparison needs at least one task and the family of each; it got {sizes}.")
    d_T = np.asarray(differences_T, dtype=float)
    sums_F, sizes_F = family_totals(d_T, families)
    interval = cluster_interval(sums_F, sizes_F, seed)
    wins, losses = int((d_T > TOLERANCE).sum()), int((d_T < -TOLERANCE).sum())
    return PairedDifference(
        estimate=float(d_T.mean()),
        low=interval.low,
        high=interval.high,
        method=interval.method,
        num_tasks=len(d_T),
        num_families=len(sums_F),
        wins=wins,
        losses=losses,
        p_mcnemar=mcnemar(wins, losses),
        p_value=sign_flip(sums_F, seed),
        mde=minimal_detectable_effect(interval.standard_error, len(sums_F)),
    )


def family_totals(differences_T: np.ndarray, families: Sequence[str]) -> tuple[np.ndarray, np.ndarray]:
    """Sum of the differences and number of tasks, by family."""
    _, index_T = np.unique(np.asarray(families, dtype=str), return_inverse=True)
    return np.bincount(index_T, weights=differences_T), np.bincount(index_T)


def cluster_interval(sums_F: np.ndarray, sizes_F: np.ndarray, seed: int = 0) -> Interval:
    """The 95 % interval of the mean difference over tasks, families being independent."""
    means_F = sums_F / sizes_F
    if np.ptp(means_F) < TOLERANCE:
        return exact_bounds(means_F, means_F[0], means_F[0])
    if (np.abs(means_F) > TOLERANCE).sum() < MIN_FAMILIES:
        return exact_bounds(means_F, 0.0, sums_F.sum() / sizes_F.sum())
    return cluster_bootstrap(sums_F, sizes_F, seed)


def cluster_bootstrap(sums_F: np.ndarray, sizes_F: np.ndarray, seed: int) -> Interval:
    """BCa bootstrap that resamples whole families.

    The bootstrap of F families is too narrow by about sqrt((F-1)/F) and knows no t; its level is therefore raised as
    in Hesterberg, arXiv 1411.5279 ("expanded percentile"), which matters below some thirty families.
    """
    from scipy.stats import bootstrap, norm, t

    num_families = len(sums_F)
    correction = np.sqrt(num_families / (num_families - 1))
    tail = norm.sf(correction * t.isf(ALPHA / 2, num_families - 1))
    random = np.random.default_rng(seed)
    sampling = {"paired": True, "vectorized": True, "n_resamples": NUM_RESAMPLES, "batch": 500, "rng": random}
    result = bootstrap((sums_F, sizes_F), ratio_of_sums, method="BCa", confidence_level=1 - 2 * tail, **sampling)
    low, high = map(float, result.confidence_interval)
    return Interval(low, high, float(correction * result.standard_error), "BCa bootstrap over families")


def ratio_of_sums(sums_F: np.ndarray, sizes_F: np.ndarray, axis: int = -1) -> np.ndarray:
    """The mean over tasks from sums and sizes of families, [families] or resamples of them."""
    return sums_F.sum(axis=axis) / sizes_F.sum(axis=axis)


def exact_bounds(means_F: np.ndarray, center: float, estimate: float) -> Interval:
    """The interval where too few families differ from `center` to be resampled; free of any law for the differences.

    A mean of values in -1..1 is at most center + P(value > center) * (1 - center), and likewise below. The
    probabilities get their exact (Clopper-Pearson) 97.5 % upper limits, so that even data that are all equal leave
    room for what was not seen.
    """
    above, below = (means_F > center + TOLERANCE).sum(), (means_F < center - TOLERANCE).sum()
    high = max(estimate, center + upper_limit(int(above), len(means_F)) * (1 - center))
    low = min(estimate, center - upper_limit(int(below), len(means_F)) * (1 + center))
    half_width = max(high - estimate, estimate - low)
    return Interval(float(low), float(high), float(half_width / 1.96), "exact binomial bounds over families")


def upper_limit(count: int, num_families: int) -> float:
    """The exact 97.5 % upper limit of a proportion."""
    from scipy.stats import binomtest

    return float(binomtest(count, num_families).proportion_ci(0.95, method="exact").high)


def mcnemar(wins: int, losses: int) -> float:
    """Two-sided p of the exact McNemar test; 1 without discordant tasks."""
    from scipy.stats import binomtest

    return float(binomtest(wins, wins + losses).pvalue) if wins + losses else 1.0


def sign_flip(sums_F: np.ndarray, seed: int = 0) -> float:
    """Two-sided p of the mean under random signs of whole families.

    Exact up to 13 families that differ, and where all magnitudes are equal (McNemar's test); otherwise drawn at random,
    families of equal magnitude together, as a binomial number of positive signs.
    """
    size_U, count_U = np.unique(np.abs(sums_F[np.abs(sums_F) > TOLERANCE]).round(9), return_counts=True)
    if len(size_U) <= 1:
        return mcnemar(int((sums_F > TOLERANCE).sum()), int((sums_F < -TOLERANCE).sum()))
    observed = abs(sums_F.sum()) - 1e-6  # ties count as extreme, whatever the rounding
    if 2 ** int(count_U.sum()) <= MAX_EXACT_FLIPS:
        return float((np.abs(all_sign_sums(np.repeat(size_U, count_U))) >= observed).mean())
    positive = np.random.default_rng(seed).binomial(count_U, 0.5, size=(NUM_FLIPS, len(count_U)))
    extreme = np.abs((2 * positive - count_U) @ size_U) >= observed
    return float((extreme.sum() + 1) / (NUM_FLIPS + 1))


def all_sign_sums(sizes_F: np.ndarray) -> np.ndarray:
    """The sum under each of the 2**F assignments of signs."""
    return (2 * (np.arange(2 ** len(sizes_F))[:, None] >> np.arange(len(sizes_F)) & 1) - 1) @ sizes_F


def minimal_detectable_effect(standard_error: float, num_families: int) -> float:
    """The true difference found with 80 % power at p < .05 under this standard error (t over families), at most 1."""
    from scipy.stats import t

    degrees = max(num_families - 1, 1)
    return float(min((t.isf(ALPHA / 2, degrees) + t.ppf(POWER, degrees)) * standard_error, 1.0))
