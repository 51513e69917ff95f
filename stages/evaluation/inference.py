"""Test a paired difference, and invert the test to an interval, for one experiment or for many at once.

A mean is rejected when studentised sign flips over units reject it and a score test that accounts for how rare
differences are does too. The second matters where few tasks differ: sign flips assume a unit's deviation to be
symmetric, which sums of nearly all zeros are not. Scores that are no shares of successes have Hall's t in its place,
which takes their skewness out (Journal of the Royal Statistical Society B 1992); where few units differ both must
reject, as these do not show how much others may differ.

Sampled units (kata's operations) are flipped whole: the mean is that over units like these. Fixed units (a benchmark's
repositories) are strata: their tasks are flipped, by their deviation from the mean of their stratum, as differences
between strata are no error of a mean over these very strata. From three training seeds on, seeds are the top level: the
spread of their gains enters with Student's t over seeds. Where seeds share collections of pairs, and there are three or
more collections, collections are the top level, as seeds that share one are not independent.

The flips are the wild cluster bootstrap-t with the hypothesis imposed (Cameron, Gelbach and Miller, Review of Economics
and Statistics 2008; Canay, Romano and Shaikh, Econometrica 2017); the score test is Tango's (Statistics in Medicine
1998) at the number of tasks that clustering leaves; levels are joined as independent limits (MOVER: Zou and Donner,
Statistics in Medicine 2008).

An evaluation may be decided at planned looks while it is running (`levels`, `parts`). Looking often and stopping at the
first small p finds something in nothing. The looks of O'Brien and Fleming (Biometrics 1979) are hard to pass early and
nearly the full test at the last. Intervals at these levels are repeated confidence intervals (Jennison and Turnbull,
JRSS B 1989): all of them hold the truth together with probability 1 - alpha, so one may stop at any look, for any
reason, and continue after a decision. Looks are spaced equally over tasks; where outcomes cluster, early looks hold
more information than their share of tasks, and the bound is conservative.

Axis names: X experiments, S training seeds, T tasks, U units, C collections, H strata, R assignments of signs, K kinds
of units. All values are fractions of one, not points.
"""

import math
from collections.abc import Callable, Sequence
from functools import cache, cached_property, lru_cache, partial
from itertools import pairwise
from statistics import NormalDist
from typing import Any

import numpy as np

from composer_stages.evaluation.difference import Decision, Size, Verdict

Array = np.ndarray
TINY, MAX_TERMS = 1e-300, 10_000


# The normal and Student's t distribution, for arrays of a few thousand values. scipy has them, too, at 143 MB and more
# time to import than a comparison takes.


def normal_cdf(z: Array | float) -> Array:
    """Return the probability that a standard normal value is at most z."""
    return np.asarray(_erfc(np.asarray(z) / -math.sqrt(2)) / 2)


_erfc = np.vectorize(math.erfc, otypes=[float])


@partial(np.vectorize, otypes=[float])
def student_cdf(df: float, t: float) -> float:
    """Return the probability that a value of Student's t with `df` degrees of freedom is at most t."""
    tail = _incomplete_beta(df / 2, 0.5, df / (df + t * t), t * t / (df + t * t)) / 2
    return tail if t < 0 else 1 - tail


@partial(np.vectorize, otypes=[float])
@lru_cache(4096)  # bisection asks for the same levels again and again
def student_quantile(df: float, p: float) -> float:
    """Return the value that Student's t with `df` degrees of freedom exceeds with probability 1 - p, for p >= 1/2.

    By Newton's method in the angle atan(t / sqrt(df)): there the distribution is concave, so that no step from the
    middle passes the root.
    """
    density = math.exp(math.lgamma((df + 1) / 2) - math.lgamma(df / 2)) / math.sqrt(math.pi)
    angle, step = 0.0, 1.0
    while step > 1e-14 and angle < math.pi / 2:
        step = (p - float(student_cdf(df, math.sqrt(df) * math.tan(angle)))) / (density * math.cos(angle) ** (df - 1))
        angle += step
    return math.sqrt(df) * math.tan(angle)


