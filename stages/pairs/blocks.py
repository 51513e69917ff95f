"""Thousands of states at a time as arrays: their steps, their answers, and which actions are equal.

No Python object per row, except for texts that are seen for the first time. Rows come from DuckDB, which joins and
sorts the tables of runs on disk where they exceed its memory (`open_database`, `rows_of`, `OrderedRows`).
"""

from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from stages.pairs.voting import form
from stages.runs import store
from stages.runs.parquet import Scan
from stages.runs.records import Row

if TYPE_CHECKING:
    import duckdb

Array = np.ndarray[Any, Any]
NOTHING = -1
"""The number of a missing or malformed action."""
MEMORY = "200MB"
"""Memory of DuckDB before it sorts on disk."""
BATCH_ROWS = 1024


@dataclass(frozen=True)
class ActionClasses:
    """The classes of equal actions of a block: steps first, then answers, in their order.

    class_of [R + A]: a number of `names`, `NOTHING` for malformed or missing. compared_by: for each state. lost: states
    that could not be reached again, so that nothing is decided there. failing [R + A]: whether a pair would choose the
    action, which ends the episode and fails.
    """

    class_of: Array
    names: Sequence[str]
    compared_by: pa.Array
    lost: Array
    failing: Array


@dataclass(frozen=True)
class AlikeStates:
    """States of a block with the same numbers of steps and of each teacher's answers.

    states [S]; rows [S, L] of all their actions, steps first, then answers teacher by teacher, as numbers of
    `StateBlock.actions`; students: how many of the L are steps; samples: the number of answers of each teacher.
    """

    states: Array
    rows: Array
    students: int
    samples: tuple[int, ...]


