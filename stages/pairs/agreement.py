"""Describe how student and teachers agree: two permutation tests with tasks as clusters.

kappa - agreement of teachers beyond what it would be if each answered another task's state of the same step. Null: what
    teachers do in a state is independent given the step. Kappa is (observed - chance) / (1 - chance), after Cohen
    (1960), with chance taken from the rearrangements and not from products of margins.
roles - how often a majority of the others opposes the student, compared with a teacher in the student's place. Null:
    the student is like one of the teachers, so that in each task any of them could have had its role.

Both tests are exact for their nulls, and neither of them tests pairs: teachers that share a wrong answer agree beyond
chance, and a student that merely words its actions oddly is opposed. They are reported, and decide no verdict:
`audit.OutcomeJudgement` relates disagreement to outcomes, and `continuation` plays the actions of the pairs.
"""

from array import array
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations

import numpy as np

from stages.pairs.blocks import NOTHING, Array, short_name

LEVEL = 0.01
DRAWS = 999
MIN_TASKS = 6
"""With fewer tasks, too few rearrangements differ for a p-value of `LEVEL`."""


@dataclass(frozen=True)
class Labels:
    """Actions [N, 1 + T] as numbers, those of the student first; task and step of each state [N].

    Equal numbers are equal actions, in every state; a malformed or missing action is `NOTHING` and equals nothing.
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


class Numbering:
    """Labels collected from the classes of some states after the other."""

    def __init__(self, teachers: Sequence[str]) -> None:
        self._teachers = tuple(teachers)
        self._known: dict[str, int] = {}
        self._tasks: dict[str, int] = {}
        self._actions = [np.zeros((0, 1 + len(teachers)), dtype=np.int64)]
        self._task, self._step = array("q"), array("q")

    def add(
        self, actions: Array, names: Mapping[int, str] | Sequence[str], tasks: Iterable[str], steps: Iterable[int]
    ) -> None:
        """Add the actions of student and teachers in some states: numbers [S, 1 + T] of these names, or `NOTHING`."""
        local, inverse = np.unique(actions, return_inverse=True)
        numbers = [
            NOTHING if one == NOTHING else self._known.setdefault(short_name(names[one]), len(self._known))
            for one in local.tolist()
        ]
        self._actions.append(np.array(numbers, dtype=np.int64)[inverse].reshape(actions.shape))
        self._task.extend(self._tasks.setdefault(task, len(self._tasks)) for task in tasks)
        self._step.extend(steps)

    def labels(self) -> Labels:
        """Return the labels of all states added so far."""
        return Labels(np.concatenate(self._actions), np.array(self._task), np.array(self._step), self._teachers)


class Shuffles:
    """Rearrangements of states that move tasks as units, and each state only to one of the same step.

    What the states of a task share moves with it. Where the partner has fewer states of a step, they repeat.
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
        """Return, for each state [N], the state that takes its place."""
        # One order of the tasks for all steps, so that what a task's states share moves together.
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
    """Share of states with a majority against the student, the mean for teachers in its place, the p-value."""

    against_student: float
    against_teacher: float
    p_value: float


@dataclass(frozen=True)
class AgreementTests:
    """Both tests, and the agreement of each teacher with the student and with the other teachers."""

    kappa: Kappa
    roles: Roles
    teachers: dict[str, tuple[float, float]]


def agreement_tests(labels: Labels, *, draws: int = DRAWS, seed: int = 0) -> AgreementTests | None:
    """Return both tests on the actions of a run; None with fewer than two teachers or `MIN_TASKS` tasks."""
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
    """Test the agreement of teachers beyond chance; each but the first is rearranged on its own."""
    teachers, shuffles = labels.actions[:, 1:], Shuffles(labels)
    columns = range(teachers.shape[1])
    agreements = np.empty(1 + draws)  # the observed one first
    for draw in range(1 + draws):
        moved = [
            teachers[shuffles.draw(random), column] if draw and column else teachers[:, column] for column in columns
        ]
        agreements[draw] = np.mean([_equal(moved[a], moved[b]).mean() for a, b in combinations(columns, 2)])
    observed, by_chance = float(agreements[0]), agreements[1:]
    chance = float(by_chance.mean())
    beyond = (observed - chance) / (1 - chance) if chance < 1 else 0.0
    return Kappa(observed, chance, beyond, p_value(by_chance, observed))


def roles(labels: Labels, draws: int, random: np.random.Generator) -> Roles:
    """Test how often a majority of the others opposes the student, against any teacher in the student's place."""
    actions, outvoted = labels.actions, []
    for role in range(actions.shape[1]):
        others = [column for column in range(actions.shape[1]) if column != role]
        opposed = np.zeros(len(actions), dtype=bool)
        for column in others:
            behind = sum(_equal(actions[:, column], actions[:, other]).astype(np.int64) for other in others)
            opposed |= (behind > len(others) / 2) & (actions[:, column] != actions[:, role])
        outvoted.append(opposed)
    odd = np.stack(outvoted)  # [roles, N]
    counts = np.stack([np.bincount(labels.task, weights=one, minlength=labels.num_tasks) for one in odd])
    tasks = np.arange(labels.num_tasks)
    exchanged = np.array([counts[random.integers(0, len(odd), size=len(tasks)), tasks].sum() for _ in range(draws)])
    return Roles(float(odd[0].mean()), float(odd[1:].mean()), p_value(exchanged, float(counts[0].sum())))


def p_value(null: Array, observed: float) -> float:
    """Return a one-sided permutation p-value, with the + 1 that makes it valid and a tolerance for rounded sums."""
    return (1 + int((null >= observed - 1e-9).sum())) / (len(null) + 1)


def _equal(a: Array, b: Array) -> Array:
    return (a == b) & (a != NOTHING)
