"""How often a model passes each task and all tasks together, with 95 % intervals: the table of `collect` and `show`."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from composer_stages.evaluation.inference import numbered, rate_interval, wilson
from composer_stages.layout import LEFT, RIGHT, aligned, counted, rate_with_interval

SHOWN = 20
"""Tasks that have a line."""


class TaskCount(NamedTuple):
    """The scored rollouts of a task, and those of them that passed."""

    task_id: str
    family: str | None
    scored: int
    passed: int


def overall(counts: Sequence[TaskCount]) -> tuple[float, float, float]:
    """Return the mean of the tasks' pass rates with its interval, over families where there are several, else tasks."""
    rates_ST = np.array([[count.passed / count.scored for count in counts]])
    families = {count.family for count in counts}
    units = [count.task_id if len(families) == 1 or count.family is None else count.family for count in counts]
    return float(rates_ST.mean()), *rate_interval(rates_ST, numbered(units))


def table(counts: Sequence[TaskCount]) -> str:
    """Return the pass rates as text; empty where no task was scored more than once, as rollouts then say the same."""
    scored = [count for count in counts if count.scored]
    if max((count.scored for count in scored), default=0) < 2:
        return ""
    rows = [(count.task_id, count.scored, count.passed, _own_rate(count)) for count in scored[:SHOWN]]
    rollouts, passed = (sum(getattr(count, name) for count in scored) for name in ("scored", "passed"))
    more = [(f"and {counted(len(scored) - SHOWN, 'more task')}", "", "", "")] if len(scored) > SHOWN else []
    total = (f"all {counted(len(scored), 'task')}", rollouts, passed, rate_with_interval(*overall(scored)))
    head = ("task", "rollouts", "passed", "pass rate [95 %]")
    return aligned([*rows, *more, total], head, (LEFT, RIGHT, RIGHT, RIGHT))


def _own_rate(count: TaskCount) -> str:
    rate = count.passed / count.scored
    return rate_with_interval(rate, *wilson(rate, count.scored))
