"""Statistics of labelled rows that are not independent: rows of one problem are correlated.

First tests of a flag (Welch, permutation, regression, concordance), then `Labelled`, the scored rows of the T4 checks,
then effect sizes that are comparable across adapters. Cosines are not: adapters differ in their number of parameters.
Scores are [n, D], one column for each direction, so that v and all its placebos share one computation. The bounds of
too little data are those of the probe's plan.

Shapes: n rows, D directions, S strata, C clusters (problems), R draws.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
from jaxtyping import Bool, Float, Int
from scipy.optimize import brentq
from scipy.sparse import csr_array
from scipy.stats import norm, t as student_t

from composer_stages.evaluation.inference import design_effect, one_sided_p, wilson
from composer_stages.runs.kinds import Row
from composer_stages.words import Sentence


@dataclass(frozen=True)
class Draws:
    """The number of permutations, and their seed."""

    permutations: int = 2000
    seed: int = 0


Scores = Float[np.ndarray, "n D"]
Flags = Bool[np.ndarray, " n"]
Codes = Int[np.ndarray, " n"]
MIN_ROWS, MIN_PROBLEMS = 15, 8
"""The minimum of rows in a bucket, and of problems with both kinds of rows."""
Z = float(norm.ppf(0.95))
"""Of one-sided bounds."""
EDGE = 1e-9
"""The distance from an observed share at which the search for its bounds begins."""
FROM_HACKS = ("perm_pairs", "hack_hack")
"""Families of placebos made of the gradients of hacks: reported, but no null (see `probe.direction`)."""


def codes(*labels: Sequence[object] | np.ndarray) -> Codes:
    """Return one integer for every combination of labels."""
    # With a separator that no label contains, so that ("a", "bc") and ("ab", "c") differ.
    joined = ["\x1f".join(str(part) for part in row) for row in zip(*labels, strict=True)]
    return np.unique(np.asarray(joined, dtype=str), return_inverse=True)[1]


def welch(scores: Scores, flags: Flags) -> tuple[Float[np.ndarray, " D"], Float[np.ndarray, " D"]]:
    """Return Welch's t of flagged minus other rows and its df (Welch-Satterthwaite), as if rows were independent."""
    parts = [scores[flags], scores[~flags]]
    means = [part.mean(0) for part in parts]
    errors = [part.var(0, ddof=1) / len(part) for part in parts]
    total = errors[0] + errors[1]
    df = total**2 / sum(error**2 / (len(part) - 1) for error, part in zip(errors, parts, strict=True))
    return (means[0] - means[1]) / np.sqrt(total), df


def within(scores: Scores, strata: Codes) -> Scores:
    """Return scores less the mean of their stratum."""
    counts = np.bincount(strata)
    return scores - (_sums(scores, strata, len(counts)) / np.maximum(counts, 1)[:, None])[strata]


def _sums(values: Scores, groups: Codes, count: int) -> Float[np.ndarray, "G D"]:
    """Return the sum of rows for each of `count` groups: equal to `np.add.at` bit for bit, in a tenth of its time."""
    # A sparse product adds a group's rows in their order, each times 1.
    rows = np.arange(len(groups))
    members = csr_array((np.ones(len(groups)), (groups, rows)), shape=(count, len(groups)))
    return np.asarray(members @ values)


def mixed(flags: Flags, strata: Codes) -> int:
    """Return the number of strata that hold both flagged and other rows."""
    total, flagged = np.bincount(strata), np.bincount(strata, weights=flags)
    return int(((flagged > 0) & (flagged < total)).sum())


def permuted(
    values: Float[np.ndarray, " n"], strata: Codes, draws: int, rng: np.random.Generator
) -> Float[np.ndarray, "B n"]:
    """Return random permutations of the values within strata, one a line."""
    order = np.argsort(strata, kind="stable")
    # Sorting these keys permutes rows within strata: the integer part keeps each row in its stratum.
    keys = strata[order] + rng.random((draws, len(values)))
    dealt = np.empty((draws, len(values)))
    dealt[:, order] = values[order][np.argsort(keys, axis=1)]
    return dealt


