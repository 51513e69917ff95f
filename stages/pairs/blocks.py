"""Thousands of states at a time as arrays: their steps, their answers, and which actions are equal.

A row costs no Python object, except a text that is new. DuckDB joins the tables of runs; the rows are then sorted by
state on disk (`SortedRows`).
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from composer_stages.pairs.actions import Form, form
from composer_stages.runs import store

Array = np.ndarray[Any, Any]
NOTHING = -1
"""The number of a missing or malformed action."""
RUN_BYTES = 32 * 1024 * 1024
"""Bytes of rows that are sorted in memory together."""
PIECE_BYTES = 256 * 1024
"""Bytes of a sorted run that are read at a time."""
MOST_TEXTS = 65_536
"""Texts whose canonical forms are cached."""


@dataclass(frozen=True)
class ActionClasses:
    """The classes of equal actions of a block: steps first, then answers, in their order.

    class_of [R + A]: an index of `names`, `NOTHING` for malformed or missing. compared_by [S]. lost [S]: states that
    could not be reproduced, which give no pairs. failing [R + A]: actions that a pair would choose although they end
    the rollout and fail.
    """

    class_of: Array
    names: Sequence[str]
    compared_by: pa.Array
    lost: Array
    failing: Array


@dataclass(frozen=True)
class StateGroup:
    """States of a block with the same numbers of steps and of each teacher's answers.

    states [S]; rows [S, L]: their actions as indices of `StateBlock.actions`, steps first, then answers teacher by
    teacher; students: how many of the L are steps; samples: the number of answers of each teacher.
    """

    states: Array
    rows: Array
    students: int
    samples: tuple[int, ...]


class CanonicalForms:
    """A cache of at most `max_texts` canonical forms, as indices of `names`.

    Arrow looks texts up, so that a text which two blocks share costs no Python object in the second.
    """

    def __init__(self, form: Form = form, max_texts: int = MOST_TEXTS) -> None:
        self._form, self._max_texts = form, max_texts
        self._forget()

    def _forget(self) -> None:
        self.names = list[str]()  # a new list: earlier blocks refer to the old one
        self._indices: dict[str, int] = {}
        self._texts, self._number_of = pa.array([], pa.string()), np.zeros(0, dtype=np.int64)

    def numbers(self, texts: pa.Array) -> Array:
        """Return the index of each text's form, `NOTHING` for a malformed text."""
        if len(self._texts) + len(texts) > self._max_texts:
            self._forget()
        indices = to_numpy(pc.index_in(texts, self._texts), null=NOTHING)
        numbers = np.append(self._number_of, NOTHING)[indices]  # the last entry is that of -1
        unknown = indices == NOTHING
        new = texts.filter(pa.array(unknown))
        new_numbers = [NOTHING if name is None else self._number(name) for name in map(self._form, new.to_pylist())]
        numbers[unknown] = new_numbers
        self._texts = pa.concat_arrays([self._texts, new])
        self._number_of = np.append(self._number_of, np.array(new_numbers, dtype=np.int64))
        return numbers

    def _number(self, name: str) -> int:
        number = self._indices.setdefault(name, len(self.names))
        if number == len(self.names):
            self.names.append(name)
        return number


