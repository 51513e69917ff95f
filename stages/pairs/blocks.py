"""Some thousand states at a time as arrays: steps, answers, and whose actions were equal.

Nothing here is a Python object for each row, except texts that are looked at for the first time.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from stages.pairs.canonical import form
from stages.pairs.labels import NOTHING, Array


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

    def of_first(self, column: str) -> pa.Array:
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