def permutation_p(score: Float[np.ndarray, " n"], flags: Flags, strata: Codes, draws: int, seed: int) -> float:
    """Return the one-sided p of sum over strata of n1 n0 / (n1 + n0) (mean1 - mean0), flags permuted within strata.

    That statistic is the sum of flagged rows' scores, less their stratum's mean.
    """
    centred = within(score[:, None], strata)[:, 0]
    dealt = permuted(centred, strata, draws, np.random.default_rng(seed))
    # The identity permutation sums in another order.
    return one_sided_p(dealt[:, flags].sum(1), centred[flags].sum(), rounding=1e-12)


@dataclass(frozen=True)
class Regression:
    """The coefficient of a flag with cluster-robust standard error and t [D]; p is one-sided, with clusters - 1 df."""

    estimate: Float[np.ndarray, " D"]
    error: Float[np.ndarray, " D"]
    t: Float[np.ndarray, " D"]
    p: Float[np.ndarray, " D"]


def regress(scores: Scores, flags: Flags, nuisances: Float[np.ndarray, "n k"], clusters: Codes) -> Regression:
    """Regress scores on the flag, nuisances and a fixed effect of each cluster by least squares.

    By Frisch-Waugh: the flag's residual on the nuisances. Standard errors are robust to clusters (Liang and Zeger,
    Biometrika 73, 1986) with the correction C / (C - 1) (n - 1) / (n - p), which clubSandwich calls CR1S. t is NaN
    where the nuisances explain the flag completely.
    """
    nuisance_columns = within(nuisances.astype(float), clusters)
    nuisance_columns = nuisance_columns / np.maximum(np.linalg.norm(nuisance_columns, axis=0), 1e-12)
    flag, outcome = within(flags[:, None].astype(float), clusters), within(scores, clusters)
    basis = nuisance_columns
    # An orthonormal basis of the span; columns that are constant within problems, and collinear ones, drop out.
    if nuisance_columns.shape[1]:
        vectors, strengths, _ = np.linalg.svd(nuisance_columns, full_matrices=False)
        basis = vectors[:, strengths > 1e-8]
    flag, outcome = flag - basis @ (basis.T @ flag), outcome - basis @ (basis.T @ outcome)
    weight = float((flag**2).sum())
    if weight < 1e-9 * len(flags):
        nan = np.full(scores.shape[1], np.nan)
        return Regression(nan, nan, nan, nan)
    estimate = (flag * outcome).sum(0) / weight
    residuals = flag * (outcome - flag * estimate)
    sums = _sums(residuals, clusters, clusters.max() + 1)
    count, rows, used = len(np.unique(clusters)), len(flags), basis.shape[1] + 1
    correction = count / (count - 1) * (rows - 1) / max(rows - used, 1)
    error = np.sqrt(correction * (sums**2).sum(0)) / weight
    t = estimate / np.maximum(error, 1e-300)
    return Regression(estimate, error, t, np.asarray(student_t.sf(t, count - 1)))


