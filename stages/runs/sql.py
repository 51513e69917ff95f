"""A question in SQL about tables of runs, answered in a thread that is left after a time limit.

A question is one SELECT that reads the given files and no others, writes nothing and loads no extension. It can still
be endless (a join without a condition, a recursion), and large: time, rows and the memory that DuckDB counts are
bounded. DuckDB looks at an interruption between blocks of rows only, and one call of a function can take hours: its
thread is a daemon, which ends with the process.
"""

import atexit
import re
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from pathlib import Path
from threading import Thread
from time import monotonic
from typing import Any

import duckdb

from composer_stages.backends import resources
from composer_stages.errors import BadInput, UsageError
from composer_stages.runs import store
from composer_stages.runs.index import Entry
from composer_stages.runs.kinds import Row
from composer_stages.words import Sentence, did_you_mean

LIMIT_S = 60.0
"""Seconds that a question may take."""
ROWS = 1_000_000
"""Rows of the largest answer."""
BLOCK = 10_000
MOST_THREADS = 16
PARTS = 4
"""Parts of a process' memory: one for DuckDB, one for the rows, two for printing them."""
INTERRUPT_S = 1.0
"""Seconds to wait for the end of a question that was interrupted."""
EXIT_S = 10.0
"""Seconds that the process waits for it before it ends."""
RUNS = dict.fromkeys(
    ("run", "stage", "status", "label", "started_at", "fingerprint", "path"), "VARCHAR"
) | dict.fromkeys(("seconds", "cost_usd"), "DOUBLE")
"""The columns of the table `runs`, with their types."""
LESS = (
    "Ask for less: name runs with --from, join on a condition, count or average, add a limit. "
    "The tables are Parquet files, which DuckDB itself reads without this bound."
)
Answer = tuple[list[str], list[tuple[Any, ...]]]


@dataclass(frozen=True)
class SqlQuery:
    """SQL, the Parquet files that it may read by the name of their table, and the rows of the table `runs`.

    Files that were deleted are left out when a table is read.

    memory: bytes that DuckDB may use; of a process with a limit at most a quarter of what that leaves.
    """

    sql: str
    files: Mapping[str, Sequence[Path]]
    runs: Sequence[Mapping[str, Any]]
    memory: int = 4 * 2**30


def sql_query(runs: Mapping[Path, Entry], sql: str) -> SqlQuery:
    """Return a question in SQL with the tables of these runs that it may read.

    Every table is a view under the name of its file (`rollouts`, `steps`, `pairs`, ...), with the rows of all runs
    and a column `run`; `runs` holds one row per run. DuckDB reads the Parquet files, nothing is copied.
    """
    files: dict[str, list[Path]] = {}
    lines = list[Row]()
    for folder, entry in runs.items():
        facts = {name: getattr(entry.facts, name) for name in RUNS if hasattr(entry.facts, name)}
        lines.append(facts | {"run": f"{folder.parent.name}/{folder.name}", "path": str(folder)})
        for table in entry.tables:
            files.setdefault(Path(table).stem, []).append(folder / table)
    return SqlQuery(sql, files, lines)


def pooled(runs: Mapping[Path, Entry], sql: str) -> list[str]:
    """Return sentences about rows that a question reads without telling runs apart: of several stages, or of copies."""
    with duckdb.connect() as connection:
        ((parsed,),) = connection.execute("SELECT json_serialize_sql(?)", [sql]).fetchall()
    # In JSON, which nests too deeply for Python's readers; quotes in a text of the question are escaped there.
    read = {name.lower() for name in re.findall(r'"table_name":"([^"]+)"', parsed)}
    columns = {name.lower() for name in re.findall(r'"column_names":\[(?:"[^"]*",)*"([^"]*)"\]', parsed)}
    if "runs" in read or columns & {"run", "source"}:
        return []
    stages: dict[str, set[str]] = {}
    firsts: dict[tuple[str, str], Path] = {}
    copies = list[str]()
    for folder, entry in runs.items():
        first = firsts.setdefault((entry.facts.stage, entry.content), folder)
        if entry.facts.status == "complete" and first != folder and read & {Path(name).stem for name in entry.tables}:
            copies.append(Sentence("runs.rows-of-copy", run=folder.name, first=first.name))
        for table in entry.tables:
            stages.setdefault(Path(table).stem, set()).add(entry.facts.stage)
    return copies + [
        Sentence("runs.rows-of-several-stages", stages=sorted(makers), table=table)
        for table, makers in stages.items()
        if len(makers) > 1 and table.lower() in read
    ]


