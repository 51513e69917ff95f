"""Pass rates by task: intervals equal scipy's, all tasks as an evaluation has them, and what has no line."""

import numpy as np
import pytest
from scipy.stats import binomtest

from composer_stages.evaluation.inference import rate_interval
from composer_stages.evaluation.task_rates import TaskCount, overall, table


def counts(*passed: int, scored: int = 4, families: str = "") -> list[TaskCount]:
    names = families or "x" * len(passed)
    return [TaskCount(f"t{i}", names[i], scored, number) for i, number in enumerate(passed)]


@pytest.mark.parametrize(("passed", "scored"), [(0, 4), (1, 4), (4, 4), (37, 64)])
def test_the_interval_of_a_task_is_wilsons(passed, scored):
    line = table(counts(passed, 0, scored=scored)).splitlines()[1]
    low, high = binomtest(passed, scored).proportion_ci(method="wilson")
    expected = f"{100 * passed / scored:.1f} % [{100 * low:.1f}, {100 * high:.1f}]"
    assert line.split(maxsplit=3) == ["t0", str(scored), str(passed), expected]


@pytest.mark.parametrize(("families", "units"), [("", range(6)), ("aabbcc", (0, 0, 1, 1, 2, 2))])
def test_all_tasks_are_one_mean_over_tasks_or_over_families_where_there_are_several(families, units):
    some = counts(0, 1, 4, 4, 2, 0, families=families)
    rates = np.array([[0, 0.25, 1, 1, 0.5, 0]])
    assert overall(some) == (rates.mean(), *rate_interval(rates, np.array(units)))
    assert table(some).splitlines()[-1].startswith("all 6 tasks") and " 45.8 % [" in table(some)


def test_tasks_that_were_scored_once_or_never_have_no_table_and_many_are_cut():
    assert table([]) == table(counts(1, 0, 1, scored=1)) == table(counts(0, scored=0)) == ""
    lines = table([*counts(*[1] * 25), TaskCount("unscored", "x", 0, 0)]).splitlines()
    assert (
        len(lines) == 23
        and lines[-2] == "and 5 more tasks"
        and lines[-1].split()[:5] == ["all", "25", "tasks", "100", "25"]
    )
