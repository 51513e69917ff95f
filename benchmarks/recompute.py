"""Recompute the main numbers of docs/experiments/skills-teachers.md from its Parquet file, without this project's code.

    python benchmarks/recompute.py [TABLE.parquet]

Prints, for each registered comparison, the mean difference in passes with the protocol kept at temperature 0, in
points, with its 95 % interval and p. Written from the rule's description alone, by numpy and the t and normal
distributions of scipy: families are flipped whole by signs, the p of flips and of Tango's score test is the larger one,
a difference counts as of the mean size of differences, and trainings enter with Student's t; distances of both levels
add in squares, and are no smaller than that of families.
"""

import sys
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
from scipy.stats import norm, t

TABLE = Path(__file__).parents[1] / "docs" / "experiments" / "skills-teachers.parquet"
SIGNS = np.random.default_rng(0).integers(0, 2, size=(4000, 71), dtype=np.int8) * 2.0 - 1
SIGNS[0] = 1  # the observed signs are one of the assignments


def cube(rows, arm):
    """Return outcomes by training and task, and the family of each task; tasks in the order of their names."""
    own = [row for row in rows if row["arm"] == arm]
    tasks, seeds = (sorted({row[name] for row in own}) for name in ("task_id", "train_seed"))
    family = {row["task_id"]: row["family"] for row in own}
    found = np.full((len(seeds), len(tasks)), np.nan)
    for row in own:
        found[seeds.index(row["train_seed"]), tasks.index(row["task_id"])] = row["passed"] and row["protocol_ok"]
    return found, [family[task] for task in tasks]


def flipped_p(signs, sums, sizes, mean):
    """Return how often a t ratio of units with flipped signs is above the observed one, the first; ties count half."""
    flipped, total = signs * (sums - sizes * mean), sizes.sum()
    middle = flipped.sum(1) / total
    error = ((flipped - sizes * middle[:, None]) ** 2).sum(1)
    ratios = flipped.sum(1) ** 2 / np.maximum(error, 1e-300)
    return (np.mean(ratios >= ratios[0] * (1 - 1e-9)) + np.mean(ratios > ratios[0] * (1 + 1e-9))) / 2


def score_p(up, down, num, mean):
    """Return the p of Tango's score test for a difference of matched proportions."""
    linear, constant = (2 * num - up + down) * mean - up - down, -down * mean * (1 - mean)
    q = (np.sqrt(max(linear**2 - 8 * num * constant, 0)) - linear) / (4 * num)
    return 2 * norm.cdf(-abs((up - down - num * mean) / np.sqrt(max(num * (2 * q + mean * (1 - mean)), 1e-12))))


def effect(means, group, num):
    """Return how much families multiply the variance of an arm's rate."""
    rest, size = means - means.mean(), np.bincount(group)
    return ((np.bincount(group, rest) ** 2).sum() + (size**2).sum() / num / 4) / ((rest**2).sum() + 1 / 4)


def compare(rows, treatment, baseline):
    """Return the difference, the limits of its interval and its p."""
    (one, families), (other, _) = cube(rows, treatment), cube(rows, baseline)
    group, num = np.unique(families, return_inverse=True)[1], len(families)
    each = np.nan_to_num(one - other)
    per_task, by_training = each.mean(0), each.mean(1)
    sums, sizes = np.bincount(group, per_task), np.bincount(group).astype(float)
    mean = per_task.mean()
    spread = ((sums - sizes * mean) ** 2).sum()
    clustered = sum(effect(arm.mean(0), group, num) for arm in (one, other)) / 2
    size = (per_task**2).sum() / np.abs(per_task).sum()
    design = (spread + size * clustered) / (np.abs(per_task).sum() - num * mean**2 + 1)
    up, down = (np.clip(side, 0, None).sum() / design for side in (per_task, -per_task))
    seeds = len(by_training)
    error = by_training.std(ddof=1) / seeds**0.5
    rest = each - by_training[:, None]
    rest -= rest.mean(0)
    noise = sum((np.bincount(group, row) ** 2).sum() for row in rest) / (seeds * (seeds - 1))
    share = max(1 - noise / max(spread, 1e-12), 1e-6)
    return limits(mean, error, seeds, share, (SIGNS[:, : len(sums)], sums, sizes), (up, down, num / design))


def limits(mean, error, num_top, share, units, counts):
    """Return a difference, its limits and its p; units: signs, sums and sizes; counts: up, down and all, as tasks."""
    (signs, sums, sizes), (up, down, num) = units, counts

    def rejects(value, alpha):
        left = (value - mean) ** 2 - (t.ppf(1 - alpha / 2, num_top - 1) * error) ** 2
        apart = min((max(left, 0) / share) ** 0.5, abs(value - mean))
        at = np.clip(mean + np.sign(value - mean) * apart, -1, 1)
        return left > 0 and max(flipped_p(signs, sums, sizes, at), score_p(up, down, num, at)) < alpha

    def bisect(inside, outside, out):
        for _ in range(20):
            middle = (inside + outside) / 2
            inside, outside = (inside, middle) if out(middle) else (middle, outside)
        return outside

    ends = [bisect(mean, end, lambda value: rejects(value, 0.05)) for end in (-1.0, 1.0)]
    return mean, *ends, bisect(0.0, 1.0, lambda alpha: rejects(0.0, alpha))


if __name__ == "__main__":
    table = pq.read_table(sys.argv[1] if len(sys.argv) > 1 else TABLE).to_pylist()
    for first, second in (("C", "A"), ("C", "D"), ("B", "C")):
        estimate, low, high, p = compare(table, f"{first}@0", f"{second}@0")
        print(f"{first} - {second}: {100 * estimate:+.1f} points [{100 * low:+.1f}, {100 * high:+.1f}], p = {p:.3f}")
