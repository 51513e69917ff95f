"""Thousands of states at a time as arrays: their steps, their answers, and which actions are equal.

No Python object per row, except for texts that are seen for the first time. Rows come from DuckDB, which joins the
tables of runs, and are sorted by state on disk (`SortedRows`).
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from stages.pairs.actions import Form, form
from stages.runs import store

Array = np.ndarray[Any, Any]
NOTHING = -1
"""The number of a missing or malformed action."""
RUN_BYTES = 32 * 1024 * 1024
"""Bytes of rows that are sorted in memory together."""
PIECE_BYTES = 256 * 1024
"""Bytes that are read together of each run."""
MOST_TEXTS = 65_536
"""Texts whose canonical forms are kept."""


@dataclass(frozen=True)
class ActionClasses:
    """The classes of equal actions of a block: steps first, then answers, in their order.

    class_of [R + A]: a number of `names`, `NOTHING` for malformed or missing. compared_by: for each state. lost: states
    that could not be reached again, so that nothing is decided there. failing [R + A]: whether a pair would choose the
    action, which ends the rollout and fails.
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


class CanonicalForms:
    """The canonical forms of texts as numbers of `names`, each computed once while no more than `most` are known.

    Arrow looks texts up, so that those of one block which the next one repeats cost no Python object.
    """

    def __init__(self, form: Form = form, most: int = MOST_TEXTS) -> None:
        self._form, self._most = form, most
        self._forget()

    def _forget(self) -> None:
        self.names = list[str]()  # a new one: blocks that were numbered before keep theirs
        self._known: dict[str, int] = {}
        self._texts, self._number_of = texts_to_arrow([]), np.zeros(0, dtype=np.int64)

    def numbers(self, texts: pa.Array) -> Array:
        """Return the number of each text's form, `NOTHING` for a malformed text."""
        if len(self._texts) + len(texts) > self._most:
            self._forget()
        at = to_numpy(pc.index_in(texts, self._texts), null=NOTHING)
        numbers = np.append(self._number_of, NOTHING)[at]  # the last entry is that of -1
        unknown = at == NOTHING
        new = texts.filter(to_arrow(unknown))
        found = [NOTHING if one is None else self._number(one) for one in map(self._form, new.to_pylist())]
        numbers[unknown] = found
        self._texts = pa.concat_arrays([self._texts, new])
        self._number_of = np.append(self._number_of, np.array(found, dtype=np.int64))
        return numbers

    def _number(self, name: str) -> int:
        number = self._known.setdefault(name, len(self.names))
        if number == len(self.names):
            self.names.append(name)
        return number