def _incomplete_beta(a: float, b: float, x: float, complement: float) -> float:
    """Return the regularised incomplete beta function at x = 1 - complement: its continued fraction, by Lentz's method.

    Abramowitz and Stegun, Handbook of Mathematical Functions, 26.5.8; it converges fast below (a + 1) / (a + b + 2).
    """
    if x <= 0 or complement <= 0:
        return float(x > 0)
    if x > (a + 1) / (a + b + 2):
        return 1 - _incomplete_beta(b, a, complement, x)
    fraction, upper, lower = 1.0, 1.0, 0.0
    for term in range(MAX_TERMS):
        m = term // 2
        if term == 0:
            share = 1.0
        elif term % 2:
            share = -(a + m) * (a + b + m) * x / ((a + 2 * m) * (a + 2 * m + 1))
        else:
            share = m * (b - m) * x / ((a + 2 * m - 1) * (a + 2 * m))
        lower = 1 / ((1 + share * lower) or TINY)
        upper = (1 + share / upper) or TINY
        fraction *= upper * lower
        if abs(upper * lower - 1) < 1e-15:
            break
    scale = math.lgamma(a + b) - math.lgamma(a) - math.lgamma(b) + a * math.log(x) + b * math.log(complement)
    return math.exp(scale) * (fraction - 1) / a


ALPHA = 0.05
MIN_GAIN = 0.02
POWER = 0.8
MIN_SEEDS = 3
"""With fewer, a result holds for these checkpoints and not for training."""
NUM_FLIPS = 3999
MAX_EXACT_UNITS = 12
MANY_UNITS = 2000
"""From so many units on that all differ, or kinds of units, the t of sign flips is normal."""
MIN_SCORE_UNITS = 20
"""With fewer, skewed scores find a gain in nothing in up to 17 % of cases (benchmarks/compare.py)."""
MOST_SEEDS = 1000
STEPS = 26
"""Steps of bisection; a limit is found to 2**-26."""
TIE, TOLERANCE = 1e-9, 1e-12
GRID = 101
"""Points of the density of a normal path; the bound of looks is right to 1e-4."""


class SignFlips:
    """Studentised sign flips of the units of X experiments, which give the p-values of tested means.

    A unit is what is independent of the rest. If the mean over tasks is m, a unit's sum of deviations from m is as
    likely to have the other sign. The statistic is the mean's t ratio, its standard error computed anew for every
    assignment of signs. All assignments are taken of up to 12 units, else random ones after the identity; of thousands
    of units that differ from each other the ratio is taken to be normal.
    """

    def __init__(self, sums_XU: Array, sizes_U: Array, num_flips: int = NUM_FLIPS, seed: int = 0) -> None:
        self.sums_XU, self.sizes_U = sums_XU, sizes_U
        self.estimate_X = sums_XU.sum(1) / sizes_U.sum()
        self.exact = len(sizes_U) <= MAX_EXACT_UNITS
        random = np.random.default_rng(seed)
        signs_RU = None
        if len(sums_XU) == 1 and not self.exact:
            # In the order that the mirror image has, too, so that two sides that are exchanged draw the same signs, and
            # so do tasks of other names.
            towards = -1.0 if self.estimate_X[0] < 0 else 1.0
            unit_kinds = towards * sums_XU[0].round(9) + 1j * sizes_U
            kinds, count_K = np.unique(unit_kinds, return_counts=True)
            if len(kinds) < min(len(sizes_U) / 2, MANY_UNITS):
                # Units that are alike in sum and size are flipped together: a binomial number of them is positive.
                signs_RU = 2.0 * random.binomial(count_K, 0.5, size=(num_flips + 1, len(count_K))) - count_K
                signs_RU[0] = count_K
                sums_XU, sizes_U = towards * kinds.real[None], kinds.imag
            elif len(sizes_U) <= MANY_UNITS:
                order_U = np.argsort(unit_kinds, kind="stable")
                sums_XU, sizes_U = sums_XU[:, order_U], sizes_U[order_U]
        self.normal = signs_RU is None and len(sizes_U) > MANY_UNITS
        if self.normal:
            squares_X = ((sums_XU - sizes_U * self.estimate_X[:, None]) ** 2).sum(1)
            self._error_X = np.sqrt(np.maximum(squares_X, TOLERANCE)) / sizes_U.sum()
            return
        if signs_RU is None:
            signs_RU = draw_signs(len(sizes_U), random, num_flips)
        # The numerator and the error of every t are linear in the tested mean: these are their coefficients.
        self._s_XR, self._sn_XR = sums_XU @ signs_RU.T, (sums_XU * sizes_U) @ signs_RU.T
        self._n_R, self._nn_R = signs_RU @ sizes_U, signs_RU @ sizes_U**2

    @property
    def num_draws(self) -> int | None:
        """Return the number of assignments of signs, without the identity of random ones; None in the normal limit."""
        return None if self.normal else len(self._n_R) - (not self.exact)

    def p(self, mean_X: Array, at: Array | slice = slice(None)) -> Array:
        """Return [X] the two-sided p of the hypothesis that the mean of experiment `at[x]` is `mean_X[x]`.

        Assignments with the observed t count half (mid-p: Lancaster, JASA 1961), as few units that pass or fail have
        few different t, and a test that counts them whole finds half of what it could. Of all assignments at least the
        observed one and its mirror image count: five units can never reject at 5 %.

        at: numbers of experiments, by default of all.
        """
        if self.normal:
            return np.asarray(2 * normal_cdf(-np.abs(self.estimate_X[at] - mean_X) / self._error_X[at]))
        mean_X1, total = mean_X[:, None], self.sizes_U.sum()
        squares_X1 = ((self.sums_XU[at] - self.sizes_U * mean_X1) ** 2).sum(1)[:, None]
        top_XR, cross_XR = self._s_XR[at] - mean_X1 * self._n_R, self._sn_XR[at] - mean_X1 * self._nn_R
        flipped_XR = top_XR / total
        error_XR = squares_X1 - 2 * flipped_XR * cross_XR + flipped_XR**2 * (self.sizes_U**2).sum()
        error_XR = np.maximum(error_XR, 0, out=error_XR)
        # How often t**2 is at least the observed one, by products: the error of a t can be zero.
        observed_XR, others_XR = top_XR[:, :1] ** 2 * error_XR, top_XR**2 * error_XR[:, :1]
        slack_XR = 1e-12 * squares_X1**2 * total
        least_X = (others_XR >= observed_XR * (1 - TIE) - slack_XR).mean(1)
        more_X = (others_XR > observed_XR * (1 + TIE) + slack_XR).mean(1)
        share_X: Array = np.maximum((least_X + more_X) / 2, (1 + self.exact) / others_XR.shape[1])
        return share_X


