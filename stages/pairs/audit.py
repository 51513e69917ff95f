"""What each teacher was worth: pairs that it backed, pairs that need it, and whose minority votes were right.

Outcomes judge pairs where they are known: a pair that prefers the majority to the student is right on a rollout that
failed, one that prefers the student to a minority on a rollout that passed. How many would be right by chance is shown
by giving each task the outcomes of another.
"""

from array import array
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from stages.pairs.labels import NOTHING, Array, Labels, Shuffles
from stages.pairs.voting import STUDENT, Ballot, Preference, decide

Names = Sequence[str | None]
DRAWS = 999


@dataclass(frozen=True)
class JudgedState:
    """What was done in one state: by the student in each recorded step, by each teacher in each sample.

    Classes of actions go by names, None for nothing usable.
    """

    students: Names
    teachers: Mapping[str, Names]

    def ballots(self, without: str | None = None) -> Iterator[Ballot]:
        """One a recorded step in which the student did something, perhaps without one of the teachers."""
        teachers = {name: names for name, names in self.teachers.items() if name != without}
        classes = {name: name for names in (self.students, *teachers.values()) for name in names if name is not None}
        for own in self.students:
            yield Ballot(own or "", teachers, {"": None, **classes})

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


def preferences(state: JudgedState, without: str | None = None) -> list[tuple[Preference, int]]:
    """All preferences of a state, each with the step that it judges, as the votes on names of classes give them."""
    return [(found, step) for step, ballot in enumerate(state.ballots(without)) for found in decide(ballot)[0]]


@dataclass(frozen=True)
class Worth:
    """What a teacher is worth in a state: pairs that are lost and won without it, and that it backs.

    sides: of each recorded step, "joined" where the student did the same as it against the majority, "opposed" where
    the student did as the majority, else None; None at all where it was not in a minority.
    """

    lost: int
    won: int
    backed: int
    sides: tuple[str | None, ...] | None


def worth(state: JudgedState, teacher: str) -> Worth:
    """A teacher's worth in one state."""
    found = [preference for preference, _ in preferences(state)]
    everybody = {_sides(preference) for preference in found}
    without = {_sides(preference) for preference, _ in preferences(state, without=teacher)}
    backed = sum(_backs(teacher, state, preference) for preference in found)
    said, winner = state.says(teacher), _winner(found[-1]) if found else None
    sides = None
    if winner is not None and said is not None and said != winner:
        names = {said: "joined", winner: "opposed"}
        sides = tuple(None if own is None else names.get(own) for own in state.students)
    return Worth(len(everybody - without), len(without - everybody), backed, sides)


class Audit:
    """What each teacher was worth, some states after the other."""

    def __init__(self, teachers: Iterable[str]) -> None:
        self._counts = {name: Counter[str]() for name in teachers}

    def add(self, worths: Sequence[Worth], known: Sequence[int], passed: Sequence[int], times: int = 1) -> None:
        """So many states in which each teacher is worth the same.

        known: of each recorded step, in how many of them its rollout has a known outcome; passed: in how many it did
        pass.
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
    """How often outcomes call pairs right: a rollout and a side a pair."""

    def __init__(self, passed: Mapping[str, bool | None]) -> None:
        self._passed = passed
        self._rollouts: dict[str, int] = {}
        self._tasks: dict[str, int] = {}
        self._task_of, self._outcome_of = array("q"), array("b")
        self._wanted = np.zeros((2, 0), dtype=np.int64)
        """How many pairs each rollout [.., R] makes right by failing, and by passing."""

    def meet(self, rollouts: Sequence[str], tasks: Sequence[str]) -> Array:
        """A number of each of these rollouts, `NOTHING` without a known outcome. tasks: where each is met."""
        for rollout, task in zip(rollouts, tasks, strict=True):
            if self._passed.get(rollout) is not None and rollout not in self._rollouts:
                self._rollouts[rollout] = len(self._rollouts)
                self._task_of.append(self._tasks.setdefault(task, len(self._tasks)))
                self._outcome_of.append(bool(self._passed[rollout]))
        if len(self._outcome_of) > (places := self._wanted.shape[1]):
            self._wanted = np.pad(self._wanted, ((0, 0), (0, 2 * len(self._outcome_of) - places)))
        return np.array([self._rollouts.get(rollout, NOTHING) for rollout in rollouts], dtype=np.int64)

    def add(self, where: Array, wants: bool) -> None:
        """A pair on each of these rollouts, by their numbers; wants: the outcome that makes it right."""
        np.add.at(self._wanted[int(wants)], where[where != NOTHING], 1)

    def outcomes(self) -> Array:
        """Whether the rollouts so far passed, by their numbers."""
        return np.array(self._outcome_of, dtype=bool)

    def alignment(self, *, draws: int = DRAWS, seed: int = 0) -> Alignment | None:
        """What outcomes say; None where no pair lies on a rollout with a known outcome."""
        outcome = self.outcomes()
        failing, passing = self._wanted[:, : len(outcome)]
        pairs = int(failing.sum() + passing.sum())
        if not pairs:
            return None
        steps = np.zeros(len(outcome), dtype=np.int64)
        shuffles = Shuffles(Labels(np.zeros((len(outcome), 1)), np.array(self._task_of), steps, ()))
        random = np.random.default_rng(seed)

        def share(passed: Array) -> float:
            return float(np.where(passed, passing, failing).sum() / pairs)

        right = share(outcome)
        null = np.array([share(outcome[shuffles.draw(random)]) for _ in range(draws)])
        p_value = (1 + int((null >= right - 1e-9).sum())) / (draws + 1)
        return Alignment(pairs, right, float(null.mean()), p_value)
