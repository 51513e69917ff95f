"""What sides cost beside how well they do: money and tokens for a sample, and for a success.

What a log does not record is unknown and never 0. A quantity that is 0 in all samples of a side is not recorded, as
programs write 0 where they know no price.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from composer_stages.comparison.logs import ReadLog
from composer_stages.comparison.pairs import ComparisonRules
from composer_stages.evaluation.inference import MIN_SCORE_UNITS, Array, PairedTest
from composer_stages.evaluation.outcomes import PairedOutcomes

QUANTITIES: Mapping[str, str] = {
    "cost_usd": "cost",
    "prompt_tokens": "tokens read",
    "completion_tokens": "tokens written",
    "total_tokens": "tokens",
}
"""Columns of items, and what they are called."""
ROOM = 4
"""By how much the range of tests exceeds the largest value, so that no interval ends there."""


@dataclass(frozen=True)
class Spent:
    """A mean of both sides, and their difference with its 95 % interval; without one where units are too few."""

    baseline: float
    treatment: float
    estimate: float
    low: float | None
    high: float | None


@dataclass(frozen=True)
class CostDifference:
    """What two sides spent, on the tasks of which both record it.

    per_success: for each success, failures included; None where outcomes are no passes, or a side has none. unknown:
    the sides that record none, of which there is no mean.
    """

    quantity: str
    num_tasks: int
    per_sample: Spent | None
    per_success: Spent | None
    unknown: tuple[str, ...]


@dataclass(frozen=True)
class Frontier:
    """The sides that no other one beats in cost or quality without losing in the other. column: of what they cost."""

    column: str
    quantity: str
    letters: tuple[str, ...]


def compare_costs(
    sides: Sequence[ReadLog], outcomes: PairedOutcomes, rules: ComparisonRules, letters: Sequence[str], passes: bool
) -> tuple[CostDifference, ...]:
    """Return what the second side spends beside the first, of each quantity that either records.

    passes: the mean of a task's scores is its share of successes.
    """
    spent = [spending(side, outcomes.tasks) for side in sides]
    if not any(spent):
        return ()
    rates = [np.nanmean(side_ST, 0) for side_ST in (outcomes.baseline_ST, outcomes.treatment_ST)]
    unit_T, differences = outcomes.unit_T, list[CostDifference]()
    for name, title in QUANTITIES.items():
        values = [of_side.get(name) for of_side in spent]
        unknown = tuple(letter for letter, value_T in zip(letters, values, strict=True) if value_T is None)
        if len(unknown) == len(sides):
            continue
        if unknown:
            differences.append(CostDifference(title, 0, None, None, unknown))
            continue
        first_T, second_T = (value_T for value_T in values if value_T is not None)
        both_T = np.isfinite(first_T) & np.isfinite(second_T)
        if not both_T.any():
            differences.append(CostDifference(title, 0, None, None, ()))
            continue
        first_T, second_T, units = first_T[both_T], second_T[both_T], np.unique(unit_T[both_T], return_inverse=True)[1]
        per_sample = _difference(first_T, second_T, first_T.mean(), second_T.mean(), units, rules)
        per_success, means = None, [float(rate_T[both_T].mean()) for rate_T in rates]
        if passes and min(means) > 0:
            # A ratio of sums differs from that of other tasks as its linear part does (Cochran, Sampling Techniques,
            # 1977, section 6.3).
            ratios = [value_T.mean() / mean for value_T, mean in zip((first_T, second_T), means, strict=True)]
            parts = [
                ratio + (value_T - ratio * rate_T[both_T]) / mean
                for ratio, value_T, rate_T, mean in zip(ratios, (first_T, second_T), rates, means, strict=True)
            ]
            per_success = _difference(parts[0], parts[1], ratios[0], ratios[1], units, rules)
        differences.append(CostDifference(title, int(both_T.sum()), per_sample, per_success, ()))
    return tuple(differences)


def spending(side: ReadLog, tasks: Sequence[str] | pa.Array) -> dict[str, Array]:
    """Return [T] the mean of a task's samples of each quantity that a side records; NaN where none of them does."""
    names = [name for name in QUANTITIES if (pc.max(side.items[name]).as_py() or 0) > 0]
    if not names:
        return {}
    cells = side.items.group_by("task", use_threads=False).aggregate([(name, "mean") for name in names])
    at = pc.index_in(pa.array(tasks, pa.string()), cells["task"])
    return {name: cells[f"{name}_mean"].take(at).to_numpy() for name in names}


def _difference(
    first_T: Array, second_T: Array, first: float, second: float, unit_T: Array, rules: ComparisonRules
) -> Spent:
    """Return the difference of two means, tested as scores are."""
    width = ROOM * float(np.abs([first_T, second_T]).max())
    second_XST, first_XST = (side_T[None, None] / width for side_T in (second_T, first_T))
    test = PairedTest(second_XST, first_XST, unit_T, fixed=rules.fixed, scores=True, bounded=False)
    estimate = float(second - first)
    low = high = estimate
    if np.ptp(second_T - first_T) > 0:  # without any spread the limits would be off by the last step of bisection
        low, high = (width * float(limit[0]) for limit in test.interval())
    has_interval = test.num_flipped >= MIN_SCORE_UNITS
    limits = (low, high) if has_interval else (None, None)
    return Spent(float(first), float(second), estimate, *limits)


def find_frontier(sides: Mapping[str, tuple[Mapping[str, float], float]]) -> Frontier | None:
    """Return the sides that no other one beats, by the first quantity that all record; None where they share none.

    sides: what a sample of each costs, and its quality.
    """
    name = next((name for name in QUANTITIES if all(name in costs for costs, _ in sides.values())), None)
    if name is None:
        return None
    points = {letter: (costs[name], -quality) for letter, (costs, quality) in sides.items()}
    beaten = {
        letter
        for (letter, point), rival in product(points.items(), points.values())
        if rival != point and all(rival_value <= value for rival_value, value in zip(rival, point, strict=True))
    }
    return Frontier(name, QUANTITIES[name], tuple(letter for letter in points if letter not in beaten))
