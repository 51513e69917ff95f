"""The tables of one run as views of DuckDB: a view for each kind of record, of the journal where a run is in progress.

Rollouts of a collection, an import or a training and items of an evaluation are read the same way.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any

import duckdb
import orjson
import pyarrow as pa

from composer_stages.data_files import load_toml
from composer_stages.messages import Message
from composer_stages.runs.kinds import (
    CONTINUATION,
    EVAL_ITEM,
    ORIGIN,
    PAIR,
    ROLLOUT,
    STATE,
    STEP,
    TASK,
    TEACHER_ACTION,
    Kind,
    Row,
)
from composer_stages.runs.run import Run
from composer_stages.runs.tables import Scan, parquet

UNREADABLE = (duckdb.Error, pa.ArrowException, orjson.JSONDecodeError, OSError)  # pyarrow's for a damaged footer
"""Errors of torn files: a run that has not ended has no digests by which they would be found."""
SQL = load_toml(__package__, "queries.toml")
OUTCOME: str = SQL["expressions"]["outcome"]
"""The outcome of a rollout in words, as SQL over its reward: `passed`, `failed`, `failed, hacked`, `error`."""
ID_AND_REWARD = {EVAL_ITEM.name: ("item_id", "CAST(passed AS DOUBLE)"), ROLLOUT.name: ("rollout_id", "reward")}
"""The columns of an id and of a reward, in the order in which a run that holds both kinds is searched."""
OTHERS = {EVAL_ITEM.name: ("arm", "train_seed", "sampled_tokens"), ROLLOUT.name: ("NULL", "seed", "completion_tokens")}
LISTED = {
    table: SQL["expressions"]["listed"].format(
        table=table, id=key, reward=reward, outcome=OUTCOME.format(reward), arm=arm, seed=seed, tokens=tokens
    )
    for table, (key, reward), (arm, seed, tokens) in zip(
        ID_AND_REWARD, ID_AND_REWARD.values(), OTHERS.values(), strict=True
    )
}
"""Rollouts of a run that has this table, as SQL, with columns of the same names."""
PREVIEW = 400
"""Characters of a prompt that a list carries."""


def prompts_of(
    connection: duckdb.DuckDBPyConnection, views: set[str], name: str, rows: Sequence[Row]
) -> dict[str, str | None]:
    """Return the beginning of the prompt of each of these listed rows, as far as it is known, by their ids."""
    ids, places = [row["id"] for row in rows], [row["file_row"] for row in rows]
    if not rows:
        return {}
    if name == EVAL_ITEM.name:
        question = SQL["rollouts"]["items_begin"]
        states = connection.execute(question, [min(places), max(places), ids]).fetchall()
    elif STEP.name in views:
        question = SQL["rollouts"]["steps_begin"]
        states = connection.execute(question, [ids]).fetchall()
    else:
        return {}
    return {key: _prompt(*texts) for key, *texts in states}


def _prompt(messages_json: str | None, steps_json: str | None) -> str | None:
    """Return the beginning of the last message of a user before the first action; None without one.

    The messages before it may be worked examples, which all tasks share. steps_json: of an item, whose messages go on
    after its first action. Items of an earlier version have none: theirs begin with the first message of the model.
    """
    messages: list[Message] = orjson.loads(messages_json) if messages_json else []
    if steps_json is None:
        answers = (index for index, message in enumerate(messages) if message["role"] == "assistant")
        first = next(answers, len(messages))
    else:
        steps: list[Row] = orjson.loads(steps_json)
        first = steps[0]["message"] if steps else len(messages)
    questions = (message["content"][:PREVIEW] for message in reversed(messages[:first]) if message["role"] == "user")
    return next(questions, None)


def at_states(run: Run, kind: Kind, states: Sequence[str]) -> list[Row]:
    """Return the rows of a kind (teacher actions, pairs) at the states with these digests."""
    with open_views(run) as (connection, views, _):
        if not states or kind.name not in views:
            return []
        # unnest(): one parameter for any number of digests.
        question = f"SELECT * FROM {kind.name} WHERE state_sha256 IN (SELECT unnest(?))"
        return rows_of(connection, question, [list(states)])


def first_rows(run: Run, number: int) -> dict[str, list[Row]]:
    """Return the first rows of every table of a run, by the table's name."""
    with database().cursor() as connection:
        return {
            name: rows_of(connection, f"SELECT * EXCLUDE (file_row_number) FROM {parquet(path)} LIMIT {int(number)}")
            for name, path in run.tables().items()
            if path.is_file()
        }


def rows_of(
    connection: duckdb.DuckDBPyConnection, question: str, values: Sequence[Any] | Mapping[str, Any] = ()
) -> list[Row]:
    """Return the rows of an answer by their columns."""
    answer = connection.execute(question, values)
    names = [column[0] for column in answer.description or ()]
    return [dict(zip(names, row, strict=True)) for row in answer.fetchall()]


TABLES = (ROLLOUT, STEP, EVAL_ITEM, TEACHER_ACTION, PAIR, TASK, STATE, CONTINUATION, ORIGIN)
database = cache(duckdb.connect)
"""Returns the one empty database of this process; views belong to the cursor that makes them."""


@contextmanager
def open_views(run: Run) -> Iterator[tuple[duckdb.DuckDBPyConnection, set[str], str | None]]:
    """Open a connection with a view per record kind of the run, named in the set, with the column `file_row` added.

    Yields last which of the tables of `LISTED` the run has; None where it has neither.
    """
    with database().cursor() as connection:
        views = set[str]()
        tables = run.tables()
        for kind in TABLES:
            if name := run.holds(kind):
                # A run that an earlier version wrote may lack a column.
                present = set(Scan(tables[name]).columns)
                parts = (f'"{name}"' if name in present else f'NULL AS "{name}"' for name in kind.columns)
                columns = ", ".join([*parts, "file_row_number AS file_row"])
                connection.execute(f"CREATE TEMP VIEW {kind.name} AS SELECT {columns} FROM {parquet(tables[name])}")
                views.add(kind.name)
        if not views:  # a run in progress writes its tables at its end
            for kind, rows in _journal(run):
                connection.register(f"journal_{kind.name}", pa.Table.from_pylist(rows, schema=kind.schema))
                connection.execute(
                    f"CREATE TEMP VIEW {kind.name} AS SELECT *, row_number() OVER () - 1 AS file_row "
                    f"FROM journal_{kind.name}"
                )
                views.add(kind.name)
        yield connection, views, next((name for name in LISTED if name in views), None)


def _journal(run: Run) -> list[tuple[Kind, list[Row]]]:
    """Return the finished units of a run in progress as the rows that its tables will hold."""
    rollouts, steps, items = list[Row](), list[Row](), list[Row]()
    for unit in run.units():
        if "rollout" in unit:
            rollouts.append(unit["rollout"])
            steps += unit["steps"]
        items += [unit["item"]] if "item" in unit else []
    return [(kind, rows) for kind, rows in ((ROLLOUT, rollouts), (STEP, steps), (EVAL_ITEM, items)) if rows]