def chi_square(degrees: float, z: float = 0) -> float:
    """Return the value of chi-square over its degrees that the normal value z stands for: by default the median.

    Wilson and Hilferty, Proceedings of the National Academy of Sciences 1931.
    """
    return max(1 - 2 / (9 * degrees) + z * math.sqrt(2 / (9 * degrees)), 0.1) ** 3


class PairedTest:
    """Test treatment minus baseline, of X experiments with the same layout of tasks, units and seeds.

    treatment_XST, baseline_XST: outcomes in 0..1 (means over samples), NaN where either has none; every task has one.
    scores: they are no shares of successes, so that Hall's t takes the place of the test for proportions, which joins
    it where fewer than 20 units differ. bounded: scores lie in 0..1; else none is known to differ by at most one.
    unit_T: the unit of each task, numbered from 0; strata with `fixed`. collection_S: the collection of each training
    seed, numbered from 0; None where every seed has its own or all have one.

    `top_error_X` is the standard error of the mean over the top level, `num_top` seeds or collections; None below three
    seeds.
    """

    def __init__(
        self,
        treatment_XST: Array,
        baseline_XST: Array,
        unit_T: Array,
        *,
        fixed: bool = False,
        collection_S: Array | None = None,
        scores: bool = False,
        bounded: bool = True,
        num_flips: int = NUM_FLIPS,
        seed: int = 0,
    ) -> None:
        self.scores = scores
        d_XST = treatment_XST - baseline_XST
        mean = np.nanmean if np.isnan(d_XST).any() else np.mean  # the same numbers; the latter does not copy
        d_XT = mean(d_XST, 1)
        flipped_T = np.arange(len(unit_T)) if fixed else unit_T

        def spread(values_XT: Array) -> Array:
            return within_strata(values_XT, unit_T) if fixed else values_XT

        sizes_U = np.bincount(flipped_T).astype(float)
        self.flips = SignFlips(by_unit(spread(d_XT), flipped_T), sizes_U, num_flips, seed)
        self.estimate_X = self.flips.estimate_X
        self.num_flipped = len(sizes_U)
        self.few_X = bounded & ((by_unit(np.abs(d_XT), unit_T) > TIE).sum(1) < MIN_SCORE_UNITS)
        mean_X = d_XT.mean(1)
        squares_X = ((self.flips.sums_XU - sizes_U * mean_X[:, None]) ** 2).sum(1)
        # The design effect: how much clustering multiplies the variance of independent tasks. Means of several samples
        # differ by less than one: to the score test they are differences of the size seen, of which there are more.
        total_X = np.abs(d_XT).sum(1)
        bernoulli_X = total_X - d_XT.shape[1] * mean_X**2
        self.size_X = size_X = np.where(total_X > 0, (d_XT**2).sum(1) / np.maximum(total_X, TOLERANCE), 1.0)
        if fixed:
            # Strata of equal outcomes have no spread in the sample, which is no proof that they have none: each counts
            # as if one task differed. Never worse than without strata, where one task more differs over all.
            squares_XH = by_unit((self.flips.sums_XU - mean_X[:, None]) ** 2, unit_T)
            plain_X = ((d_XT - mean_X[:, None]) ** 2).sum(1) + size_X
            seen_X = np.minimum(np.maximum(squares_XH, size_X[:, None]).sum(1), plain_X)
        else:
            # One event more, as clustered as the arms' outcomes are: a few differences cannot show how clustered they
            # are.
            arms = sum(design_effect(mean(arm_XST, 1), unit_T) for arm_XST in (treatment_XST, baseline_XST))
            seen_X = squares_X + size_X * arms / 2
        effect_X = seen_X / (bernoulli_X + 1)
        # Wins, losses and tasks of the score test, each divided by the design effect.
        self.up_X, self.down_X = (np.clip(side_XT, 0, None).sum(1) / effect_X for side_XT in (d_XT, -d_XT))
        self.tasks_X = d_XT.shape[1] / effect_X
        self.num_seeds = self.num_top = d_XST.shape[1]
        self.top_error_X: Array | None = None
        if self.num_seeds >= MIN_SEEDS:
            gain_XS = mean(d_XST, 2)
            self.top_error_X, self.num_top = top_error(gain_XS, collection_S)
            # The spread of the seeds' gains contains the noise of single seeds, which the units' variance has, too:
            # that part is taken out of the units' share.
            centred_XST = d_XST - gain_XS[:, :, None]
            rest_XST = centred_XST - mean(centred_XST, 1, keepdims=True)
            rest_XST[np.isnan(rest_XST)] = 0
            parts = (by_unit(spread(rest_XST[:, seed]), flipped_T) for seed in range(self.num_seeds))
            noise_X = sum((part_XU**2).sum(1) for part_XU in parts) / (self.num_seeds * (self.num_seeds - 1))
            self._share_X = np.clip(1 - noise_X / np.maximum(squares_X, TOLERANCE), 0, 1)

    def rejects(self, mean: Array | float, alpha: Array | float = ALPHA, among_X: Array | bool = True) -> Array:
        """Return [X] whether the true difference is shown not to be `mean`, at two-sided level `alpha`.

        among_X: the experiments that are asked for; False for others.
        """
        mean_X, possible_X = self._units_mean(np.broadcast_to(mean, self.estimate_X.shape), alpha)
        rejected_X: Array = among_X & possible_X & (self._other_p(mean_X) < alpha)
        # Flips are most of the work, and needed only where the other test rejects.
        if (at := np.flatnonzero(rejected_X)).size:
            rejected_X[at] = self.flips.p(mean_X[at], at) < np.broadcast_to(alpha, mean_X.shape)[at]
        return rejected_X

    def above(self, bar: float, alpha: float = ALPHA) -> Array:
        """Return [X] whether the true difference is shown to be above `bar`."""
        return self.rejects(bar, alpha, self.estimate_X > bar)

    def below(self, bar: float, alpha: float = ALPHA) -> Array:
        """Return [X] whether the true difference is shown to be below `bar`."""
        return self.rejects(bar, alpha, self.estimate_X < bar)

    def interval(self, alpha: float = ALPHA) -> tuple[Array, Array]:
        """Return [X] the limits of the differences that are not rejected, by bisection from the estimate.

        A p-value may rise again beyond a limit, so that 0 is not rejected though it lies outside: the interval then
        reaches 0, and never contradicts the decision.
        """
        low_X, high_X = (limit(lambda mean_X: self.rejects(mean_X, alpha), self.estimate_X, at) for at in (-1.0, 1.0))
        none_X = self.rejects(0.0, alpha)
        return np.where(none_X, low_X, np.minimum(low_X, 0)), np.where(none_X, high_X, np.maximum(high_X, 0))

    def p(self, mean: float = 0.0) -> Array:
        """Return [X] the smallest level at which `mean` is rejected."""
        if self.top_error_X is None:
            mean_X = np.broadcast_to(mean, self.estimate_X.shape)
            return np.asarray(np.maximum(self.flips.p(mean_X), self._other_p(mean_X)))
        # With a top level, the mean that units must reject depends on the level, which is found by bisection.
        low_X, high_X = np.zeros(len(self.estimate_X)), np.ones(len(self.estimate_X))
        for _ in range(STEPS):
            middle_X = (low_X + high_X) / 2
            out_X = self.rejects(mean, middle_X)
            low_X, high_X = np.where(out_X, low_X, middle_X), np.where(out_X, middle_X, high_X)
        return high_X

    def size_for(self, gain: float, alpha: float = ALPHA, power: float = POWER) -> Size:
        """Return the size at which an experiment like the first of these finds a gain with this power.

        Squared errors of units fall with tasks, those of trainings with training seeds alone: where the seeds leave no
        room for tasks, as many seeds are named as leave half of the error to these.
        """
        sizes_U, num_units = self.flips.sizes_U, len(self.flips.sizes_U)
        rest_U = self.flips.sums_XU[0] - sizes_U * self.estimate_X[0]
        seen = float((rest_U**2).sum()) * num_units / max(num_units - 1, 1)
        # Where nothing differs, one task may: of the size seen.
        variance = max(seen, float(self.size_X[0])) / sizes_U.sum() ** 2
        at_level, at_power = (NormalDist().inv_cdf(share) for share in (1 - alpha / 2, power))
        room, seeds = gain**2, None
        if (top_error_X := self.top_error_X) is not None:
            variance *= float(self._share_X[0])
            num = self.num_top

            def of_seeds(num: int) -> float:
                at_top = float(student_quantile(num - 1, 1 - alpha / 2)) + at_power
                return at_top**2 * float(top_error_X[0]) ** 2 / chi_square(self.num_top - 1) * self.num_top / num

            while of_seeds(num) > room / 2 and num < MOST_SEEDS:
                num += 1
            seeds = num if num > self.num_top else None
            room -= min(of_seeds(num), room / 2)
        tasks = sizes_U.sum() * (at_level + at_power) ** 2 * variance / room
        # A variance is known to its degrees of freedom, and that of rare differences to their number.
        differing = float((rest_U**2).sum() / max((rest_U**4).sum(), TINY) * (rest_U**2).sum())
        degrees = max(min(num_units - 1, 2 * differing), 1)
        low, middle, high = (math.ceil(tasks / chi_square(degrees, z)) for z in (1.2816, 0, -1.2816))
        return Size(middle, low, high, seeds)

    def score(self, mean_X: Array) -> Array:
        """Return [X] Tango's score statistic for a difference of matched proportions."""
        n, b, c, m = self.tasks_X, self.up_X, self.down_X, mean_X
        # q: the probability of a loss, maximising the likelihood under the hypothesis: a root of a quadratic equation.
        linear, constant = (2 * n - b + c) * m - b - c, -c * m * (1 - m)
        q = (np.sqrt(np.maximum(linear**2 - 8 * n * constant, 0)) - linear) / (4 * n)
        statistic: Array = (b - c - n * m) / np.sqrt(np.maximum(n * (2 * q + m * (1 - m)), TOLERANCE))
        return statistic

    def _other_p(self, mean_X: Array) -> Array:
        """Return [X] the p-value of the score test; of scores that of Hall's t, or the larger one where few differ."""
        if self.scores and not self.few_X.any():
            return self.hall(mean_X)
        p_X: Array = 2 * normal_cdf(-np.abs(self.score(mean_X)))
        if not self.scores:
            return p_X
        hall_X = self.hall(mean_X)
        return np.where(self.few_X, np.maximum(p_X, hall_X), hall_X)

    def hall(self, mean_X: Array) -> Array:
        """Return [X] the p-value of Hall's t, which is Student's with the skewness of the units taken out."""
        num, mean_size = len(self.flips.sizes_U), self.flips.sizes_U.mean()
        sd_X, skew_X = self._spread_and_skew
        ratio_X = (self.estimate_X - mean_X) * mean_size / sd_X
        moved_X = ratio_X + skew_X * ratio_X**2 / 3 + skew_X**2 * ratio_X**3 / 27 + skew_X / (6 * num)
        p_X: Array = 2 * student_cdf(num - 1, -np.abs(np.sqrt(num - 1) * moved_X))
        return p_X

    @cached_property
    def _spread_and_skew(self) -> tuple[Array, Array]:
        """Return [X] the standard deviation and the skewness of the units' deviations from the estimate."""
        rest_XU = self.flips.sums_XU - self.flips.sizes_U * self.estimate_X[:, None]
        sd_X = np.sqrt(np.maximum((rest_XU**2).mean(1), TOLERANCE**2))
        return sd_X, (rest_XU**3).mean(1) / sd_X**3

    def _units_mean(self, mean_X: Array, alpha: Array | float) -> tuple[Array, Array]:
        """Return [X] the mean that units must reject so that both levels reject `mean_X`, and whether they can.

        Limits of independent parts add in squares: a limit lies sqrt(share * u**2 + s**2) from the estimate, u being
        the units' distance and s that of the top level, and never nearer than u: that trainings are alike is no
        evidence about tasks.
        """
        distance_X = mean_X - self.estimate_X
        if self.top_error_X is None:
            return mean_X, np.ones(len(distance_X), dtype=bool)
        left_X = distance_X**2 - (student_quantile(self.num_top - 1, 1 - np.asarray(alpha) / 2) * self.top_error_X) ** 2
        for_units_X = np.sqrt(np.maximum(left_X, 0) / np.maximum(self._share_X, 1e-6))
        for_units_X = np.minimum(for_units_X, np.abs(distance_X))
        return np.clip(self.estimate_X + np.sign(distance_X) * for_units_X, -1, 1), left_X > 0