@dataclass(frozen=True)
class StateBlock:
    """Consecutive states, numbered from 0 to `size`.

    steps [R]: columns `n` (the state among all), `state_sha256`, `rollout_id`, `task_id`, `step`, `action`,
    `truncated`, `has_ids`, in the order of states, rollouts and numbers. answers [A]: `whole` (null for no answer, or
    one that was cut off), `served`, `cost_usd` (null where not known), in the order of states and teachers. at [R] and
    answered [A]: the state of each; teacher [A]: its number. first_step [S]: the row of the first step in each state.
    actions [R + A]: the texts of steps and answers; text_of: the number of each in the distinct `texts`, `NOTHING` for
    none. usd [S]: the cost of all answers in a state, NaN where one has no known price.
    """

    size: int
    teachers: tuple[str, ...]
    steps: pa.Table
    answers: pa.Table
    at: Array
    answered: Array
    teacher: Array
    first_step: Array
    actions: pa.Array
    text_of: Array
    texts: list[str]
    usd: Array

    @classmethod
    def from_tables(
        cls, begin: int, end: int, teachers: Sequence[str], steps: pa.Table, answers: pa.Table
    ) -> "StateBlock":
        """Return states `begin` to `end` of all. answers: in their recorded order, with `n` and `teacher`."""
        size = end - begin
        at = to_numpy(answers["n"]) - begin
        teacher = to_numpy(pc.index_in(answers["teacher"], pa.array(teachers, pa.string())))
        cost, usd = to_numpy(answers["cost_usd"].fill_null(np.nan)), np.zeros(size)
        start, number = np.searchsorted(at, np.arange(size)), np.bincount(at, minlength=size)
        # Added in the order of the rows, so that equal rows give equal bits wherever a block begins.
        for nth in range(number.max(initial=0)):
            more = number > nth
            usd[more] += cost[start[more] + nth]
        order = np.argsort(at * len(teachers) + teacher, kind="stable")
        ordered, of_step = answers.take(pa.array(order)), to_numpy(steps["n"]) - begin
        actions = pa.chunked_array([*steps["action"].chunks, *ordered["whole"].chunks], pa.string()).combine_chunks()
        # Arrow finds the distinct texts: these alone become Python objects, and all others are compared as numbers.
        coded = actions.dictionary_encode()
        return cls(
            size=size,
            teachers=tuple(teachers),
            steps=steps,
            answers=ordered,
            at=of_step,
            answered=at[order],
            teacher=teacher[order],
            first_step=np.searchsorted(of_step, np.arange(size)),
            actions=actions,
            text_of=to_numpy(coded.indices.fill_null(NOTHING)),
            texts=coded.dictionary.to_pylist(),
            usd=usd,
        )

    def first_step_column(self, column: str) -> pa.Array:
        """Return a column [S] of the first step in each state."""
        return self.steps[column].take(pa.array(self.first_step)).combine_chunks()

    def classes_by_text(self) -> ActionClasses:
        """Return classes by canonical forms alone."""
        known: dict[str, int] = {}
        class_of_text = [NOTHING if one is None else known.setdefault(one, len(known)) for one in map(form, self.texts)]
        class_of = np.array([*class_of_text, NOTHING], dtype=np.int64)[self.text_of]  # the last entry is that of -1
        compared_by = pa.array(["canonical"]).take(pa.array(np.zeros(self.size, dtype=np.int64)))
        lost, failing = np.zeros(self.size, dtype=bool), np.zeros(len(self.actions), dtype=bool)
        return ActionClasses(class_of, list(known), compared_by, lost, failing)

    def alike(self, most: int) -> Iterator[AlikeStates]:
        """Yield the states grouped by their numbers of steps and answers.

        In parts: comparing everyone with everyone in one needs no array of more than `most` numbers.
        """
        number = len(self.teachers)
        answers = np.bincount(self.answered * number + self.teacher, minlength=self.size * number)
        counts = np.column_stack([np.bincount(self.at, minlength=self.size), answers.reshape(self.size, number)])
        first_answer = len(self.steps) + np.searchsorted(self.answered, np.arange(self.size))
        for states in equal_rows(counts):
            students, *samples = counts[states[0]].tolist()
            own = self.first_step[states, None] + np.arange(students)
            given = first_answer[states, None] + np.arange(sum(samples))
            rows = np.hstack([own, given])
            part = max(most // max(rows.shape[1] ** 2, 1), 1)
            for start in range(0, len(states), part):
                yield AlikeStates(states[start : start + part], rows[start : start + part], students, tuple(samples))


def equal_rows(table: Array) -> list[Array]:
    """Return, for each distinct row of a contiguous array [N, W], the numbers of the rows equal to it."""
    # Rows as fixed-size binary values, which Arrow hashes in one pass; np.unique would sort them.
    width = table.shape[1] * table.itemsize
    as_bytes = pa.FixedSizeBinaryArray.from_buffers(pa.binary(width), len(table), [None, pa.py_buffer(table)])
    which = to_numpy(as_bytes.dictionary_encode().indices)
    return np.split(np.argsort(which, kind="stable"), np.cumsum(np.bincount(which))[:-1])


def to_numpy(column: pa.Array | pa.ChunkedArray) -> Array:
    """Return a column as a NumPy array."""
    # pa.Array.to_numpy copies nothing unless it may, and so refuses booleans; a chunked array is always copied.
    found: Array = column.to_numpy() if isinstance(column, pa.ChunkedArray) else column.to_numpy(zero_copy_only=False)
    return found


@lru_cache(65_536)
def short_name(name: str) -> str:
    """Return the short name of a class of actions, the same in every state."""
    return store.digest(name)[:16]


@dataclass(eq=False)
class OrderedRows:
    """Rows in the order of `n`, read up to a bound at a time."""

    rows: pa.RecordBatchReader
    _held: pa.Table | None = field(default=None, init=False)

    def until(self, end: int) -> pa.Table:
        """Return the rows with `n` below `end` that have not been returned yet."""
        parts = [self.rows.schema.empty_table() if self._held is None else self._held]
        while not len(parts[-1]) or parts[-1]["n"][-1].as_py() < end:
            batch = next(self.rows, None)
            if batch is None:
                break
            if len(batch):
                parts.append(pa.Table.from_batches([batch]))
        # Batches end anywhere: rows of a state that begins beyond the bound are held back for the next call.
        table = pa.concat_tables(parts)
        size = int(np.searchsorted(to_numpy(table["n"]), end))
        self._held = table.slice(size)
        return table.slice(0, size).combine_chunks()


def open_database(folder: Path, memory: str = MEMORY, **tables: Scan) -> "duckdb.DuckDBPyConnection":
    """Open a DuckDB database in `folder` with these tables as views, which also have `file_row_number`."""
    import duckdb  # slow to import, and few commands need it

    settings: dict[str, str | bool | int | float | list[str]] = {
        "memory_limit": memory,
        "threads": 2,
        # What is stored is temporary: compressing it is not worth the time.
        "force_compression": "uncompressed",
        "temp_directory": str(folder / "spilled"),
    }
    (folder / "rows.duckdb").unlink(missing_ok=True)
    database = duckdb.connect(str(folder / "rows.duckdb"), config=settings)
    for name, table in tables.items():
        # CREATE VIEW takes no parameters, so the path is quoted by hand.
        path = str(table.path).replace("'", "''")
        database.execute(
            f"CREATE VIEW {name} AS SELECT * FROM read_parquet('{path}', file_row_number = true)"  # noqa: S608
        )
    return database


def rows_of(database: "duckdb.DuckDBPyConnection", query: str) -> Generator[Row, None, None]:
    """Yield the rows of a query, one after the other."""
    # A cursor of its own: a connection has one result at a time, and steps and answers are read side by side.
    with database.cursor() as cursor:
        for batch in cursor.sql(query).to_arrow_reader(BATCH_ROWS):
            yield from batch.to_pylist()