@dataclass(frozen=True)
class StateBlock:
    """Consecutive states, numbered from 0 to `size`.

    steps [R]: columns `n` (the state's number among all), `state_sha256`, `rollout_id`, `task_id`, `step`, `action`,
    `truncated`, `by_teacher`, `has_ids`, in the order of states, rollouts and steps. answers [A]: `whole` (null where
    missing or truncated), `served`, `cost_usd` (null where not known), in the order of states and teachers. step_state
    [R] and answer_state [A]: the state of each; teacher [A]: its index in `teachers`. first_step [S]: the row of the
    first step in each state. actions [R + A]: the texts of steps and answers; text_of: the index of each in the
    distinct `texts`, `NOTHING` for none. usd [S]: the cost of all answers in a state, NaN where one has no price.
    forms: the cache of canonical forms, shared with other blocks.
    """

    size: int
    teachers: tuple[str, ...]
    steps: pa.Table
    answers: pa.Table
    step_state: Array
    answer_state: Array
    teacher: Array
    first_step: Array
    actions: pa.Array
    text_of: Array
    texts: pa.Array
    usd: Array
    forms: CanonicalForms

    @classmethod
    def from_tables(
        cls,
        begin: int,
        end: int,
        teachers: Sequence[str],
        steps: pa.Table,
        answers: pa.Table,
        forms: CanonicalForms | None = None,
    ) -> "StateBlock":
        """Build the block of states `begin` to `end`. answers: in their recorded order, with `n` and `teacher`."""
        size = end - begin
        state = to_numpy(answers["n"]) - begin
        teacher = to_numpy(pc.index_in(answers["teacher"], pa.array(teachers, pa.string())))
        cost, usd = to_numpy(answers["cost_usd"], null=np.nan), np.zeros(size)
        number = np.bincount(state, minlength=size)
        start = group_starts(number)
        # Added in the order of the rows, so that equal rows give equal bits wherever a block begins.
        for nth in range(number.max(initial=0)):
            has_nth = number > nth
            usd[has_nth] += cost[start[has_nth] + nth]
        by_teacher = state * len(teachers) + teacher
        if (by_teacher[:-1] > by_teacher[1:]).any():
            order = np.argsort(by_teacher, kind="stable")
            answers, state, teacher = answers.take(pa.array(order)), state[order], teacher[order]
        of_step = to_numpy(steps["n"]) - begin
        actions = pa.chunked_array([*steps["action"].chunks, *answers["whole"].chunks], pa.string()).combine_chunks()
        # Arrow finds the distinct texts, and all are compared as numbers.
        coded = actions.dictionary_encode()
        return cls(
            size=size,
            teachers=tuple(teachers),
            steps=steps,
            answers=answers,
            step_state=of_step,
            answer_state=state,
            teacher=teacher,
            first_step=group_starts(np.bincount(of_step, minlength=size)),
            actions=actions,
            text_of=to_numpy(coded.indices, null=NOTHING),
            texts=coded.dictionary,
            usd=usd,
            forms=forms or CanonicalForms(),
        )

    def first_step_column(self, column: str) -> pa.Array:
        """Return a column [S] of the first step in each state."""
        return self.steps[column].take(pa.array(self.first_step)).combine_chunks()

    def classes_by_text(self) -> ActionClasses:
        """Return the classes by canonical form."""
        class_of = np.append(self.forms.numbers(self.texts), NOTHING)[self.text_of]  # the last entry is that of -1
        compared_by = pa.array(["canonical"], pa.string()).take(pa.array(np.zeros(self.size, dtype=np.int64)))
        lost, failing = np.zeros(self.size, dtype=bool), np.zeros(len(self.actions), dtype=bool)
        return ActionClasses(class_of, self.forms.names, compared_by, lost, failing)

    def groups(self, max_numbers: int) -> Iterator[StateGroup]:
        """Yield the states grouped by their numbers of steps and answers.

        A group is small enough that comparing all its actions pairwise takes no array of more than `max_numbers`.
        """
        number = len(self.teachers)
        answers = np.bincount(self.answer_state * number + self.teacher, minlength=self.size * number)
        answers = answers.reshape(self.size, number)
        counts = np.column_stack([np.bincount(self.step_state, minlength=self.size), answers])
        first_answer = len(self.steps) + group_starts(answers.sum(axis=1))
        for states in equal_rows(counts):
            students, *samples = counts[states[0]].tolist()
            step_rows = self.first_step[states, None] + np.arange(students)
            answer_rows = first_answer[states, None] + np.arange(sum(samples))
            rows = np.hstack([step_rows, answer_rows])
            part = max(max_numbers // max(rows.shape[1] ** 2, 1), 1)
            for start in range(0, len(states), part):
                yield StateGroup(states[start : start + part], rows[start : start + part], students, tuple(samples))


def group_starts(numbers: Array) -> Array:
    """Return the first row of each group, given the number of rows in each."""
    first: Array = np.cumsum(numbers) - numbers
    return first


def equal_rows(table: Array) -> list[Array]:
    """Return the indices of equal rows of a contiguous array [N, W], one array for each distinct row."""
    # As fixed-size binary values, which Arrow hashes in one pass; np.unique would sort them.
    if not len(table):  # np.split() would make one empty part
        return []
    width = table.shape[1] * table.itemsize
    as_bytes = pa.FixedSizeBinaryArray.from_buffers(pa.binary(width), len(table), [None, pa.py_buffer(table)])
    codes = to_numpy(as_bytes.dictionary_encode().indices)
    return np.split(np.argsort(codes, kind="stable"), np.cumsum(np.bincount(codes))[:-1])


def to_numpy(column: pa.Array | pa.ChunkedArray, null: float | None = None) -> Array:
    """Return a column of numbers or booleans as a NumPy array, with this value in place of nulls."""
    filled = column if null is None else column.fill_null(null)
    return filled.to_numpy(zero_copy_only=False)


@lru_cache(65_536)
def short_name(name: str) -> str:
    """Return the digest that names a class of actions, the same in every state."""
    return store.digest(name)[:16]


class SortedRows:
    """An external sort of rows of states by the columns `n` and `nth`, read any number of times.

    Runs of rows that fit into memory are sorted and written in pieces; a piece is read when its first state is. DuckDB
    takes twice the processor time to sort rows with texts.
    """

    def __init__(
        self, path: Path, rows: pa.RecordBatchReader, *, run_bytes: int = RUN_BYTES, piece_bytes: int = PIECE_BYTES
    ) -> None:
        self._path, self.schema = path, rows.schema
        self._pieces: list[tuple[int, int, int]] = []
        """The first `n` of each piece, with its offset in the file and its size in bytes."""
        with path.open("wb") as file:
            for run in _runs(rows, run_bytes):
                length = max(len(run) * piece_bytes // max(run.nbytes, 1), 1)
                for piece in sort_rows(run, "n", "nth").to_batches(length):
                    data = piece.serialize()
                    self._pieces.append((piece["n"][0].as_py(), file.tell(), data.size))
                    file.write(data)
        self._pieces.sort()

    def parts(self, ends: Iterable[int]) -> Iterator[pa.Table]:
        """Yield, for each of these ascending bounds, the remaining rows with `n` below it."""
        next_piece, pieces = 0, list[pa.RecordBatch]()
        with self._path.open("rb") as file:
            for end in ends:
                while next_piece < len(self._pieces) and self._pieces[next_piece][0] < end:
                    _, offset, size = self._pieces[next_piece]
                    file.seek(offset)
                    pieces.append(pa.ipc.read_record_batch(pa.py_buffer(file.read(size)), self.schema))
                    next_piece += 1
                sizes = [int(np.searchsorted(to_numpy(piece["n"]), end)) for piece in pieces]
                ready = [piece.slice(0, size) for piece, size in zip(pieces, sizes, strict=True) if size]
                pieces = [piece.slice(size) for piece, size in zip(pieces, sizes, strict=True) if size < len(piece)]
                yield sort_rows(pa.Table.from_batches(ready, self.schema), "n", "nth").combine_chunks()


def _runs(rows: pa.RecordBatchReader, most_bytes: int) -> Iterator[pa.Table]:
    """Yield all rows in tables of `most_bytes` and at most one batch more."""
    batches, size = list[pa.RecordBatch](), 0
    for batch in rows:
        batches.append(batch)
        size += batch.nbytes
        if size >= most_bytes:
            yield pa.Table.from_batches(batches)
            batches, size = [], 0
    if size:
        yield pa.Table.from_batches(batches)


def sort_rows(table: pa.Table, *keys: str) -> pa.Table:
    """Sort rows stably by integer columns, the first key before the next ones."""
    columns = [to_numpy(table[name]) for name in keys]
    ascending = np.ones(max(len(table) - 1, 0), dtype=bool)
    for column in reversed(columns):
        before, after = column[:-1], column[1:]
        ascending = (before < after) | ((before == after) & ascending)
    return table if ascending.all() else table.combine_chunks().take(pa.array(np.lexsort(columns[::-1])))
