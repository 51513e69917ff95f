"""Statistics of labelled rows that are not independent: rows of one problem resemble each other.

Scores are [n, D], one column a direction, so that v and all its placebos go through the same arithmetic at once.
Shapes: n rows, D directions, S strata, C clusters (problems), R draws.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from jaxtyping import Bool, Float, Int

Scores = Float[np.ndarray, "n D"]
Flags = Bool[np.ndarray, " n"]
Codes = Int[np.ndarray, " n"]


def codes(*labels: Sequence[object] | np.ndarray) -> Codes:
    """One integer for every combination of labels."""
    joined = ["\x1f".join(str(part) for part in row) for row in zip(*labels, strict=True)]
    return np.unique(np.asarray(joined, dtype=str), return_inverse=True)[1]


def welch(scores: Scores, flags: Flags) -> tuple[Float[np.ndarray, " D"], Float[np.ndarray, " D"]]:
    """Welch's t of flagged minus other rows and its df (Welch-Satterthwaite), as if rows were independent."""
    parts = [scores[flags], scores[~flags]]
    means = [part.mean(0) for part in parts]
    errors = [part.var(0, ddof=1) / len(part) for part in parts]
    total = errors[0] + errors[1]
    df = total**2 / sum(error**2 / (len(part) - 1) for error, part in zip(errors, parts, strict=True))
    return (means[0] - means[1]) / np.sqrt(total), df


def within(scores: Scores, strata: Codes) -> Scores:
    """Scores less the mean of their stratum."""
    counts = np.bincount(strata)
    sums = np.zeros((len(counts), scores.shape[1]))
    np.add.at(sums, strata, scores)
    return scores - (sums / np.maximum(counts, 1)[:, None])[strata]


def mixed(flags: Flags, strata: Codes) -> int:
    """Strata that hold both flagged and other rows."""
    total, flagged = np.bincount(strata), np.bincount(strata, weights=flags)
    return int(((flagged > 0) & (flagged < total)).sum())


def permutation_p(score: Float[np.ndarray, " n"], flags: Flags, strata: Codes, draws: int, seed: int) -> float:
    """One-sided p of sum over strata of n1 n0 / (n1 + n0) (mean1 - mean0), flags dealt anew within strata.

    That statistic is the sum of flagged rows' scores, less their stratum's mean.
    """
    order = np.argsort(strata, kind="stable")
    centred, flagged, sorted_strata = within(score[:, None], strata)[order, 0], flags[order], strata[order]
    rng = np.random.default_rng(seed)
    observed = centred[flagged].sum() - 1e-12
    keys = sorted_strata + rng.random((draws, len(score)))  # the integer part keeps rows in their stratum
    dealt = centred[np.argsort(keys, axis=1)]
    return float((1 + (dealt[:, flagged].sum(1) >= observed).sum()) / (draws + 1))


@dataclass(frozen=True)
class Regression:
    """The coefficient of a flag with cluster-robust standard error and t [D]; df is the number of clusters less 1."""

    estimate: Float[np.ndarray, " D"]
    error: Float[np.ndarray, " D"]
    t: Float[np.ndarray, " D"]
    df: int

    def p(self) -> Float[np.ndarray, " D"]:
        """One-sided: the probability of a t as large under no effect."""
        from scipy.stats import t

        return np.asarray(t.sf(self.t, self.df))


def regress(scores: Scores, flags: Flags, nuisances: Float[np.ndarray, "n k"], clusters: Codes) -> Regression:
    """Least squares of scores on the flag, nuisances and a fixed effect of each cluster.

    By Frisch-Waugh: what of the flag the others do not explain. Standard errors are robust to clusters (Liang and
    Zeger, Biometrika 73, 1986) with the correction C / (C - 1) (n - 1) / (n - p), which clubSandwich calls CR1S. t is
    NaN where the others explain the flag whole.
    """
    others = within(nuisances.astype(float), clusters)
    others = others / np.maximum(np.linalg.norm(others, axis=0), 1e-12)
    flag, outcome = within(flags[:, None].astype(float), clusters), within(scores, clusters)
    basis = _basis(others)
    flag, outcome = flag - basis @ (basis.T @ flag), outcome - basis @ (basis.T @ outcome)
    weight = float((flag**2).sum())
    if weight < 1e-9 * len(flags):
        nan = np.full(scores.shape[1], np.nan)
        return Regression(nan, nan, nan, 0)
    estimate = (flag * outcome).sum(0) / weight
    residuals = flag * (outcome - flag * estimate)
    sums = np.zeros((clusters.max() + 1, scores.shape[1]))
    np.add.at(sums, clusters, residuals)
    count, rows, used = len(np.unique(clusters)), len(flags), basis.shape[1] + 1
    correction = count / (count - 1) * (rows - 1) / max(rows - used, 1)
    error = np.sqrt(correction * (sums**2).sum(0)) / weight
    return Regression(estimate, error, estimate / np.maximum(error, 1e-300), count - 1)


