"""Chat data sets: rows of messages with an id and a verdict, as public sets of trajectories are laid out.

The columns are declared (fields.toml): the messages under `messages`, `trajectory` or `conversations`, role and text in
either of two spellings, whether a message is trained on under `weight`, `train` or their like, the task under
`instance_id` and its like, the verdict under `resolved` or a number under `reward`. A column under another name is not
guessed at.
"""

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from typing import Any

from composer_stages import json_text
from composer_stages.formats.base import FIELDS, Origin, Reader, Record, Trajectory
from composer_stages.formats.measurement import REWARD, MeasuredSample, State
from composer_stages.formats.messages import conversation, split_turns, user_messages
from composer_stages.rollouts import missing
from composer_stages.words import Sentence

NAME = "messages"


COLUMNS: dict[str, list[str]] = FIELDS["columns"]
OF_TRAJECTORY = ("model", "statement", "submission", "terminated_by")
"""Fields of a trajectory that are columns."""
CALLS = ("function_call", "tool_call")
"""Roles of messages that are calls of the model, as JSON."""
SPOKEN = ("tool_calls", "function_call", "reasoning_content", "reasoning", "thinking")
"""What a message may hold in place of a text."""
OTHERS = frozenset({"info", "history", "trajectory_format", "replay_config", "environment", "completion", "session_id"})
"""Keys of other programs' own records, which have readers of their own."""


def recognises(record: Any) -> bool:
    """Whether the messages of a row are a list, empty or of messages with a role, and it names a task or a verdict."""
    if not isinstance(record, dict) or OTHERS & record.keys():
        return False
    items = _list(record, COLUMNS["messages"])
    # An id or a verdict is required: chats without either (instruction data) are no rollouts of a task.
    named = any(_first(record, COLUMNS[name]) is not None for name in ("task", "resolved", "reward"))
    return (
        items is not None
        and named
        and all(isinstance(item, dict) and isinstance(_first(item, COLUMNS["role"]), str) for item in items)
    )


def _first(record: Record, names: list[str]) -> Any:
    return next((record[name] for name in names if record.get(name) is not None), None)


def _list(record: Record, names: list[str]) -> list[Any] | None:
    """Return a list, which Parquet files often hold as JSON text; None if the row has none."""
    value = _first(record, names)
    value = json_text.loads(value) if isinstance(value, str) and value.startswith("[") else value
    return value if isinstance(value, list) else None


def _messages(raw: Record) -> Iterator[Record]:
    """Yield the messages of one entry in OpenAI's form: several of a user's in Anthropic's that holds results."""
    names = COLUMNS["content"]
    role, content = _first(raw, COLUMNS["role"]), next(filter(None, map(raw.get, names)), None)
    if not {*names, *SPOKEN} & raw.keys():
        raise ValueError(Sentence("formats.message-without-text", keys=[*raw], names=names))
    if role in CALLS:
        with suppress(ValueError):
            content = json_text.loads(content) if isinstance(content, str) else content
        calls = content if isinstance(content, list) else [content]
        # What is no JSON, as in templates that write calls as tags, stays as it is.
        is_text = isinstance(content, str)
        yield {
            **raw,
            "role": "assistant",
            **({"content": content} if is_text else {"content": None, "tool_calls": calls}),
        }
    elif role == "user" and isinstance(content, list):
        yield from user_messages(content)
    else:
        yield {**raw, "role": role, "content": content}


def trajectories(record: Record, origin: Origin) -> Iterator[Trajectory]:
    """Yield the one rollout of a row. A row without any message of the model is a rollout that failed before it."""
    del origin
    raw = _list(record, COLUMNS["messages"]) or []
    items = [item for each in raw for item in _messages(each)]
    # Those of another model, of a demonstration or with a mistake: what trains on the file masks them.
    masked = {number for number, item in enumerate(items) if any(item.get(name) == 0 for name in COLUMNS["loss"])}
    opening, turns = split_turns(conversation(items), masked)
    # A target is a verdict in one data set, and the right answer in others.
    verdicts = [name for name in COLUMNS["verdict"] if name != "target" or isinstance(record.get(name), bool)]
    own_id, task, item, reward = (_first(record, COLUMNS[name]) for name in ("own_id", "task", "item", "reward"))
    resolved = _first(record, verdicts)
    # Some sets write the verdict as 0 or 1.
    if resolved in (0, 1) and not isinstance(resolved, str):
        resolved = bool(resolved)
    elif resolved is not None:
        raise TypeError(Sentence("formats.resolved-not-boolean", resolved=f"{resolved!r:.40}"))
    measured = MeasuredSample(item="" if item is None or task is not None else str(item))
    if reward in (0, 1) and resolved is not None and reward != resolved:
        reason = f"reward {reward}, and {'' if resolved else 'not '}resolved"
        measured = replace(measured, scores={REWARD: float(reward)}, state=State.INVALID, reason=reason)
        reward = resolved = None
    yield Trajectory(
        task_id="" if task is None else str(task),
        opening=opening,
        turns=turns,
        own_id=None if own_id is None else str(own_id),
        **{name: _first(record, COLUMNS[name]) for name in OF_TRAJECTORY},
        # A row that is not trained on at all still has its verdict.
        missing={missing.STEPS} if masked and not turns else set(),
        measured=measured,
        unscored=measured.state is not None,
        reward=None if reward is None else float(reward),
        resolved=resolved,
        tools=_list(record, COLUMNS["tools"]) or [],
        # A run plays many tasks (SWE-Gym/OpenHands-Sampled-Trajectories), and tells equal rollouts apart.
        extra={name: record[name] for name in ("run_id",) if name in record},
    )


READERS = (Reader(NAME, recognises, trajectories),)
