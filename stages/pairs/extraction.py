"""Extract preference pairs from votes, block after block, with counts of what was dropped and evidence for the pairs.

What is decided in a state depends only on which of its actions are equal. `patterns` groups the states of a block by
that pattern of equalities and decides each pattern once; `pair_rows` writes the pairs of all of its states, and
`PairEvidence` collects what is known about the votes without playing on: agreement, outcomes, an audit of the teachers.
"""

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import lru_cache

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from stages import layout
from stages.envs.base import Task
from stages.pairs import agreement
from stages.pairs.agreement import Numbering
from stages.pairs.audit import (
    Audit,
    JudgedState,
    OutcomeJudgement,
    TeacherWorth,
    failure_text,
    failure_verdict,
    spent,
    worth,
)
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
from stages.pairs.continuation import Continued
from stages.pairs.groups import pair_ids
from stages.pairs.report import PairAccount, PairVerdict, report
from stages.pairs.states import LOST, AnsweredStates, asked_blindly, decided
from stages.pairs.voting import STUDENT, Preference
from stages.runs import store
from stages.runs.kinds import PAIR, TEACHER_ACTION
from stages.runs.run import Run, RunWriter

MOST_NUMBERS = 4_000_000
"""Numbers in the largest array that compares the actions of alike states with each other."""
MOST_STATES = 50_000
"""States that agreement is tested on: a thousand rearrangements of more take minutes, and find what is irrelevant."""
NOT_PLAYED = "signal.rollouts = N plays both actions of every pair N times, and tests the pairs by that"
CHOSEN_FAILS = "chosen_ends_in_failure"
CONTINUATIONS_FAIL = "chosen_continuations_fail"
COST_COLUMNS = ["teacher", "cost_usd", "error_type"]
AUDIT_HEAD = ("teacher", "agrees", "with student", "backs", "lost", "won", "minority", "right", "wrong", "USD/backed")
AUDIT_LEGEND = """
agrees, with student: how often its action equals that of another teacher, or of the student, from 0 to 1
backs: pairs that it voted for; lost, won: pairs that would disappear, or appear, without it
minority: its votes against the majority; right, wrong: how many of these the outcomes support, or contradict"""

Places = tuple[int, ...]


class Extraction:
    """One extraction from teachers' answers. passed: whether each rollout passed."""

    def __init__(self, states: AnsweredStates, answers: Run, passed: Mapping[str, bool | None]) -> None:
        self._answers = answers
        self._evidence = PairEvidence(states.teachers, passed)
        self._num_rollouts, self._num_steps, states_per_task = states.counts()
        self._tested = pa.array(tasks_to_test(states_per_task), pa.string())
        self.account, self.dropped = PairAccount(), Counter[str]()

    def pairs(
        self, votes: Iterable[tuple[StateBlock, ActionClasses]], tasks: Mapping[str, Task]
    ) -> Iterator[pa.RecordBatch]:
        """Yield the pairs in the order of the states, each once; count everything else on the way."""
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
            rows = pair_rows(block, classes, found, tasks)
            self.dropped[CHOSEN_FAILS] += number - len(rows)
            yield rows

    def kept(self, pairs: Iterable[pa.RecordBatch], continued: Continued | None) -> Iterator[pa.RecordBatch]:
        """Yield the pairs that are written: all but those whose chosen action failed in every continuation."""
        for rows in pairs:
            kept = rows if continued is None else rows.filter(pa.array(continued.keeps(rows), pa.bool_()))
            self.dropped[CONTINUATIONS_FAIL] += len(rows) - len(kept)
            self.account.add_all(kept)
            yield kept

    def report(self, out: RunWriter, continued: Continued | None) -> None:
        """Write the report, the counts and the verdict."""
        cost = spent(self._answers.scan(TEACHER_ACTION).batches(COST_COLUMNS))
        evidence = self._evidence.evidence(cost)
        evidence = evidence.with_note(NOT_PLAYED) if continued is None else continued.evidence(evidence)
        report(
            self.account,
            +self.dropped,
            num_traces=self._num_rollouts,
            num_steps=self._num_steps,
            out=out,
            spent=cost,
            evidence=evidence,
        )


@dataclass(frozen=True)
class PatternPair:
    """A pair: the step that it judges, and the first places of its sides in the pattern."""

    step: int
    chosen: int
    rejected: int
    preference: Preference
    chosen_by: tuple[str, ...]


@dataclass(frozen=True)
class Pattern:
    """The decision in a state. reasons: why a step gives no pair; shared: among how many pairs its cost is shared.

    worths: of each teacher; wanted: all preferences among classes, each with the step that it judges; answers: the
    places of the student's first action, and of each teacher's most common one, `NOTHING` for none.
    """

    reasons: tuple[str, ...]
    pairs: tuple[PatternPair, ...]
    duplicates: int
    shared: int
    worths: tuple[TeacherWorth, ...]
    wanted: tuple[tuple[Preference, int], ...]
    answers: Places


