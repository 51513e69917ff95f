"""Queries over the tables of one run with DuckDB, a page at a time; `composer_stages.runs.sql` asks many runs in SQL.

views.py    - the tables of a run as views, with the journal of a run in progress
rollouts.py - rollouts and items of an evaluation: search, one with its steps, its place
arms.py     - two arms of an evaluation, task by task
pairs.py    - preference pairs with the states and continuations that decided them
"""

from composer_stages.runs.queries.arms import SIDES, Side, TaskFilter, TaskPage, families, of_task, tasks
from composer_stages.runs.queries.pairs import PairFilter, PairPage, continuations, pairs, state_messages
from composer_stages.runs.queries.rollouts import (
    REWARDS,
    Reward,
    RolloutFilter,
    RolloutPage,
    RolloutPlace,
    TaskMatrix,
    matrix,
    outcome,
    page,
    place,
    rollout,
    rollout_ids,
    short_ids,
    task_counts,
)
from composer_stages.runs.queries.views import OUTCOME, UNREADABLE, at_states, first_rows

__all__ = [
    "OUTCOME",
    "REWARDS",
    "SIDES",
    "UNREADABLE",
    "PairFilter",
    "PairPage",
    "Reward",
    "RolloutFilter",
    "RolloutPage",
    "RolloutPlace",
    "Side",
    "TaskFilter",
    "TaskMatrix",
    "TaskPage",
    "at_states",
    "continuations",
    "families",
    "first_rows",
    "matrix",
    "of_task",
    "outcome",
    "page",
    "pairs",
    "place",
    "rollout",
    "rollout_ids",
    "short_ids",
    "state_messages",
    "task_counts",
    "tasks",
]
