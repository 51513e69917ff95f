"""Chat data sets: rows of messages with an id and a verdict, as public sets of trajectories are laid out.

The columns are declared (`Columns`): the messages under `messages`, `trajectory` or `conversations`, role and text in
either of two spellings, the task under `instance_id` and its like, the verdict under `resolved` or a number under
`reward`. A column under another name is not guessed at.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from stages.formats.base import INSTANCE, Origin, Reader, Record, Trajectory, family_of
from stages.formats.messages import first_question, message, split_turns
from stages.rollouts import missing
from stages.runs import store

NAME = "messages"
MISSING = frozenset({missing.PARSE, missing.ELISION, missing.FINISH, missing.CALL_IDS})


@dataclass(frozen=True)
class Columns:
    """The names of each column of a row; of several names the first that is there counts."""

    messages: tuple[str, ...] = ("messages", "trajectory", "conversations")
    role: tuple[str, ...] = ("role", "from")
    content: tuple[str, ...] = ("content", "value")
    task: tuple[str, ...] = ("instance_id", "task_id", "problem_id")
    resolved: tuple[str, ...] = ("resolved", "target", "success")
    reward: tuple[str, ...] = ("reward", "score")
    model: tuple[str, ...] = ("model", "model_name", "model_name_or_path")
    own_id: tuple[str, ...] = ("trajectory_id", "traj_id", "run_id")
    submission: tuple[str, ...] = ("patch", "model_patch", "generated_patch", "submission")
    exit_status: tuple[str, ...] = ("exit_status",)
    statement: tuple[str, ...] = ("problem_statement",)
    tools: tuple[str, ...] = ("tools",)


COLUMNS = Columns()
OTHERS = frozenset({"info", "history", "trajectory_format", "replay_config", "environment", "completion", "session_id"})
"""Keys of other programs' own records, which have readers of their own."""


def recognises(record: Any) -> bool:
    """Whether the messages of a row are a list, empty or of messages with a role, and it names a task or a verdict."""
    if not isinstance(record, dict) or OTHERS & record.keys():
        return False
    items = _list(record, COLUMNS.messages)
    # An id or a verdict is required: chats without either (instruction data) are no rollouts of a task.
    named = any(_first(record, names) is not None for names in (COLUMNS.task, COLUMNS.resolved, COLUMNS.reward))
    return (
        items is not None
        and named
        and all(isinstance(item, dict) and isinstance(_first(item, COLUMNS.role), str) for item in items)
    )


def _first(record: Record, names: tuple[str, ...]) -> Any:
    return next((record[name] for name in names if record.get(name) is not None), None)


def _list(record: Record, names: tuple[str, ...]) -> list[Any] | None:
    """Return a list, which Parquet files often hold as JSON text; None where the row has none."""
    value = _first(record, names)
    value = json.loads(value) if isinstance(value, str) and value.startswith("[") else value
    return value if isinstance(value, list) else None


def trajectories(record: Record, origin: Origin) -> Iterator[Trajectory]:
    """Yield the one rollout of a row. A row without any message of the model is a rollout that failed before it."""
    raw = _list(record, COLUMNS.messages) or []
    opening, turns = split_turns(
        [message({**m, "role": _first(m, COLUMNS.role), "content": _first(m, COLUMNS.content)}) for m in raw]
    )
    task, model = _first(record, COLUMNS.task), _first(record, COLUMNS.model)
    instance = str(task) if task is not None else None
    is_instance = bool(INSTANCE.fullmatch(instance or ""))
    # Reward and verdict are the row's own, else by a report.
    resolved, reward = _first(record, COLUMNS.resolved), _first(record, COLUMNS.reward)
    # Some sets write the verdict as 0 or 1.
    if resolved in (0, 1) and not isinstance(resolved, str):
        resolved = bool(resolved)
    elif resolved is not None:
        raise TypeError(f"resolved is {resolved!r:.40}, neither true nor false")
    elif reward is None and (verdict := origin.sidecars.verdict(origin.path, instance, model)):
        resolved = verdict.resolved
    reward = resolved if reward is None else reward
    yield Trajectory(
        task_id=instance or f"{NAME}/{store.digest(first_question(opening))[:12]}",
        env="swe-bench" if is_instance else NAME,
        opening=opening,
        turns=turns,
        missing=set(MISSING) | ({missing.REWARD} if reward is None else set()),
        own_id=_first(record, COLUMNS.own_id),
        model=model,
        statement=_first(record, COLUMNS.statement),
        family=family_of(instance) if instance and is_instance else None,
        reward=None if reward is None else float(reward),
        resolved=resolved,
        submission=_first(record, COLUMNS.submission),
        terminated_by=_first(record, COLUMNS.exit_status),
        error=None if turns else ("no_actions", "the row holds no message of the model"),
        tools=_list(record, COLUMNS.tools) or [],
    )


READERS = (Reader(NAME, MISSING, recognises, trajectories),)
