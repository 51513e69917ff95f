"""Effect sizes that can be compared across adapters: Cohen's d within strata and matched AUROC, with intervals.

Cosines cannot be compared: adapters differ in their number of parameters. Strata are rows of one problem, source and
correctness; resampled are problems, the same ones for both sides of a comparison. Shapes: n rows, C problems, D
directions, R resamples.
"""

from dataclasses import dataclass

import numpy as np
from jaxtyping import Float

from stages.probe.checks.contrasts import Codes, Flags, Scores, codes, concordance
from stages.probe.checks.labelled import Labelled


@dataclass(frozen=True)
class Parts:
    """By problem: weighted gaps of means and their weights, squared deviations and their df, wins and their pairs."""

    gaps: Float[np.ndarray, "C D"]
    weights: Float[np.ndarray, " C"]
    squares: Float[np.ndarray, "C D"]
    freedom: Float[np.ndarray, " C"]
    wins: Float[np.ndarray, "C D"]
    pairs: Float[np.ndarray, " C"]

    def d(self, counts: Float[np.ndarray, "R C"]) -> Float[np.ndarray, "R D"]:
        """Cohen's d when each problem is taken so many times: mean gap within strata over the spread within them."""
        gap = counts @ self.gaps / np.maximum(counts @ self.weights, 1e-12)[:, None]
        spread = np.sqrt(counts @ self.squares / np.maximum(counts @ self.freedom, 1)[:, None])
        return gap / np.maximum(spread, 1e-12)

    def auroc(self, counts: Float[np.ndarray, "R C"]) -> Float[np.ndarray, "R D"]:
        """The matched AUROC when each problem is taken so many times."""
        return counts @ self.wins / np.maximum(counts @ self.pairs, 1e-12)[:, None]


def effect_parts(scores: Scores, flags: Flags, strata: Codes, problems: Codes) -> Parts:
    """What d and AUROC are made of, by problem; a stratum without both kinds gives its spread alone."""
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
            weight = len(sides[0]) * len(sides[1]) / inside.sum()
            gaps[problem] += weight * (sides[0].mean(0) - sides[1].mean(0))
            weights[problem] += weight
    pairs = concordance(scores, flags, strata, problems)
    return Parts(gaps, weights, squares, freedom, pairs.wins, pairs.pairs)


@dataclass(frozen=True)
class Comparison:
    """Effect sizes of two scores of the same rows.

    `ratio` is the second d over the first and `difference` the second less the first, each (value, low, high) with the
    bounds of its 95 % interval.
    """

    d: tuple[float, float]
    auroc: tuple[float, float]
    ratio: tuple[float, float, float]
    difference: tuple[float, float, float]


def compare_effects(rows: Labelled, draws: int, seed: int) -> Comparison:
    """Compare the two columns of scores [n, 2], hacked against other rows, paired by resampled problem."""
    strata = codes(rows.problem, rows.wrong, rows.source)
    parts = effect_parts(rows.scores, rows.hacked, strata, rows.problem)
    count = len(parts.weights)
    once = np.ones((1, count))
    d, auroc = parts.d(once)[0], parts.auroc(once)[0]
    drawn = np.random.default_rng(seed).multinomial(count, np.full(count, 1 / count), size=draws)
    resampled = parts.d(drawn.astype(float))
    ratio = resampled[:, 1] / np.where(np.abs(resampled[:, 0]) < 1e-12, np.nan, resampled[:, 0])
    difference = resampled[:, 1] - resampled[:, 0]
    return Comparison(
        d=(float(d[0]), float(d[1])),
        auroc=(float(auroc[0]), float(auroc[1])),
        ratio=(float(d[1] / d[0]), *_interval(ratio)),
        difference=(float(d[1] - d[0]), *_interval(difference)),
    )


def _interval(values: Float[np.ndarray, " R"]) -> tuple[float, float]:
    low, high = np.nanquantile(values, [0.025, 0.975])
    return float(low), float(high)
