"""Extract preference pairs from votes, block after block, with counts of what was dropped and evidence for the pairs.

`states.patterns` decides each pattern of equal actions once; `pair_rows` writes the pairs of all states that have it.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from stages.envs.base import Task
from stages.pairs.blocks import (
    NOTHING,
    ActionClasses,
    AlikeStates,
    Array,
    StateBlock,
    equal_rows,
    lists_to_arrow,
    texts_to_arrow,
    to_arrow,
    to_numpy,
)
from stages.pairs.config import Config
from stages.pairs.continuation import REJECTED_PASSED, Continued
from stages.pairs.evidence import PairEvidence, spent, tasks_to_test
from stages.pairs.groups import pair_id
from stages.pairs.report import PairAccount, report
from stages.pairs.states import AnsweredStates, Pattern, PatternPair, asked_blindly, patterns
from stages.runs.kinds import PAIR, TEACHER_ACTION
from stages.runs.run import Run, RunWriter

NOT_PLAYED = "signal.rollouts = N plays both actions of every pair N times, and tests the pairs by that"
CHOSEN_FAILS = "chosen_ends_in_failure"
COST_COLUMNS = ["teacher", "cost_usd", "error_type"]


class Extraction:
    """One extraction from teachers' answers. passed: whether each rollout passed.

    respect: whether pairs that teach against these outcomes are dropped.
    """

    def __init__(
        self, states: AnsweredStates, answers: Run, passed: Mapping[str, bool | None], *, respect: bool = True
    ) -> None:
        self._answers, self._passed, self._respect = answers, passed, respect
        self._evidence = PairEvidence(states.teachers, passed)
        self._num_rollouts, self._num_steps, states_per_task = states.counts()
        self._tested = pa.array(tasks_to_test(states_per_task), pa.string())
        self.account, self.dropped = PairAccount(), Counter[str]()

    def pairs(
        self, votes: Iterable[tuple[StateBlock, ActionClasses]], tasks: Mapping[str, Task]
    ) -> Iterator[pa.RecordBatch]:
        """Yield the pairs in the order of the states, each once; count everything else on the way.

        With one column more, `REJECTED_PASSED`: whether the pair teaches against the outcome of a rollout.
        """
        for block, classes in votes:
            found = list(patterns(block, classes))
            number = 0
            for alike, pattern in found:
                number += len(pattern.pairs) * len(alike.states)
                for reason in pattern.reasons:
                    self.dropped[reason] += len(alike.states)
                self.dropped["duplicate"] += pattern.duplicates * len(alike.states)
            tested = to_numpy(pc.is_in(block.first_step_column("task_id"), self._tested)) & asked_blindly(
                self._answers, block
            )
            self._evidence.add(block, classes, found, tested)
            rows, rejected = pair_rows(block, classes, found, tasks)
            self.dropped[CHOSEN_FAILS] += number - len(rows)
            against = np.isin(rejected, self._passed_actions(block, classes)) & self._respect
            against &= to_numpy(pc.equal(rows["rule"], "majority_over_student"))
            yield rows.append_column(REJECTED_PASSED, to_arrow(against))

    def _passed_actions(self, block: StateBlock, classes: ActionClasses) -> Array:
        """Return the actions of a block, by `action_keys`, that some rollout took which passed."""
        coded = block.steps["rollout_id"].combine_chunks().dictionary_encode()
        passed = np.array([self._passed.get(name) is True for name in coded.dictionary.to_pylist()], dtype=bool)
        return action_keys(block, classes, np.flatnonzero(passed[to_numpy(coded.indices)]))

    def kept(self, pairs: Iterable[pa.RecordBatch], continued: Continued | None) -> Iterator[pa.RecordBatch]:
        """Yield the pairs that are written: those that neither a rollout's outcome nor their own contradicts."""
        for rows in pairs:
            against = to_numpy(rows[REJECTED_PASSED])
            rows = rows.select(PAIR.columns)
            if continued is None:
                self.dropped[REJECTED_PASSED] += int(against.sum())
                kept = rows.filter(to_arrow(~against))
            else:
                reasons = continued.reasons(rows, against.tolist(), respect=self._respect)
                self.dropped.update(reason for reason in reasons if reason is not None)
                kept = rows.filter(to_arrow(np.array([reason is None for reason in reasons], dtype=bool)))
            self.account.add_all(kept)
            yield kept

    def report(self, config: Config, out: RunWriter, continued: Continued | None) -> None:
        """Write the report, the counts and the verdict."""
        cost = spent(self._answers.scan(TEACHER_ACTION).batches(COST_COLUMNS))
        evidence = self._evidence.evidence(cost)
        evidence = (
            replace(evidence, sentences=(*evidence.sentences, NOT_PLAYED))
            if continued is None
            else continued.evidence(evidence)
        )
        report(
            self.account,
            +self.dropped,
            num_rollouts=self._num_rollouts,
            num_steps=self._num_steps,
            config=config,
            out=out,
            spent=cost,
            evidence=evidence,
        )


