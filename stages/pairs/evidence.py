"""Evidence for pairs without playing their actions: agreement, failed rollouts, and what each teacher decides.

kappa - agreement of teachers beyond what it would be if each answered another task's state of the same step. Null: what
    teachers do in a state is independent given the step. Kappa is (observed - chance) / (1 - chance), after Cohen
    (1960), with chance taken from the rearrangements and not from products of margins.
roles - how often a majority of the teachers opposes the student, compared with a teacher in the student's place. Null:
    the student is exchangeable with the teachers within each task.

Both tests are exact for their nulls, with tasks as clusters. Neither tests pairs: teachers that share a wrong answer
agree beyond chance, and a student that merely words its actions differently is opposed. They describe and decide no
verdict. Nor does the audit: the pairs that each teacher backs, those that need it, and whether its minority votes were
right.

Where the outcomes of rollouts are known, disagreement is related to them (`FailureAlignment`): a preference of the
majority over the student is in line with a rollout that failed, one of the student over a minority with a rollout that
passed. The share in line by chance is estimated by giving each task the outcomes of another. That is a heuristic about
rollouts and no test of pairs: in a failed rollout every other action counts as right, so teachers that share a wrong
answer on hard tasks pass. `continuation` plays the actions of the pairs.
"""

from array import array
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import chain, combinations
from typing import Literal

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from composer_stages import layout
from composer_stages.envs.base import Grade
from composer_stages.evaluation.inference import one_sided_p
from composer_stages.pairs.actions import STUDENT
from composer_stages.pairs.blocks import NOTHING, ActionClasses, Array, StateBlock, StateGroup, short_name, to_numpy
from composer_stages.pairs.report import PairVerdict
from composer_stages.pairs.states import LeaveOneOut, Pattern
from composer_stages.runs import store
from composer_stages.runs.kinds import Row
from composer_stages.words import Sentence

LEVEL = 0.01
DRAWS = 999
MIN_TASKS = 6
"""With fewer tasks, too few rearrangements differ for a p-value of `LEVEL`."""
MOST_STATES = 50_000
"""States that agreement is tested on: a thousand rearrangements of more take minutes and find irrelevant effects."""
AUDIT_HEAD = ("teacher", "agrees", "with student", "backs", "lost", "won", "minority", "right", "wrong", "USD/backed")
AUDIT_LEGEND = """
agrees, with student: how often its action equals that of another teacher, or of the student, from 0 to 1
backs: pairs that it voted for; lost, won: pairs that would disappear, or appear, without it
minority: its votes against the majority; right, wrong: how many of these the outcomes support, or contradict"""


# Agreement


@dataclass(frozen=True)
class Labels:
    """Actions [N, 1 + T] as numbers, the student's first; task and step of each state [N].

    Equal numbers are equal actions, in every state; a malformed or missing action is `NOTHING` and equals no action.
    Tasks are the independent clusters: the rollouts of one task depend on each other.
    """

    actions: Array
    task: Array
    step: Array
    teachers: tuple[str, ...]

    @property
    def num_tasks(self) -> int:
        """Return the number of independent clusters."""
        return int(self.task.max(initial=-1)) + 1


class LabelCollector:
    """Collects labels from the classes of states, block by block."""

    def __init__(self, teachers: Sequence[str]) -> None:
        self._teachers = tuple(teachers)
        self._numbers: dict[str, int] = {}
        self._tasks: dict[str, int] = {}
        self._actions = [np.zeros((0, 1 + len(teachers)), dtype=np.int64)]
        self._task, self._step = array("q"), array("q")

    def add(
        self, actions: Array, names: Mapping[int, str] | Sequence[str], tasks: Iterable[str], steps: Iterable[int]
    ) -> None:
        """Add the actions of student and teachers in some states: indices [S, 1 + T] of `names`, or `NOTHING`."""
        local, inverse = np.unique(actions, return_inverse=True)
        numbers = [
            NOTHING if index == NOTHING else self._numbers.setdefault(short_name(names[index]), len(self._numbers))
            for index in local.tolist()
        ]
        self._actions.append(np.array(numbers, dtype=np.int64)[inverse].reshape(actions.shape))
        self._task.extend(self._tasks.setdefault(task, len(self._tasks)) for task in tasks)
        self._step.extend(steps)

    def labels(self) -> Labels:
        """Return the labels of all added states."""
        return Labels(np.concatenate(self._actions), np.array(self._task), np.array(self._step), self._teachers)


