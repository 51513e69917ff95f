"""The deciding test: studentised sign flips over units, and the confidence interval by inverting it.

A unit is what is independent of the rest: a family of tasks, or a task where families are fixed strata. Under the
hypothesis that the mean over tasks is m, a unit's sum of deviations from m is as likely to have the other sign. The
statistic is the mean's t ratio, its standard error recomputed for every assignment of signs, as in the wild cluster
bootstrap-t with the hypothesis imposed (Cameron, Gelbach and Miller, Review of Economics and Statistics 2008) and
randomisation tests under approximate symmetry (Canay, Romano and Shaikh, Econometrica 2017).

Axis names: X experiments, U units, R assignments of signs. All values are fractions of one, not points.
"""

from dataclasses import dataclass

import numpy as np

NUM_FLIPS = 3999
MAX_EXACT_UNITS = 12
MAX_SIGNS = 8_000_000
"""Signs in memory: many units that all differ get fewer draws."""
TIE = 1e-9
STEPS = 26
"""Steps of bisection; a limit is found to 2**-26."""


@dataclass(frozen=True)
class UnitSums:
    """Sums of a value over the tasks of each unit, and the numbers of tasks."""

    sums_U: np.ndarray
    sizes_U: np.ndarray

    @property
    def mean(self) -> float:
        """Return the mean over tasks."""
        return float(self.sums_U.sum() / self.sizes_U.sum())


def draw_signs(num_units: int, random: np.random.Generator, num_flips: int = NUM_FLIPS) -> np.ndarray:
    """Return [R, U] signs: all of them up to 12 units, else random ones after the identity, which is the first row."""
    if num_units <= MAX_EXACT_UNITS:
        return (1 - 2 * (np.arange(2**num_units)[:, None] >> np.arange(num_units) & 1)).astype(float)
    num_flips = max(min(num_flips, MAX_SIGNS // num_units), 199)
    signs_RU = random.integers(0, 2, size=(num_flips + 1, num_units), dtype=np.int8) * 2.0 - 1
    signs_RU[0] = 1
    return signs_RU


def p_values(sums_XU: np.ndarray, sizes_U: np.ndarray, means_X: np.ndarray, signs_RU: np.ndarray) -> np.ndarray:
    """Return [X] two-sided p of the hypothesis that the mean of experiment x is `means_X[x]`; ties count as extreme."""
    s_XU = sums_XU - sizes_U * means_X[:, None]
    numerator_XR, cross_XR = s_XU @ signs_RU.T, (s_XU * sizes_U) @ signs_RU.T
    return _share(numerator_XR, cross_XR, (s_XU**2).sum(1), sizes_U)


def _share(numerator_XR: np.ndarray, cross_XR: np.ndarray, squares_X: np.ndarray, sizes_U: np.ndarray) -> np.ndarray:
    """Return how often t**2 is at least that of the first assignment, by products: the error of a t can be zero."""
    mean_XR = numerator_XR / sizes_U.sum()
    error_XR = squares_X[:, None] - 2 * mean_XR * cross_XR + mean_XR**2 * (sizes_U**2).sum()
    error_XR = np.maximum(error_XR, 0)
    left, right = numerator_XR**2 * error_XR[:, :1], numerator_XR[:, :1] ** 2 * error_XR
    scale_X1 = (squares_X * sizes_U.sum() * squares_X)[:, None]
    share_X: np.ndarray = (left >= right * (1 - TIE) - 1e-12 * scale_X1).mean(1)
    return share_X


class Flips:
    """One experiment: p-values for any hypothesis, and the interval of those that are not rejected.

    Units that are alike in sum and size are drawn together, as a binomial number of positive signs.
    """

    def __init__(self, units: UnitSums, seed: int = 0) -> None:
        self.units, random = units, np.random.default_rng(seed)
        s_U, n_U = units.sums_U.astype(float), units.sizes_U.astype(float)
        kinds, count_K = np.unique(np.stack([s_U.round(9), n_U], 1), axis=0, return_counts=True)
        if len(s_U) > MAX_EXACT_UNITS and len(kinds) < len(s_U) / 2:
            signs_RU = 2.0 * random.binomial(count_K, 0.5, size=(NUM_FLIPS + 1, len(count_K))) - count_K
            signs_RU[0] = count_K
            s, n = kinds[:, 0], kinds[:, 1]
        else:
            signs_RU, (s, n) = draw_signs(len(s_U), random), (s_U, n_U)
        self.s_R, self.n_R, self.ns_R, self.nn_R = (signs_RU @ weight for weight in (s, n, n * s, n * n))
        self.sums, self.sizes = s_U, n_U
        exact = len(s_U) <= MAX_EXACT_UNITS
        self.draws = f"all {len(self.s_R):,}" if exact else f"{len(self.s_R) - 1:,} draws"
        """How many assignments of signs there are, in words."""

    def p(self, mean: float) -> float:
        """Return the two-sided p of the hypothesis that the mean is `mean`."""
        numerator, cross = self.s_R - mean * self.n_R, self.ns_R - mean * self.nn_R
        squares = np.array([((self.sums - mean * self.sizes) ** 2).sum()])
        return float(_share(numerator[None], cross[None], squares, self.sizes)[0])

    def interval(self, alpha: float, bounds: tuple[float, float] = (-1.0, 1.0)) -> tuple[float, float]:
        """Return the interval of means, within `bounds`, that are not rejected at level `alpha`.

        Each limit is found by bisection between the estimate, which is never rejected, and a bound. The outer end of
        the last step is returned, so that the interval errs on the wide side.
        """
        limits = []
        for bound in bounds:
            inside, outside = self.units.mean, bound
            for _ in range(0 if self.p(bound) >= alpha else STEPS):
                middle = (inside + outside) / 2
                inside, outside = (middle, outside) if self.p(middle) >= alpha else (inside, middle)
            limits.append(float(outside))
        return limits[0], limits[1]
