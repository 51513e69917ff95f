"""Queries over the tables of runs with DuckDB: search in one run, a page at a time, and SQL over many runs.

Rollouts of a collection, an import or a training and items of an evaluation are searched the same way. A run in
progress has no tables yet, so its journal is searched instead.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Literal

import duckdb
import pyarrow as pa
import pyarrow.parquet as pq

from stages.errors import BadInput, UsageError
from stages.runs import store
from stages.runs.artifact import Run
from stages.runs.records import EVAL_ITEM, PAIR, ROLLOUT, STEP, TEACHER_ACTION, Kind, Row

Reward = Literal["", "passed", "failed", "none"]
COLUMNS = "task_id, family, sample_idx, num_steps, hacked, gt_pass, visible_pass, terminated_by, error_type, error"
LISTED = {  # in the order in which a run that holds both is searched
    EVAL_ITEM.name: f"SELECT item_id AS id, arm, CAST(passed AS DOUBLE) AS reward, {COLUMNS}, file_row FROM eval_item",
    ROLLOUT.name: f"SELECT rollout_id AS id, NULL AS arm, reward, {COLUMNS}, file_row FROM rollout",
}
REWARDS = {"passed": "reward >= 1.0", "failed": "reward < 1.0", "none": "reward IS NULL"}
ORDERS = {"": "file_row", "reward": "reward DESC NULLS LAST, file_row", "steps": "num_steps DESC, file_row"}


@dataclass(frozen=True)
class RolloutFilter:
    """Which rollouts to list: every field that is not empty narrows the choice."""

    text: str = ""
    task: str = ""
    arm: str = ""
    reward: Reward = ""
    hacked: bool = False
    error: bool = False
    order: str = ""


@dataclass(frozen=True)
class RolloutPage:
    """The number of matching rollouts, and the rows from `offset` on."""

    total: int
    offset: int
    rows: list[Row]


def page(run: Run, wanted: RolloutFilter, offset: int = 0, size: int = 50) -> RolloutPage | None:
    """Return one page of the matching rollouts, in the order of the run or of the filter.

    None for a run that has neither rollouts nor items, and is not writing its first ones.
    """
    if not run.holds(ROLLOUT) and not run.holds(EVAL_ITEM) and not any((run.path / "steps").glob("*.jsonl.open")):
        return None
    with _views(run) as (connection, views):
        name = next((name for name in LISTED if name in views), None)
        if name is None:
            return RolloutPage(0, 0, [])
        where, values = _conditions(wanted, name)
        listed = f"(SELECT * FROM ({LISTED[name]}) WHERE {where})"
        if wanted.text:  # search once, for the count and for the page: the search is most of the work
            connection.execute(f"CREATE TEMP TABLE fitting AS FROM {listed}", values)
            listed, values = "fitting", []
        ((total,),) = connection.execute(f"SELECT count(*) FROM {listed}", values).fetchall()
        order = ORDERS.get(wanted.order, ORDERS[""])
        rows = _rows(
            connection, f"SELECT * FROM {listed} ORDER BY {order} LIMIT {int(size)} OFFSET {int(offset)}", values
        )
    return RolloutPage(total, offset, rows)


def rollout(run: Run, rollout_id: str) -> tuple[Row | None, list[Row]]:
    """Return the full row of one rollout or item, and its steps in order; items have none."""
    steps = list[Row]()
    with _views(run) as (connection, views):
        name = next((name for name in LISTED if name in views), None)
        if name is None:
            return None, steps
        key = "item_id" if name == EVAL_ITEM.name else "rollout_id"
        found = _rows(connection, f"SELECT * FROM {name} WHERE {key} = ? LIMIT 1", [rollout_id])
        if found and name == ROLLOUT.name and STEP.name in views:
            # Row numbers first, from the one narrow column: the wide ones (observations) are then read only there.
            question = "SELECT min(file_row), max(file_row) FROM step WHERE rollout_id = ?"
            ((first, last),) = connection.execute(question, [rollout_id]).fetchall()
            if first is not None:
                question = "SELECT * FROM step WHERE file_row BETWEEN ? AND ? AND rollout_id = ? ORDER BY step"
                steps = _rows(connection, question, [first, last, rollout_id])
    return (found[0] if found else None), steps


def tasks(run: Run, size: int = 500) -> list[Row]:
    """Return passed and scored rollouts of an evaluation by task and arm, largest differences first."""
    with _views(run) as (connection, views):
        if EVAL_ITEM.name not in views:
            return []
        rows = _rows(
            connection,
            # count(passed) leaves out null: an item that could not be graded is neither passed nor failed.
            "WITH cells AS (SELECT task_id, arm, count(*) FILTER (passed) AS passed, count(passed) AS scored "
            "FROM eval_item GROUP BY ALL), "
            "rates AS (SELECT *, passed / greatest(scored, 1) AS rate FROM cells) "
            "SELECT task_id, max(rate) - min(rate) AS spread, "
            "list({'arm': arm, 'passed': passed, 'scored': scored} ORDER BY arm) AS arms "
            f"FROM rates GROUP BY task_id ORDER BY spread DESC, task_id LIMIT {int(size)}",
            [],
        )
    return [{"task_id": row["task_id"], "cells": {cell["arm"]: cell for cell in row["arms"]}} for row in rows]


def of_task(run: Run, task: str, arm: str) -> list[Row]:
    """Return the items of one arm on one task, by training seed and sample."""
    with _views(run) as (connection, views):
        question = "SELECT * FROM eval_item WHERE task_id = ? AND arm = ? ORDER BY train_seed, sample_idx"
        return _rows(connection, question, [task, arm]) if EVAL_ITEM.name in views else []


def at_states(run: Run, kind: Kind, states: Sequence[str]) -> list[Row]:
    """Return the rows of a kind (teacher actions, pairs) at the states with these digests."""
    with _views(run) as (connection, views):
        if not states or kind.name not in views:
            return []
        # unnest(): one parameter for any number of digests.
        question = f"SELECT * FROM {kind.name} WHERE state_sha256 IN (SELECT unnest(?))"
        return _rows(connection, question, [list(states)])


def first_rows(run: Run, number: int) -> dict[str, list[Row]]:
    """Return the first rows of every table of a run, by record kind."""
    kinds = {name: out["kind"] for name, out in run.manifest.outputs.items()}
    with _database().cursor() as connection:
        return {
            kinds[name]: _rows(
                connection, f"SELECT * EXCLUDE (file_row_number) FROM {_parquet(path)} LIMIT {int(number)}", []
            )
            for name, path in run.tables().items()
            if path.is_file()
        }


def _conditions(wanted: RolloutFilter, name: str) -> tuple[str, list[Any]]:
    where, values = ["true"], list[Any]()
    if wanted.text:
        text = wanted.text.lower()
        # transcript_json is searched for the text as JSON writes it, with escapes, since its characters are not parsed.
        inside = "SELECT rollout_id FROM step WHERE contains(lower(action), ?) OR contains(lower(observation), ?)"
        if name == EVAL_ITEM.name:
            inside = "SELECT item_id FROM eval_item WHERE contains(lower(transcript_json), ?)"
            values += [text, text, store.encode(text).decode()[1:-1]]
        else:
            values += [text] * 4
        where.append(f"(contains(lower(id), ?) OR contains(lower(coalesce(error, '')), ?) OR id IN ({inside}))")
    for column, value in (("task_id", wanted.task), ("arm", wanted.arm)):
        if value:
            where.append(f"{column} = ?")
            values.append(value)
    where += [REWARDS[wanted.reward]] if wanted.reward in REWARDS else []
    where += ["hacked"] if wanted.hacked else []
    where += ["error_type IS NOT NULL"] if wanted.error else []
    return " AND ".join(where), values


def _rows(connection: duckdb.DuckDBPyConnection, question: str, values: Sequence[Any]) -> list[Row]:
    answer = connection.execute(question, values)
    names = [column[0] for column in answer.description or ()]
    return [dict(zip(names, row, strict=True)) for row in answer.fetchall()]


TABLES = (ROLLOUT, STEP, EVAL_ITEM, TEACHER_ACTION, PAIR)
_database = cache(duckdb.connect)
"""Returns the one empty database of this process; views belong to the cursor that makes them."""


@contextmanager
def _views(run: Run) -> Iterator[tuple[duckdb.DuckDBPyConnection, set[str]]]:
    """Open a connection with a view per record kind of the run, named in the set, with the column `file_row` added."""
    with _database().cursor() as connection:
        views = set[str]()
        tables = run.tables()
        for kind in TABLES:
            if name := run.holds(kind):
                # Columns that an older version of the kind lacks are null.
                there = set(pq.read_schema(tables[name]).names)
                columns = [f'"{c}"' if c in there else f'NULL AS "{c}"' for c in kind.columns]
                selected = ", ".join([*columns, "file_row_number AS file_row"])
                connection.execute(f"CREATE TEMP VIEW {kind.name} AS SELECT {selected} FROM {_parquet(tables[name])}")
                views.add(kind.name)
        if not views:  # a run in progress writes its tables at its end
            for kind, rows in _journal(run):
                connection.register(f"journal_{kind.name}", pa.Table.from_pylist(rows, schema=kind.schema))
                connection.execute(
                    f"CREATE TEMP VIEW {kind.name} AS SELECT *, row_number() OVER () - 1 AS file_row "
                    f"FROM journal_{kind.name}"
                )
                views.add(kind.name)
        yield connection, views


def _parquet(path: Path) -> str:
    quoted = str(path).replace("'", "''")  # a table function takes no parameters
    return f"read_parquet('{quoted}', file_row_number = true)"


def _journal(run: Run) -> list[tuple[Kind, list[Row]]]:
    """Return the finished units of a run in progress as the rows that its tables will hold."""
    rollouts, steps, items = list[Row](), list[Row](), list[Row]()
    for unit in run.units():
        for payload in unit.get("played", [unit] if "rollout" in unit else []):
            rollouts.append(payload["rollout"])
            steps += payload["steps"]
        items += [unit["item"]] if "item" in unit else []
    return [(kind, rows) for kind, rows in ((ROLLOUT, rollouts), (STEP, steps), (EVAL_ITEM, items)) if rows]


RUNS = pa.schema(
    [(name, pa.string()) for name in ("run", "stage", "status", "label", "started_at", "fingerprint", "path")]
    + [("seconds", pa.float64()), ("cost_usd", pa.float64())]
)


def query(runs: Sequence[Run], sql: str) -> tuple[list[str], list[tuple[Any, ...]]]:
    """Answer a question in SQL about many runs: column names and rows; `UsageError` with DuckDB's message.

    Every table is a view under the name of its file (`rollouts`, `steps`, `pairs`, ...), with the rows of all runs
    and a column `run`; `runs` holds one row per run. DuckDB reads the Parquet files, nothing is copied. A question may
    come from anyone: it is one SELECT that reads these files and no others, writes nothing and loads no extension.
    """
    with duckdb.connect() as connection:
        _require_one_select(connection, sql)
        files: dict[str, list[Path]] = {}
        lines = list[Row]()
        for run in runs:
            facts = {name: getattr(run.manifest, name) for name in RUNS.names if hasattr(run.manifest, name)}
            lines.append(facts | {"run": f"{run.path.parent.name}/{run.path.name}", "path": str(run.path)})
            for path in run.tables().values():
                if path.is_file():
                    files.setdefault(path.stem, []).append(path.resolve())
        for name, paths in files.items():
            _create_view(connection, name, paths)
        connection.register("runs", pa.Table.from_pylist(lines, schema=RUNS))
        # From here on the connection can open these files alone, and not write them: COPY is no SELECT. The list is
        # set before access is closed, which cannot be undone, and no setting can be changed after the last line.
        paths_allowed = _quoted_list([path for paths in files.values() for path in paths])
        connection.execute(f"SET allowed_paths = {paths_allowed}")
        connection.execute("SET enable_external_access = false")
        connection.execute("SET lock_configuration = true")
        try:
            answer = connection.execute(sql)
            return [column[0] for column in answer.description or ()], answer.fetchall()
        except duckdb.Error as error:
            tables = ", ".join(sorted([*files, "runs"]))
            raise UsageError(
                f"That question cannot be answered: {str(error).splitlines()[0]} There are the tables {tables}."
            ) from None


def _require_one_select(connection: duckdb.DuckDBPyConnection, sql: str) -> None:
    """`UsageError` unless the text is one SELECT; WITH, FROM, VALUES, DESCRIBE, SHOW and SUMMARIZE are forms of it."""
    try:
        statements = connection.extract_statements(sql)
    except duckdb.Error as error:
        raise UsageError(f"That question cannot be answered: {str(error).splitlines()[0]}. Ask in SQL.") from None
    if not statements:
        raise UsageError("The question is empty. Ask in SQL, such as: select run, status from runs.")
    kinds = [statement.type.name for statement in statements]
    if kinds != ["SELECT"]:
        raise UsageError(
            f"A question is one SELECT, and this is {' and '.join(kinds)}: `composer query` reads the runs' tables "
            "and changes nothing."
        )


def _create_view(connection: duckdb.DuckDBPyConnection, name: str, paths: Sequence[Path]) -> None:
    """Create a view with the rows of these files and the column `run`; `BadInput` that names a damaged file."""
    quoted = name.replace('"', '""')
    try:
        # union_by_name: runs of several versions of a stage have different columns. The file's path names the run.
        connection.execute(
            f"CREATE VIEW \"{quoted}\" AS SELECT parse_path(filename)[-3] || '/' || parse_path(filename)[-2] AS run, "
            f"* EXCLUDE (filename) FROM read_parquet({_quoted_list(paths)}, union_by_name = true, filename = true)"
        )
    except duckdb.Error as error:
        if len(paths) == 1:
            raise BadInput(
                f"{paths[0]} cannot be read as Parquet ({str(error).splitlines()[0]}). Restore it, rerun its stage, or "
                "name the runs to ask with --from."
            ) from None
        for path in paths:  # the one that cannot be read
            _create_view(connection, f"{name} of {path}", [path])
        raise UsageError(
            f"The tables {name} of these runs cannot be read as one ({str(error).splitlines()[0]}). "
            "Name runs of one kind with --from."
        ) from None


def _quoted_list(paths: Sequence[Path]) -> str:
    # Table functions and settings take no parameters.
    return "[" + ", ".join("'" + str(path).replace("'", "''") + "'" for path in paths) + "]::VARCHAR[]"