def shows(
    tests: Sequence[PairedTest], min_gain: float = MIN_GAIN, alpha: float = ALPHA, margin_alpha: float | None = None
) -> Array:
    """Return [X] what is shown. It must hold in every test: the first as observed, others with lost outcomes imputed.

    BETTER: a gain. BETTER_BY_LESS: a gain of less than `min_gain`. WORSE: a loss. NO_GAIN: less than `min_gain`, which
    would have been found. Else UNDECIDED. margin_alpha: the level of what is about `min_gain`; else alpha.
    """
    moved = [(test, test.rejects(0.0, alpha)) for test in tests]
    better_X = np.logical_and.reduce([moved_X & (test.estimate_X > 0) for test, moved_X in moved])
    worse_X = np.logical_and.reduce([moved_X & (test.estimate_X < 0) for test, moved_X in moved])
    short_X = np.logical_and.reduce([test.below(min_gain, margin_alpha or alpha) for test in tests])
    choices = (Decision.BETTER_BY_LESS, Decision.BETTER, Decision.WORSE, Decision.NO_GAIN)
    conditions = [better_X & short_X, better_X, worse_X, short_X]
    return np.select(conditions, [choice.value for choice in choices], Decision.UNDECIDED.value)


def decide_difference(
    tests: Sequence[PairedTest],
    min_gain: float = MIN_GAIN,
    alpha: float = ALPHA,
    *,
    margin_alpha: float | None = None,
    fewest: int = 0,
    two_sided: bool = False,
) -> Decision:
    """Return what all tests of one experiment show: the rule behind every decision of the program.

    margin_alpha: the level of what is about `min_gain`; else alpha. fewest: the units below which nothing is decided.
    two_sided: whether no gain of interest is told apart from no difference of interest in either direction.
    """
    if tests[0].num_flipped < fewest:
        return Decision.UNDECIDED
    decision, level = Decision(str(shows(tests, min_gain, alpha, margin_alpha)[0])), margin_alpha or alpha
    if two_sided and decision is Decision.NO_GAIN and all(bool(test.above(-min_gain, level)[0]) for test in tests):
        return Decision.NO_DIFFERENCE
    return decision


