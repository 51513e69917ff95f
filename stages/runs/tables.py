"""The tables of many runs at once, for questions in SQL: DuckDB over the Parquet files, nothing copied.

Every table is there under the name of its file (`rollouts`, `steps`, `pairs`, ...), with the rows of all runs and a
column `run`; `runs` holds a row a run.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import duckdb
import pyarrow as pa

from stages.errors import UsageError
from stages.runs.artifact import Run

RUNS = pa.schema(
    [(name, pa.string()) for name in ("run", "stage", "status", "label", "started_at", "fingerprint", "path")]
    + [("seconds", pa.float64()), ("cost_usd", pa.float64())]
)


def query(runs: Sequence[Run], sql: str) -> tuple[list[str], list[tuple[Any, ...]]]:
    """Column names and rows of an answer; `UsageError` with DuckDB's own words when the question cannot be answered."""
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
    """A query for the rows of some Parquet files; a file of another version may have other columns."""
    listed = ", ".join("'" + str(path.resolve()).replace("'", "''") + "'" for path in paths)
    run = "parse_path(filename)[-3] || '/' || parse_path(filename)[-2] AS run"
    # paths are quoted above; a table function takes no parameters
    return f"SELECT {run}, * EXCLUDE (filename) FROM read_parquet([{listed}], union_by_name = true, filename = true)"  # noqa: S608


def _about(run: Run) -> dict[str, Any]:
    """The columns of `runs`."""
    found = run.manifest
    facts = {name: getattr(found, name) for name in RUNS.names if hasattr(found, name)}
    return facts | {"run": f"{run.path.parent.name}/{run.path.name}", "path": str(run.path)}
