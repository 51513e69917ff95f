"""OpenEnv: episodes of `openenv collect` (`results.jsonl`) and TrainingTrace documents.

A trace stands alone or beside an episode's id and reward. A call whose whole completion is masked is context and no
step: it must not be trained on. A call whose prompt does not go on from the one before (compaction) begins a rollout of
its own.

Format read from openenv 0.10.0, `openenv/core/harness/{collect,rollout,training}.py`.
"""

from collections.abc import Iterator
from itertools import pairwise
from typing import Any

from stages.importers import messages
from stages.importers.base import ImportedTurn, Origin, Record, Trajectory
from stages.messages import Message
from stages.rollouts import missing
from stages.runs import store

NAME = "openenv"
MISSING = frozenset({missing.PARSE, missing.ELISION, missing.CALL_IDS})
TURN = {"prompt_token_ids", "completion_token_ids", "per_token_logps"}


def recognises(record: Any) -> bool:
    """An episode with its messages, a TrainingTrace, or a list of captured calls."""
    if isinstance(record, list):
        return bool(record) and all(isinstance(turn, dict) and turn.keys() >= TURN for turn in record)
    if not isinstance(record, dict):
        return False
    episode = {"episode_id", "messages"} <= record.keys() and bool(
        {"tool_trace", "verify_metrics", "done"} & record.keys()
    )
    turns = _turns(record)
    return episode or (
        isinstance(turns, list) and all(isinstance(turn, dict) and turn.keys() >= TURN for turn in turns)
    )


def _turns(record: Record) -> Any:
    inner = record.get("trace", record)
    return inner.get("turns") if isinstance(inner, dict) and "schema_version" in inner else None


def trajectories(record: Any, origin: Origin) -> Iterator[Trajectory]:
    """The rollouts of one record."""
    if isinstance(record, dict) and _turns(record) is None:
        yield _episode(record, origin)
        return
    about = record if isinstance(record, dict) else {}
    calls = record if isinstance(record, list) else _turns(record)
    for part in _segments(calls):
        yield _captured(part, about)


def _episode(record: Record, origin: Origin) -> Trajectory:
    opening, turns = messages.turns([messages.message(item) for item in record["messages"]])
    metrics, extra = record.get("metrics") or {}, record.get("extra") or {}
    about = origin.sidecars.description(origin.path)
    env = extra.get("env") or about.get("env_id") or about.get("env") or NAME
    return Trajectory(
        task_id=extra.get("task_id") or _task_id(env, record.get("task"), opening),
        env=env,
        opening=opening,
        turns=turns,
        missing=set(MISSING) | {missing.FINISH},
        own_id=extra.get("rollout_id"),
        model=extra.get("model") or about.get("model"),
        family=extra.get("family"),
        split=extra.get("split"),
        reward=record.get("reward"),
        resolved=extra.get("resolved"),
        submission=extra.get("submission"),
        terminated_by=extra.get("terminated_by") or ("max_steps" if metrics.get("truncated") else None),
        error=None if turns else ("no_actions", "the episode holds no message of the model"),
        task_data={"task": record["task"]} if record.get("task") is not None else {},
        tools=extra.get("tools") or [],
        extra={name: record.get(name) for name in ("episode_id", "done", "metrics", "verify_metrics", "artifacts")},
    )


def _task_id(env: str, task: Any, opening: list[Message]) -> str:
    if isinstance(task, dict):
        named = next(
            (task[name] for name in ("task_id", "instance_id", "id") if isinstance(task.get(name), str | int)), None
        )
        return f"{env}/{named if named is not None else store.digest(task)[:12]}"
    return f"{env}/{store.digest(task if task is not None else opening)[:12]}"


def _segments(calls: list[Record]) -> list[list[Record]]:
    """Calls by conversation: one whose messages do not go on from those of the call before begins a new one."""
    parts = [[calls[0]]] if calls else []
    for before, after in pairwise(calls):
        sent, then = (_sent(before), _sent(after))
        parts[-1].append(after) if then[: len(sent)] == sent else parts.append([after])
    return parts


def _sent(call: Record) -> list[Message]:
    return [messages.message(item) for item in (call.get("request") or {}).get("messages") or []]


def _captured(calls: list[Record], about: Record) -> Trajectory:
    opening, turns = _sent(calls[0]), []
    for index, call in enumerate(calls):
        reply = _reply(call)
        if any(call.get("loss_mask", [1])[len(call["prompt_token_ids"]) :]):
            turns.append(_turn(call, reply))
        else:
            (turns[-1].observed if turns else opening).append({"role": "assistant", "content": reply})
        following = _sent(calls[index + 1]) if index + 1 < len(calls) else []
        (turns[-1].observed if turns else opening).extend(following[len(_sent(call)) + 1 :])
    env = about.get("env") or NAME
    return Trajectory(
        task_id=about.get("task_id") or _task_id(env, about.get("task"), _sent(calls[0])),
        env=env,
        opening=opening,
        turns=turns,
        missing=set(MISSING) | (set() if "reward" in about else {missing.REWARD}),
        own_id=about.get("rollout_id"),
        model=about.get("model") or (calls[0].get("metadata") or {}).get("model"),
        family=about.get("family"),
        split=about.get("split"),
        reward=about.get("reward"),
        resolved=about.get("resolved"),
        submission=about.get("submission"),
        terminated_by=about.get("terminated_by"),
        error=None if turns else ("no_actions", "every call of the trace is masked"),
        sampling=(calls[0].get("metadata") or {}).get("sampling_params") or None,
        tools=(calls[0].get("request") or {}).get("tools") or [],
    )


def _reply(call: Record) -> str:
    choices = (call.get("response") or {}).get("choices") or []
    return messages.message({"role": "assistant", **choices[0]["message"]})["content"] if choices else ""


def _turn(call: Record, reply: str) -> ImportedTurn:
    choices = (call.get("response") or {}).get("choices") or [{}]
    return ImportedTurn(
        reply,
        finish_reason=choices[0].get("finish_reason"),
        prompt_ids=call["prompt_token_ids"],
        completion_ids=call["completion_token_ids"],
        logprobs=call["per_token_logps"],
        prompt_tokens=len(call["prompt_token_ids"]),
        completion_tokens=len(call["completion_token_ids"]),
    )