def verdict_of(decision: str, num_seeds: int) -> Verdict:
    """Return the verdict that follows from what is shown over so many training seeds.

    Below three seeds the spread of trainings is not seen, and neither direction is about more than these checkpoints:
    with one or two seeds, 8 to 30 % of true gains of 2 to 5 points looked like none.
    """
    if decision == Decision.BETTER_BY_LESS:
        return Verdict.PARTIAL
    if decision == Decision.BETTER:
        return Verdict.VALIDATED if num_seeds >= MIN_SEEDS else Verdict.PARTIAL
    lacking = decision in (Decision.WORSE, Decision.NO_GAIN) and num_seeds >= MIN_SEEDS
    return Verdict.INVALIDATED if lacking else Verdict.UNDERPOWERED


def limit(rejects: Callable[[Array], Array], inside_X: Array, bound: float) -> Array:
    """Return [X] where the means that are not rejected end, between one that is not and a bound.

    The outer end of the last step of bisection is returned, so that intervals err on the wide side.
    """
    outside_X = np.full(len(inside_X), bound)
    free_X = ~rejects(outside_X)
    for _ in range(0 if free_X.all() else STEPS):
        middle_X = (inside_X + outside_X) / 2
        out_X = rejects(middle_X)
        inside_X, outside_X = np.where(out_X, inside_X, middle_X), np.where(out_X, middle_X, outside_X)
    return np.where(free_X, bound, outside_X)


