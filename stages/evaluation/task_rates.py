"""How often a model passes each task and all tasks together, with 95 % intervals: the table of `collect` and `show`."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from composer_stages.evaluation.inference import numbered, rate_interval, wilson
from composer_stages.layout import LEFT, RIGHT, aligned, counted

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
    rows = [
        (c.task_id, c.scored, c.passed, _rate(c.passed / c.scored, *wilson(c.passed / c.scored, c.scored)))
        for c in scored
    ]
    rollouts, passed = (sum(getattr(count, name) for count in scored) for name in ("scored", "passed"))
    more = [(f"and {counted(len(rows) - SHOWN, 'more task')}", "", "", "")] if len(rows) > SHOWN else []
    total = (f"all {counted(len(rows), 'task')}", rollouts, passed, _rate(*overall(scored)))
    head = ("task", "rollouts", "passed", "pass rate [95 %]")
    return aligned([*rows[:SHOWN], *more, total], head, (LEFT, RIGHT, RIGHT, RIGHT))


def _rate(rate: float, low: float, high: float) -> str:
    return f"{100 * rate:.1f} % [{100 * low:.1f}, {100 * high:.1f}]"