def patterns(block: StateBlock, classes: ActionClasses) -> Iterator[tuple[AlikeStates, Pattern]]:
    """Yield the states of a block, those with one pattern together."""
    truncated = np.zeros(len(block.actions), dtype=bool)
    truncated[: len(block.steps)] = to_numpy(block.steps["truncated"], null=False)
    class_of = np.where(truncated, NOTHING, classes.class_of)
    for alike in block.alike(MOST_NUMBERS):
        length, students = alike.rows.shape[1], alike.students
        cut, lost = truncated[alike.rows[:, :students]], classes.lost[alike.states, None]
        equalities = np.hstack([_first_equal(block.text_of[alike.rows]), _first_equal(class_of[alike.rows]), cut, lost])
        for same in equal_rows(np.ascontiguousarray(equalities, dtype=np.int32)):
            row, shape = equalities[same[0]].tolist(), (students, alike.samples)
            texts, kinds, flags = row[:length], row[length : 2 * length], row[2 * length :]
            pattern = _pattern(block.teachers, shape, tuple(texts), tuple(kinds), tuple(flags[:-1]), bool(flags[-1]))
            yield AlikeStates(alike.states[same], alike.rows[same], *shape), pattern


def _first_equal(values: Array) -> Array:
    """Return the first place [S, L] in each row [S, L] that holds the same; `NOTHING` stays so."""
    # The states last: NumPy then compares and reduces thousands of them at a time.
    columns = np.ascontiguousarray(values.T)
    places = np.arange(len(columns), dtype=np.int32)[:, None, None]
    first = np.where(columns[:, None] == columns[None], places, len(columns)).min(axis=0)
    return np.where(columns == NOTHING, NOTHING, first).T


@lru_cache(16_384)
def _pattern(
    teachers: tuple[str, ...],
    shape: tuple[int, tuple[int, ...]],
    texts: Places,
    classes: Places,
    truncated: Places,
    lost: bool,
) -> Pattern:
    """Decide a pattern: steps and samples of each teacher (`shape`), and what equals what (`texts`, `classes`)."""
    students, samples = shape
    ends = (students + np.cumsum(samples, dtype=int)).tolist()
    places = {name: range(end - number, end) for name, number, end in zip(teachers, samples, ends, strict=True)}
    class_names = [None if place == NOTHING else str(place) for place in classes]
    reasons, votes = list[str](), list[PatternPair]()
    for step in range(students):
        reason, found = _step_pairs(step, places, texts, class_names, bool(truncated[step]), lost)
        reasons += [] if reason is None else [reason]
        votes += found
    sides = [(one.chosen, one.rejected) for one in votes]
    # Steps with equal actions give equal pairs: reversed, so that the first of them is the one that is kept.
    kept = dict(zip(reversed(sides), reversed(votes), strict=True))
    actions = {name: [class_names[place] for place in of] for name, of in places.items()}
    judged = JudgedState(class_names[:students], actions)
    answers = [judged.students[0], *(judged.most_common(name) for name in teachers)]
    return Pattern(
        tuple(reasons),
        tuple(one for side, one in zip(sides, votes, strict=True) if kept[side] is one),
        len(votes) - len(kept),
        len(kept),
        tuple(worth(judged, name) for name in teachers),
        tuple(judged.preferences()),
        tuple(NOTHING if most is None else int(most) for most in answers),
    )


def _step_pairs(
    step: int,
    places: dict[str, range],
    texts: Places,
    class_names: Sequence[str | None],
    truncated: bool,
    lost: bool,
) -> tuple[str | None, list[PatternPair]]:
    """Return the pairs of one recorded step, or the reason for none."""
    if lost:
        return LOST, []
    if truncated:
        return "student_truncated", []
    if not any(places.values()):
        return "not_asked", []
    given = [place for of in places.values() for place in of]
    class_of = {texts[place]: class_names[place] for place in (*given, step)}
    order = dict.fromkeys(text for text in (texts[step], *(texts[place] for place in given)) if text != NOTHING)
    teachers = tuple(
        (name, tuple(None if texts[place] == NOTHING else str(texts[place]) for place in of))
        for name, of in places.items()
    )
    found, reason = decided(str(texts[step]), teachers, tuple(class_of[text] for text in order))
    return reason, [PatternPair(step, int(one.chosen), int(one.rejected), one, by) for one, by in found]