class Shuffles:
    """Permutations of states that move tasks as units, and each state only to a state of the same step.

    Correlation within a task is preserved. Where the partner task has fewer states of a step, they repeat.
    """

    def __init__(self, labels: Labels) -> None:
        self._size, self._num_tasks = len(labels.task), labels.num_tasks
        self._strata = []
        for step in np.unique(labels.step):
            states = np.flatnonzero(labels.step == step)
            states = states[np.argsort(labels.task[states], kind="stable")]
            tasks, starts, counts = np.unique(labels.task[states], return_index=True, return_counts=True)
            task_at = np.repeat(np.arange(len(tasks)), counts)
            nth = np.arange(len(states)) - starts[task_at]
            self._strata.append((states, tasks, starts, counts, task_at, nth))

    def draw(self, random: np.random.Generator) -> Array:
        """Return, for each state [N], the state that replaces it."""
        # One permutation of the tasks for all steps, so that the states of a task move together.
        rank = random.permutation(self._num_tasks)
        source = np.empty(self._size, dtype=np.int64)
        for states, tasks, starts, counts, task_at, nth in self._strata:
            partner = np.argsort(rank[tasks])[task_at]
            source[states] = states[starts[partner] + nth % counts[partner]]
        return source


@dataclass(frozen=True)
class Kappa:
    """Agreement of teachers, agreement by chance, kappa, and the one-sided p-value."""

    agreement: float
    chance: float
    kappa: float
    p_value: float


@dataclass(frozen=True)
class Roles:
    """Share of states with a majority against the student, the mean for a teacher in its place, and the p-value."""

    against_student: float
    against_teacher: float
    p_value: float


@dataclass(frozen=True)
class AgreementTests:
    """Both tests; by teacher, its agreement with the student and with the other teachers."""

    kappa: Kappa
    roles: Roles
    teachers: dict[str, tuple[float, float]]


def agreement_tests(labels: Labels, *, draws: int = DRAWS, seed: int = 0) -> AgreementTests | None:
    """Run both tests on the actions of a run; None with fewer than two teachers or `MIN_TASKS` tasks."""
    if len(labels.teachers) < 2 or labels.num_tasks < MIN_TASKS:
        return None
    random = np.random.default_rng(seed)
    equal = {
        (a, b): float(_equal(labels.actions[:, a], labels.actions[:, b]).mean())
        for a, b in combinations(range(labels.actions.shape[1]), 2)
    }
    columns = range(1, len(labels.teachers) + 1)
    teachers = {
        name: (equal[0, t], float(np.mean([equal[min(t, u), max(t, u)] for u in columns if u != t])))
        for t, name in zip(columns, labels.teachers, strict=True)
    }
    return AgreementTests(kappa(labels, draws, random), roles(labels, draws, random), teachers)


def kappa(labels: Labels, draws: int, random: np.random.Generator) -> Kappa:
    """Test the agreement of teachers beyond chance; each teacher but the first is permuted independently."""
    teachers, shuffles = labels.actions[:, 1:], Shuffles(labels)
    columns = range(teachers.shape[1])
    agreements = np.empty(1 + draws)  # the observed one first
    for draw in range(1 + draws):
        rearranged = [
            teachers[shuffles.draw(random), column] if draw and column else teachers[:, column] for column in columns
        ]
        agreements[draw] = np.mean([_equal(rearranged[a], rearranged[b]).mean() for a, b in combinations(columns, 2)])
    observed, by_chance = float(agreements[0]), agreements[1:]
    chance = float(by_chance.mean())
    coefficient = (observed - chance) / (1 - chance) if chance < 1 else 0.0
    return Kappa(observed, chance, coefficient, one_sided_p(by_chance, observed))


