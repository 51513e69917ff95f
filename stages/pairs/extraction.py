"""Pairs of votes, block after block, with counts of what was dropped and all that speaks for the pairs."""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from stages.envs.base import Task
from stages.pairs.audit import Evidence, Found, Pattern, blocks, patterns, spent
from stages.pairs.blocks import Alike, Array, Block, Classes, equal_rows, numbers
from stages.pairs.groups import pair_id
from stages.pairs.report import PairAccount, report
from stages.pairs.states import AnsweredStates, blindly_asked
from stages.runs.artifact import Run, RunWriter
from stages.runs.records import PAIR, TEACHER_ACTION

BILL = ["teacher", "cost_usd", "error_type"]


class Extraction:
    """One extraction from teachers' answers. passed: of each rollout, whether it did."""

    def __init__(self, states: AnsweredStates, answers: Run, passed: Mapping[str, bool | None]) -> None:
        self._states, self._answers = states, answers
        self._evidence = Evidence(states.teachers, passed)
        self._blind, self._tested = blindly_asked(answers), pa.array(blocks(states.per_task()), pa.string())
        self.account, self.dropped = PairAccount(), Counter[str]()

    def pairs(self, votes: Iterable[tuple[Block, Classes]], tasks: Mapping[str, Task]) -> Iterator[pa.RecordBatch]:
        """The pairs in the order of the states, each once; everything else is counted on the way."""
        for block, classes in votes:
            told = list(patterns(block, classes))
            for alike, pattern in told:
                for reason in pattern.reasons:
                    self.dropped[reason] += len(alike.states)
                self.dropped["duplicate"] += pattern.duplicates * len(alike.states)
            tested = numbers(pc.is_in(block.broadcast_from_rank0("task_id"), self._tested)) & self._blind(block)
            self._evidence.add(block, classes, told, tested)
            found = pair_rows(block, classes, told, tasks)
            self.account.add_all(found)
            yield found

    def report(self, out: RunWriter) -> None:
        """Write the report, counts and the verdict."""
        cost = spent(self._answers.scan(TEACHER_ACTION).batches(BILL))
        report(
            self.account,
            +self.dropped,
            num_traces=self._states.num_rollouts,
            num_steps=self._states.num_steps,
            out=out,
            spent=cost,
            evidence=self._evidence.verdict(cost),
        )


def pair_rows(
    block: Block, classes: Classes, told: Sequence[tuple[Alike, Pattern]], tasks: Mapping[str, Task]
) -> pa.RecordBatch:
    """The `pair/4` rows of a block, in the order of states and of the pairs in each."""
    served, parts = _Served(block), list[Array]()
    kinds, whose = list[Found](), list[list[str]]()
    for alike, pattern in told:
        for place, found in enumerate(pattern.pairs):
            rows, same = alike.rows, np.ones(len(alike.states), dtype=np.int64)
            sides = [rows[:, found.step], rows[:, found.chosen], rows[:, found.rejected]]
            backed = served.of(alike, found.chosen_by, whose)
            parts.append(
                np.column_stack([alike.states, place * same, *sides, len(kinds) * same, pattern.shared * same, backed])
            )
            kinds.append(found)
    order = np.concatenate([np.zeros((0, 8), dtype=np.int64), *parts])
    state, _, step, chosen, rejected, kind, shared, backed = order[np.lexsort((order[:, 1], order[:, 0]))].T

    def of_step(column: str, at: Array = step) -> pa.Array:
        return block.steps[column].take(pa.array(at)).combine_chunks()

    def of_kind(values: Sequence[object], kind_of: pa.DataType) -> pa.Array:
        return pa.array(values, kind_of).take(pa.array(kind))

    first = block.first_step[state]
    named = np.where(numbers(of_step("has_ids")), step, first)
    name = [of_step("rollout_id", named), of_step("step", named).cast(pa.string()), "/"]
    task, digest = of_step("task_id", first), of_step("state_sha256")
    texts = [block.actions.take(pa.array(side)) for side in (chosen, rejected)]
    preferences, usd = [found.preference for found in kinds], block.usd[state]
    columns = {
        "pair_id": pa.array(map(pair_id, *(column.to_pylist() for column in (digest, *texts))), pa.string()),
        "rule": of_kind([one.rule for one in preferences], pa.string()),
        "rollout_id": of_step("rollout_id"),
        "task_id": task,
        "family": pa.array([tasks[one].family for one in task.to_pylist()], pa.string()),
        "step": of_step("step"),
        "state_sha256": digest,
        "state_id": pc.binary_join_element_wise(*name),
        "chosen": texts[0],
        "rejected": texts[1],
        "rejected_by": of_kind([one.rejected_by for one in preferences], pa.string()),
        "votes_chosen": of_kind([one.votes_chosen for one in preferences], pa.float64()),
        "votes_rejected": of_kind([one.votes_rejected for one in preferences], pa.float64()),
        "num_teachers": pa.array(np.full(len(state), len(block.teachers)), pa.int64()),
        "compared_by": classes.compared_by.take(pa.array(state)),
        "chosen_by": of_kind([list(found.chosen_by) for found in kinds], pa.list_(pa.string())),
        "served_models": pa.array(whose, pa.list_(pa.string())).take(pa.array(backed)),
        "cost_usd": pa.array(usd / shared, pa.float64(), mask=np.isnan(usd)),
    }
    return pa.record_batch([columns[column] for column in PAIR.columns], schema=PAIR.schema)


class _Served:
    """What the servers of teachers answered with in a block."""

    def __init__(self, block: Block) -> None:
        coded = block.answers["served"].combine_chunks().dictionary_encode()
        self._code, self._names = numbers(coded.indices), coded.dictionary.to_pylist()
        self._block = block
        self._known: dict[tuple[int, ...], int] = {}

    def of(self, alike: Alike, backing: Sequence[str], lists: list[list[str]]) -> Array:
        """Which of `lists`, which grow, holds the sorted names of what the servers of these teachers said last [S]."""
        ends = alike.students + np.cumsum(alike.samples, dtype=int)
        last = [
            end - 1
            for name, number, end in zip(self._block.teachers, alike.samples, ends.tolist(), strict=True)
            if name in backing and number
        ]
        codes = self._code[alike.rows[:, last] - len(self._block.steps)]
        found = np.zeros(len(codes), dtype=np.int64)
        for same in equal_rows(np.ascontiguousarray(codes)):
            row = tuple(codes[same[0]].tolist())
            if row not in self._known:
                self._known[row] = len(lists)
                lists.append(sorted({self._names[code] for code in row}))
            found[same] = self._known[row]
        return found
