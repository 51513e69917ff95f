"""Queries over the tables of one run with DuckDB, a page at a time; `composer_stages.runs.sql` asks many runs in SQL.

views.py    - the tables of a run as views, with the journal of a run in progress; the longer SQL is in queries.toml
rollouts.py - rollouts and items of an evaluation: search, one with its steps, its place
arms.py     - two arms of an evaluation, task by task
pairs.py    - preference pairs with the states and continuations that decided them
"""

from composer_stages.runs.queries.arms import (
    SIDES as SIDES,
    Side as Side,
    TaskFilter as TaskFilter,
    TaskPage as TaskPage,
    families as families,
    of_task as of_task,
    tasks as tasks,
)
from composer_stages.runs.queries.pairs import (
    PairFilter as PairFilter,
    PairPage as PairPage,
    continuations as continuations,
    pairs as pairs,
    state_messages as state_messages,
)
from composer_stages.runs.queries.rollouts import (
    REWARDS as REWARDS,
    Reward as Reward,
    RolloutFilter as RolloutFilter,
    RolloutPage as RolloutPage,
    RolloutPlace as RolloutPlace,
    TaskMatrix as TaskMatrix,
    matrix as matrix,
    outcome as outcome,
    page as page,
    place as place,
    rollout as rollout,
    rollout_ids as rollout_ids,
    short_ids as short_ids,
    task_counts as task_counts,
)
from composer_stages.runs.queries.views import (
    OUTCOME as OUTCOME,
    UNREADABLE as UNREADABLE,
    at_states as at_states,
    first_rows as first_rows,
)