def roles(labels: Labels, draws: int, random: np.random.Generator) -> Roles:
    """Test how often a majority of the teachers opposes the student, against any teacher in the student's place."""
    actions, outvoted = labels.actions, []
    for role in range(actions.shape[1]):
        voters = [column for column in range(actions.shape[1]) if column != role]
        opposed = np.zeros(len(actions), dtype=bool)
        for column in voters:
            support = sum(_equal(actions[:, column], actions[:, voter]).astype(np.int64) for voter in voters)
            opposed |= (support > len(voters) / 2) & (actions[:, column] != actions[:, role])
        outvoted.append(opposed)
    odd = np.stack(outvoted)  # [roles, N]
    counts = np.stack(
        [np.bincount(labels.task, weights=opposed_states, minlength=labels.num_tasks) for opposed_states in odd]
    )
    tasks = np.arange(labels.num_tasks)
    exchanged = np.array([counts[random.integers(0, len(odd), size=len(tasks)), tasks].sum() for _ in range(draws)])
    return Roles(float(odd[0].mean()), float(odd[1:].mean()), one_sided_p(exchanged, float(counts[0].sum())))


def _equal(a: Array, b: Array) -> Array:
    return (a == b) & (a != NOTHING)


# Outcomes of rollouts, and the audit of teachers


PASSED_COLUMNS = ["rollout_id", "hidden_pass", "reward"]
"""The columns of rollouts that `passed_by_rollout` reads."""


FailureVerdict = Literal["DISAGREEMENT TRACKS FAILURE", "DISAGREEMENT NOT SHOWN TO TRACK FAILURE", "TOO LITTLE DATA"]


def passed_by_rollout(rollouts: Iterable[Row]) -> dict[str, bool | None]:
    """Return whether each rollout passed, by its verdict or else a full reward; None without either."""
    return {row["rollout_id"]: Grade(row["reward"], row["hidden_pass"]).passed for row in rollouts}


def teacher_costs(answers: Iterable[pa.RecordBatch]) -> dict[str, float | None]:
    """Return the cost of each teacher's answers in USD; None if the price of an answer is not known."""
    sums: dict[str, float | None] = {}
    for batch in answers:
        coded = batch["teacher"].dictionary_encode()
        teacher, cost, failed = to_numpy(coded.indices), batch["cost_usd"], batch["error_type"].is_valid()
        unknown = to_numpy(pc.and_not(cost.is_null(), failed))
        for code, name in enumerate(coded.dictionary.to_pylist()):
            rows, subtotal = teacher == code, sums.get(name, 0.0)
            if subtotal is None or unknown[rows].any():
                sums[name] = None
            else:  # cumsum adds sequentially, so that the sum does not depend on the sizes of batches
                sums[name] = float(np.cumsum([subtotal, *to_numpy(cost.fill_null(0.0))[rows]])[-1])
    return sums


@dataclass(frozen=True)
class TeacherAudit:
    """One teacher: pairs that it backs, pairs that are lost and won without it, and its votes against the majority.

    minority: states in which its action differs from the majority's. joined: rollout steps in these states with the
    teacher's action, and joined_passed those on rollouts that passed; opposed and opposed_passed: the same for steps
    with the majority's action. usd_per_backed: its cost per pair that it backs; None if not known.
    """

    teacher: str
    backed: int
    lost_without: int
    won_without: int
    minority: int
    joined: int
    joined_passed: int
    opposed: int
    opposed_passed: int
    usd_per_backed: float | None


class Audit:
    """Sums the effects of each teacher on the pairs over states."""

    def __init__(self, teachers: Iterable[str]) -> None:
        self._counts = {name: Counter[str]() for name in teachers}

    def add(
        self, decided: Sequence[LeaveOneOut], with_outcome: Sequence[int], passed: Sequence[int], times: int = 1
    ) -> None:
        """Add `times` states with equal decisions of each teacher.

        with_outcome: for each recorded step, the number of states in which its rollout has a known outcome; passed: in
        which that outcome is a pass.
        """
        for counts, decision in zip(self._counts.values(), decided, strict=True):
            counts["lost_without"] += decision.lost * times
            counts["won_without"] += decision.won * times
            counts["backed"] += decision.backed * times
            counts["minority"] += times if decision.sides is not None else 0
            for step, side in enumerate(decision.sides or ()):
                if side is not None:
                    counts[side] += with_outcome[step]
                    counts[f"{side}_passed"] += passed[step]

    def lines(self, costs: Mapping[str, float | None]) -> list[TeacherAudit]:
        """Return the audit of each teacher. costs: USD of each teacher's answers."""
        _, *counted, _ = TeacherAudit.__dataclass_fields__  # without the teacher and its price
        lines = []
        for name, counts in self._counts.items():
            usd = costs.get(name)
            price = None if usd is None or not counts["backed"] else usd / counts["backed"]
            lines.append(TeacherAudit(teacher=name, usd_per_backed=price, **{name: counts[name] for name in counted}))
        return lines