def draw_signs(num_units: int, random: np.random.Generator, num_flips: int = NUM_FLIPS) -> Array:
    """Return [R, U] signs: all of them up to 12 units, else random ones after the identity, which is the first row."""
    if num_units <= MAX_EXACT_UNITS:
        return (1 - 2 * (np.arange(2**num_units)[:, None] >> np.arange(num_units) & 1)).astype(float)
    signs_RU: Array = random.integers(0, 2, size=(num_flips + 1, num_units), dtype=np.int8) * 2.0 - 1
    signs_RU[0] = 1
    return signs_RU


def fewest_units(alpha: float = ALPHA) -> int:
    """Return the fewest units with which sign flips can reject: with U of them the smallest p-value is 2**(1 - U)."""
    return int(np.floor(1 - np.log2(alpha))) + 1


def numbered(names: Sequence[str]) -> Array:
    """Return each name's number among the sorted names."""
    index = {name: number for number, name in enumerate(sorted(set(names)))}
    return np.fromiter(map(index.__getitem__, names), dtype=np.int64, count=len(names))


def by_unit(values_XT: Array, unit_T: Array) -> Array:
    """Return [X, U] sums over the tasks of each unit."""
    if len(unit_T) == unit_T[-1] + 1 and (np.diff(unit_T) == 1).all():
        return values_XT  # each task is its own unit
    order_T = np.argsort(unit_T, kind="stable")
    first_U = np.flatnonzero(np.diff(unit_T[order_T], prepend=-1))
    sums_XU: Array = np.add.reduceat(values_XT[:, order_T], first_U, axis=1)
    return sums_XU


