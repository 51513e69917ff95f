"""Several benchmarks: a decision for each, and a mean in which they weigh alike."""

import csv
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from composer_stages.comparison import report
from composer_stages.comparison.config import Config
from composer_stages.comparison.decision import LogComparison, compare
from composer_stages.comparison.measure import weigh_alike
from composer_stages.comparison.sides import read_sides
from composer_stages.evaluation.difference import Decision
from composer_stages.evaluation.inference import PairedTest

SHIFTS = {"large": (600, 90, 30), "b/c": (60, 2, 18), "d": (60, 3, 18)}
"""Of each benchmark its tasks, and how many the second side gains and loses."""


def compared(
    folder: Path,
    column: str = "benchmark",
    shifts: Mapping[str, tuple[int, int, int]] = SHIFTS,
    of_first: str = "",
    id_of: str = "{at}",
    **settings: Any,
) -> LogComparison:
    """Two logs of benchmarks, of which one may be in the first alone."""
    paths = []
    for side in range(2):
        path = folder / f"{'ab'[side]}.csv"
        with path.open("w", newline="") as file:
            writer = csv.writer(file)
            writer.writerow([column, "id", "score"])
            for name, (num, gained, lost) in shifts.items():
                before = [0] * gained + [1] * lost + [at % 2 for at in range(num - gained - lost)]
                after = [1] * gained + [0] * lost + before[gained + lost :]
                rows = ((name, id_of.format(name=name, at=at), (before, after)[side][at]) for at in range(num))
                writer.writerows(() if side and name == of_first else rows)
        paths.append(str(path))
    config = Config(paths=paths, **settings)
    return compare(read_sides(config.paths, config.columns), config)[0]


@pytest.mark.parametrize("id_of", ["{at}", "{name}-{at}"])
def test_better_over_all_tasks_and_worse_on_two_of_three_is_not_better(tmp_path: Path, id_of: str) -> None:
    comparison = compared(tmp_path, id_of=id_of)
    (difference,), (pairing,) = comparison.differences, comparison.pairings
    assert difference.estimate == pytest.approx(29 / 720) and difference.p_value < 0.05
    assert difference.decision is Decision.UNDECIDED
    rows = {row.name: row for row in pairing.benchmarks}
    assert [(name, row.num_tasks, row.decision.value) for name, row in rows.items()] == [
        ("b/c", 60, "worse"),
        ("d", 60, "worse"),
        ("large", 600, "better"),
        ("", 720, "worse"),
    ]
    assert rows[""].estimate == pytest.approx((60 / 600 - 16 / 60 - 15 / 60) / 3)
    assert all(row.low <= row.estimate <= row.high for row in pairing.benchmarks)
    text = report.text(comparison)
    assert "depends on how the benchmarks are weighed" in text and "all, with equal weights" in text


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("of_first", ["", "small"])
def test_what_a_large_benchmark_shows_of_all_tasks_passes_no_gate(tmp_path: Path, of_first: str, reverse: bool) -> None:
    """A loss of 30 of the 60 tasks of a small benchmark, or all of them missing, is less than a point of all tasks."""
    shifts = {"large": (8000, 0, 0), "small": (60, 0, 0 if of_first else 30)}
    shifts = dict(reversed(shifts.items())) if reverse else shifts
    (difference,) = compared(tmp_path, shifts=shifts, of_first=of_first, not_worse=0.02).differences
    assert difference.low > -0.02 and difference.not_worse is None
    (difference,) = compared(tmp_path, shifts=shifts, of_first=of_first, not_worse=0.6).differences
    assert difference.not_worse is True
    (difference,) = compared(tmp_path, shifts={**shifts, "small": (60, 0, 0)}).differences
    assert difference.decision is Decision.UNDECIDED, "the small benchmark may differ by more than two points"


def test_parts_of_one_benchmark_are_pooled(tmp_path: Path) -> None:
    """As lm-evaluation-harness and others pool the subjects of MMLU."""
    for id_of in ("{at}", "{name}-{at}"):
        comparison = compared(tmp_path, "subset", id_of=id_of)
        assert comparison.differences[0].decision is Decision.BETTER and not comparison.pairings[0].benchmarks


def test_the_interval_of_equal_weights_covers_and_finds_nothing_in_nothing() -> None:
    """500 experiments on benchmarks of 300, 60 and 40 tasks, of which the difference is 0, 10 and -10 points."""
    random, covered = np.random.default_rng(0), []
    for _ in range(500):
        tests = []
        for num, gain in ((300, 0.0), (60, 0.1), (40, -0.1)):
            rate = np.clip(random.normal(0.5, 0.2, num), 0.15, 0.85)
            sides = [(random.random(num) < chance).astype(float)[None, None] for chance in (rate + gain, rate)]
            tests.append(PairedTest(*sides, np.arange(num), num_flips=199))
        _, low, high = weigh_alike(tests)
        covered.append(low <= 0 <= high)
    assert 0.93 <= np.mean(covered) <= 0.99