@dataclass(frozen=True)
class Alignment:
    """Preferences on rollouts with a known outcome, the share in line with it, that share by chance, and the p-value.

    tasks: how many have such a preference. differ: whether some of their rollouts passed and some failed.
    """

    pairs: int
    right: float
    by_chance: float
    p_value: float
    tasks: int
    differ: bool


def failure_verdict(alignment: Alignment | None) -> FailureVerdict:
    """Return the verdict: whether teachers oppose the student more than by chance on rollouts that fail, at `LEVEL`."""
    if alignment is None or alignment.tasks < MIN_TASKS or not alignment.differ:
        return "TOO LITTLE DATA"
    return "DISAGREEMENT TRACKS FAILURE" if alignment.p_value <= LEVEL else "DISAGREEMENT NOT SHOWN TO TRACK FAILURE"


def failure_text(alignment: Alignment | None) -> str:
    """Return the numbers behind `failure_verdict` as a sentence, with the missing data and the caveat."""
    if alignment is None:
        return Sentence("pairs.no-known-outcome")
    return Sentence("pairs.failure-alignment", alignment=alignment, tasks_needed=MIN_TASKS, level=LEVEL)


class FailureAlignment:
    """Counts how often outcomes agree with preferences. passed: by rollout; None if unknown."""

    def __init__(self, passed: Mapping[str, bool | None]) -> None:
        self._passed = passed
        self._rollouts: dict[str, int] = {}
        self._tasks: dict[str, int] = {}
        self._task_of, self._outcome_of = array("q"), array("b")
        self._in_line = np.zeros((2, 0), dtype=np.int64)
        """Number of preferences in line with each rollout [.., R] if it fails, and if it passes."""

    def rollout_numbers(self, rollouts: Sequence[str], tasks: Sequence[str]) -> tuple[Array, Array]:
        """Return the number of each rollout, `NOTHING` without a known outcome, and whether it passed.

        tasks: the task of each rollout.
        """
        for rollout, task in zip(rollouts, tasks, strict=True):
            if self._passed.get(rollout) is not None and rollout not in self._rollouts:
                self._rollouts[rollout] = len(self._rollouts)
                self._task_of.append(self._tasks.setdefault(task, len(self._tasks)))
                self._outcome_of.append(bool(self._passed[rollout]))
        # Twice the needed capacity: an array that grew by each block would be copied once a block.
        if len(self._outcome_of) > (capacity := self._in_line.shape[1]):
            self._in_line = np.pad(self._in_line, ((0, 0), (0, 2 * len(self._outcome_of) - capacity)))
        numbers = np.array([self._rollouts.get(rollout, NOTHING) for rollout in rollouts], dtype=np.int64)
        return numbers, np.array([bool(self._passed.get(rollout)) for rollout in rollouts], dtype=bool)

    def add(self, rollouts: Array, outcome: bool) -> None:
        """Add a preference on each of these rollouts, by number. outcome: the one in line with the preference."""
        np.add.at(self._in_line[int(outcome)], rollouts[rollouts != NOTHING], 1)

    def alignment(self, *, draws: int = DRAWS, seed: int = 0) -> Alignment | None:
        """Return the share in line and its permutation test; None without a preference on a known outcome."""
        outcome = np.array(self._outcome_of, dtype=bool)
        failing, passing = self._in_line[:, : len(outcome)]
        pairs = int(failing.sum() + passing.sum())
        if not pairs:
            return None
        steps = np.zeros(len(outcome), dtype=np.int64)
        shuffles = Shuffles(Labels(np.zeros((len(outcome), 1)), np.array(self._task_of), steps, ()))
        random = np.random.default_rng(seed)
        # The observed outcomes first, then those of permuted tasks.
        assigned = chain([outcome], (outcome[shuffles.draw(random)] for _ in range(draws)))
        right, *by_chance = (float(np.where(passed, passing, failing).sum() / pairs) for passed in assigned)
        null = np.array(by_chance)
        tasks = len(np.unique(np.array(self._task_of)[failing + passing > 0]))
        differ = bool(outcome.any() and not outcome.all())
        return Alignment(pairs, right, float(null.mean()), one_sided_p(null, right), tasks, differ)