def pair_rows(
    block: StateBlock,
    classes: ActionClasses,
    found: Sequence[tuple[AlikeStates, Pattern]],
    tasks: Mapping[str, Task],
) -> pa.RecordBatch:
    """Return the `pair/1` rows of a block, in the order of states and of the pairs in each.

    Without those that choose an action which ends the episode and fails.
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
        "pair_id": pair_ids(digest, *texts),
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
    return pa.RecordBatch.from_arrays([columns[column] for column in PAIR.columns], schema=PAIR.schema)


def tasks_to_test(states_per_task: Mapping[str, int], most: int = MOST_STATES) -> Collection[str]:
    """Return the tasks to test agreement on: all, or a random part of them where they have more states than `most`.

    By the digests of their names, so that equal work tests on the same ones.
    """
    left, chosen = most, set[str]()
    for task in sorted(states_per_task, key=store.digest):
        left -= states_per_task[task]
        if left < 0 and len(chosen) >= agreement.MIN_TASKS:
            break
        chosen.add(task)
    return chosen


class PairEvidence:
    """What is known of votes without playing on, block after block: agreement, outcomes, audit of the teachers.

    passed: whether each rollout did. teachers: in order. The student counts with its first recorded step of a state, so
    that everyone has one action in it.
    """

    def __init__(self, teachers: Sequence[str], passed: Mapping[str, bool | None]) -> None:
        self._audit, self._judgement = Audit(teachers), OutcomeJudgement(passed)
        self._labels = Numbering(teachers)

    def add(
        self,
        block: StateBlock,
        classes: ActionClasses,
        found: Sequence[tuple[AlikeStates, Pattern]],
        tested: Array,
    ) -> None:
        """Add one block with its patterns. tested: states [S] that agreement is tested on, chosen without a gate."""
        coded = block.steps["rollout_id"].combine_chunks().dictionary_encode()
        index = to_numpy(coded.indices)
        _, first = np.unique(index, return_index=True)
        tasks = block.first_step_column("task_id").take(pa.array(block.at[first])).to_pylist()
        numbers, outcomes = self._judgement.rollout_numbers(coded.dictionary.to_pylist(), tasks)
        rollout, outcome = numbers[index], outcomes[index]  # of each step
        actions = np.full((block.size, 1 + len(block.teachers)), NOTHING, dtype=np.int64)
        for alike, pattern in found:
            own = alike.rows[:, : alike.students]
            known, passed = rollout[own] != NOTHING, outcome[own]
            worths, times = pattern.worths, len(alike.states)
            self._audit.add(worths, known.sum(axis=0).tolist(), passed.sum(axis=0).tolist(), times)
            for preference, step in pattern.wanted:
                self._judgement.add(rollout[own[:, step]], preference.rejected_by != STUDENT)
            for column, place in enumerate(pattern.answers):
                if place != NOTHING:
                    actions[alike.states, column] = classes.class_of[alike.rows[:, place]]
        tasks, steps = block.first_step_column("task_id"), to_numpy(block.first_step_column("step"))
        self._labels.add(actions[tested], classes.names, tasks.filter(pa.array(tested)).to_pylist(), steps[tested])

    def evidence(self, spent: Mapping[str, float | None]) -> PairVerdict:
        """Return the verdict on disagreement and failure, with all numbers. spent: USD of each teacher."""
        tests, aligned = agreement.agreement_tests(self._labels.labels()), self._judgement.alignment()
        audits = self._audit.lines(spent)
        numbers = {
            "agreement": tests and {"kappa": vars(tests.kappa), "roles": vars(tests.roles)},
            "alignment": aligned and vars(aligned),
            "teachers": [asdict(line) for line in audits],
        }
        described = f"two teachers and {agreement.MIN_TASKS} tasks are needed to test their agreement"
        if tests is not None:
            kappa, roles = tests.kappa, tests.roles
            described = (
                f"teachers agree in {kappa.agreement:.1%} of states; chance alone would give {kappa.chance:.1%} "
                f"(kappa {kappa.kappa:.2f}, p = {kappa.p_value:.3f}); a majority of the others is against the student "
                f"in {roles.against_student:.1%}, against a teacher in its place in {roles.against_teacher:.1%} "
                f"(p = {roles.p_value:.3f})"
            )
        cells = []
        for line in audits:
            with_student, with_teachers = tests.teachers[line.teacher] if tests else (None, None)
            right = line.joined_passed + line.opposed - line.opposed_passed
            wrong = line.joined + line.opposed - right
            counts = (line.backed, line.lost_without, line.won_without, line.minority, right, wrong)
            rates = ("-" if rate is None else f"{rate:.2f}" for rate in (with_teachers, with_student))
            price = "-" if line.usd_per_backed is None else f"{line.usd_per_backed:.4f}"
            cells.append((line.teacher, *rates, *counts, price))
        sides = [layout.LEFT, *[layout.RIGHT] * (len(AUDIT_HEAD) - 1)]
        table = layout.aligned(cells, AUDIT_HEAD, sides) + AUDIT_LEGEND
        return PairVerdict(failure_verdict(aligned), numbers, (failure_text(aligned), described), table)
