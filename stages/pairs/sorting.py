"""Tables of runs joined and sorted by DuckDB, which goes on on disk where they are larger than its memory."""

from collections.abc import Generator, Iterator
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import TYPE_CHECKING

from stages.runs.artifact import Run
from stages.runs.records import STEP, Row
from stages.runs.scan import Scan

if TYPE_CHECKING:
    import duckdb

MEMORY = "200MB"
"""What DuckDB may take before it sorts on disk."""
BATCH_ROWS = 1024
OF_STEPS = (
    *("rollout_id", "task_id", "step", "new_messages_json", "history", "state_sha256"),
    *("action", "commands", "truncated"),
)
"""What rollouts of one task are compared by."""


def on_disk(folder: Path, memory: str = MEMORY, **tables: Scan) -> "duckdb.DuckDBPyConnection":
    """A database in `folder` with these tables as views, `file_row_number` beside their columns.

    What it stores is gone soon, so that compressing it is not worth its time.
    """
    settings: dict[str, str | bool | int | float | list[str]] = {
        "memory_limit": memory,
        "threads": 2,
        "force_compression": "uncompressed",
    }
    import duckdb  # slow to import, and few commands need it

    (folder / "rows.duckdb").unlink(missing_ok=True)
    database = duckdb.connect(
        str(folder / "rows.duckdb"), config=settings | {"temp_directory": str(folder / "spilled")}
    )
    for name, table in tables.items():
        path = str(table.path).replace("'", "''")
        database.execute(
            f"CREATE VIEW {name} AS SELECT * FROM read_parquet('{path}', file_row_number = true)"  # noqa: S608
        )
    return database


def rows_of(database: "duckdb.DuckDBPyConnection", question: str) -> Generator[Row, None, None]:
    """The rows of an answer, one after the other."""
    with database.cursor() as cursor:
        for batch in cursor.sql(question).to_arrow_reader(BATCH_ROWS):
            yield from batch.to_pylist()


def steps_by_task(run: Run, folder: Path) -> Iterator[tuple[str, list[Row]]]:
    """The steps of one task after the other, in the order in which they were recorded; columns `OF_STEPS` alone."""
    table = run.scan(STEP)
    columns = ", ".join(name for name in OF_STEPS if name in table.columns)
    with on_disk(folder, steps=table) as database:
        ordered = rows_of(database, f"SELECT {columns} FROM steps ORDER BY task_id, file_row_number")  # noqa: S608
        for task, rows in groupby(ordered, key=itemgetter("task_id")):
            yield task, list(rows)