# Agreement and outcomes, block by block


def sample_tasks(states_per_task: Mapping[str, int], max_states: int = MOST_STATES) -> Collection[str]:
    """Return the tasks to test agreement on: all, or a random sample where they have more than `max_states` states.

    Sampled by the digests of their names, so that equal runs test the same tasks.
    """
    room, chosen = max_states, set[str]()
    for task in sorted(states_per_task, key=store.digest):
        room -= states_per_task[task]
        if room < 0 and len(chosen) >= MIN_TASKS:
            break
        chosen.add(task)
    return chosen


class PairEvidence:
    """Collects the evidence of votes block by block: agreement, outcomes, audit of the teachers.

    passed: by rollout. The student counts with its first recorded step of a state, so that student and teachers have
    one action each.
    """

    def __init__(self, teachers: Sequence[str], passed: Mapping[str, bool | None]) -> None:
        self._audit, self._alignment = Audit(teachers), FailureAlignment(passed)
        self._labels = LabelCollector(teachers)

    def add(
        self, block: StateBlock, classes: ActionClasses, decided: Sequence[tuple[StateGroup, Pattern]], tested: Array
    ) -> None:
        """Add a block with its patterns. tested: a mask of the states [S] that agreement is tested on."""
        coded = block.steps["rollout_id"].combine_chunks().dictionary_encode()
        index = to_numpy(coded.indices)
        _, first = np.unique(index, return_index=True)
        tasks = block.first_step_column("task_id").take(pa.array(block.step_state[first])).to_pylist()
        numbers, outcomes = self._alignment.rollout_numbers(coded.dictionary.to_pylist(), tasks)
        rollout, outcome = numbers[index], outcomes[index]  # of each step
        actions = np.full((block.size, 1 + len(block.teachers)), NOTHING, dtype=np.int64)
        for group, pattern in decided:
            step_rows = group.rows[:, : group.students]
            has_outcome, passed = rollout[step_rows] != NOTHING, outcome[step_rows]
            self._audit.add(
                pattern.teachers, has_outcome.sum(axis=0).tolist(), passed.sum(axis=0).tolist(), len(group.states)
            )
            for preference, step in pattern.preferences:
                self._alignment.add(rollout[step_rows[:, step]], preference.rejected_by != STUDENT)
            for column, position in enumerate(pattern.answers):
                if position != NOTHING:
                    actions[group.states, column] = classes.class_of[group.rows[:, position]]
        tasks, steps = block.first_step_column("task_id"), to_numpy(block.first_step_column("step"))
        self._labels.add(actions[tested], classes.names, tasks.filter(pa.array(tested)).to_pylist(), steps[tested])

    def evidence(self, costs: Mapping[str, float | None]) -> PairVerdict:
        """Return the verdict on disagreement and failure, with all numbers. costs: USD of each teacher's answers."""
        tests, aligned = agreement_tests(self._labels.labels()), self._alignment.alignment()
        audits = self._audit.lines(costs)
        numbers = {
            "agreement": tests and {"kappa": vars(tests.kappa), "roles": vars(tests.roles)},
            "alignment": aligned and vars(aligned),
            "teachers": [asdict(line) for line in audits],
        }
        described = (
            Sentence("pairs.agreement", kappa=tests.kappa, roles=tests.roles)
            if tests
            else Sentence("pairs.agreement-untested", tasks=MIN_TASKS)
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
