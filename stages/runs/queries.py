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

from stages.errors import UsageError
from stages.runs import store
from stages.runs.artifact import Run
from stages.runs.records import EVAL_ITEM, PAIR, ROLLOUT, STEP, TEACHER_ACTION, Kind, Row

Reward = Literal["", "passed", "failed", "none"]
COLUMNS = "task_id, family, sample_idx, num_steps, hacked, gt_pass, visible_pass, terminated_by, error_type, error"
LISTED = {
    ROLLOUT.name: f"SELECT rollout_id AS id, NULL AS arm, reward, {COLUMNS}, file_row FROM rollout",
    EVAL_ITEM.name: f"SELECT item_id AS id, arm, CAST(passed AS DOUBLE) AS reward, {COLUMNS}, file_row FROM eval_item",
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


def holds_rollouts(run: Run) -> bool:
    """Return whether the run has rollouts or items, or is writing its first ones."""
    return bool(run.holds(ROLLOUT) or run.holds(EVAL_ITEM)) or any((run.path / "steps").glob("*.jsonl.open"))


def page(run: Run, wanted: RolloutFilter, offset: int = 0, size: int = 50) -> RolloutPage:
    """Return one page of the matching rollouts, in the order of the run or of the filter."""
    with _tables(run) as connection:
        name = _listed(connection)
        if name is None:
            return RolloutPage(0, 0, [])
        where, values = _conditions(wanted, name)
        listed = f"(SELECT * FROM ({LISTED[name]}) WHERE {where})"
        if wanted.text:  # search once: it is most of the work
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
    with _tables(run) as connection:
        name = _listed(connection)
        if name is None:
            return None, []
        key = "item_id" if name == EVAL_ITEM.name else "rollout_id"
        found = _rows(connection, f"SELECT * FROM {name} WHERE {key} = ? LIMIT 1", [rollout_id])
        steps = _steps(connection, rollout_id) if found and name == ROLLOUT.name else []
    return (found[0] if found else None), steps


def _steps(connection: duckdb.DuckDBPyConnection, rollout_id: str) -> list[Row]:
    """Return the steps of a rollout: find their row numbers first, so that wide columns are read only there."""
    if not _has(connection, STEP.name):
        return []
    ((first, last),) = connection.execute(
        "SELECT min(file_row), max(file_row) FROM step WHERE rollout_id = ?", [rollout_id]
    ).fetchall()
    if first is None:
        return []
    question = "SELECT * FROM step WHERE file_row BETWEEN ? AND ? AND rollout_id = ? ORDER BY step"
    return _rows(connection, question, [first, last, rollout_id])


def tasks(run: Run, size: int = 500) -> list[Row]:
    """Return passed and scored rollouts of an evaluation by task and arm, largest differences first."""
    with _tables(run) as connection:
        if not _has(connection, EVAL_ITEM.name):
            return []
        rows = _rows(
            connection,
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
    with _tables(run) as connection:
        question = "SELECT * FROM eval_item WHERE task_id = ? AND arm = ? ORDER BY train_seed, sample_idx"
        return _rows(connection, question, [task, arm]) if _has(connection, EVAL_ITEM.name) else []


def at_states(run: Run, kind: Kind, states: Sequence[str]) -> list[Row]:
    """Return the rows of a kind (teacher actions, pairs) at the states with these digests."""
    with _tables(run) as connection:
        if not states or not _has(connection, kind.name):
            return []
        question = f"SELECT * FROM {kind.name} WHERE state_sha256 IN (SELECT unnest(?))"
        return _rows(connection, question, [list(states)])


def first_rows(run: Run, number: int) -> dict[str, list[Row]]:
    """Return the first rows of every table of a run, by record kind."""
    tables = [(out["kind"], run.path / out["file"]) for out in run.manifest.outputs.values()]
    with _database().cursor() as connection:
        return {
            kind: _rows(connection, f"SELECT * EXCLUDE (file_row_number) FROM {_parquet(path)} LIMIT {int(number)}", [])
            for kind, path in tables
            if path.suffix == ".parquet" and path.is_file()
        }


def _conditions(wanted: RolloutFilter, name: str) -> tuple[str, list[Any]]:
    where, values = ["true"], list[Any]()
    if wanted.text:
        text = wanted.text.lower()
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


def _listed(connection: duckdb.DuckDBPyConnection) -> str | None:
    return next((name for name in (EVAL_ITEM.name, ROLLOUT.name) if _has(connection, name)), None)


def _has(connection: duckdb.DuckDBPyConnection, name: str) -> bool:
    return bool(connection.execute("SELECT 1 FROM duckdb_views() WHERE view_name = ?", [name]).fetchall())


def _rows(connection: duckdb.DuckDBPyConnection, question: str, values: Sequence[Any]) -> list[Row]:
    answer = connection.execute(question, values)
    names = [column[0] for column in answer.description or ()]
    return [dict(zip(names, row, strict=True)) for row in answer.fetchall()]


TABLES = (ROLLOUT, STEP, EVAL_ITEM, TEACHER_ACTION, PAIR)


@contextmanager
def _tables(run: Run) -> Iterator[duckdb.DuckDBPyConnection]:
    """Open a connection with a view per record kind of the run, with the column `file_row` added."""
    with _database().cursor() as connection:
        files = [(kind, run.path / f"{name}.parquet") for kind in TABLES if (name := run.holds(kind))]
        for kind, path in files:
            connection.execute(f"CREATE TEMP VIEW {kind.name} AS SELECT {_columns(kind, path)} FROM {_parquet(path)}")
        if not files:
            for kind, rows in _journal(run):
                connection.register(f"journal_{kind.name}", pa.Table.from_pylist(rows, schema=kind.schema))
                connection.execute(
                    f"CREATE TEMP VIEW {kind.name} AS SELECT *, row_number() OVER () - 1 AS file_row "
                    f"FROM journal_{kind.name}"
                )
        yield connection


@cache
def _database() -> duckdb.DuckDBPyConnection:
    """Return the process's empty database; views belong to the cursor that makes them."""
    return duckdb.connect()


def _parquet(path: Path) -> str:
    quoted = str(path).replace("'", "''")
    return f"read_parquet('{quoted}', file_row_number = true)"


def _columns(kind: Kind, path: Path) -> str:
    """Return the kind's columns as SQL; columns that an older version lacks are null."""
    there = set(pq.read_schema(path).names)
    named = [f'"{name}"' if name in there else f'NULL AS "{name}"' for name in kind.columns]
    return ", ".join([*named, "file_row_number AS file_row"])


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
    and a column `run`; `runs` holds one row per run. DuckDB reads the Parquet files, nothing is copied.
    """
    with duckdb.connect() as connection:
        files: dict[str, list[Path]] = {}
        for run in runs:
            for out in run.manifest.outputs.values():
                if out["file"].endswith(".parquet") and (run.path / out["file"]).is_file():
                    files.setdefault(Path(out["file"]).stem, []).append(run.path / out["file"])
        for name, paths in files.items():
            connection.execute(f'CREATE VIEW "{name}" AS {_rows_of(paths)}')
        connection.register("runs", pa.Table.from_pylist([_about(run) for run in runs], schema=RUNS))
        if not sql.strip():
            raise UsageError("The question is empty. Ask in SQL, such as: select run, status from runs.")
        try:
            answer = connection.execute(sql)
            return [column[0] for column in answer.description or ()], answer.fetchall()
        except duckdb.Error as error:
            tables = ", ".join(sorted([*files, "runs"]))
            raise UsageError(
                f"That question cannot be answered: {str(error).splitlines()[0]} There are the tables {tables}."
            ) from None


def _rows_of(paths: Sequence[Path]) -> str:
    """Return SQL for the rows of some Parquet files, which may have different columns."""
    listed = ", ".join("'" + str(path.resolve()).replace("'", "''") + "'" for path in paths)
    run = "parse_path(filename)[-3] || '/' || parse_path(filename)[-2] AS run"
    # paths are quoted above; a table function takes no parameters
    return f"SELECT {run}, * EXCLUDE (filename) FROM read_parquet([{listed}], union_by_name = true, filename = true)"


def _about(run: Run) -> dict[str, Any]:
    """Return a run's row of the view `runs`."""
    found = run.manifest
    facts = {name: getattr(found, name) for name in RUNS.names if hasattr(found, name)}
    return facts | {"run": f"{run.path.parent.name}/{run.path.name}", "path": str(run.path)}