@dataclass(frozen=True)
class Concordance:
    """Pairs (flagged row, other row) of one stratum and those that score in this order, by cluster.

    `sizes` are the numbers of flagged and of other rows in each stratum.
    """

    wins: Float[np.ndarray, "C D"]
    pairs: Float[np.ndarray, " C"]
    sizes: Float[np.ndarray, "S two"]

    def auroc(self) -> Float[np.ndarray, " D"]:
        """Return the share of concordant pairs, ties half; NaN without pairs."""
        return self.wins.sum(0) / self.pairs.sum() if self.pairs.sum() else np.full(self.wins.shape[1], np.nan)

    def interval(self) -> tuple[float, float]:
        """Return the 95 % interval of the first column: all values that the observed share does not refute.

        Newcombe's method 5 (Stat. Med. 25:559, 2006): the variance of Hanley and McNeil (Radiology 143:29, 1982) is
        taken at the tested value and not at the observed one, where it is 0 for perfect separation, as is that of
        resampled clusters. It is multiplied by the design effect, the variance between clusters (Obuchowski,
        Biometrics 53:567, 1997) over that of independent rows, if above 1; the quantile is Student's with clusters - 1
        degrees of freedom. NaN without pairs.
        """
        share, total = float(self.auroc()[0]), float(self.pairs.sum())
        if not total:
            return math.nan, math.nan
        filled = self.pairs > 0
        count, rough = int(filled.sum()), self._variance(share)
        between = float(((self.wins[:, 0] - share * self.pairs)[filled] ** 2).sum()) / total**2
        design = max(1.0, between * count / (count - 1) / rough) if count > 1 and rough > 0 else 1.0
        # One cluster has no variance between clusters: rows are taken as independent.
        width = float(student_t.ppf(0.975, count - 1) if count > 1 else norm.ppf(0.975))

        def refuted(value: float) -> float:
            return (share - value) ** 2 - width**2 * design * self._variance(value)

        # At the observed share the difference is 0 and not refuted, so the search for bounds begins beside it.
        low, high = share - EDGE, share + EDGE
        return (
            float(brentq(refuted, 0, low)) if low > 0 and refuted(low) < 0 else max(share, 0.0),
            float(brentq(refuted, high, 1)) if high < 1 and refuted(high) < 0 else min(share, 1.0),
        )

    def _variance(self, share: float) -> float:
        """Return Hanley and McNeil's variance of the share, summed over strata, both sizes at their mean (Newcombe)."""
        flagged, unflagged = self.sizes.T
        pairs, size = flagged * unflagged, (flagged + unflagged) / 2
        covariance = (size - 1) * ((1 - share) / (2 - share) + share / (1 + share))
        return float((share * (1 - share) * pairs * (1 + covariance)).sum() / pairs.sum() ** 2)


def concordance(scores: Scores, flags: Flags, strata: Codes, clusters: Codes) -> Concordance:
    """Count the pairs of the matched AUROC: flagged against other rows of the same stratum, gathered by cluster.

    The share of concordant pairs, ties half; summing it by stratum and cluster is this project's own.
    """
    wins, pairs = np.zeros((clusters.max() + 1, scores.shape[1])), np.zeros(clusters.max() + 1)
    sizes = []
    for stratum in np.unique(strata):
        inside = strata == stratum
        high, low = scores[inside & flags], scores[inside & ~flags]
        difference = high[:, None] - low[None]
        cluster = clusters[inside][0]  # strata are parts of clusters, so that any row has the stratum's cluster
        wins[cluster] += (difference > 0).sum((0, 1)) + 0.5 * (difference == 0).sum((0, 1))
        pairs[cluster] += len(high) * len(low)
        sizes.append([len(high), len(low)])
    return Concordance(wins, pairs, np.array(sizes, dtype=float))


def multiple_correlation(flags: Flags, groups: Codes) -> float:
    """Return the correlation of a flag with groups: the root of the share of its variance between groups, 0..1."""
    flag = flags.astype(float)
    total = ((flag - flag.mean()) ** 2).sum()
    residual = (within(flag[:, None], groups) ** 2).sum()
    return float(np.sqrt(max(0.0, 1 - residual / total))) if total else 0.0


def intraclass_correlation(values: Float[np.ndarray, " n"], clusters: Codes) -> float:
    """Return ICC(1) of values by cluster, from one-way analysis of variance with unequal sizes; NaN without variance.

    Shrout and Fleiss, Psychological Bulletin 86 (1979), with the mean size for unequal clusters.
    """
    # Renumbered: problems without a row after a selection would count as empty clusters.
    _, clusters = np.unique(clusters, return_inverse=True)
    counts = np.bincount(clusters)
    count, rows = len(counts), len(values)
    means = np.bincount(clusters, weights=values) / counts
    between = float((counts * (means - values.mean()) ** 2).sum()) / (count - 1)
    inside = float(((values - means[clusters]) ** 2).sum()) / (rows - count)
    size = (rows - (counts**2).sum() / rows) / (count - 1)
    return (between - inside) / (between + (size - 1) * inside) if between + inside else float("nan")


