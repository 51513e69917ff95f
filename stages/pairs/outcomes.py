"""What an action led to: it is executed from a copy of the recorded state, reached by repeating the recorded actions.

The repetition is checked: each observation must come out as recorded, else the state is not reproducible and nothing is
claimed.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from stages.envs.base import ComparesOutcomes, Environment, Task
from stages.errors import InfrastructureError


class NotReproducible(Exception):
    """The recorded actions did not lead to the recorded observations."""


@dataclass(frozen=True)
class State:
    """A recorded state: the task, the actions that led there and what each of them showed."""

    task: Task
    actions: tuple[str, ...]
    observations: tuple[str, ...]


def outcomes(make: Callable[[], Environment], state: State, candidates: Sequence[str]) -> list[str]:
    """A digest of the outcome of every candidate action in a state; equal digests mean equal outcomes.

    Raises `NotReproducible` when the state cannot be reached again, `InfrastructureError` when the machinery breaks.
    """
    return [_outcome(make(), state, candidate) for candidate in candidates]


def _outcome(environment: Environment, state: State, candidate: str) -> str:
    try:
        if not isinstance(environment, ComparesOutcomes):
            raise InfrastructureError(f"{environment.name} cannot compare outcomes")
        environment.reset(state.task)
        for index, (action, seen) in enumerate(zip(state.actions, state.observations, strict=True)):
            if environment.step(action).content != seen:
                raise NotReproducible(f"action {index} showed something else than recorded")
        return environment.outcome(environment.step(candidate))
    finally:
        environment.close()
