"""What each teacher was worth: pairs that it backed, pairs that need it, and whose minority votes were right.

Outcomes judge pairs where they are known: a pair that prefers the majority to the student is right on a rollout that
failed, one that prefers the student to a minority on a rollout that passed. How many would be right by chance is shown
by giving each task the outcomes of another.
"""

from array import array
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import lru_cache
from typing import Any

import numpy as np

from stages.pairs.labels import Labels, Shuffles
from stages.pairs.voting import STUDENT, Ballot, Preference, decide

Names = Sequence[str | None]
DRAWS = 999


@dataclass(frozen=True)
class JudgedState:
    """What was done in one state: by the student in each recorded step, by each teacher in each sample.

    Classes of actions go by names, None for nothing usable. rollouts: of each step.
    """

    task: str
    step: int
    students: Names
    rollouts: Sequence[str]
    teachers: Mapping[str, Names]

    def ballots(self, without: str | None = None) -> Iterator[Ballot]:
        """One a recorded step in which the student did something, perhaps without one of the teachers."""
        teachers = {name: names for name, names in self.teachers.items() if name != without}
        classes = {name: name for names in (self.students, *teachers.values()) for name in names if name is not None}
        for own in self.students:
            yield Ballot(own or "", teachers, {"": None, **classes})

    def alike(self) -> "JudgedState":
        """The same with names that tell only what is equal, so that most states of a run become one of a few."""
        known: dict[str | None, str | None] = {None: None}
        told = [
            [known.setdefault(name, str(len(known))) for name in names]
            for names in (self.students, *self.teachers.values())
        ]
        return JudgedState(
            self.task, self.step, told[0], self.rollouts, dict(zip(self.teachers, told[1:], strict=True))
        )

    def says(self, teacher: str) -> str | None:
        """What a teacher does most often."""
        known = Counter(name for name in self.teachers.get(teacher, ()) if name is not None)
        return known.most_common(1)[0][0] if known else None


@dataclass(frozen=True)
class TeacherAudit:
    """One teacher: pairs that it backs, pairs that are lost and won without it, and its votes against the majority.

    minority: states in which it did otherwise than the majority. joined: rollout steps in which the student did the
    same as it there; joined_passed: those of them on rollouts that passed; opposed and opposed_passed are the same for
    a student that did as the majority. usd_per_backed: its price for each pair that it backs; None where not known.
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

    def as_dict(self) -> dict[str, Any]:
        """JSON-able."""
        return asdict(self)


@dataclass(frozen=True)
class Alignment:
    """Pairs that outcomes can judge, the share that they call right, the same by chance, and the p-value."""

    pairs: int
    right: float
    by_chance: float
    p_value: float


def preferences(state: JudgedState, without: str | None = None) -> list[tuple[Preference, str]]:
    """All preferences of a state with the rollouts that they judge, as the votes on names of classes give them."""
    teachers = tuple((name, tuple(names)) for name, names in state.teachers.items())
    return [(found, state.rollouts[step]) for found, step in _preferences(tuple(state.students), teachers, without)]


@lru_cache(16_384)
def _preferences(
    students: tuple[str | None, ...], teachers: tuple[tuple[str, tuple[str | None, ...]], ...], without: str | None
) -> tuple[tuple[Preference, int], ...]:
    ballots = JudgedState("", 0, students, (), dict(teachers)).ballots(without)
    return tuple((found, step) for step, ballot in enumerate(ballots) for found in decide(ballot)[0])


class Audit:
    """What each teacher was worth, state after state. passed: of each rollout."""

    def __init__(self, teachers: Iterable[str], passed: Mapping[str, bool | None]) -> None:
        self._passed = passed
        self._counts = {name: Counter[str]() for name in teachers}

    def add(self, state: JudgedState, found: Sequence[tuple[Preference, str]]) -> None:
        """One state, with all preferences in it."""
        everybody = {_sides(preference) for preference, _ in found}
        for teacher, counts in self._counts.items():
            without = {_sides(preference) for preference, _ in preferences(state, without=teacher)}
            counts["lost"] += len(everybody - without)
            counts["won"] += len(without - everybody)
            counts["backed"] += sum(_backs(teacher, state, preference) for preference, _ in found)
            said, winner = state.says(teacher), _winner(found[-1][0]) if found else None
            if winner is None or said is None or said == winner:
                continue
            counts["minority"] += 1
            for own, rollout in zip(state.students, state.rollouts, strict=True):
                outcome = self._passed.get(rollout)
                if outcome is not None and own in (said, winner):
                    side = "joined" if own == said else "opposed"
                    counts[side] += 1
                    counts[f"{side}_passed"] += outcome

    def lines(self, spent: Mapping[str, float | None]) -> list[TeacherAudit]:
        """One line a teacher. spent: USD of each teacher's answers."""
        return [_line(name, counts, spent.get(name)) for name, counts in self._counts.items()]


def _line(teacher: str, counts: Counter[str], usd: float | None) -> TeacherAudit:
    return TeacherAudit(
        teacher,
        counts["backed"],
        counts["lost"],
        counts["won"],
        counts["minority"],
        counts["joined"],
        counts["joined_passed"],
        counts["opposed"],
        counts["opposed_passed"],
        None if usd is None or not counts["backed"] else usd / counts["backed"],
    )


def _sides(preference: Preference) -> tuple[str, str, str]:
    return preference.rule, preference.chosen, preference.rejected


def _winner(preference: Preference) -> str:
    """What the majority does: by either rule it is what was chosen."""
    return preference.chosen


def _backs(teacher: str, state: JudgedState, preference: Preference) -> bool:
    """It did what was chosen over the student, or is rejected in favour of the student."""
    if preference.rejected_by == STUDENT:
        return state.says(teacher) == preference.chosen
    return state.says(teacher) == preference.rejected


class Judgement:
    """How often outcomes call pairs right, state after state: a rollout and a side a pair."""

    def __init__(self, passed: Mapping[str, bool | None]) -> None:
        self._passed = passed
        self._rollouts: dict[str, int] = {}
        self._tasks: dict[str, int] = {}
        self._task_of, self._where, self._wants = array("q"), array("q"), array("b")

    def add(self, state: JudgedState, found: Sequence[tuple[Preference, str]]) -> None:
        """One state, with all preferences in it."""
        for rollout in state.rollouts:
            if self._passed.get(rollout) is not None and rollout not in self._rollouts:
                self._rollouts[rollout] = len(self._rollouts)
                self._task_of.append(self._tasks.setdefault(state.task, len(self._tasks)))
        for preference, rollout in found:
            if rollout in self._rollouts:
                self._where.append(self._rollouts[rollout])
                self._wants.append(preference.rejected_by != STUDENT)

    def alignment(self, *, draws: int = DRAWS, seed: int = 0) -> Alignment | None:
        """What outcomes say; None where no pair lies on a rollout with a known outcome."""
        if not self._where:
            return None
        outcome = np.array([bool(self._passed[rollout]) for rollout in self._rollouts])
        where, wants = np.array(self._where), np.array(self._wants, dtype=bool)
        steps = np.zeros(len(outcome), dtype=np.int64)
        shuffles = Shuffles(Labels(np.zeros((len(outcome), 1)), np.array(self._task_of), steps, ()))
        random = np.random.default_rng(seed)
        right = float((outcome[where] == wants).mean())
        null = np.array([(outcome[shuffles.draw(random)][where] == wants).mean() for _ in range(draws)])
        p_value = (1 + int((null >= right - 1e-9).sum())) / (draws + 1)
        return Alignment(len(where), right, float(null.mean()), p_value)