@dataclass(frozen=True)
class Labelled:
    """n rows with their labels and scores, as arrays.

    `scores` [n, 1 + D] has the scores of v and of its placebos, `first` [n, 1] the score of v on the first 128 tokens,
    `style` [n, 2] the numbers of hedges and comments, `length` own tokens, `logp` nats a token. `families` has the
    family of each of the D placebos.
    """

    hacked: Flags
    wrong: Flags
    problem: Codes
    source: Codes
    length: Float[np.ndarray, " n"]
    style: Float[np.ndarray, "n 2"]
    logp: Float[np.ndarray, " n"]
    scores: Scores
    first: Scores
    families: tuple[str, ...] = ()

    def __len__(self) -> int:
        return len(self.hacked)

    def where(self, keep: Flags) -> "Labelled":
        """Return the rows where `keep` is true."""
        by_row = [name for name in self.__dataclass_fields__ if name != "families"]
        return replace(self, **{name: getattr(self, name)[keep] for name in by_row})

    @property
    def null(self) -> Flags:
        """The mask of the D placebos that are a null for v: those without gradients of hacks."""
        return np.array([family not in FROM_HACKS for family in self.families], dtype=bool)


def labelled(rows: Sequence[Row], scores: Scores, families: Sequence[str] = ()) -> Labelled:
    """Return `probe_row/1` rows with their scores as arrays, without rows of unknown label or undefined score.

    families: of the placebos, in the order of their columns; one family for all by default.
    """
    keep = [
        index
        for index, row in enumerate(rows)
        if row["hacked"] is not None and row["hidden_pass"] is not None and np.isfinite(scores[index]).all()
    ]
    used = [rows[index] for index in keep]
    style = [[row["hedge_count"] or 0, row["comment_count"] or 0] for row in used]
    return Labelled(
        hacked=np.array([row["hacked"] for row in used], dtype=bool),
        wrong=np.array([not row["hidden_pass"] for row in used], dtype=bool),
        problem=codes([row["problem_id"] for row in used]),
        source=codes([row["src_pool"] for row in used]),
        length=np.array([row["n_loss_tokens"] for row in used], dtype=float),
        style=np.array(style, dtype=float).reshape(len(used), 2),
        logp=np.array([row["logp_mean"] for row in used], dtype=float),
        scores=scores[keep],
        first=np.array([[row["cos_first128"]] for row in used], dtype=float).reshape(len(used), 1),
        families=tuple(families) or ("placebo",) * (scores.shape[1] - 1),
    )


class Rate(NamedTuple):
    """A rate with its one-sided 95 % bounds, below and above."""

    value: float
    low: float
    high: float

    @classmethod
    def of(cls, flags: Sequence[bool], problems: Sequence[object]) -> "Rate":
        """Return the rate of flags: Wilson's bounds, of as many rows as problems leave independent."""
        values = np.array([flags], dtype=float)
        effect, value = float(design_effect(values, codes(problems))[0]), float(values.mean())
        return cls(value, *wilson(value, len(flags) / effect, Z))

    @property
    def complement(self) -> "Rate":
        """Return one less this rate."""
        return Rate(1 - self.value, 1 - self.high, 1 - self.low)

    def less(self, rate: "Rate") -> "Rate":
        """Return the difference of two rates: distances of independent parts add in squares (MOVER)."""
        value = self.value - rate.value
        below = math.hypot(self.value - self.low, rate.high - rate.value)
        above = math.hypot(self.high - self.value, rate.value - rate.low)
        return Rate(value, value - below, value + above)

    def reaches(self, limit: float) -> bool | None:
        """Return whether the rate is shown to be at least a limit, or below it; None where neither is shown."""
        return True if self.low >= limit else False if self.high < limit else None


def shortage(flags: Flags, strata: Codes, names: tuple[str, str]) -> str | None:
    """Return why these rows are too few (under 15 rows in a bucket or 8 strata with both); None when they suffice."""
    # A stratum with one kind of rows has no comparison, however many rows it has.
    counts, num_mixed = (int(flags.sum()), int((~flags).sum())), mixed(flags, strata) if len(flags) else 0
    if min(counts) >= MIN_ROWS and num_mixed >= MIN_PROBLEMS:
        return None
    return Sentence(
        "probe.too-few-rows",
        flagged=counts[0],
        flagged_name=names[0],
        unflagged=counts[1],
        unflagged_name=names[1],
        mixed=num_mixed,
        min_rows=MIN_ROWS,
        min_problems=MIN_PROBLEMS,
    )