@dataclass(frozen=True)
class StateBlock:
    """Consecutive states, numbered from 0 to `size`.

    steps [R]: columns `n` (the state among all), `state_sha256`, `rollout_id`, `task_id`, `step`, `action`,
    `truncated`, `has_ids`, in the order of states, rollouts and numbers. answers [A]: `whole` (null for no answer, or
    one that was cut off), `served`, `cost_usd` (null where not known), in the order of states and teachers. at [R] and
    answered [A]: the state of each; teacher [A]: its number. first_step [S]: the row of the first step in each state.
    actions [R + A]: the texts of steps and answers; text_of: the number of each in the distinct `texts`, `NOTHING` for
    none. usd [S]: the cost of all answers in a state, NaN where one has no known price. forms: of texts, shared with
    other blocks.
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
        """Return states `begin` to `end` of all. answers: in their recorded order, with `n` and `teacher`."""
        size = end - begin
        at = to_numpy(answers["n"]) - begin
        teacher = to_numpy(pc.index_in(answers["teacher"], texts_to_arrow(teachers)))
        cost, usd = to_numpy(answers["cost_usd"], null=np.nan), np.zeros(size)
        number = np.bincount(at, minlength=size)
        start = first_of(number)
        # Added in the order of the rows, so that equal rows give equal bits wherever a block begins.
        for nth in range(number.max(initial=0)):
            more = number > nth
            usd[more] += cost[start[more] + nth]
        by_teacher = at * len(teachers) + teacher
        if (by_teacher[:-1] > by_teacher[1:]).any():
            order = np.argsort(by_teacher, kind="stable")
            answers, at, teacher = answers.take(to_arrow(order)), at[order], teacher[order]
        of_step = to_numpy(steps["n"]) - begin
        actions = pa.chunked_array([*steps["action"].chunks, *answers["whole"].chunks], pa.string()).combine_chunks()
        # Arrow finds the distinct texts, and all are compared as numbers.
        coded = actions.dictionary_encode()
        return cls(
            size=size,
            teachers=tuple(teachers),
            steps=steps,
            answers=answers,
            at=of_step,
            answered=at,
            teacher=teacher,
            first_step=first_of(np.bincount(of_step, minlength=size)),
            actions=actions,
            text_of=to_numpy(coded.indices, null=NOTHING),
            texts=coded.dictionary,
            usd=usd,
            forms=forms or CanonicalForms(),
        )

    def first_step_column(self, column: str) -> pa.Array:
        """Return a column [S] of the first step in each state."""
        return self.steps[column].take(to_arrow(self.first_step)).combine_chunks()

    def classes_by_text(self) -> ActionClasses:
        """Return classes by canonical forms alone."""
        class_of = np.append(self.forms.numbers(self.texts), NOTHING)[self.text_of]  # the last entry is that of -1
        compared_by = texts_to_arrow(["canonical"]).take(to_arrow(np.zeros(self.size, dtype=np.int64)))
        lost, failing = np.zeros(self.size, dtype=bool), np.zeros(len(self.actions), dtype=bool)
        return ActionClasses(class_of, self.forms.names, compared_by, lost, failing)

    def alike(self, most: int) -> Iterator[AlikeStates]:
        """Yield the states grouped by their numbers of steps and answers.

        In parts: comparing everyone with everyone in one needs no array of more than `most` numbers.
        """
        number = len(self.teachers)
        answers = np.bincount(self.answered * number + self.teacher, minlength=self.size * number)
        answers = answers.reshape(self.size, number)
        counts = np.column_stack([np.bincount(self.at, minlength=self.size), answers])
        first_answer = len(self.steps) + first_of(answers.sum(axis=1))
        for states in equal_rows(counts):
            students, *samples = counts[states[0]].tolist()
            own = self.first_step[states, None] + np.arange(students)
            given = first_answer[states, None] + np.arange(sum(samples))
            rows = np.hstack([own, given])
            part = max(most // max(rows.shape[1] ** 2, 1), 1)
            for start in range(0, len(states), part):
                yield AlikeStates(states[start : start + part], rows[start : start + part], students, tuple(samples))


def first_of(numbers: Array) -> Array:
    """Return where each group begins in rows that are ordered by group, from the number of rows of each."""
    first: Array = np.cumsum(numbers) - numbers
    return first


def equal_rows(table: Array) -> list[Array]:
    """Return, for each distinct row of a contiguous array [N, W], the numbers of the rows equal to it."""
    # Rows as fixed-size binary values, which Arrow hashes in one pass; np.unique would sort them.
    if not len(table):  # np.split() would make one empty part
        return []
    width = table.shape[1] * table.itemsize
    as_bytes = pa.FixedSizeBinaryArray.from_buffers(pa.binary(width), len(table), [None, pa.py_buffer(table)])
    which = to_numpy(as_bytes.dictionary_encode().indices)
    return np.split(np.argsort(which, kind="stable"), np.cumsum(np.bincount(which))[:-1])


# Between NumPy and Arrow through the buffers alone: pa.array() and to_numpy() import pandas wherever it is installed,
# which takes 0.35 s of processor time (pyarrow 26).


def to_numpy(column: pa.Array | pa.ChunkedArray, null: float | None = None) -> Array:
    """Return a column of numbers or truth values as a NumPy array, which may share its memory.

    null: the value in place of nulls; without one there may be none.
    """
    whole = column.combine_chunks() if isinstance(column, pa.ChunkedArray) else column
    if whole.null_count and null is None:
        raise ValueError(f"{whole.null_count} of {len(whole)} values are null")
    valid, values = whole.buffers()
    if pa.types.is_boolean(whole.type):
        found: Array = _bits(values, whole)
    else:
        held: Array = np.frombuffer(values or b"", dtype=whole.type.to_pandas_dtype())
        found = held[whole.offset : whole.offset + len(whole)]
    return np.where(_bits(valid, whole), found, found.dtype.type(null)) if whole.null_count else found


def _bits(buffer: pa.Buffer | None, of: pa.Array) -> Array:
    packed = np.frombuffer(buffer or b"", dtype=np.uint8)
    return np.unpackbits(packed, count=of.offset + len(of), bitorder="little")[of.offset :].astype(bool)


def to_arrow(values: Array, valid: Array | None = None) -> pa.Array:
    """Return numbers or truth values as an Arrow array. valid: which of them are not null; all without."""
    bits = pa.py_buffer(
        np.packbits(values, bitorder="little") if values.dtype == bool else np.ascontiguousarray(values)
    )
    nulls = None if valid is None else pa.py_buffer(np.packbits(valid, bitorder="little"))
    return pa.Array.from_buffers(pa.from_numpy_dtype(values.dtype), len(values), [nulls, bits])


def texts_to_arrow(texts: Sequence[str]) -> pa.Array:
    """Return texts as an Arrow array."""
    encoded = [text.encode() for text in texts]
    ends = np.cumsum([0, *map(len, encoded)], dtype=np.int32)
    return pa.StringArray.from_buffers(len(texts), pa.py_buffer(ends), pa.py_buffer(b"".join(encoded)))


def lists_to_arrow(lists: Sequence[Sequence[str]]) -> pa.Array:
    """Return lists of texts as an Arrow array."""
    ends = to_arrow(np.cumsum([0, *map(len, lists)], dtype=np.int32))
    return pa.ListArray.from_arrays(ends, texts_to_arrow([text for texts in lists for text in texts]))


@lru_cache(65_536)
def short_name(name: str) -> str:
    """Return the short name of a class of actions, the same in every state."""
    return store.digest(name)[:16]


class SortedRows:
    """Rows of states in a file, to be read in the order of the columns `n` and `nth`, any number of times.

    An external sort: runs of rows that fit into memory are sorted and written in pieces, and a piece is read when its
    first state is. DuckDB's own sort takes twice the processor time where rows hold texts.
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
                for piece in in_order(run, "n", "nth").to_batches(length):
                    data = piece.serialize()
                    self._pieces.append((piece["n"][0].as_py(), file.tell(), data.size))
                    file.write(data)
        self._pieces.sort()

    def parts(self, ends: Iterable[int]) -> Iterator[pa.Table]:
        """Yield, for each of these ascending bounds, the rows with `n` below it that came with no earlier bound."""
        coming, held = 0, list[pa.RecordBatch]()
        with self._path.open("rb") as file:
            for end in ends:
                while coming < len(self._pieces) and self._pieces[coming][0] < end:
                    _, offset, size = self._pieces[coming]
                    file.seek(offset)
                    held.append(pa.ipc.read_record_batch(pa.py_buffer(file.read(size)), self.schema))
                    coming += 1
                sizes = [int(np.searchsorted(to_numpy(piece["n"]), end)) for piece in held]
                taken = [piece.slice(0, size) for piece, size in zip(held, sizes, strict=True) if size]
                held = [piece.slice(size) for piece, size in zip(held, sizes, strict=True) if size < len(piece)]
                yield in_order(pa.Table.from_batches(taken, self.schema), "n", "nth").combine_chunks()


def _runs(rows: pa.RecordBatchReader, most_bytes: int) -> Iterator[pa.Table]:
    """Yield all rows in tables that end with the batch which makes them as long as `most_bytes`."""
    held, size = list[pa.RecordBatch](), 0
    for batch in rows:
        held.append(batch)
        size += batch.nbytes
        if size >= most_bytes:
            yield pa.Table.from_batches(held)
            held, size = [], 0
    if size:
        yield pa.Table.from_batches(held)


def in_order(table: pa.Table, *keys: str) -> pa.Table:
    """Return the rows in the order of whole numbers, the first column before the others; equal rows stay in order."""
    columns = [to_numpy(table[name]) for name in keys]
    ascending = np.ones(max(len(table) - 1, 0), dtype=bool)
    for column in reversed(columns):
        before, after = column[:-1], column[1:]
        ascending = (before < after) | ((before == after) & ascending)
    return table if ascending.all() else table.combine_chunks().take(to_arrow(np.lexsort(columns[::-1])))
