"""Some thousand states at a time as arrays: steps, answers, and whose actions were equal.

Nothing here is a Python object for each row, except texts that are looked at for the first time.
"""

from array import array
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from stages.pairs.voting import form
from stages.runs import store
from stages.runs.artifact import Run
from stages.runs.parquet import Scan
from stages.runs.records import STEP, Row

if TYPE_CHECKING:
    import duckdb


# ---- labels
# What student and teachers did in the distinct states of a run, as numbers: equal numbers are equal actions.
#
# A class of equal actions goes by one of its canonical forms, so that it means the same in every state; an action
# that is
# malformed or missing equals nothing.

Array = np.ndarray[Any, Any]
NOTHING = -1


@dataclass(frozen=True)
class Labels:
    """Actions [N, 1 + T], those of the student first; task and step of each state [N].

    Tasks are the independent clusters: what several rollouts of one task do hangs together.
    """

    actions: Array
    task: Array
    step: Array
    teachers: tuple[str, ...]

    @property
    def num_tasks(self) -> int:
        """The number of independent clusters."""
        return int(self.task.max(initial=-1)) + 1


@lru_cache(65_536)
def _short(name: str) -> str:
    return store.digest(name)[:16]


class Numbering:
    """Labels from classes, states after states."""

    def __init__(self, teachers: Sequence[str]) -> None:
        self.teachers = tuple(teachers)
        self._known: dict[str, int] = {}
        self._tasks: dict[str, int] = {}
        self._actions, self._task, self._step = (
            [np.zeros((0, 1 + len(teachers)), dtype=np.int64)],
            array("q"),
            array("q"),
        )

    def add(
        self, actions: Array, names: Mapping[int, str] | Sequence[str], tasks: Iterable[str], steps: Iterable[int]
    ) -> None:
        """What student and teachers did in some states, by the numbers [S, 1 + T] of these names or `NOTHING`."""
        here, where = np.unique(actions, return_inverse=True)
        mean = [
            NOTHING if one == NOTHING else self._known.setdefault(_short(names[one]), len(self._known))
            for one in here.tolist()
        ]
        self._actions.append(np.array(mean, dtype=np.int64)[where].reshape(actions.shape))
        self._task.extend(self._tasks.setdefault(task, len(self._tasks)) for task in tasks)
        self._step.extend(steps)

    def labels(self) -> Labels:
        """All of it."""
        return Labels(np.concatenate(self._actions), np.array(self._task), np.array(self._step), self.teachers)


def class_names(classes: Mapping[str, str | None], forms: Mapping[str, str | None]) -> dict[str, str | None]:
    """A name for every text's class that means the same in every state: the first of its canonical forms."""
    first: dict[str, str] = {}
    for text, canonical in forms.items():
        name = classes[text]
        if name is not None and canonical is not None:
            first[name] = min(first.get(name, canonical), canonical)
    return {text: None if name is None else first.get(name, name) for text, name in classes.items()}


class Shuffles:
    """Rearrangements of states that move whole tasks, and each state only to one of the same step.

    What several states of a task share moves with it. Where the partner has fewer states of a step, they repeat.
    """

    def __init__(self, labels: Labels) -> None:
        self._size, self._tasks = len(labels.task), labels.num_tasks
        self._strata = [_Stratum(np.flatnonzero(labels.step == step), labels.task) for step in np.unique(labels.step)]

    def draw(self, random: np.random.Generator) -> Array:
        """For each state [N] the one that takes its place."""
        rank = random.permutation(self._tasks)
        source = np.empty(self._size, dtype=np.int64)
        for stratum in self._strata:
            source[stratum.states] = stratum.partners(rank)
        return source


class _Stratum:
    """The states of one step, grouped by task."""

    def __init__(self, states: Array, task: Array) -> None:
        self.states = states[np.argsort(task[states], kind="stable")]
        self._tasks, self._starts, self._counts = np.unique(task[self.states], return_index=True, return_counts=True)
        self._position = np.repeat(np.arange(len(self._tasks)), self._counts)
        self._nth = np.arange(len(self.states)) - self._starts[self._position]

    def partners(self, rank: Array) -> Array:
        partner = np.argsort(rank[self._tasks])[self._position]
        return self.states[self._starts[partner] + self._nth % self._counts[partner]]