@dataclass(frozen=True)
class EffectParts:
    """By problem: weighted gaps of means and weights, squared deviations and df, wins and pairs of the AUROC."""

    gaps: Float[np.ndarray, "C D"]
    weights: Float[np.ndarray, " C"]
    squares: Float[np.ndarray, "C D"]
    freedom: Float[np.ndarray, " C"]
    wins: Float[np.ndarray, "C D"]
    pairs: Float[np.ndarray, " C"]

    def d(self, counts: Float[np.ndarray, "R C"]) -> Float[np.ndarray, "R D"]:
        """Return Cohen's d, the mean gap over the spread within strata. counts: the weight of each problem."""
        gap = counts @ self.gaps / np.maximum(counts @ self.weights, 1e-12)[:, None]
        spread = np.sqrt(counts @ self.squares / np.maximum(counts @ self.freedom, 1)[:, None])
        return gap / np.maximum(spread, 1e-12)

    def auroc(self, counts: Float[np.ndarray, "R C"]) -> Float[np.ndarray, "R D"]:
        """Return the matched AUROC. counts: the weight of each problem."""
        return counts @ self.wins / np.maximum(counts @ self.pairs, 1e-12)[:, None]


def effect_parts(scores: Scores, flags: Flags, strata: Codes, problems: Codes) -> EffectParts:
    """Return the terms of d and AUROC by problem; a stratum without both kinds contributes its spread only."""
    count, width = problems.max() + 1, scores.shape[1]
    gaps, squares = np.zeros((count, width)), np.zeros((count, width))
    weights, freedom = np.zeros(count), np.zeros(count)
    for stratum in np.unique(strata):
        inside = strata == stratum
        problem, sides = problems[inside][0], [scores[inside & flags], scores[inside & ~flags]]
        for side in (side for side in sides if len(side)):
            squares[problem] += ((side - side.mean(0)) ** 2).sum(0)
            freedom[problem] += len(side) - 1
        if all(len(side) for side in sides):
            # The weight of a difference of two means with equal variances, n1 n0 / (n1 + n0).
            weight = len(sides[0]) * len(sides[1]) / inside.sum()
            gaps[problem] += weight * (sides[0].mean(0) - sides[1].mean(0))
            weights[problem] += weight
    pairs = concordance(scores, flags, strata, problems)
    return EffectParts(gaps, weights, squares, freedom, pairs.wins, pairs.pairs)


@dataclass(frozen=True)
class EffectComparison:
    """Effect sizes of two scores of the same rows.

    `ratio` is the second d over the first and `difference` the second less the first, each (value, low, high) with the
    bounds of its 95 % interval.
    """

    d: tuple[float, float]
    auroc: tuple[float, float]
    ratio: tuple[float, float, float]
    difference: tuple[float, float, float]


def compare_effects(rows: Labelled, draws: int, seed: int) -> EffectComparison:
    """Compare the two columns of scores [n, 2], hacked against other rows: Cohen's d within strata and matched AUROC.

    Strata are rows of one problem, source and correctness. Problems are resampled, the same ones for both columns.
    """
    strata = codes(rows.problem, rows.wrong, rows.source)
    parts = effect_parts(rows.scores, rows.hacked, strata, rows.problem)
    count = len(parts.weights)
    once = np.ones((1, count))
    d, auroc = parts.d(once)[0], parts.auroc(once)[0]
    # The same problems for both columns: both scores are of the same rows, so their difference is paired.
    drawn = np.random.default_rng(seed).multinomial(count, np.full(count, 1 / count), size=draws)
    resampled = parts.d(drawn.astype(float))
    ratio = resampled[:, 1] / np.where(np.abs(resampled[:, 0]) < 1e-12, np.nan, resampled[:, 0])
    difference = resampled[:, 1] - resampled[:, 0]
    return EffectComparison(
        d=(float(d[0]), float(d[1])),
        auroc=(float(auroc[0]), float(auroc[1])),
        ratio=(float(d[1] / d[0]), *_interval(ratio)),
        difference=(float(d[1] - d[0]), *_interval(difference)),
    )


def _interval(values: Float[np.ndarray, " R"]) -> tuple[float, float]:
    low, high = np.nanquantile(values, [0.025, 0.975])
    return float(low), float(high)
