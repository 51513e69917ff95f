"""Recompute the main numbers of docs/experiments/teacher-pairs.md from its Parquet file, without this project's code.

    python benchmarks/recompute_teacher_pairs.py [TABLE.parquet]

Prints the planned comparisons and C - A, for passes and for kept passes, with the 95 % interval and p: over these
twelve operations (strata, tasks flipped) and others (operations flipped), with Student's t over collections of pairs.
"""

import sys
from itertools import product
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
from recompute import effect, limits

TABLE = Path(__file__).parents[1] / "docs" / "experiments" / "teacher-pairs.parquet"


def cube(rows, arm, value):
    """Return outcomes by training and task, the operation of each task and the collection of each training."""
    own = sorted((row for row in rows if row["arm"] == arm), key=lambda row: (row["train_seed"], row["task_id"]))
    found = np.array([value(row) for row in own], dtype=float).reshape(-1, len({row["task_id"] for row in own}))
    tasks = found.shape[1]
    return found, [row["unit"] for row in own[:tasks]], [row["pair_set"] for row in own[::tasks]]


def signs_of(num):
    """Return all assignments of signs to a dozen units, 4,000 random ones to more, the observed one first."""
    if num <= 12:
        return 1.0 - 2 * (np.arange(2**num)[:, None] >> np.arange(num) & 1)
    return np.vstack([np.ones(num), np.random.default_rng(1).integers(0, 2, size=(4000, num)) * 2.0 - 1])


def compare(rows, treatment, baseline, value, fixed):
    """Return the difference, the limits of its interval and its p."""
    (one, units, pairs), (other, _, _) = cube(rows, treatment, value), cube(rows, baseline, value)
    stratum = np.unique(units, return_inverse=True)[1]
    each, size, num = one - other, np.bincount(stratum), len(units)
    group = np.arange(num) if fixed else stratum

    def spread(values):
        """Return values whose spread about their mean is that within strata (Cochran 1977, section 5.4)."""
        inside = values - (np.bincount(stratum, values) / size)[stratum]
        return values.mean() + inside * np.sqrt(size / (size - 1))[stratum] if fixed else values

    per_task, by_training = each.mean(0), each.mean(1)
    mean, sizes = per_task.mean(), np.bincount(group).astype(float)
    sums = np.bincount(group, spread(per_task))
    squares = ((sums - sizes * mean) ** 2).sum()
    bernoulli = np.abs(per_task).sum() - num * mean**2
    if fixed:
        within = np.maximum(np.bincount(stratum, (sums - mean) ** 2), 1).sum()
        design = min(within, ((per_task - mean) ** 2).sum() + 1) / (bernoulli + 1)
    else:
        design = (squares + sum(effect(arm.mean(0), stratum, num) for arm in (one, other)) / 2) / (bernoulli + 1)
    up, down = (np.clip(side, 0, None).sum() / design for side in (per_task, -per_task))
    tops = [by_training[[pair == name for pair in pairs]].mean() for name in sorted(set(pairs))]
    error = np.std(tops, ddof=1) / len(tops) ** 0.5
    rest = each - by_training[:, None]
    rest -= rest.mean(0)
    seeds = len(each)
    noise = sum((np.bincount(group, spread(row)) ** 2).sum() for row in rest) / (seeds * (seeds - 1))
    share, signs = max(1 - noise / squares, 1e-6), signs_of(len(sums))
    return limits(mean, error, len(tops), share, (signs, sums, sizes), (up, down, num / design))


VALUES = {"passed": lambda row: row["passed"], "passed and kept": lambda row: row["passed"] and row["protocol_ok"]}

if __name__ == "__main__":
    table = pq.read_table(sys.argv[1] if len(sys.argv) > 1 else TABLE).to_pylist()
    for (what, value), fixed, (one, other) in product(VALUES.items(), (True, False), ("BA", "BC", "CA")):
        estimate, low, high, p = compare(table, one, other, value, fixed)
        said = f"{100 * estimate:+.1f} points [{100 * low:+.1f}, {100 * high:+.1f}], p = {p:.3f}"
        print(f"{what}, {'these' if fixed else 'other'} operations, {one} - {other}: {said}")