def within_strata(values_XT: Array, stratum_T: Array) -> Array:
    """Return [X, T] values whose spread about the mean of all tasks is their spread within strata.

    Each value becomes the mean of all plus its deviation from its stratum's mean, times sqrt(n / (n - 1)) for the n
    tasks of the stratum: the sum of squares over tasks then estimates the variance of a stratified mean (Cochran,
    Sampling Techniques, 1977, section 5.4). Strata of one task have no spread of their own and are pooled into one
    ("collapsed strata", section 5A.12), a lone one with the smallest other stratum.
    """
    label_T = np.unique(stratum_T, return_inverse=True)[1]
    size_H = np.bincount(label_T)
    single = np.flatnonzero(size_H == 1)
    if len(single) and len(size_H) > 1:
        several = np.flatnonzero(size_H > 1)
        into = single[0] if len(single) > 1 or not len(several) else several[size_H[several].argmin()]
        label_T = np.unique(np.where(np.isin(label_T, single), into, label_T), return_inverse=True)[1]
    size_H = np.bincount(label_T)
    rest_XT = values_XT - (by_unit(values_XT, label_T) / size_H)[:, label_T]
    scale_H = np.sqrt(size_H / np.maximum(size_H - 1, 1))
    spread_XT: Array = values_XT.mean(1, keepdims=True) + rest_XT * scale_H[label_T]
    return spread_XT


def top_error(gain_XS: Array, collection_S: Array | None = None) -> tuple[Array, int]:
    """Return [X] the standard error of a mean over seeds, and the number of seeds or collections it is taken over."""
    if collection_S is None or collection_S.max() + 1 < MIN_SEEDS:
        collection_S = np.arange(gain_XS.shape[1])
    size_C = np.bincount(collection_S)
    rest_XC = by_unit(gain_XS, collection_S) / size_C - gain_XS.mean(1, keepdims=True)
    # With collections of equal size this is their standard deviation over the root of their number.
    squares_X = ((size_C / size_C.sum() * rest_XC) ** 2).sum(1)
    return np.sqrt(squares_X * len(size_C) / (len(size_C) - 1)), len(size_C)


def design_effect(mean_XT: Array, unit_T: Array) -> Array:
    """Return [X] how much the units multiply the variance of a mean; that of equal outcomes where none vary."""
    size_U, rest_XT = np.bincount(unit_T).astype(float), mean_XT - mean_XT.mean(1, keepdims=True)
    # The 1/4, the variance of an even coin, is added as one outcome more that is shared by all of a unit: where nothing
    # varies the ratio is then that of equal outcomes, and not 0 / 0.
    mean_size = (size_U**2).sum() / size_U.sum()
    effect_X: Array = ((by_unit(rest_XT, unit_T) ** 2).sum(1) + mean_size / 4) / ((rest_XT**2).sum(1) + 1 / 4)
    return effect_X


