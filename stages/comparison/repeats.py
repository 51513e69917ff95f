"""How large a difference repeats alone make: several samples of a task in one log, or several runs of one model."""

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from composer_stages.comparison.logs import ReadLog
from composer_stages.evaluation.inference import ALPHA, Array

OF_A_RUN = frozenset({"seed", "max_connections", "max_retries", "timeout", "batch_size"})
"""Settings that repeats of one model may differ in."""


@dataclass(frozen=True)
class Noise:
    """The difference that 95 % of repeats stay below where sides have equal rates, in units of the score.

    repeated: the sides whose repeats show it; another one is taken to vary as they do. same: both sides are runs of one
    model.
    """

    limit: float
    repeated: tuple[str, ...]
    same: bool


def are_repeats(first: ReadLog, second: ReadLog) -> bool:
    """Return whether two logs say that they are runs of one model with the same settings. A copy is no repeat."""
    settings = [
        {name: values for name, values in log.settings.items() if name not in OF_A_RUN} for log in (first, second)
    ]
    of_one_model = len(first.models) == 1 and first.models == second.models and settings[0] == settings[1]
    return of_one_model and first.digests != second.digests


def measure_noise(
    sides: Sequence[ReadLog], runs: Sequence[Sequence[ReadLog]], letters: Sequence[str], tasks: Sequence[str]
) -> Noise | None:
    """Return how large a difference of two sides repeats alone make; None where most tasks of both have no repeat.

    runs: the other runs of each side's model. Samples of a task vary; the mean over n of them has an nth of that
    variance.
    """
    spreads = [_spread(side, others, tasks) for side, others in zip(sides, runs, strict=True)]
    repeated = [np.isfinite(variance_T).sum() * 2 > len(tasks) for variance_T, _ in spreads]
    if not any(repeated):
        return None
    # A task or side without repeats is taken to vary as others do.
    variances = [
        np.where(np.isnan(variance_T), np.nanmean(variance_T), variance_T) if is_repeated else variance_T
        for (variance_T, _), is_repeated in zip(spreads, repeated, strict=True)
    ]
    of_other = variances[repeated.index(True)]
    means = [
        np.nanmean((variance_T if is_repeated else of_other) / num_T)
        for variance_T, (_, num_T), is_repeated in zip(variances, spreads, repeated, strict=True)
    ]
    limit = NormalDist().inv_cdf(1 - ALPHA / 2) * float(sum(means) / len(tasks)) ** 0.5
    named = tuple(letter for letter, is_repeated in zip(letters, repeated, strict=True) if is_repeated)
    return Noise(limit, named, any(run is sides[1] for run in runs[0]))


def _spread(side: ReadLog, runs: Sequence[ReadLog], tasks: Sequence[str]) -> tuple[Array, Array]:
    """Return [T] the variance of a sample of each task, NaN where there is one alone, and how many a side has."""
    if not runs and side.num_tasks == len(side.items):
        return np.full(len(tasks), np.nan), np.ones(len(tasks))
    names = pa.array(tasks, pa.string())
    columns = ["seed", "task", "score"]
    items = pa.concat_tables(log.items.select(columns) for log in (side, *runs))
    aggregations = [("score", "variance", pc.VarianceOptions(ddof=1))]
    cells = items.group_by(["seed", "task"], use_threads=False).aggregate(aggregations)
    variances = cells.group_by("task", use_threads=False).aggregate([("score_variance", "mean")])
    of_side = side.items.filter(pc.is_valid(side.items["score"])).group_by(["seed", "task"], use_threads=False)
    samples = of_side.aggregate([([], "count_all")])
    # A mean over seeds or judges, of n samples each, has the variance of their number times the harmonic mean of n.
    shares = pc.divide(1.0, pc.cast(samples["count_all"], pa.float64()))
    counts = pa.table({"task": samples["task"], "share": shares}).group_by("task", use_threads=False)
    counts = counts.aggregate([("share", "mean"), ("share", "count")])
    counts = counts.append_column("num", pc.divide(counts["share_count"], counts["share_mean"]))

    def of_tasks(table: pa.Table, column: str) -> Array:
        values: Array = pc.cast(table[column], pa.float64()).take(pc.index_in(names, table["task"])).to_numpy()
        return values

    return of_tasks(variances, "score_variance_mean"), of_tasks(counts, "num")
