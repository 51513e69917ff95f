"""Rollouts of a run by text, task, family, arm and outcome: pages, one with its steps, and its place among them."""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from os.path import commonprefix
from typing import Any, Literal

import duckdb

from composer_stages.runs import store
from composer_stages.runs.kinds import EVAL_ITEM, ORIGIN, ROLLOUT, STEP, TASK, Row
from composer_stages.runs.queries.views import ID_AND_REWARD, LISTED, OUTCOME, SQL, open_views, prompts_of, rows_of
from composer_stages.runs.run import Run

Reward = Literal["", "passed", "failed", "none"]
SHORTEST = 4
"""Characters to which an id is shortened at most, as far as words at its beginning allow."""
LONGEST = 20
"""Digits of a seed up to which it is shortened; where two are alike for longer, all stay whole."""
REWARDS = {"passed": "reward >= 1.0", "failed": "reward < 1.0", "none": "reward IS NULL"}
ORDERS = {"": "file_row", "reward": "reward DESC NULLS LAST, file_row", "steps": "num_steps DESC, file_row"}


@dataclass(frozen=True)
class RolloutFilter:
    """Which rollouts to list: every field that is not empty narrows the choice.

    ids: those to choose from; None for all.
    """

    text: str = ""
    task: str = ""
    family: str = ""
    arm: str = ""
    reward: Reward = ""
    hacked: bool = False
    error: bool = False
    order: str = ""
    ids: tuple[str, ...] | None = None


@dataclass(frozen=True)
class RolloutPage:
    """The number of matching rollouts, and the rows from `offset` on, each with the beginning of its `prompt`.

    `short` of a row is its id without what all ids of the run share. `outcomes` are the numbers of all rollouts of the
    run by outcome, the most frequent first; `passes` those that passed, by ground, "" for an unknown one.
    """

    total: int
    offset: int
    rows: list[Row]
    outcomes: dict[str, int]
    passes: dict[str, int]


def page(run: Run, filters: RolloutFilter, offset: int = 0, size: int = 50) -> RolloutPage | None:
    """Return one page of the matching rollouts, in the order of the run or of the filter.

    None for a run that holds neither rollouts nor items, and has not finished any.
    """
    if not run.holds(ROLLOUT) and not run.holds(EVAL_ITEM) and run.manifest.status == "complete":
        return None
    with open_views(run) as (connection, views, name):
        if name is None:
            return None
        where, values = _conditions(filters, name, views)
        listed = f"(SELECT * FROM ({LISTED[name]}) WHERE {where})"
        if filters.text:  # search once, for the count and for the page: the search is most of the work
            connection.execute(f"CREATE TEMP TABLE fitting AS FROM {listed}", values)
            listed, values = "fitting", []
        ((total,),) = connection.execute(f"SELECT count(*) FROM {listed}", values).fetchall()
        order = ORDERS.get(filters.order, ORDERS[""])
        rows = rows_of(
            connection, f"SELECT * FROM {listed} ORDER BY {order} LIMIT {int(size)} OFFSET {int(offset)}", values
        )
        prompts = prompts_of(connection, views, name, rows)
        short = _differing(connection, name) if rows else str
        counted = f"SELECT outcome, count(*) FROM ({LISTED[name]}) GROUP BY outcome ORDER BY count(*) DESC, outcome"
        outcomes = dict(connection.execute(counted).fetchall())
        counted = (
            f"SELECT coalesce(ground, ''), count(*) FROM ({LISTED[name]}) WHERE reward >= 1 GROUP BY ALL ORDER BY 1"
        )
        passes = dict(connection.execute(counted).fetchall())
    listed_rows = [{**row, "short": short(row["id"]), "prompt": prompts.get(row["id"])} for row in rows]
    return RolloutPage(total, offset, listed_rows, outcomes, passes)


@dataclass(frozen=True)
class TaskMatrix:
    """Tasks by arms: `rows` holds, by task and arm, the rollouts by seed and sample; `total` counts all tasks."""

    total: int
    offset: int
    arms: list[str | None]
    rows: dict[str, dict[str | None, list[Row]]]


