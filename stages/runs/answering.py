"""The answer to a question in SQL about tables of runs, found in a process of its own that is bounded.

A question may come from anyone: it is one SELECT that reads the given files and no others, writes nothing and loads no
extension. It can still be endless (a join without a condition, a recursion), and large. DuckDB 2.0 runs no handler of a
signal while it works, looks at its own interruption between blocks of rows only (one call of a function can take
hours), does not count the texts of a block as memory, and streams an answer of any length. So a process is ended from
outside: after a time, on Ctrl-C, or when whoever asked is gone; and the kernel bounds its memory.
"""

import os
import pickle
import re
import resource
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import duckdb
import pyarrow as pa

from stages.errors import BadInput, ComposerError, InfrastructureError, UsageError

LIMIT_S = 60.0
"""Seconds that a question may take."""
ROWS, BYTES = 1_000_000, 2**30
"""The largest answer."""
BLOCK = 10_000
WATCH_S = 0.5
SOURCE = Path(__file__).resolve().parents[2]
RUNS = pa.schema(
    [(name, pa.string()) for name in ("run", "stage", "status", "label", "started_at", "fingerprint", "path")]
    + [("seconds", pa.float64()), ("cost_usd", pa.float64())]
)
LESS = (
    "Ask for less: name runs with --from, join on a condition, count or average, add a limit. "
    "The tables are Parquet files, which DuckDB itself reads without this bound."
)
Answer = tuple[list[str], list[tuple[Any, ...]]]


@dataclass(frozen=True)
class Question:
    """SQL, the Parquet files that it may read by the name of their table, and the rows of the table `runs`.

    memory: bytes that DuckDB may use; the process may use twice as much.
    """

    sql: str
    files: Mapping[str, Sequence[Path]]
    runs: Sequence[Mapping[str, Any]]
    memory: int = 4 * 2**30


def answer(question: Question, limit_s: float = LIMIT_S) -> Answer:
    """Return column names and rows; `UsageError` where the question has no answer, or none within the bounds."""
    places = [str(SOURCE), *filter(None, [os.environ.get("PYTHONPATH")])]
    try:
        done = subprocess.run(
            [sys.executable, "-m", __name__],
            input=pickle.dumps((os.getpid(), question)),
            capture_output=True,
            env=os.environ | {"PYTHONPATH": os.pathsep.join(places)},
            timeout=limit_s,
            start_new_session=True,  # Ctrl-C in a terminal goes to this process alone, which then ends the other
        )
    except subprocess.TimeoutExpired:
        raise UsageError(f"That question had no answer after {limit_s:g} seconds and was stopped. {LESS}") from None
    if done.returncode:
        last = done.stderr.decode(errors="replace").strip().rpartition("\n")[2]
        raise InfrastructureError(
            f"The process that answers questions ended with {done.returncode} ({last or 'and said nothing'}). {LESS}"
        )
    found: Answer | ComposerError = pickle.loads(done.stdout)  # noqa: S301 - of our own process, which runs no code
    if isinstance(found, ComposerError):
        raise found
    return found


def main() -> None:
    """Answer the question on stdin, on stdout, in a process that `answer` started."""
    parent, question = pickle.load(sys.stdin.buffer)  # noqa: S301 - of the process that started this one
    threading.Thread(target=_end_without, args=(parent,), daemon=True).start()
    # RLIMIT_DATA and not RLIMIT_AS: allocators reserve address space that they never touch.
    resource.setrlimit(resource.RLIMIT_DATA, (2 * question.memory, 2 * question.memory))
    try:
        told = pickle.dumps(ask(question))
    except ComposerError as error:
        told = pickle.dumps(error)
    except MemoryError:
        told = pickle.dumps(_too_large(f"{2 * question.memory / 2**30:.3g} GB of memory"))
    if len(told) > BYTES:
        told = pickle.dumps(_too_large(f"{BYTES / 2**30:g} GB for its answer"))
    sys.stdout.buffer.write(told)
    sys.stdout.buffer.flush()
    os._exit(0)  # DuckDB's threads may still work, and would be waited for


def _end_without(parent: int) -> None:
    """End this process once the process that asked has ended."""
    while os.getppid() == parent:
        time.sleep(WATCH_S)
    os._exit(1)


def _too_large(what: str) -> UsageError:
    return UsageError(f"That question needs more than {what}. {LESS}")


def ask(question: Question) -> Answer:
    """Return column names and rows, found in this process, where nothing bounds the time."""
    with duckdb.connect() as connection:
        _require_one_select(connection, question.sql)
        for name, paths in question.files.items():
            _create_view(connection, name, paths)
        connection.register("runs", pa.Table.from_pylist([dict(run) for run in question.runs], schema=RUNS))
        # From here on the connection can open these files alone, and not write them: COPY is no SELECT. The list is
        # set before access is closed, which cannot be undone, and no setting can be changed after the last line.
        paths_allowed = _quoted_list([path for paths in question.files.values() for path in paths])
        connection.execute(f"SET allowed_paths = {paths_allowed}")
        connection.execute(f"SET memory_limit = '{question.memory}B'")
        connection.execute("SET temp_directory = ''")  # a sort of much would write to the working folder
        connection.execute("SET enable_external_access = false")
        connection.execute("SET lock_configuration = true")
        try:
            answered = connection.execute(question.sql)
            rows = list[tuple[Any, ...]]()
            while block := answered.fetchmany(BLOCK):
                rows += block
                if len(rows) > ROWS:
                    raise _too_large(f"{ROWS:,} rows for its answer")
            return [column[0] for column in answered.description or ()], rows
        except duckdb.OutOfMemoryException:
            raise _too_large(f"{question.memory / 2**30:.3g} GB of memory") from None
        except duckdb.Error as error:
            tables = ", ".join(sorted([*question.files, "runs"]))
            first, *more = str(error).splitlines()
            # A second line that proposes a table may name one of DuckDB's own, which nobody means.
            columns = "".join(f" {line}." for line in more[:1] if line.startswith("Candidate bindings"))
            if missing := NO_TABLE.match(first):
                near = get_close_matches(missing[1], [*question.files, "runs"], 1)
                first = f"no run here holds a table {missing[1]}.{''.join(f' Did you mean {one}?' for one in near)}"
            raise UsageError(
                f"That question cannot be answered: {first}{columns} There are the tables {tables}."
            ) from None


NO_TABLE = re.compile(r"Catalog Error: Table with name (\S+) does not exist")


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


if __name__ == "__main__":
    main()