@dataclass(frozen=True)
class Classes:
    """What the actions of a block are equal to: steps first, then answers, in their order.

    class_of [R + A] is a number of `names`, `NOTHING` for what is malformed or missing. compared_by: of each state.
    lost: states that could not be reached again, so that nothing is decided there.
    """

    class_of: Array
    names: Sequence[str]
    compared_by: pa.Array
    lost: Array


@dataclass(frozen=True)
class Alike:
    """States of a block in which everybody spoke equally often.

    states [S]; rows [S, L] of all their actions, steps first, then answers teacher by teacher, as numbers of
    `Block.actions`; students: how many of the L are steps; samples: how many answers each teacher gave.
    """

    states: Array
    rows: Array
    students: int
    samples: tuple[int, ...]

    def parts(self, most: int) -> Iterator["Alike"]:
        """The same in parts that need no array of more than `most` numbers to compare everybody with everybody."""
        size = max(most // max(self.rows.shape[1] ** 2, 1), 1)
        for at in range(0, len(self.states), size):
            yield Alike(self.states[at : at + size], self.rows[at : at + size], self.students, self.samples)


@dataclass(frozen=True)
class Block:
    """States that follow each other, from 0 to `size`.

    steps [R]: columns `n` (the state among all), `state_sha256`, `rollout_id`, `task_id`, `step`, `action`,
    `truncated`, `has_ids`, in the order of states, rollouts and numbers. answers [A]: `whole` (null for no answer, or
    one that was cut off), `served`, `cost_usd` (null where not known), in the order of states and teachers. at [R] and
    answered [A]: the state of each; teacher [A]: its number. usd [S]: what all answers in a state cost, NaN where one
    has no known price.
    """

    size: int
    teachers: tuple[str, ...]
    steps: pa.Table
    answers: pa.Table
    at: Array
    answered: Array
    teacher: Array
    usd: Array

    @classmethod
    def of(cls, begin: int, end: int, teachers: Sequence[str], steps: pa.Table, answers: pa.Table) -> "Block":
        """States `begin` to `end` of all. answers: in the order in which they were given, with `n` and `teacher`."""
        at = numbers(answers["n"]) - begin
        teacher = numbers(pc.index_in(answers["teacher"], pa.array(teachers, pa.string())))
        usd = _sums(numbers(answers["cost_usd"].fill_null(np.nan)), at, end - begin)
        order = np.argsort(at * len(teachers) + teacher, kind="stable")
        sorted_answers = answers.take(pa.array(order))
        return cls(
            end - begin,
            tuple(teachers),
            steps,
            sorted_answers,
            numbers(steps["n"]) - begin,
            at[order],
            teacher[order],
            usd,
        )

    @cached_property
    def actions(self) -> pa.Array:
        """The texts [R + A] of steps and answers."""
        return pa.chunked_array(
            [*self.steps["action"].chunks, *self.answers["whole"].chunks], pa.string()
        ).combine_chunks()

    @cached_property
    def first_step(self) -> Array:
        """The row [S] of the first step in each state."""
        return _starts(self.at, self.size)

    @property
    def asked(self) -> Array:
        """Whether there is any answer, whole or not, in a state [S]."""
        return np.bincount(self.answered, minlength=self.size) > 0

    def broadcast_from_rank0(self, column: str) -> pa.Array:
        """A column [S] of the first step in each state."""
        return self.steps[column].take(pa.array(self.first_step)).combine_chunks()

    @cached_property
    def text_of(self) -> Array:
        """Equal numbers [R + A] for equal texts, `NOTHING` for none."""
        return numbers(self._coded.indices.fill_null(NOTHING))

    @cached_property
    def _coded(self) -> pa.DictionaryArray:
        return self.actions.dictionary_encode()

    def by_text(self) -> Classes:
        """Classes by canonical forms alone."""
        known: dict[str, int] = {}
        forms = map(form, self._coded.dictionary.to_pylist())
        class_of_text = [NOTHING if one is None else known.setdefault(one, len(known)) for one in forms]
        class_of = np.array([*class_of_text, NOTHING], dtype=np.int64)[self.text_of]
        same = pa.array(["canonical"]).take(pa.array(np.zeros(self.size, dtype=np.int64)))
        return Classes(class_of, list(known), same, np.zeros(self.size, dtype=bool))

    def alike(self) -> Iterator[Alike]:
        """The states, sorted by how often everybody spoke."""
        number = len(self.teachers)
        spoke = np.bincount(self.answered * number + self.teacher, minlength=self.size * number)
        recorded = np.bincount(self.at, minlength=self.size)
        counts = np.column_stack([recorded, spoke.reshape(self.size, number)])
        first_answer = len(self.steps) + _starts(self.answered, self.size)
        for states in equal_rows(counts):
            shape = counts[states[0]].tolist()
            own = self.first_step[states, None] + np.arange(shape[0])
            given = first_answer[states, None] + np.arange(sum(shape[1:]))
            yield Alike(states, np.hstack([own, given]), shape[0], tuple(shape[1:]))


class Cut:
    """Rows that are sorted by `n`, cut where one wants."""

    def __init__(self, rows: pa.RecordBatchReader) -> None:
        self._rows = rows
        self._held: pa.Table = rows.schema.empty_table()

    def until(self, end: int) -> pa.Table:
        """The rows with `n` below this that have not been given yet."""
        parts = [self._held]
        while not len(parts[-1]) or parts[-1]["n"][-1].as_py() < end:
            batch = next(self._rows, None)
            if batch is None:
                break
            if len(batch):
                parts.append(pa.Table.from_batches([batch]))
        whole = pa.concat_tables(parts)
        given = int(np.searchsorted(numbers(whole["n"]), end))
        self._held = whole.slice(given)
        return whole.slice(0, given).combine_chunks()


def equal_rows(table: Array) -> list[Array]:
    """The numbers of the rows of a contiguous array [N, W] that are equal, for each row that there is."""
    width = table.shape[1] * table.itemsize
    as_bytes = pa.FixedSizeBinaryArray.from_buffers(pa.binary(width), len(table), [None, pa.py_buffer(table)])
    which = numbers(as_bytes.dictionary_encode().indices)
    return np.split(np.argsort(which, kind="stable"), np.cumsum(np.bincount(which))[:-1])


def numbers(column: pa.Array | pa.ChunkedArray) -> Array:
    """A column as an array."""
    found: Array = column.to_numpy() if isinstance(column, pa.ChunkedArray) else column.to_numpy(zero_copy_only=False)
    return found


def _starts(at: Array, size: int) -> Array:
    """Where each of `size` states begins among rows that are sorted by state."""
    return np.searchsorted(at, np.arange(size))


def _sums(cost: Array, at: Array, size: int) -> Array:
    """Sums [size] in the order of the rows, so that equal rows give equal bits."""
    start, number, total = _starts(at, size), np.bincount(at, minlength=size), np.zeros(size)
    for nth in range(number.max(initial=0)):
        more = number > nth
        total[more] += cost[start[more] + nth]
    return total


# ---- sorting
# Tables of runs joined and sorted by DuckDB, which goes on on disk where they are larger than its memory.

MEMORY = "200MB"
"""What DuckDB may take before it sorts on disk."""
BATCH_ROWS = 1024
OF_STEPS = (
    *("rollout_id", "task_id", "step", "new_messages_json", "history", "state_sha256"),
    *("action", "commands", "truncated"),
)
"""What rollouts of one task are compared by."""


def open_database(folder: Path, memory: str = MEMORY, **tables: Scan) -> "duckdb.DuckDBPyConnection":
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
    with open_database(folder, steps=table) as database:
        ordered = rows_of(database, f"SELECT {columns} FROM steps ORDER BY task_id, file_row_number")  # noqa: S608
        for task, rows in groupby(ordered, key=itemgetter("task_id")):
            yield task, list(rows)
