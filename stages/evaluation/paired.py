"""The outcomes of two arms as statistics of the deciding test, for one experiment or for many simulated ones at once.

The decision is `rejects`: a mean is rejected when studentised sign flips over units reject it and a score test that
accounts for how rare differences are does too. The second matters where few tasks differ: sign flips assume a unit's
deviation to be symmetric, which sums of nearly all zeros are not.

Sampled units (kata's operations) are what sign flips flip: the mean is that over units like these. Fixed units (a
benchmark's repositories) are strata: tasks are flipped, by their deviation from the mean of their stratum, as the
differences between strata are no error of a mean over these very strata.

From three training seeds on, seeds are the top level: the spread of their gains enters with Student's t over seeds.
Where the seeds were trained on three or more collections of pairs, collections are the top level instead, as seeds that
share one are not independent.

Axis names: X experiments, S training seeds, T tasks, U units, C collections. Values are fractions of one.
"""

from dataclasses import dataclass

import numpy as np

from stages.evaluation.flips import p_values

MIN_SEEDS = 3
"""With fewer, a result holds for these checkpoints and not for training."""
TOLERANCE = 1e-12
Array = np.ndarray


@dataclass(frozen=True)
class Paired:
    """Treatment minus baseline. The score test has `up_X` wins and `down_X` losses among `tasks_X`, all effective.

    `top_error_X`: the standard error of the mean over the top level, `num_top` seeds or collections; None below three
    seeds. `share_X`: the part of the units' variance that is not the noise of single seeds, which the spread of the top
    level already contains.
    """

    sums_XU: Array
    sizes_U: Array
    up_X: Array
    down_X: Array
    tasks_X: Array
    num_seeds: int
    num_top: int
    top_error_X: Array | None
    share_X: Array

    @property
    def mean_X(self) -> Array:
        """Return the mean over tasks."""
        mean: Array = self.sums_XU.sum(1) / self.sizes_U.sum()
        return mean


def by_unit(values_XT: Array, unit_T: Array) -> Array:
    """Return [X, U] sums over the tasks of each unit."""
    # Each task is its own unit: the product below would be with an identity of millions of entries.
    steps = np.diff(unit_T)
    if len(unit_T) == unit_T.max() + 1 and (steps == 1).all():
        return values_XT
    if unit_T[0] == 0 and ((steps == 0) | (steps == 1)).all():
        ordered_XU: Array = np.add.reduceat(values_XT, np.flatnonzero(np.diff(unit_T, prepend=-1)), axis=1)
        return ordered_XU
    member_TU = np.zeros((len(unit_T), unit_T.max() + 1))
    member_TU[np.arange(len(unit_T)), unit_T] = 1
    sums_XU: Array = values_XT @ member_TU
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
        others = np.flatnonzero(size_H > 1)
        into = single[0] if len(single) > 1 or not len(others) else others[size_H[others].argmin()]
        label_T = np.unique(np.where(np.isin(label_T, single), into, label_T), return_inverse=True)[1]
    size_H = np.bincount(label_T)
    rest_XT = values_XT - (by_unit(values_XT, label_T) / size_H)[:, label_T]
    scale_H = np.sqrt(size_H / np.maximum(size_H - 1, 1))
    spread_XT: Array = values_XT.mean(1, keepdims=True) + rest_XT * scale_H[label_T]
    return spread_XT


def pair(
    treatment_XST: Array,
    baseline_XST: Array,
    unit_T: Array,
    *,
    fixed: bool = False,
    collection_S: Array | None = None,
) -> Paired:
    """Compare arms of outcomes (means over samples, 0..1); NaN where either arm has none.

    unit_T: the unit of each task, numbered from 0. fixed: units are strata. collection_S: the collection of each
    training seed, numbered from 0; None where every seed has its own or all have one.
    """
    d_XST = treatment_XST - baseline_XST
    mean = np.nanmean if np.isnan(d_XST).any() else np.mean  # the same numbers; the latter does not copy
    d_XT = mean(d_XST, 1)
    flipped_T = np.arange(len(unit_T)) if fixed else unit_T

    def spread(values_XT: Array) -> Array:
        return within_strata(values_XT, unit_T) if fixed else values_XT

    sizes_U = np.bincount(flipped_T).astype(float)
    sums_XU = by_unit(spread(d_XT), flipped_T)
    mean_X = d_XT.mean(1)
    squares_X = ((sums_XU - sizes_U * mean_X[:, None]) ** 2).sum(1)
    bernoulli_X = np.abs(d_XT).sum(1) - d_XT.shape[1] * mean_X**2
    if fixed:
        # Strata of equal outcomes have no spread in the sample, which is no proof that they have none: each counts as
        # if one task differed. Never worse than without strata, where one task more differs over all.
        squares_XH = by_unit((sums_XU - mean_X[:, None]) ** 2, unit_T)
        plain_X = ((d_XT - mean_X[:, None]) ** 2).sum(1) + 1
        effect_X = np.minimum(np.maximum(squares_XH, 1).sum(1), plain_X) / (bernoulli_X + 1)
    else:
        # One event more, as clustered as the arms' outcomes are: a few differences cannot show how clustered they are.
        arms = []
        for arm_XST in (treatment_XST, baseline_XST):
            mean_XT = mean(arm_XST, 1)
            centred_XT = mean_XT - mean_XT.mean(1, keepdims=True)
            arms.append(design_effect(by_unit(centred_XT, unit_T), centred_XT, sizes_U))
        effect_X = (squares_X + sum(arms) / 2) / (bernoulli_X + 1)
    up_X, down_X = np.clip(d_XT, 0, None).sum(1) / effect_X, np.clip(-d_XT, 0, None).sum(1) / effect_X
    num_seeds = d_XST.shape[1]
    error_X, num_top, share_X = None, num_seeds, np.ones(len(d_XST))
    if num_seeds >= MIN_SEEDS:
        # The spread of the seeds' gains contains the noise of single seeds, which the units' variance has, too: that
        # part is taken out of the units' share.
        gain_XS = mean(d_XST, 2)
        error_X, num_top = top_error(gain_XS, collection_S)
        centred_XST = d_XST - gain_XS[:, :, None]
        rest_XST = centred_XST - mean(centred_XST, 1, keepdims=True)
        rest_XST[np.isnan(rest_XST)] = 0
        rest = sum((by_unit(spread(rest_XST[:, seed]), flipped_T) ** 2).sum(1) for seed in range(num_seeds))
        noise_X = rest / (num_seeds * (num_seeds - 1))
        share_X = np.clip(1 - noise_X / np.maximum(squares_X, TOLERANCE), 0, 1)
    tasks_X = d_XT.shape[1] / effect_X
    return Paired(sums_XU, sizes_U, up_X, down_X, tasks_X, num_seeds, num_top, error_X, share_X)


