"""Whether teachers agree more than by chance, and more with each other than with the student.

Two questions, each with a test that is exact for its null and has tasks as its clusters:

kappa - agreement of teachers beyond what it would be if each answered another task's state of the same step. Null: what
    teachers do in a state is independent given the step. Kappa is (observed - chance) / (1 - chance), after Cohen
    (1960), chance taken from the rearrangements rather than from products of margins.
roles - agreement among teachers less that of teachers with the student. Null: the student is like one of the teachers,
    so that in each task any of them could have had its role.

Pairs carry signal when both hold at `LEVEL`: the first alone holds where everybody, the student included, knows the
task; the second alone where the student is merely odd.
"""

from dataclasses import dataclass
from itertools import combinations
from typing import Literal

import numpy as np

from stages.pairs.labels import NOTHING, Array, Labels, Shuffles

LEVEL = 0.01
DRAWS = 999
LEAST_TASKS = 6
"""With fewer, too few rearrangements differ for a p-value of `LEVEL`."""


@dataclass(frozen=True)
class Kappa:
    """Agreement of teachers, what it is by chance, kappa, and the one-sided p-value."""

    agreement: float
    chance: float
    kappa: float
    p_value: float


@dataclass(frozen=True)
class Roles:
    """Agreement among teachers, of teachers with the student, and the one-sided p-value of the difference."""

    among_teachers: float
    with_student: float
    p_value: float


@dataclass(frozen=True)
class Signal:
    """Both tests, and each teacher's agreement with the student and with the other teachers."""

    kappa: Kappa
    roles: Roles
    teachers: dict[str, tuple[float, float]]

    @property
    def found(self) -> bool:
        """Whether both tests hold."""
        return max(self.kappa.p_value, self.roles.p_value) <= LEVEL


def signal(labels: Labels, *, draws: int = DRAWS, seed: int = 0) -> Signal | None:
    """Both tests on the actions of a run; None where two teachers or `LEAST_TASKS` tasks are not there."""
    if len(labels.teachers) < 2 or labels.num_tasks < LEAST_TASKS:
        return None
    random = np.random.default_rng(seed)
    equal = agreements(labels)
    others = [
        (equal[0, t], np.mean([equal[min(t, u), max(t, u)] for u in range(1, len(labels.teachers) + 1) if u != t]))
        for t in range(1, len(labels.teachers) + 1)
    ]
    told = {name: (float(own), float(rest)) for name, (own, rest) in zip(labels.teachers, others, strict=True)}
    return Signal(kappa(labels, draws, random), roles(labels, draws, random), told)


def agreements(labels: Labels) -> dict[tuple[int, int], float]:
    """The share of states in which two columns (0 is the student) did the same."""
    columns = range(labels.actions.shape[1])
    return {
        (a, b): float(_equal(labels.actions[:, a], labels.actions[:, b]).mean()) for a, b in combinations(columns, 2)
    }


def kappa(labels: Labels, draws: int, random: np.random.Generator) -> Kappa:
    """Agreement of teachers beyond chance; each but the first is rearranged on its own."""
    teachers, shuffles = labels.actions[:, 1:], Shuffles(labels)
    observed = _mean_agreement(teachers)
    columns = range(1, teachers.shape[1])
    by_chance = np.empty(draws)
    for draw in range(draws):
        moved = [teachers[shuffles.draw(random), column] for column in columns]
        by_chance[draw] = _mean_agreement(np.column_stack([teachers[:, 0], *moved]))
    chance = float(by_chance.mean())
    beyond = (observed - chance) / (1 - chance) if chance < 1 else 0.0
    return Kappa(observed, chance, beyond, _p_value(by_chance, observed))


def roles(labels: Labels, draws: int, random: np.random.Generator) -> Roles:
    """How much more teachers agree with each other than with the student, against any of them in its place."""
    count = labels.actions.shape[1]
    equal = np.zeros((count, count, len(labels.task)))  # [R, R, N]
    for a, b in combinations(range(count), 2):
        equal[a, b] = equal[b, a] = _equal(labels.actions[:, a], labels.actions[:, b])
    apart = equal.sum(axis=1) / (count - 1)  # [R, N]: agreement of each with all others
    pairs = equal.sum(axis=(0, 1)) / 2  # [N]
    among = (pairs - apart * (count - 1)) / ((count - 1) * (count - 2) / 2)  # [R, N]: without it, among the others
    gap = np.stack([np.bincount(labels.task, weights=(among - apart)[role]) for role in range(count)])  # [R, tasks]
    observed = float(gap[0].sum())
    tasks = np.arange(labels.num_tasks)
    exchanged = np.array([gap[random.integers(0, count, size=len(tasks)), tasks].sum() for _ in range(draws)])
    return Roles(float(among[0].mean()), float(apart[0].mean()), _p_value(exchanged, observed))


def _equal(a: Array, b: Array) -> Array:
    return (a == b) & (a != NOTHING)


def _mean_agreement(actions: Array) -> float:
    columns = range(actions.shape[1])
    return float(np.mean([_equal(actions[:, a], actions[:, b]).mean() for a, b in combinations(columns, 2)]))


def _p_value(null: Array, observed: float) -> float:
    """With the + 1 of a valid permutation test; sums of floats are compared with room for rounding."""
    return (1 + int((null >= observed - 1e-9).sum())) / (len(null) + 1)


Verdict = Literal["SIGNAL", "NO SIGNAL", "TOO LITTLE DATA"]


def verdict(found: Signal | None) -> Verdict:
    """What both tests say; TOO LITTLE DATA where they cannot be made."""
    return "TOO LITTLE DATA" if found is None else "SIGNAL" if found.found else "NO SIGNAL"
