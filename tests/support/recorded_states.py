"""The distinct states of a run by digest: what several stages compute in one pass, held in memory to compare with."""

from dataclasses import dataclass

from composer_stages.messages import Message
from composer_stages.rollouts.trace import by_rollout, states
from composer_stages.runs.kinds import Row


@dataclass(frozen=True)
class RecordedState:
    """A distinct state of a run: its conversation, and every step that was taken in it.

    `path`: the steps before it in the rollout that reached it first.
    """

    messages: list[Message]
    path: list[Row]
    steps: list[Row]


def states_by_digest(steps: list[Row]) -> dict[str, RecordedState]:
    """Return the distinct states of a run by digest, in the order of rollouts and steps."""
    recorded: dict[str, RecordedState] = {}
    for rows in by_rollout(steps).values():
        for index, (messages, row) in enumerate(zip(states(rows), rows, strict=True)):
            state = recorded.setdefault(row["state_sha256"], RecordedState(messages, rows[:index], []))
            state.steps.append(row)
    return recorded
