"""Audit the teachers: pairs that each backs, pairs that need it, whose minority votes were right; and outcomes.

Outcomes are related to disagreement where they are known: a preference of the majority over the student is in line
with a rollout that failed, one of the student over a minority with a rollout that passed. How many would be in line by
chance is estimated by giving each task the outcomes of another. That is a heuristic about rollouts and no test of
pairs: in a failed rollout every other action counts as right, so teachers that share a wrong answer on hard tasks pass.
"""

from array import array
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Literal

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from stages.envs.base import Grade
from stages.pairs.agreement import DRAWS, LEVEL, MIN_TASKS, Labels, Shuffles, p_value
from stages.pairs.blocks import NOTHING, Array, to_numpy
from stages.pairs.voting import STUDENT, Ballot, Preference, decide
from stages.plurals import counted
from stages.runs.kinds import Row

PASSED_COLUMNS = ["rollout_id", "gt_pass", "reward"]
"""The columns of rollouts that `passed_by_rollout` reads."""


FailureVerdict = Literal["DISAGREEMENT TRACKS FAILURE", "DISAGREEMENT NOT SHOWN TO TRACK FAILURE", "TOO LITTLE DATA"]


def passed_by_rollout(rollouts: Iterable[Row]) -> dict[str, bool | None]:
    """Return whether each rollout passed: its verdict, else whether its reward is above 0, else None."""
    return {row["rollout_id"]: Grade(row["reward"], row["gt_pass"]).passed for row in rollouts}


def spent(answers: Iterable[pa.RecordBatch]) -> dict[str, float | None]:
    """Return the cost of each teacher's answers in USD; None where the price of an answer is not known."""
    sums: dict[str, float | None] = {}
    for batch in answers:
        coded = batch["teacher"].dictionary_encode()
        teacher, cost, failed = to_numpy(coded.indices), batch["cost_usd"], batch["error_type"].is_valid()
        unknown = to_numpy(pc.and_not(cost.is_null(), failed))
        for code, name in enumerate(coded.dictionary.to_pylist()):
            own, so_far = teacher == code, sums.get(name, 0.0)
            known = so_far is not None and not unknown[own].any()
            # cumsum adds one after the other, so that the sum does not depend on the sizes of batches
            sums[name] = float(np.cumsum([so_far or 0.0, *to_numpy(cost.fill_null(0.0))[own]])[-1]) if known else None
    return sums


@dataclass(frozen=True)
class JudgedState:
    """The actions in one state: of the student in each recorded step, of each teacher in each sample.

    Actions are names of classes, None for a missing or malformed one.
    """

    students: Sequence[str | None]
    teachers: Mapping[str, Sequence[str | None]]

    def preferences(self, without: str | None = None) -> Iterator[tuple[Preference, int]]:
        """Yield the preferences among classes, perhaps without one teacher, each with the step that it judges."""
        teachers = {name: actions for name, actions in self.teachers.items() if name != without}
        classes = {name: name for names in (self.students, *teachers.values()) for name in names if name is not None}
        for step, own in enumerate(self.students):
            for preference in decide(Ballot(own or "", teachers, {"": None, **classes}))[0]:
                yield preference, step

    def most_common(self, teacher: str) -> str | None:
        """Return the most common action of a teacher; None where it has none."""
        known = Counter(name for name in self.teachers.get(teacher, ()) if name is not None)
        return known.most_common(1)[0][0] if known else None


@dataclass(frozen=True)
class TeacherWorth:
    """The worth of a teacher in a state: pairs that are lost and won without it, and pairs that it backs.

    sides: for each recorded step, "joined" where the student did the same as the teacher against the majority,
    "opposed" where the student did as the majority, else None; None instead of a tuple without a minority vote.
    """

    lost: int
    won: int
    backed: int
    sides: tuple[str | None, ...] | None


def worth(state: JudgedState, teacher: str) -> TeacherWorth:
    """Return the worth of a teacher in one state."""
    found = [preference for preference, _ in state.preferences()]
    everyone = {(each.rule, each.chosen, each.rejected) for each in found}
    without = {(each.rule, each.chosen, each.rejected) for each, _ in state.preferences(without=teacher)}
    answer = state.most_common(teacher)
    # a teacher backs a pair by doing what is chosen over the student, or what is rejected in favour of the student
    backed = sum(answer == (each.chosen if each.rejected_by == STUDENT else each.rejected) for each in found)
    winner = found[-1].chosen if found else None  # by either rule the majority does what was chosen
    sides = None
    if winner is not None and answer is not None and answer != winner:
        names = {answer: "joined", winner: "opposed"}
        sides = tuple(None if own is None else names.get(own) for own in state.students)
    return TeacherWorth(len(everyone - without), len(without - everyone), backed, sides)