def action_keys(block: StateBlock, classes: ActionClasses, rows: Array) -> Array:
    """Return a number for each of these actions [N] of a block: equal in one state for equal actions, and only there.

    Malformed actions are equal where their texts are.
    """
    state = np.append(block.at, block.answered)[rows]
    kind = np.where(classes.class_of == NOTHING, len(classes.names) + block.text_of, classes.class_of)[rows]
    keys: Array = state * (len(classes.names) + len(block.texts) + 1) + kind
    return keys


def pair_rows(
    block: StateBlock,
    classes: ActionClasses,
    found: Sequence[tuple[AlikeStates, Pattern]],
    tasks: Mapping[str, Task],
) -> tuple[pa.RecordBatch, Array]:
    """Return the `pair/1` rows of a block, in the order of states and of the pairs in each, and their rejected actions.

    Without those that choose an action which ends the rollout and fails. The rejected actions [N] are `action_keys`.
    """
    coded = block.answers["served"].combine_chunks().dictionary_encode()
    served_code, served_names = to_numpy(coded.indices, null=NOTHING), coded.dictionary.to_pylist()
    parts, kinds, backers = list[Array](), list[PatternPair](), [np.zeros((0, len(block.teachers)), dtype=np.int64)]
    for alike, pattern in found:
        ends = (alike.students + np.cumsum(alike.samples, dtype=int)).tolist()
        for place, pair in enumerate(pattern.pairs):
            rows, same = alike.rows, np.ones(len(alike.states), dtype=np.int64)
            sides = [rows[:, pair.step], rows[:, pair.chosen], rows[:, pair.rejected]]
            # A server may change its model between answers: that of each backer's last answer is recorded.
            models = np.full((len(same), len(block.teachers)), NOTHING)
            for teacher, (name, number, end) in enumerate(zip(block.teachers, alike.samples, ends, strict=True)):
                if name in pair.chosen_by and number:
                    models[:, teacher] = served_code[rows[:, end - 1] - len(block.steps)]
            backers.append(models)
            parts.append(
                np.column_stack([alike.states, place * same, *sides, len(kinds) * same, pattern.shared * same])
            )
            kinds.append(pair)
    models, served = np.concatenate(backers), list[list[str]]()
    models_of = np.zeros(len(models), dtype=np.int64)  # of each pair: the number of its list of models
    for equal in equal_rows(models):
        models_of[equal] = len(served)
        served.append(sorted({served_names[code] for code in models[equal[0]] if code != NOTHING}))
    order = np.column_stack([np.concatenate([np.zeros((0, 7), dtype=np.int64), *parts]), models_of])
    order = order[~classes.failing[order[:, 3]]]
    state, _, step, chosen, rejected, kind, shared, models_of = order[np.lexsort((order[:, 1], order[:, 0]))].T
    kind_of_row = to_arrow(kind)

    def of_step(column: str, at: Array = step) -> pa.Array:
        return block.steps[column].take(to_arrow(at)).combine_chunks()

    def text_of(values: Sequence[str]) -> pa.Array:
        return texts_to_arrow(values).take(kind_of_row)

    def number_of(values: Sequence[float]) -> pa.Array:
        return to_arrow(np.array(values, dtype=np.float64)[kind])

    # A pair's context is the student's own step where its token ids are known, else that of the rollout which reached
    # the state first: both have the same messages.
    first = block.first_step[state]
    named = np.where(to_numpy(of_step("has_ids")), step, first)
    state_id = of_step("rollout_id", named), of_step("step", named).cast(pa.string()), texts_to_arrow(["/"])[0]
    task, digest = of_step("task_id", first).dictionary_encode(), of_step("state_sha256")
    texts = [block.actions.take(to_arrow(side)) for side in (chosen, rejected)]
    preferences, usd = [pair.preference for pair in kinds], block.usd[state]
    families = [tasks[one].family for one in task.dictionary.to_pylist()]
    columns = {
        "pair_id": texts_to_arrow(list(map(pair_id, *(side.to_pylist() for side in (digest, *texts))))),
        "rule": text_of([one.rule for one in preferences]),
        "rollout_id": of_step("rollout_id"),
        "task_id": task.dictionary_decode(),
        "family": texts_to_arrow(families).take(task.indices),
        "step": of_step("step"),
        "state_sha256": digest,
        "state_id": pc.binary_join_element_wise(*state_id),
        "chosen": texts[0],
        "rejected": texts[1],
        "rejected_by": text_of([one.rejected_by for one in preferences]),
        "votes_chosen": number_of([one.votes_chosen for one in preferences]),
        "votes_rejected": number_of([one.votes_rejected for one in preferences]),
        "num_teachers": to_arrow(np.full(len(state), len(block.teachers), dtype=np.int64)),
        "compared_by": classes.compared_by.take(to_arrow(state)),
        "chosen_by": lists_to_arrow([pair.chosen_by for pair in kinds]).take(kind_of_row),
        "served_models": lists_to_arrow(served).take(to_arrow(models_of)),
        "cost_usd": to_arrow(usd / shared, valid=~np.isnan(usd)),
    }
    batch = pa.RecordBatch.from_arrays([columns[column] for column in PAIR.columns], schema=PAIR.schema)
    return batch, action_keys(block, classes, rejected)