def rate_interval(
    values_ST: Array, unit_T: Array, *, fixed: bool = False, collection_S: Array | None = None
) -> tuple[float, float]:
    """Return the 95 % interval of one arm's rate: sign flips over units, joined with Wilson's interval.

    values_ST: means of samples by training seed and task, NaN where there is none. unit_T: the unit of each task,
    numbered from 0; strata with `fixed`. From three training seeds on the interval is of other trainings, too.
    """
    values_XT = np.nanmean(values_ST, 0)[None]
    flipped_T = np.arange(len(unit_T)) if fixed else unit_T
    spread_XT = within_strata(values_XT, unit_T) if fixed else values_XT
    flips = SignFlips(by_unit(spread_XT, flipped_T), np.bincount(flipped_T).astype(float))
    rate = float(flips.estimate_X[0])
    low, high = (
        float(limit(lambda mean_X: flips.p(mean_X) < ALPHA, flips.estimate_X, bound)[0]) for bound in (0.0, 1.0)
    )
    # Sign flips take deviations to be symmetric, which they are not near 0 and 1: with all outcomes equal they give an
    # interval of no width. Wilson's holds there, at the number of tasks that clustering leaves.
    if fixed:  # as in `PairedTest`: a stratum of equal outcomes counts as if one task differed
        squares_H = np.maximum(np.bincount(unit_T, (spread_XT[0] - rate) ** 2), 1)
        effect = min(squares_H.sum() / (((values_XT - rate) ** 2).sum() + 1), 1.0)
    else:
        effect = design_effect(values_XT, unit_T)[0]
    least, most = wilson(rate, len(unit_T) / effect)
    low, high = min(low, least), max(high, most)
    if len(values_ST) >= MIN_SEEDS:
        error_X, num_top = top_error(np.nanmean(values_ST, 1)[None], collection_S)
        of_top = float(student_quantile(num_top - 1, 1 - ALPHA / 2) * error_X[0])
        # Distances of independent parts add in squares, as in `PairedTest`.
        low = max(rate - float(np.hypot(rate - low, of_top)), 0.0)
        high = min(rate + float(np.hypot(high - rate, of_top)), 1.0)
    return low, high


def one_sided_p(null: Any, observed: Any, rounding: float = 1e-9) -> float:
    """Return the share of draws under the null that are as large as what was observed, which counts as one of them.

    So it is never 0. null: an array or tensor. rounding: by how much equal sums may differ.
    """
    return (1 + int((null >= observed - rounding).sum())) / (len(null) + 1)


def wilson(rate: float, num_tasks: float, z: float = NormalDist().inv_cdf(0.975)) -> tuple[float, float]:
    """Return Wilson's interval, by default of 95 %, of a rate among a number of tasks that need not be whole."""
    middle, n = rate + z**2 / (2 * num_tasks), 1 + z**2 / num_tasks
    half = z * np.sqrt(rate * (1 - rate) / num_tasks + z**2 / (4 * num_tasks**2))
    return max(float((middle - half) / n), 0.0), min(float((middle + half) / n), 1.0)


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
    if num_looks == 1:
        return (alpha,)
    # At look k of K the bound on the z value is c * sqrt(K / k): nearly the full test at the last look.
    low, high = 1.0, 4.0
    for _ in range(STEPS):
        bound = (low + high) / 2
        low, high = (bound, high) if crossing(bound * np.sqrt(num_looks), num_looks) > alpha else (low, bound)
    return tuple(float(2 * normal_cdf(-bound * np.sqrt(num_looks / look))) for look in range(1, num_looks + 1))


def crossing(bound: float, num_looks: int) -> float:
    """Return the probability that a walk of standard normal steps ever leaves [-bound, bound]."""

    def density_of(z: Array) -> Array:
        density: Array = np.exp(-(z**2) / 2) / np.sqrt(2 * np.pi)
        return density

    # The density of the walk while it has stayed inside, at Gauss-Legendre nodes; a step convolves it with the normal
    # density, and what is left of its mass at the end has not crossed.
    at, weight = (nodes * bound for nodes in np.polynomial.legendre.leggauss(GRID))
    step, density = density_of(at[:, None] - at[None]) * weight[None], density_of(at)
    for _ in range(num_looks - 1):
        density = step @ density
    return float(1 - density @ weight)


def parts(num_tasks: int, num_looks: int) -> list[range]:
    """Return the tasks that each look adds: as equal in number as possible, none of them empty."""
    ends = [round(num_tasks * look / num_looks) for look in range(num_looks + 1)]
    return [range(start, end) for start, end in pairwise(ends) if end > start]
