"""OpenEnv: episodes of `openenv collect` (`results.jsonl`) and TrainingTrace documents.

A trace stands alone or beside an episode's id and reward. A call whose whole completion is masked is context and no
step: it must not be trained on. A call whose prompt does not go on from the one before (compaction) begins a rollout of
its own.

Format read from openenv 0.10.0, `openenv/core/harness/{collect,rollout,training}.py`.
"""

from collections import Counter
from collections.abc import Iterable, Iterator
from itertools import accumulate, pairwise
from typing import Any

import orjson

from stages import messages as stages_messages
from stages.formats import messages
from stages.formats.base import ImportedTurn, Origin, Record, Trajectory
from stages.formats.transcripts import ExportedTranscript, File, chat, json_lines
from stages.messages import Message
from stages.rollouts import missing
from stages.runs import store
from stages.runs.records import Row

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


# ---- openenv
# OpenEnv: `results.jsonl` as `openenv collect` writes it, and `captured_traces.jsonl` where token ids are known.
#
# A line of the latter is a TrainingTrace beside its episode's id and reward.

LOST = (
    "results.jsonl: token ids, log-probs, finish reasons, costs and times",
    "captured_traces.jsonl: what was observed after the last action, the task's own data, costs and times",
    "return codes, commands and errors",
)


def files(transcripts: Iterable[ExportedTranscript], dropped: Counter[str]) -> Iterable[File]:
    """Traces first, so that who reads the whole folder meets the richer record of an episode before the plainer one."""
    acted = (transcript for transcript in transcripts if transcript.turns)
    if any(transcript.has_tokens for transcript in acted):
        yield json_lines(
            "captured_traces.jsonl", (_openenv_captured(t) for t in transcripts if t.turns and t.has_tokens)
        )

    def episodes() -> Iterator[Row]:
        for transcript in transcripts:
            dropped["no_steps"] += not transcript.turns
            if transcript.turns:
                dropped["no_tokens_for_a_training_trace"] += not transcript.has_tokens
                yield _openenv_episode(transcript)

    yield json_lines("results.jsonl", episodes())


def _known(transcript: ExportedTranscript) -> Row:
    rollout = transcript.rollout
    fields = {"model": rollout["model"], "resolved": rollout["gt_pass"], "terminated_by": rollout["terminated_by"]}
    return {**transcript.mark, **fields, "submission": transcript.submission}


def _openenv_episode(transcript: ExportedTranscript) -> Row:
    opening, rest = chat(transcript)
    return {
        "episode_id": transcript.rollout["rollout_id"],
        "messages": [*opening, *rest],
        "reward": transcript.rollout["reward"],
        "done": True,
        "tool_trace": _tool_trace(transcript),
        "metrics": {"turns": len(transcript.turns)},
        "verify_metrics": {},
        "artifacts": {},
        "task": None,
        "extra": {**_known(transcript), "tools": transcript.tools},
    }


def _tool_trace(transcript: ExportedTranscript) -> list[Row]:
    """Every call that got an answer of its own, with that answer."""
    traced = []
    for turn in transcript.turns:
        shown = [message["content"] for message in turn.observed if message["role"] == "tool"]
        for call, data in zip(stages_messages.read(turn.step["action"]).calls, shown, strict=False):
            arguments = (
                orjson.loads(call.arguments) if stages_messages.is_object(call.arguments) else {"_": call.arguments}
            )
            result = {"data": data, "done": False, "metadata": {}, "error": None}
            traced.append({"tool_name": call.name, "arguments": arguments, "result": result})
    return traced


def _openenv_captured(transcript: ExportedTranscript) -> Row:
    opening, rest = chat(transcript)
    sent = list(accumulate(rest, lambda before, message: [*before, message], initial=opening))
    starts = [index for index, message in enumerate(rest) if message["role"] == "assistant"]
    starts = starts[: len(transcript.turns)]
    tools = transcript.tools or None
    turns = [_openenv_turn(transcript, i, sent[start], rest[start], tools) for i, start in enumerate(starts)]
    fields = {"episode_id": transcript.rollout["rollout_id"], "reward": transcript.rollout["reward"]}
    return {**fields, **_known(transcript), "trace": {"schema_version": 1, "turns": turns}}


def _openenv_turn(
    transcript: ExportedTranscript, index: int, sent: list[Row], reply: Row, tools: list[Row] | None
) -> Row:
    turn = transcript.turns[index]
    prompt, sampled = turn.prompt or [], turn.step["completion_token_ids"]
    sampling = orjson.loads(turn.step["sampling_json"] or "{}")
    return {
        "node_id": f"{transcript.rollout['rollout_id']}/{index}",
        "prompt_token_ids": prompt,
        "completion_token_ids": sampled,
        "per_token_logps": turn.step["logprobs"],
        "loss_mask": [0] * len(prompt) + [1] * len(sampled),
        "request": {"messages": sent, "tools": tools},
        "response": {"choices": [{"message": reply, "finish_reason": turn.step["finish_reason"]}]},
        "metadata": {"model": turn.step["model"], "sampling_params": sampling, "index": index},
    }