@dataclass(frozen=True)
class TeacherAudit:
    """One teacher: pairs that it backs, pairs that are lost and won without it, and its votes against the majority.

    minority: states in which its action differs from the majority's. joined: rollout steps there in which the student
    did the same as the teacher; joined_passed: those on rollouts that passed; opposed and opposed_passed: the same for
    a student that did as the majority. usd_per_backed: its cost per pair that it backs; None where not known.
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
    """The worth of each teacher, summed over states."""

    def __init__(self, teachers: Iterable[str]) -> None:
        self._counts = {name: Counter[str]() for name in teachers}

    def add(self, worths: Sequence[TeacherWorth], known: Sequence[int], passed: Sequence[int], times: int = 1) -> None:
        """Add `times` states in which each teacher has the same worth.

        known: for each recorded step, in how many of the states its rollout has a known outcome; passed: in how many
        that outcome is a pass.
        """
        for counts, one in zip(self._counts.values(), worths, strict=True):
            counts["lost"] += one.lost * times
            counts["won"] += one.won * times
            counts["backed"] += one.backed * times
            counts["minority"] += times if one.sides is not None else 0
            for step, side in enumerate(one.sides or ()):
                if side is not None:
                    counts[side] += known[step]
                    counts[f"{side}_passed"] += passed[step]

    def lines(self, spent: Mapping[str, float | None]) -> list[TeacherAudit]:
        """Return one line per teacher. spent: USD of each teacher's answers."""
        lines = []
        for name, counts in self._counts.items():
            usd = spent.get(name)
            line = TeacherAudit(
                teacher=name,
                backed=counts["backed"],
                lost_without=counts["lost"],
                won_without=counts["won"],
                minority=counts["minority"],
                joined=counts["joined"],
                joined_passed=counts["joined_passed"],
                opposed=counts["opposed"],
                opposed_passed=counts["opposed_passed"],
                usd_per_backed=None if usd is None or not counts["backed"] else usd / counts["backed"],
            )
            lines.append(line)
        return lines


@dataclass(frozen=True)
class Alignment:
    """Preferences on rollouts with a known outcome, the share in line with it, that share by chance, and the p-value.

    tasks: how many have such a preference. differ: whether some of their rollouts passed and others failed.
    """

    pairs: int
    right: float
    by_chance: float
    p_value: float
    tasks: int
    differ: bool


def failure_verdict(found: Alignment | None) -> FailureVerdict:
    """Return whether teachers oppose the student more on rollouts that fail than by chance, at `LEVEL`."""
    if found is None or found.tasks < MIN_TASKS or not found.differ:
        return "TOO LITTLE DATA"
    return "DISAGREEMENT TRACKS FAILURE" if found.p_value <= LEVEL else "DISAGREEMENT NOT SHOWN TO TRACK FAILURE"


HEURISTIC = (
    "this does not test the pairs: in a failed rollout every other action counts as right, so teachers that share a "
    "wrong answer on hard tasks track failure too"
)


def failure_text(found: Alignment | None) -> str:
    """Return the numbers behind `failure_verdict` as a sentence, with what they lack and what they do not show."""
    if found is None:
        return "no vote was taken on a rollout with a known outcome"
    lacking = f", and {MIN_TASKS} tasks are needed" if found.tasks < MIN_TASKS else ""
    lacking += "" if found.differ else ", and all rollouts ended alike"
    of = f"{counted(found.pairs, 'preference')} in {counted(found.tasks, 'task')}"
    return (
        f"outcomes are in line with {found.right:.1%} of {of}; chance "
        f"alone would give {found.by_chance:.1%} (p = {found.p_value:.3f}, {LEVEL:g} needed){lacking}; {HEURISTIC}"
    )


class OutcomeJudgement:
    """How often outcomes are in line with preferences. passed: whether each rollout did; None for not known."""

    def __init__(self, passed: Mapping[str, bool | None]) -> None:
        self._passed = passed
        self._rollouts: dict[str, int] = {}
        self._tasks: dict[str, int] = {}
        self._task_of, self._outcome_of = array("q"), array("b")
        self._wanted = np.zeros((2, 0), dtype=np.int64)
        """Number of preferences in line with each rollout [.., R] if it fails, and if it passes."""

    def rollout_numbers(self, rollouts: Sequence[str], tasks: Sequence[str]) -> tuple[Array, Array]:
        """Return a number for each rollout, `NOTHING` without a known outcome, and whether it is known to have passed.

        tasks: the task of each.
        """
        for rollout, task in zip(rollouts, tasks, strict=True):
            if self._passed.get(rollout) is not None and rollout not in self._rollouts:
                self._rollouts[rollout] = len(self._rollouts)
                self._task_of.append(self._tasks.setdefault(task, len(self._tasks)))
                self._outcome_of.append(bool(self._passed[rollout]))
        # Twice the room that is needed: an array that grew by each block would be copied once a block.
        if len(self._outcome_of) > (capacity := self._wanted.shape[1]):
            self._wanted = np.pad(self._wanted, ((0, 0), (0, 2 * len(self._outcome_of) - capacity)))
        numbers = np.array([self._rollouts.get(rollout, NOTHING) for rollout in rollouts], dtype=np.int64)
        return numbers, np.array([bool(self._passed.get(rollout)) for rollout in rollouts], dtype=bool)

    def add(self, rollouts: Array, wants: bool) -> None:
        """Add a preference on each of these rollouts, by number; wants: the outcome that it is in line with."""
        np.add.at(self._wanted[int(wants)], rollouts[rollouts != NOTHING], 1)

    def alignment(self, *, draws: int = DRAWS, seed: int = 0) -> Alignment | None:
        """Return the share in line and its permutation test; None without a preference on a known outcome."""
        outcome = np.array(self._outcome_of, dtype=bool)
        failing, passing = self._wanted[:, : len(outcome)]
        pairs = int(failing.sum() + passing.sum())
        if not pairs:
            return None
        steps = np.zeros(len(outcome), dtype=np.int64)
        shuffles = Shuffles(Labels(np.zeros((len(outcome), 1)), np.array(self._task_of), steps, ()))
        random = np.random.default_rng(seed)
        # The observed outcomes first, then those that each task has from another one.
        assigned = chain([outcome], (outcome[shuffles.draw(random)] for _ in range(draws)))
        right, *by_chance = (float(np.where(passed, passing, failing).sum() / pairs) for passed in assigned)
        null = np.array(by_chance)
        tasks = len(np.unique(np.array(self._task_of)[failing + passing > 0]))
        differ = bool(outcome.any() and not outcome.all())
        return Alignment(pairs, right, float(null.mean()), p_value(null, right), tasks, differ)