def run_sql(query: SqlQuery, limit_s: float = LIMIT_S) -> Answer:
    """Return column names and rows; `UsageError` where the query has no answer, or none within the bounds."""
    # What DuckDB leaves is for the rows and for printing them: orjson crashes where it gets no memory.
    quarters = [free // PARTS for free in resources.within_limits().values()]
    limits = ""
    if quarters and min(quarters) < query.memory:
        query = replace(query, memory=min(quarters))
        limits = "".join(f", a quarter of what `ulimit {option}` left to it" for option in resources.within_limits())
    # The stack of a thread counts as memory of the process.
    connection = duckdb.connect(config={"threads": min(resources.cores(), MOST_THREADS)})
    done = Future[Answer]()
    asking = Thread(target=_fulfil, args=(done, connection, query, limits), daemon=True)
    asking.start()
    try:
        return done.result(limit_s)
    except TimeoutError:
        raise UsageError("runs.query-too-slow", limit_s=limit_s, less=LESS) from None
    finally:
        # Not `close`, which would wait for a call of a function that DuckDB does not interrupt.
        _interrupt(connection, asking, INTERRUPT_S)
        if asking.is_alive():
            # A thread that comes back from DuckDB while the interpreter shuts down aborts the process.
            atexit.register(_interrupt, connection, asking, EXIT_S)


def _interrupt(connection: duckdb.DuckDBPyConnection, asking: Thread, seconds: float) -> None:
    """Interrupt the connection until its thread ends; an interruption between two statements stops neither."""
    until = monotonic() + seconds
    while asking.is_alive() and monotonic() < until:
        connection.interrupt()
        asking.join(0.05)


def _fulfil(done: "Future[Answer]", connection: duckdb.DuckDBPyConnection, query: SqlQuery, limits: str) -> None:
    try:
        done.set_result(_ask(connection, query))
    except (duckdb.OutOfMemoryException, MemoryError):
        done.set_exception(too_large(f"{query.memory / 2**30:.3g} GB of memory{limits}"))
    except Exception as error:
        done.set_exception(error)


def too_large(limit: str) -> UsageError:
    """Return the error of a question that needs more than this."""
    return UsageError("runs.query-needs-more-memory", what=limit, less=LESS)


def _ask(connection: duckdb.DuckDBPyConnection, query: SqlQuery) -> Answer:
    _require_one_select(connection, query.sql)
    connection.execute(f"SET memory_limit = '{query.memory}B'")
    # A question about runs alone opens none of their tables; one about the tables themselves opens all.
    lists_tables = ABOUT_TABLES.search(query.sql)
    named_files = {
        name: paths for name, paths in query.files.items() if lists_tables or name.lower() in query.sql.lower()
    }
    existing = {name: [path.resolve() for path in paths if path.is_file()] for name, paths in named_files.items()}
    files = {name: paths for name, paths in existing.items() if paths}
    for name, paths in files.items():
        _create_view(connection, name, paths)
    # As a parameter: Arrow and DataFrames would load pandas, which takes longer than the question.
    columns = ", ".join(f"{name} {meaning}" for name, meaning in RUNS.items())
    connection.execute(
        f"CREATE TABLE runs AS SELECT unnest($1::STRUCT({columns})[], recursive := true)",
        [[{name: run.get(name) for name in RUNS} for run in query.runs]],
    )
    # From here on the connection can open these files alone, and not write them: COPY is no SELECT. The list is
    # set before access is closed, which cannot be undone, and no setting can be changed after the last line.
    paths_allowed = _quoted_list([path for paths in files.values() for path in paths])
    connection.execute(f"SET allowed_paths = {paths_allowed}")
    connection.execute("SET temp_directory = ''")  # a sort of much would write to the working folder
    connection.execute("SET enable_external_access = false")
    connection.execute("SET lock_configuration = true")
    try:
        answered = connection.execute(query.sql)
        rows = list[tuple[Any, ...]]()
        while block := answered.fetchmany(BLOCK):
            rows += block
            if len(rows) > ROWS:
                raise too_large(f"{ROWS:,} rows for its answer")
            if any(free < 2 * query.memory for free in resources.within_limits().values()):
                raise MemoryError
        names = [column[0] for column in answered.description or ()]
        # Of two columns of one name, as a join has them, a row by names would lose one; these are DuckDB's own names.
        return [f"{name}_{count}" if (count := names[:at].count(name)) else name for at, name in enumerate(names)], rows
    except duckdb.OutOfMemoryException:
        raise
    except duckdb.Error as error:
        tables = f"There are the tables {', '.join(sorted([*query.files, 'runs']))}."
        if not query.runs:
            tables = Sentence("runs.no-runs")
        first, *more = str(error).splitlines()
        # A second line that proposes a table may name one of DuckDB's own, which nobody means.
        columns = "".join(f" {line}." for line in more[:1] if line.startswith("Candidate bindings"))
        if missing := NO_TABLE.match(first):
            first = f"no run here holds a table {missing[1]}.{did_you_mean(missing[1], [*query.files, 'runs'])}"
        raise UsageError("runs.query-failed", first=first, columns=columns, tables=tables) from None


ABOUT_TABLES = re.compile(
    r"\b(show|describe|tables?|columns?|information_schema|duckdb_\w+|pragma_\w+)\b", re.IGNORECASE
)
NO_TABLE = re.compile(r"Catalog Error: Table with name (\S+) does not exist")


def _require_one_select(connection: duckdb.DuckDBPyConnection, sql: str) -> None:
    """`UsageError` unless the text is one SELECT; WITH, FROM, VALUES, DESCRIBE, SHOW and SUMMARIZE are forms of it."""
    try:
        statements = connection.extract_statements(sql)
    except duckdb.Error as error:
        raise UsageError("runs.no-query", error=str(error).splitlines()[0]) from None
    if not statements:
        raise UsageError("runs.query-empty")
    kinds = [statement.type.name for statement in statements]
    if kinds != ["SELECT"]:
        raise UsageError("runs.query-not-select", kinds=kinds)


def _create_view(connection: duckdb.DuckDBPyConnection, name: str, paths: Sequence[Path]) -> None:
    """Create a view with the rows of these files and the column `run`; `BadInput` that names a damaged file."""
    view = name.replace('"', '""')
    try:
        # union_by_name: runs of several versions of a stage have different columns. The file's path names the run.
        named = "parse_path(filename)[-3] || '/' || parse_path(filename)[-2] AS run"
        source = f"read_parquet({_quoted_list(paths)}, union_by_name = true, filename = true)"
        connection.execute(f'CREATE VIEW "{view}" AS SELECT {named}, * EXCLUDE (filename) FROM {source}')
    except duckdb.OutOfMemoryException:
        raise
    except duckdb.Error as error:
        if len(paths) == 1:
            raise BadInput("runs.parquet-unreadable", path=paths[0], error=str(error).splitlines()[0]) from None
        for path in paths:  # the one that cannot be read
            _create_view(connection, f"{name} of {path}", [path])
        raise UsageError("runs.tables-of-several-kinds", name=name, error=str(error).splitlines()[0]) from None


def _quoted_list(paths: Sequence[Path]) -> str:
    return f"[{', '.join(map(store.in_sql, paths))}]::VARCHAR[]"