def top_error(gain_XS: Array, collection_S: Array | None = None) -> tuple[Array, int]:
    """Return [X] the standard error of a mean over seeds, and the number of seeds or collections it is taken over."""
    if collection_S is None or collection_S.max() + 1 < MIN_SEEDS:
        error_X: Array = gain_XS.std(1, ddof=1) / np.sqrt(gain_XS.shape[1])
        return error_X, gain_XS.shape[1]
    size_C = np.bincount(collection_S)
    mean_XC = by_unit(gain_XS, collection_S) / size_C
    # With collections of equal size this is their standard deviation over the root of their number.
    part_C = size_C / size_C.sum()
    squares_X = ((part_C * (mean_XC - gain_XS.mean(1, keepdims=True))) ** 2).sum(1)
    return np.sqrt(squares_X * len(size_C) / (len(size_C) - 1)), len(size_C)


def design_effect(sums_XU: Array, deviations_XT: Array, sizes_U: Array) -> Array:
    """Return [X] how much the units multiply the variance of a mean; that of equal outcomes where none vary."""
    # The 1/4, the variance of an even coin, is added as one outcome more that is shared by all of a unit: where nothing
    # varies the ratio is then that of equal outcomes, and not 0 / 0.
    every = (sizes_U**2).sum() / sizes_U.sum()
    effect: Array = ((sums_XU**2).sum(1) + every / 4) / ((deviations_XT**2).sum(1) + 1 / 4)
    return effect


def score(paired: Paired, means_X: Array) -> Array:
    """Return [X] Tango's score statistic for a difference of matched proportions (Statistics in Medicine 1998)."""
    n, b, c, m = paired.tasks_X, paired.up_X, paired.down_X, means_X
    # q: the probability of a loss, maximising the likelihood under the hypothesis: a root of a quadratic equation.
    linear, constant = (2 * n - b + c) * m - b - c, -c * m * (1 - m)
    q = (np.sqrt(np.maximum(linear**2 - 8 * n * constant, 0)) - linear) / (4 * n)
    statistic: Array = (b - c - n * m) / np.sqrt(np.maximum(n * (2 * q + m * (1 - m)), TOLERANCE))
    return statistic


def rejects(paired: Paired, mean: float, signs_RU: Array, alpha: float = 0.05) -> Array:
    """Return [X] whether the true difference is shown not to be `mean`, at two-sided level `alpha`."""
    from scipy.stats import norm

    means_X, possible_X = units_mean(paired, mean, alpha)
    refuted = p_values(paired.sums_XU, paired.sizes_U, means_X, signs_RU) < alpha
    rejected: Array = possible_X & refuted & (np.abs(score(paired, means_X)) > norm.isf(alpha / 2))
    return rejected


def units_mean(paired: Paired, mean: float, alpha: float) -> tuple[Array, Array]:
    """Return [X] the mean that units must reject so that both levels together reject `mean`, and whether they can.

    Limits of independent parts add in squares (MOVER: Zou and Donner, Statistics in Medicine 2008): a limit lies
    sqrt(share * u**2 + s**2) from the estimate, u being the units' distance and s that of the top level.
    """
    distance_X = mean - paired.mean_X
    if paired.top_error_X is None:
        return np.full(len(distance_X), mean), np.ones(len(distance_X), dtype=bool)
    from scipy.stats import t

    left_X = distance_X**2 - (t.isf(alpha / 2, paired.num_top - 1) * paired.top_error_X) ** 2
    for_units_X = np.sqrt(np.maximum(left_X, 0) / np.maximum(paired.share_X, 1e-6))
    return np.clip(paired.mean_X + np.sign(distance_X) * for_units_X, -1, 1), left_X > 0