def _basis(columns: Float[np.ndarray, "n k"]) -> Float[np.ndarray, "n r"]:
    """An orthonormal basis of the columns' span; constant and collinear columns drop out."""
    if not columns.shape[1]:
        return columns
    left, strengths, _ = np.linalg.svd(columns, full_matrices=False)
    return left[:, strengths > 1e-8]


@dataclass(frozen=True)
class Concordance:
    """Pairs (flagged row, other row) of one stratum that score in this order, by cluster: wins [C, D] of pairs [C]."""

    wins: Float[np.ndarray, "C D"]
    pairs: Float[np.ndarray, " C"]

    def auroc(self) -> Float[np.ndarray, " D"]:
        """The share of concordant pairs, ties half; NaN without pairs."""
        return self.wins.sum(0) / self.pairs.sum() if self.pairs.sum() else np.full(self.wins.shape[1], np.nan)

    def interval(self, draws: int, seed: int) -> tuple[float, float]:
        """95 % interval of the first column by resampling clusters."""
        rng = np.random.default_rng(seed)
        weights = rng.multinomial(len(self.pairs), np.full(len(self.pairs), 1 / len(self.pairs)), size=draws)
        total = weights @ self.pairs
        drawn = (weights @ self.wins[:, 0])[total > 0] / total[total > 0]
        return (float(np.quantile(drawn, 0.025)), float(np.quantile(drawn, 0.975))) if len(drawn) else (np.nan, np.nan)


def concordance(scores: Scores, flags: Flags, strata: Codes, clusters: Codes) -> Concordance:
    """Matched AUROC: flagged rows against other rows of the same stratum, gathered by cluster.

    The share of pairs that are ordered rightly, ties half; gathering it by stratum and cluster is this project's own.
    """
    wins, pairs = np.zeros((clusters.max() + 1, scores.shape[1])), np.zeros(clusters.max() + 1)
    for stratum in np.unique(strata):
        inside = strata == stratum
        high, low = scores[inside & flags], scores[inside & ~flags]
        difference = high[:, None] - low[None]
        cluster = clusters[inside][0]
        wins[cluster] += (difference > 0).sum((0, 1)) + 0.5 * (difference == 0).sum((0, 1))
        pairs[cluster] += len(high) * len(low)
    return Concordance(wins, pairs)


def multiple_correlation(flags: Flags, groups: Codes) -> float:
    """How well groups predict a flag: the square root of the share of its variance that lies between groups, 0..1."""
    flag = flags.astype(float)
    total = ((flag - flag.mean()) ** 2).sum()
    residual = (within(flag[:, None], groups) ** 2).sum()
    return float(np.sqrt(max(0.0, 1 - residual / total))) if total else 0.0


def intraclass_correlation(values: Float[np.ndarray, " n"], clusters: Codes) -> float:
    """ICC(1) of values by cluster, from one-way analysis of variance with unequal sizes; NaN without variance.

    Shrout and Fleiss, Psychological Bulletin 86 (1979), with the mean size that unequal clusters ask for.
    """
    _, clusters = np.unique(clusters, return_inverse=True)  # some of the numbered problems may have no row left
    counts = np.bincount(clusters)
    count, rows = len(counts), len(values)
    means = np.bincount(clusters, weights=values) / counts
    between = float((counts * (means - values.mean()) ** 2).sum()) / (count - 1)
    inside = float(((values - means[clusters]) ** 2).sum()) / (rows - count)
    size = (rows - (counts**2).sum() / rows) / (count - 1)
    return (between - inside) / (between + (size - 1) * inside) if between + inside else float("nan")