def matrix(run: Run, offset: int = 0, size: int = 50) -> TaskMatrix:
    """Return the rollouts of some tasks of a run, task by task and arm by arm; without arms all are one column."""
    with open_views(run) as (connection, _, name):
        if name is None:
            return TaskMatrix(0, offset, [], {})
        ((total,),) = connection.execute(f"SELECT count(DISTINCT task_id) FROM {name}").fetchall()
        some = f"SELECT DISTINCT task_id FROM {name} ORDER BY task_id LIMIT {int(size)} OFFSET {int(offset)}"
        question = f"SELECT id, task_id, arm, reward, outcome FROM ({LISTED[name]}) WHERE task_id IN ({some})"
        items = rows_of(connection, f"{question} ORDER BY task_id, arm, seed, sample_idx, file_row")
    rows: dict[str, dict[str | None, list[Row]]] = {}
    for row in items:
        rows.setdefault(row["task_id"], {}).setdefault(row["arm"], []).append(row)
    return TaskMatrix(total, offset, sorted({row["arm"] for row in items}, key=str), rows)


def task_counts(run: Run) -> list[tuple[str, str | None, int, int]]:
    """Return each task with its family, its scored rollouts and those that passed; empty for items of an evaluation."""
    with open_views(run) as (connection, _, name):
        if name != ROLLOUT.name:
            return []
        return connection.execute(SQL["rollouts"]["tasks"]).fetchall()


def short_ids(run: Run, ids: Sequence[str]) -> list[str]:
    """Return these ids of rollouts or items without what all ids of the run share; `rollout_ids` finds them by that."""
    with open_views(run) as (connection, _, name):
        return list(ids) if name is None else list(map(_differing(connection, name), ids))


def _differing(connection: duckdb.DuckDBPyConnection, name: str) -> Callable[[str], str]:
    """Return a function that leaves out of an id the words at its beginning and end that all ids of the run share.

    Of seeds that differ, as in a training, it keeps so many digits that no two ids are shortened to the same text.
    """
    key, _ = ID_AND_REWARD[name]
    ends = f"SELECT min({key}), max({key}), min(reverse({key})), max(reverse({key})), min(length({key})) FROM {name}"
    ((first, last, first_end, last_end, shortest),) = connection.execute(ends).fetchall()
    if first == last:
        return str
    end = _shared_words(first_end, last_end)[-1]
    starts = [start for start in _shared_words(first, last) if shortest - start - end >= SHORTEST]
    start = max(starts, default=0)
    if end:
        return lambda name: name[start : len(name) - end]
    # Of ids with the same beginning, those are most alike whose seeds are next to each other in alphabetical order.
    alike = f"list_sum([CAST(left(seed, n) = left(before, n) AS INT) FOR n IN range({SHORTEST}, {LONGEST} + 1)])"
    seeds = f"SELECT DISTINCT {key}, split_part({key}, '@', -1) AS seed FROM {name}"
    neighbours = (
        f"SELECT seed, lag(seed) OVER (PARTITION BY left({key}, -length(seed)) ORDER BY seed) AS before "
        f"FROM ({seeds}) WHERE regexp_full_match(seed, '[0-9]+')"
    )
    question = f"SELECT max({alike}) FROM ({neighbours}) WHERE left(seed, {SHORTEST}) = left(before, {SHORTEST})"
    ((shared,),) = connection.execute(question).fetchall()
    digits = SHORTEST + (shared or 0)

    def short(name: str) -> str:
        before, at, seed = name.rpartition("@")
        cut = at and digits <= LONGEST and seed.isascii() and seed.isdigit()
        return f"{before}{at}{seed[:digits] if cut else seed}"[start:]

    return short


def _shared_words(name: str, second: str) -> list[int]:
    """Return where words begin in the beginning that two texts share, which is shared by all texts between them."""
    alike = commonprefix([name, second])  # noqa: RUF071 - these are no paths
    return [0, *(match.end() for match in re.finditer(r"[\W_]+", alike))]


def rollout(run: Run, rollout_id: str) -> tuple[Row | None, list[Row]]:
    """Return the full row of one rollout or item with its `outcome`, and its steps in order; items have none.

    That of an imported rollout has also its file, what the file adds to it, and the target of its task.
    """
    steps = list[Row]()
    with open_views(run) as (connection, views, name):
        if name is None:
            return None, steps
        key, reward = ID_AND_REWARD[name]
        question = f"SELECT *, {OUTCOME.format(reward)} AS outcome FROM {name} WHERE {key} = ? LIMIT 1"
        step_rows = rows_of(connection, question, [rollout_id])
        if step_rows and name == ROLLOUT.name and STEP.name in views:
            # Row numbers first, from the one narrow column: the wide ones (observations) are then read only there.
            question = "SELECT min(file_row), max(file_row) FROM step WHERE rollout_id = ?"
            ((first, last),) = connection.execute(question, [rollout_id]).fetchall()
            if first is not None:
                question = "SELECT * FROM step WHERE file_row BETWEEN ? AND ? AND rollout_id = ? ORDER BY step"
                steps = rows_of(connection, question, [first, last, rollout_id])
        if step_rows and {ORIGIN.name, TASK.name} <= views:
            origins = rows_of(connection, SQL["rollouts"]["target"], [step_rows[0]["task_id"], rollout_id])
            step_rows = [step_rows[0] | more for more in origins] or step_rows
    return (step_rows[0] if step_rows else None), steps


