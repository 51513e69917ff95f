"""What student and teachers did in the distinct states of a run, as numbers: equal numbers are equal actions.

A class of equal actions goes by one of its canonical forms, so that it means the same in every state; an action that is
malformed or missing equals nothing.
"""

from array import array
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np

from stages.runs import store

Array = np.ndarray[Any, Any]
NOTHING = -1


@dataclass(frozen=True)
class Labels:
    """Actions [N, 1 + T], those of the student first; task and step of each state [N].

    Tasks are the independent clusters: what several rollouts of one task do hangs together.
    """

    actions: Array
    task: Array
    step: Array
    teachers: tuple[str, ...]

    @property
    def num_tasks(self) -> int:
        """The number of independent clusters."""
        return int(self.task.max(initial=-1)) + 1


@lru_cache(65_536)
def _short(name: str) -> str:
    return store.digest(name)[:16]


class Numbering:
    """Labels from classes, states after states."""

    def __init__(self, teachers: Sequence[str]) -> None:
        self.teachers = tuple(teachers)
        self._known: dict[str, int] = {}
        self._tasks: dict[str, int] = {}
        self._actions, self._task, self._step = (
            [np.zeros((0, 1 + len(teachers)), dtype=np.int64)],
            array("q"),
            array("q"),
        )

    def add(
        self, actions: Array, names: Mapping[int, str] | Sequence[str], tasks: Iterable[str], steps: Iterable[int]
    ) -> None:
        """What student and teachers did in some states, by the numbers [S, 1 + T] of these names or `NOTHING`."""
        here, where = np.unique(actions, return_inverse=True)
        mean = [
            NOTHING if one == NOTHING else self._known.setdefault(_short(names[one]), len(self._known))
            for one in here.tolist()
        ]
        self._actions.append(np.array(mean, dtype=np.int64)[where].reshape(actions.shape))
        self._task.extend(self._tasks.setdefault(task, len(self._tasks)) for task in tasks)
        self._step.extend(steps)

    def labels(self) -> Labels:
        """All of it."""
        return Labels(np.concatenate(self._actions), np.array(self._task), np.array(self._step), self.teachers)


def class_names(classes: Mapping[str, str | None], forms: Mapping[str, str | None]) -> dict[str, str | None]:
    """A name for every text's class that means the same in every state: the first of its canonical forms."""
    first: dict[str, str] = {}
    for text, form in forms.items():
        name = classes[text]
        if name is not None and form is not None:
            first[name] = min(first.get(name, form), form)
    return {text: None if name is None else first.get(name, name) for text, name in classes.items()}


class Shuffles:
    """Rearrangements of states that move whole tasks, and each state only to one of the same step.

    What several states of a task share moves with it. Where the partner has fewer states of a step, they repeat.
    """

    def __init__(self, labels: Labels) -> None:
        self._size, self._tasks = len(labels.task), labels.num_tasks
        self._strata = [_Stratum(np.flatnonzero(labels.step == step), labels.task) for step in np.unique(labels.step)]

    def draw(self, random: np.random.Generator) -> Array:
        """For each state [N] the one that takes its place."""
        rank = random.permutation(self._tasks)
        source = np.empty(self._size, dtype=np.int64)
        for stratum in self._strata:
            source[stratum.states] = stratum.partners(rank)
        return source


class _Stratum:
    """The states of one step, grouped by task."""

    def __init__(self, states: Array, task: Array) -> None:
        self.states = states[np.argsort(task[states], kind="stable")]
        self._tasks, self._starts, self._counts = np.unique(task[self.states], return_index=True, return_counts=True)
        self._position = np.repeat(np.arange(len(self._tasks)), self._counts)
        self._nth = np.arange(len(self.states)) - self._starts[self._position]

    def partners(self, rank: Array) -> Array:
        partner = np.argsort(rank[self._tasks])[self._position]
        return self.states[self._starts[partner] + self._nth % self._counts[partner]]
