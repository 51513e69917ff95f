"""Other ways to compare two sides on the same tasks, for many simulated experiments at once.

`METHODS` maps a name to a function of the differences of X experiments [X, T], 0 or 1 or means, and the unit of each
task [T]. It returns whether each finds a difference [X], and whether its 95 % interval holds a given one [X].

cluster z      Miller (arXiv 2411.00640): the standard error of sums over units, 1.96 times
CR2            Bell and McCaffrey (Survey Methodology 2002) with Satterthwaite's degrees of freedom, as in clubSandwich
McNemar        no interval; its mid-p as in Fagerland, Lydersen and Laake (BMC Medical Research Methodology 2013)
evalconfidence 0.1.1, `compare`: McNemar's test and a normal interval for pass and fail, Student's t over tasks else
paired-eval    0.4.0, `paired_compare`: sign flips of tasks, and the percentiles of a bootstrap of tasks
errorbars      0.2.4, `paired_compare` with clusters: CR1 with Student's t over units; without spread it finds nothing

tests/test_benchmarks.py holds p-values and intervals of the packages themselves against these.
"""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from scipy.special import bdtr, chdtrc, ndtr, ndtri, stdtr, stdtrit

from composer_stages.evaluation.inference import by_unit

Array = np.ndarray
DRAWS = 399
"""Sign flips and resamples of each simulated experiment."""
EXACT = 25
"""Discordant pairs up to which evalconfidence computes McNemar's test exactly."""
Z = float(ndtri(0.975))


class Found(NamedTuple):
    """The p-value of no difference [X], and a 95 % interval [X]; NaN for one that a method does not give."""

    p: Array
    low: Array
    high: Array


def by_error(mean: Array, error: Array, degrees: float = np.inf) -> Found:
    """Return what a standard error and Student's t find; of no spread, that a difference other than 0 is certain."""
    with np.errstate(divide="ignore", invalid="ignore"):
        ratio = np.where(mean == 0, 0.0, mean / error)
    finite = np.isfinite(degrees)
    p = 2 * (stdtr(degrees, -np.abs(ratio)) if finite else ndtr(-np.abs(ratio)))
    half = (stdtrit(degrees, 0.975) if finite else Z) * error
    return Found(p, mean - half, mean + half)


def paired_t(apart: Array, unit: Array) -> Found:
    num = apart.shape[1]
    return by_error(apart.mean(1), apart.std(1, ddof=1) / num**0.5, num - 1)


def cluster_z(apart: Array, unit: Array) -> Found:
    mean = apart.mean(1)
    sums = by_unit(apart - mean[:, None], unit)
    return by_error(mean, np.sqrt((sums**2).sum(1)) / apart.shape[1])


def errorbars(apart: Array, unit: Array) -> Found:
    units, mean = int(unit.max()) + 1, apart.mean(1)
    sums = by_unit(apart - mean[:, None], unit)
    error = np.sqrt((sums**2).sum(1) * units / (units - 1)) / apart.shape[1]
    found = by_error(mean, error, units - 1)
    return found._replace(p=np.where(error > 0, found.p, 1.0))


def cr2(apart: Array, unit: Array) -> Found:
    num, size, mean = apart.shape[1], np.bincount(unit), apart.mean(1)
    # Of a mean, (I - H) of a unit has the one other eigenvalue 1 - n / N, along the vector that sums its tasks.
    scale = (1 - size / num) ** -0.5
    sums = by_unit(apart - mean[:, None], unit) * scale
    parts = np.diag(size * scale**2) - np.outer(size * scale, size * scale) / num
    degrees = np.trace(parts) ** 2 / (parts**2).sum()
    return by_error(mean, np.sqrt((sums**2).sum(1)) / num, float(degrees))


def bootstrap(apart: Array, unit: Array) -> Found:
    """Return the percentiles of means over resampled units; a difference is found where they leave 0 out."""
    size, random = np.bincount(unit), np.random.default_rng(7)
    drawn = random.multinomial(len(size), [1 / len(size)] * len(size), size=DRAWS).T
    means = np.sort(by_unit(apart, unit) @ drawn / (size @ drawn), axis=1)
    low, high = means[:, int(0.025 * DRAWS)], means[:, int(0.975 * DRAWS) - 1]
    return Found(np.where((low > 0) | (high < 0), 0.0, 1.0), low, high)


def paired_eval(apart: Array, unit: Array) -> Found:
    each = np.arange(apart.shape[1])
    signs = np.random.default_rng(8).integers(0, 2, size=(DRAWS, len(each))) * 2.0 - 1
    flipped = np.abs(apart @ signs.T) >= np.abs(apart.sum(1))[:, None] * (1 - 1e-9)
    return bootstrap(apart, each)._replace(p=(flipped.sum(1) + 1) / (DRAWS + 1))


def mcnemar(apart: Array, unit: Array, observed: float = 1.0) -> Found:
    """Return the exact test; observed: how much the observed count counts, one half for the mid-p."""
    wins, both = (apart > 0).sum(1), (apart != 0).sum(1)
    least = np.minimum(wins, both - wins)
    below = np.where(least > 0, bdtr(np.maximum(least - 1, 0), np.maximum(both, 1), 0.5), 0.0)
    at = bdtr(least, np.maximum(both, 1), 0.5) - below
    p = np.where(both == 0, 1.0, np.minimum(2 * (below + observed * at), 1.0))
    none = np.full(len(p), np.nan)
    return Found(p, none, none)


def evalconfidence(apart: Array, unit: Array) -> Found:
    if not is_binary(apart):
        return paired_t(apart, unit)
    num, mean, both = apart.shape[1], apart.mean(1), (apart != 0).sum(1)
    corrected = chdtrc(1, (np.abs(num * mean) - 1) ** 2 / np.maximum(both, 1))
    p = np.where(both <= EXACT, mcnemar(apart, unit).p, corrected)
    return by_error(mean, np.sqrt((both / num - mean**2) / num))._replace(p=p)


def is_binary(apart: Array) -> bool:
    """Return whether these are differences of outcomes that are 0 or 1."""
    return bool(np.isin(apart, (-1, 0, 1)).all())


METHODS: dict[str, Callable[[Array, Array], Found]] = {
    "paired t": paired_t,
    "cluster z": cluster_z,
    "cluster bootstrap": bootstrap,
    "CR2": cr2,
    "McNemar": mcnemar,
    "McNemar mid-p": lambda apart, unit: mcnemar(apart, unit, 0.5),
    "evalconfidence": evalconfidence,
    "paired-eval": paired_eval,
    "errorbars": errorbars,
}
OF_PAIRS = ("McNemar", "McNemar mid-p")
"""Methods for one outcome a task and side that is 0 or 1."""
