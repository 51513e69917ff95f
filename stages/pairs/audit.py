"""What each teacher was worth: pairs that it backed, pairs that need it, and whose minority votes were right.

Outcomes judge pairs where they are known: a pair that prefers the majority to the student is right on a rollout that
failed, one that prefers the student to a minority on a rollout that passed. How many would be right by chance is shown
by giving each task the outcomes of another.
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
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

    def says(self, teacher: str) -> str | None:
        """What a teacher does most often."""
        known = Counter(name for name in self.teachers.get(teacher, ()) if name is not None)
        return known.most_common(1)[0][0] if known else None


@dataclass(frozen=True)
class Found:
    """One preference of one state, and the rollout that it judges."""

    state: int
    rollout: str
    preference: Preference


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


def preferences(states: Sequence[JudgedState], without: str | None = None) -> list[Found]:
    """All preferences of a run, as the votes on names of classes give them."""
    return [
        Found(index, rollout, preference)
        for index, state in enumerate(states)
        for ballot, rollout in zip(state.ballots(without), state.rollouts, strict=True)
        for preference in decide(ballot)[0]
    ]


def audit(
    states: Sequence[JudgedState], passed: Mapping[str, bool | None], spent: Mapping[str, float | None]
) -> list[TeacherAudit]:
    """One line a teacher. passed: of each rollout. spent: USD of each teacher's answers."""
    found = preferences(states)
    return [_audit(name, states, found, passed, spent.get(name)) for name in spent]


def _audit(
    teacher: str,
    states: Sequence[JudgedState],
    found: Sequence[Found],
    passed: Mapping[str, bool | None],
    usd: float | None,
) -> TeacherAudit:
    alone = preferences(states, without=teacher)
    everybody, without = ({_sides(one) for one in some} for some in (found, alone))
    backed = sum(_backs(teacher, states[one.state], one.preference) for one in found)
    minority, joined, opposed = 0, Counter[bool](), Counter[bool]()
    winners = {one.state: _winner(one.preference) for one in found}
    for index, winner in winners.items():
        said = states[index].says(teacher)
        if said is None or said == winner:
            continue
        minority += 1
        for own, rollout in zip(states[index].students, states[index].rollouts, strict=True):
            outcome = passed.get(rollout)
            if outcome is not None and own in (said, winner):
                (joined if own == said else opposed)[outcome] += 1
    price = None if usd is None or not backed else usd / backed
    lost, won = len(everybody - without), len(without - everybody)
    votes = (joined.total(), joined[True], opposed.total(), opposed[True])
    return TeacherAudit(teacher, backed, lost, won, minority, *votes, price)


def _sides(found: Found) -> tuple[int, str, str, str]:
    preference = found.preference
    return found.state, preference.rule, preference.chosen, preference.rejected


def _winner(preference: Preference) -> str:
    """What the majority does: by either rule it is what was chosen."""
    return preference.chosen


def _backs(teacher: str, state: JudgedState, preference: Preference) -> bool:
    """It did what was chosen over the student, or is rejected in favour of the student."""
    if preference.rejected_by == STUDENT:
        return state.says(teacher) == preference.chosen
    return state.says(teacher) == preference.rejected


def alignment(
    states: Sequence[JudgedState], passed: Mapping[str, bool | None], *, draws: int = DRAWS, seed: int = 0
) -> Alignment | None:
    """How often outcomes call pairs right; None where no pair lies on a rollout with a known outcome."""
    task_of = {rollout: state.task for state in states for rollout in state.rollouts if passed.get(rollout) is not None}
    rollouts = {rollout: index for index, rollout in enumerate(task_of)}
    tasks = {task: index for index, task in enumerate(dict.fromkeys(task_of.values()))}
    judged = [found for found in preferences(states) if found.rollout in rollouts]
    if not judged:
        return None
    outcome = np.array([bool(passed[rollout]) for rollout in rollouts])
    where = np.array([rollouts[found.rollout] for found in judged])
    wants = np.array([found.preference.rejected_by != STUDENT for found in judged])
    cluster = np.array([tasks[task] for task in task_of.values()])
    shuffles = Shuffles(Labels(np.zeros((len(rollouts), 1)), cluster, np.zeros(len(rollouts), dtype=np.int64), ()))
    random = np.random.default_rng(seed)
    right = float((outcome[where] == wants).mean())
    null = np.array([(outcome[shuffles.draw(random)][where] == wants).mean() for _ in range(draws)])
    p_value = (1 + int((null >= right - 1e-9).sum())) / (draws + 1)
    return Alignment(len(judged), right, float(null.mean()), p_value)
