"""Two arms of an evaluation, task by task, and the families of its tasks."""

from dataclasses import dataclass
from typing import Literal

from composer_stages.runs.kinds import EVAL_ITEM, Row
from composer_stages.runs.queries.views import SQL, _prompt, open_views, rows_of
from composer_stages.runs.run import Run

Side = Literal["", "first", "second", "equal"]
SIDES = {"": "true", "first": "difference < 0", "second": "difference > 0", "equal": "difference = 0"}


@dataclass(frozen=True)
class TaskFilter:
    """Which tasks of two arms to list; `side`: those that the first or the second passed more often, or equal ones."""

    side: Side = ""
    family: str = ""
    text: str = ""


@dataclass(frozen=True)
class TaskPage:
    """Tasks of two arms, the largest differences first: the numbers by side, of those that fit, and a page of rows.

    A row has task_id, family, the beginning of its prompt, rollouts passed and scored of either arm, and `difference`:
    the pass rate of the second arm less that of the first, null where either has no outcome.
    """

    first_more: int
    second_more: int
    equal: int
    total: int
    offset: int
    rows: list[Row]


def tasks(
    run: Run, first: str, second: str, filters: TaskFilter = TaskFilter(), offset: int = 0, size: int = 50
) -> TaskPage:
    """Return the tasks of an evaluation that two arms played, those first on which their pass rates differ most."""
    with open_views(run) as (connection, views, _):
        if EVAL_ITEM.name not in views:
            return TaskPage(0, 0, 0, 0, 0, [])
        connection.execute(
            SQL["arms"]["sides"],
            {"first": first, "second": second, "family": filters.family, "text": filters.text.lower()},
        )
        counted = ", ".join(f"count(*) FILTER ({SIDES[side]})" for side in ("first", "second", "equal", filters.side))
        ((firsts, seconds, equal, total),) = connection.execute(f"SELECT {counted} FROM sides").fetchall()
        rows = rows_of(
            connection,
            f"SELECT * FROM sides WHERE {SIDES[filters.side]} ORDER BY abs(difference) DESC NULLS LAST, difference, "
            f"task_id LIMIT {int(size)} OFFSET {int(offset)}",
        )
        stored = connection.execute(SQL["arms"]["tasks_begin"], [[row["task_id"] for row in rows]]).fetchall()
    prompts = {task: _prompt(*texts) for task, *texts in stored}
    return TaskPage(
        firsts, seconds, equal, total, offset, [{**row, "prompt": prompts.get(row["task_id"])} for row in rows]
    )


def families(run: Run) -> list[Row]:
    """Return, for each family of an evaluation, its tasks, and the pass rate of each arm: the mean over its tasks."""
    with open_views(run) as (connection, views, _):
        if EVAL_ITEM.name not in views:
            return []
        totals: dict[str, Row] = {}
        for row in rows_of(connection, SQL["arms"]["families"]):
            family = totals.setdefault(row["family"], {"family": row["family"], "num_tasks": 0, "rates": {}})
            family["num_tasks"] = max(family["num_tasks"], row["num_tasks"])
            family["rates"][row["arm"]] = row["rate"]
    return list(totals.values())


def of_task(run: Run, task: str, arm: str) -> list[Row]:
    """Return the items of one arm on one task, by training seed and sample."""
    with open_views(run) as (connection, views, _):
        question = "SELECT * FROM eval_item WHERE task_id = ? AND arm = ? ORDER BY train_seed, sample_idx"
        return rows_of(connection, question, [task, arm]) if EVAL_ITEM.name in views else []