def outcome(row: Row) -> str:
    """Return the outcome of a rollout or an item in words, as `OUTCOME` does: `passed`, `failed, hacked`, `error`."""
    reward = row["reward"] if "reward" in row else row["passed"]
    error = row["error_type"] is not None
    graded = "" if reward is None else "passed" if reward >= 1 else "failed"
    words = (graded or ("" if error else "not graded"), "hacked" if row["hacked"] else "", "error" if error else "")
    return ", ".join(filter(None, words))


def rollout_ids(run: Run, part: str = "") -> list[str]:
    """Return the ids of the rollouts or items with this text in their id or as their task, in the order of the run.

    Only one where the text is an id, or what `short_ids` makes of it.
    """
    with open_views(run) as (connection, _, name):
        if name is None:
            return []
        key, _ = ID_AND_REWARD[name]
        fits = f"contains({key}, $1) OR task_id = $1 OR ends_with(task_id, '/' || $1)"
        question = f"SELECT {key} FROM {name} WHERE {fits} ORDER BY file_row"
        ids = [rollout_id for (rollout_id,) in connection.execute(question, [part]).fetchall()]
        if part in ids or len(ids) < 2:
            return [part] if part in ids else ids
        short = _differing(connection, name)
        return [rollout_id for rollout_id in ids if short(rollout_id) == part] or ids


@dataclass(frozen=True)
class RolloutPlace:
    """The place of a rollout among the `total` that fit a filter, from 1, and the ids of its neighbours there."""

    number: int
    total: int
    before: str | None
    after: str | None


def place(run: Run, filters: RolloutFilter, rollout_id: str) -> RolloutPlace | None:
    """Return the place of a rollout or item in the list that `page` returns; None where it does not fit the filter."""
    with open_views(run) as (connection, views, name):
        if name is None:
            return None
        where, values = _conditions(filters, name, views)
        order = f"ORDER BY {ORDERS.get(filters.order, ORDERS[''])}"
        question = (
            f"SELECT number, total, before, after FROM (SELECT id, row_number() OVER ({order}) AS number, "
            f"count(*) OVER () AS total, lag(id) OVER ({order}) AS before, lead(id) OVER ({order}) AS after "
            f"FROM ({LISTED[name]}) WHERE {where}) WHERE id = ?"
        )
        row = connection.execute(question, [*values, rollout_id]).fetchone()
    return None if row is None else RolloutPlace(*row)


def _conditions(filters: RolloutFilter, name: str, views: set[str]) -> tuple[str, list[Any]]:
    where, values = ["true"], list[Any]()
    if filters.text:
        text = filters.text.lower()
        places = ["contains(lower(id), ?)", "contains(lower(coalesce(error, '')), ?)"]
        values += [text, text]
        if name == EVAL_ITEM.name:
            # Searched for the text as JSON writes it, with escapes, since its characters are not parsed.
            places.append("id IN (SELECT item_id FROM eval_item WHERE contains(lower(transcript_json), ?))")
            values.append(store.encode(text).decode()[1:-1])
        elif STEP.name in views:
            inside = "SELECT rollout_id FROM step WHERE contains(lower(action), ?) OR contains(lower(observation), ?)"
            places.append(f"id IN ({inside})")
            values += [text, text]
        where.append(f"({' OR '.join(places)})")
    for column, value in (("task_id", filters.task), ("family", filters.family), ("arm", filters.arm)):
        if value:
            where.append(f"{column} = ?")
            values.append(value)
    where += [REWARDS[filters.reward]] if filters.reward in REWARDS else []
    where += ["hacked"] if filters.hacked else []
    where += ["error_type IS NOT NULL"] if filters.error else []
    if filters.ids is not None:
        where.append("id IN (SELECT unnest(?))")
        values.append(list(filters.ids))
    return " AND ".join(where), values
