"""Whether teachers agree more than by chance, and are against the student more than against each other.

Two questions, each with a test that is exact for its null and has tasks as its clusters:

kappa - agreement of teachers beyond what it would be if each answered another task's state of the same step. Null: what
    teachers do in a state is independent given the step. Kappa is (observed - chance) / (1 - chance), after Cohen
    (1960), chance taken from the rearrangements rather than from products of margins.
roles - how often a majority of the others is against the student, as against a teacher that takes its place. Null: the
    student is like one of the teachers, so that in each task any of them could have had its role.

The first alone holds where everybody, the student included, knows the task; the second alone where the student is
merely odd. A student that is as good as each teacher passes the second only by its level, and yet their majority may
know better than either: where outcomes are known, `audit.alignment` tells that.
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
    """The share of states with a majority against the student, the mean of teachers in its place, the p-value."""

    against_student: float
    against_teacher: float
    p_value: float


@dataclass(frozen=True)
class Signal:
    """Both tests, and each teacher's agreement with the student and with the other teachers."""

    kappa: Kappa
    roles: Roles
    teachers: dict[str, tuple[float, float]]


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
    """How often a majority of the others is against the student, beside any of the teachers in its place."""
    odd = np.stack([_outvoted(labels.actions, role) for role in range(labels.actions.shape[1])])  # [R, N]
    counts = np.stack([np.bincount(labels.task, weights=one, minlength=labels.num_tasks) for one in odd])  # [R, tasks]
    tasks = np.arange(labels.num_tasks)
    exchanged = np.array([counts[random.integers(0, len(odd), size=len(tasks)), tasks].sum() for _ in range(draws)])
    return Roles(float(odd[0].mean()), float(odd[1:].mean()), _p_value(exchanged, float(counts[0].sum())))


def _outvoted(actions: Array, role: int) -> Array:
    """The states [N] in which more than half of the others did one thing, and this one did another."""
    others = [column for column in range(actions.shape[1]) if column != role]
    outvoted = np.zeros(len(actions), dtype=bool)
    for column in others:
        behind = sum(_equal(actions[:, column], actions[:, other]).astype(np.int64) for other in others)
        outvoted |= (behind > len(others) / 2) & (actions[:, column] != actions[:, role])
    return outvoted


def _equal(a: Array, b: Array) -> Array:
    return (a == b) & (a != NOTHING)


def _mean_agreement(actions: Array) -> float:
    columns = range(actions.shape[1])
    return float(np.mean([_equal(actions[:, a], actions[:, b]).mean() for a, b in combinations(columns, 2)]))


def _p_value(null: Array, observed: float) -> float:
    """With the + 1 of a valid permutation test; sums of floats are compared with room for rounding."""
    return (1 + int((null >= observed - 1e-9).sum())) / (len(null) + 1)


Verdict = Literal["SIGNAL", "NO SIGNAL", "TOO LITTLE DATA"]


def verdict(found: Signal | None, p_outcomes: float | None = None) -> Verdict:
    """What the tests say; TOO LITTLE DATA where they cannot be made. p_outcomes: of the outcomes' judgement, if any.

    Teachers must agree beyond chance; and either the student is outvoted more than a teacher, or outcomes call the
    pairs right more than by chance. Two ways to pass have half the level each.
    """
    if found is None:
        return "TOO LITTLE DATA"
    ways = [p_value for p_value in (found.roles.p_value, p_outcomes) if p_value is not None]
    return "SIGNAL" if found.kappa.p_value <= LEVEL and min(ways) <= LEVEL / len(ways) else "NO SIGNAL"
