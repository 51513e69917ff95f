"""OpenEnv: episodes of `openenv collect` (`results.jsonl`) and TrainingTrace documents, read and written.

A trace is a document of its own, or is recorded with an episode's id and reward. A call whose completion is masked to
its end is context and no step: it must not be trained on. A call whose prompt does not extend the one before
(compaction) begins a rollout of its own.

The writer makes `results.jsonl`, and `captured_traces.jsonl` where token ids are known: a TrainingTrace a line, with
its episode's id and reward.

Format read from openenv 0.10.0, `openenv/core/harness/{collect,rollout,training}.py`.
"""

from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Any

import orjson

from composer_stages import messages
from composer_stages.formats.base import FIELDS, ImportedTurn, Origin, Reader, Record, Trajectory, read_marks
from composer_stages.formats.messages import context, conversation, message, split_turns
from composer_stages.formats.transcripts import ExportedTranscript, File, Writer, json_lines, plain_arguments
from composer_stages.messages import Message
from composer_stages.runs import store
from composer_stages.runs.kinds import Row

NAME = "openenv"
CALL = {"prompt_token_ids", "completion_token_ids", "per_token_logps"}
"""Keys of a captured call."""
SentCall = tuple[Record, list[Message]]
"""A captured call, and the messages of its request."""


def recognises(record: Any) -> bool:
    """Whether a record is an episode with its messages, a TrainingTrace, or a list of captured calls."""
    if isinstance(record, list):
        return bool(record) and all(isinstance(call, dict) and call.keys() >= CALL for call in record)
    if not isinstance(record, dict):
        return False
    if {"episode_id", "messages"} <= record.keys() and {"tool_trace", "verify_metrics", "done"} & record.keys():
        return True
    calls = _calls(record)
    return isinstance(calls, list) and all(isinstance(call, dict) and call.keys() >= CALL for call in calls)


def _calls(record: Record) -> Any:
    """Return the captured calls of a TrainingTrace, bare or under `trace`; None of an episode."""
    inner = record.get("trace", record)
    return inner.get("turns") if isinstance(inner, dict) and "schema_version" in inner else None


def trajectories(record: Any, origin: Origin) -> Iterator[Trajectory]:
    """Yield the rollout of an episode, or one for every part of a trace whose prompts extend each other."""
    calls = record if isinstance(record, list) else _calls(record)
    if calls is None:
        yield _episode(record, origin)
        return
    parts: list[list[SentCall]] = []
    for call in calls:
        sent = conversation((call.get("request") or {}).get("messages") or [])
        # A request that does not begin with the messages of the one before belongs to a compacted conversation.
        if parts and sent[: len(parts[-1][-1][1])] == parts[-1][-1][1]:
            parts[-1].append((call, sent))
        else:
            parts.append([(call, sent)])
    for part in parts:
        yield _captured(part, record if isinstance(record, dict) else {})


def _episode(record: Record, origin: Origin) -> Trajectory:
    opening, turns = split_turns(conversation(record["messages"]))
    metrics, extra = record.get("metrics") or {}, record.get("extra") or {}
    about = origin.sidecars.description(origin.path)
    env = extra.get("env") or about.get("env_id") or about.get("env") or NAME
    return Trajectory(
        task_id=extra.get("task_id") or _task_id(env, record.get("task"), opening),
        env=env,
        opening=opening,
        turns=turns,
        model=extra.get("model") or about.get("model"),
        reward=record.get("reward"),
        unscored=True,
        own_id=extra.get("rollout_id"),
        **read_marks(extra),
        terminated_by=extra.get("terminated_by") or ("max_steps" if metrics.get("truncated") else None),
        task_data={"task": record["task"]} if record.get("task") is not None else {},
        tools=extra.get("tools") or [],
        extra={name: record.get(name) for name in ("episode_id", "done", "metrics", "verify_metrics", "artifacts")},
    )


def _task_id(env: str, task: Any, opening: list[Message]) -> str:
    """Return the id of the task, else a digest of the task, else one of the opening."""
    ids = [task.get(name) for name in ("task_id", "instance_id", "id")] if isinstance(task, dict) else []
    named = next((name for name in ids if isinstance(name, str | int)), None)
    return f"{env}/{named if named is not None else store.digest(task if task is not None else opening)[:12]}"


def _captured(part: list[SentCall], about: Record) -> Trajectory:
    (first, request_messages), turns = part[0], list[ImportedTurn]()
    opening = [*request_messages]
    for (call, sent), (_, following) in zip(part, [*part[1:], ({}, [])], strict=True):
        choices = (call.get("response") or {}).get("choices") or []
        reply = message({"role": "assistant", **choices[0]["message"]})["content"] if choices else ""
        # `loss_mask` covers prompt and completion; where it is 0 to the end, the completion must not be trained on.
        if any(call.get("loss_mask", [1])[len(call["prompt_token_ids"]) :]):
            turns.append(
                ImportedTurn(
                    reply,
                    finish_reason=choices[0].get("finish_reason") if choices else None,
                    prompt_ids=call["prompt_token_ids"],
                    completion_ids=call["completion_token_ids"],
                    logprobs=call["per_token_logps"],
                    prompt_tokens=len(call["prompt_token_ids"]),
                    completion_tokens=len(call["completion_token_ids"]),
                )
            )
        else:
            context(opening, turns).append({"role": "assistant", "content": reply})
        # The next request repeats this one and its reply; the rest of it was observed in between.
        context(opening, turns).extend(following[len(sent) + 1 :])
    env, metadata = about.get("env") or NAME, first.get("metadata") or {}
    return Trajectory(
        task_id=about.get("task_id") or _task_id(env, about.get("task"), request_messages),
        env=env,
        opening=opening,
        turns=turns,
        model=about.get("model") or metadata.get("model"),
        reward=about.get("reward"),
        unscored=not {"reward", "hidden_pass"}.isdisjoint(about),
        own_id=about.get("rollout_id"),
        **read_marks(about),
        terminated_by=about.get("terminated_by"),
        sampling=metadata.get("sampling_params") or None,
        tools=(first.get("request") or {}).get("tools") or [],
    )


def files(transcripts: Iterable[ExportedTranscript], dropped: Counter[str]) -> Iterable[File]:
    """Return traces first, so that a reader of the folder takes the richer record of an episode."""
    # Asked before: a file of traces must not be written empty.
    acted = (transcript for transcript in transcripts if transcript.turns)
    if any(transcript.has_tokens for transcript in acted):
        traces = (_written_trace(t) for t in transcripts if t.turns and t.has_tokens)
        yield json_lines("captured_traces.jsonl", traces)
    yield json_lines("results.jsonl", _written_episodes(transcripts, dropped))


def _marked(transcript: ExportedTranscript) -> Row:
    """Return the fields of a rollout that the format has no columns for."""
    rollout = transcript.rollout
    fields = {"model": rollout["model"], "resolved": rollout["hidden_pass"], "terminated_by": rollout["terminated_by"]}
    return {**transcript.mark, **fields, "submission": transcript.submission}


def _written_episodes(transcripts: Iterable[ExportedTranscript], dropped: Counter[str]) -> Iterator[Row]:
    for transcript in transcripts:
        dropped["no_steps"] += not transcript.turns
        if not transcript.turns:
            continue
        dropped["no_tokens_for_a_training_trace"] += not transcript.has_tokens
        opening, conversation = transcript.chat()
        traced = []  # every call that got an answer of its own, with that answer
        for turn in transcript.turns:
            answers = [result["content"] for result in turn.observed if result["role"] == "tool"]
            for call, data in zip(messages.read(turn.step["action"]).calls, answers, strict=False):
                # A tool's arguments have to be an object here; text that is none goes under "_".
                written = plain_arguments(call.arguments)
                call_arguments = {"_": call.arguments} if written is None else written
                result = {"data": data, "done": False, "metadata": {}, "error": None}
                traced.append({"tool_name": call.name, "arguments": call_arguments, "result": result})
        yield {
            "episode_id": transcript.rollout["rollout_id"],
            "messages": [*opening, *conversation],
            "reward": transcript.rollout["reward"],
            "done": True,
            "tool_trace": traced,
            "metrics": {"turns": len(transcript.turns)},
            "verify_metrics": {},
            "artifacts": {},
            "task": None,
            "extra": {**_marked(transcript), "tools": transcript.tools},
        }


def _written_trace(transcript: ExportedTranscript) -> Row:
    opening, conversation = transcript.chat()
    rollout_id, tools = transcript.rollout["rollout_id"], transcript.tools or None
    starts = [index for index, chat_message in enumerate(conversation) if chat_message["role"] == "assistant"]
    calls = []
    for index, (start, turn) in enumerate(zip(starts, transcript.turns, strict=False)):
        step, prompt, reply = turn.step, turn.prompt or [], conversation[start]
        sampled = step["completion_token_ids"]
        calls.append(
            {
                "node_id": f"{rollout_id}/{index}",
                "prompt_token_ids": prompt,
                "completion_token_ids": sampled,
                "per_token_logps": step["logprobs"],
                "loss_mask": [0] * len(prompt) + [1] * len(sampled),
                "request": {"messages": [*opening, *conversation[:start]], "tools": tools},
                "response": {"choices": [{"message": reply, "finish_reason": step["finish_reason"]}]},
                "metadata": {
                    "model": step["model"],
                    "sampling_params": orjson.loads(step["sampling_json"] or "{}"),
                    "index": index,
                },
            }
        )
    fields = {"episode_id": rollout_id, "reward": transcript.rollout["reward"]}
    return {**fields, **_marked(transcript), "trace": {"schema_version": 1, "turns": calls}}


READERS = (Reader(NAME, recognises, trajectories),)
WRITER = Writer(FIELDS[NAME]["lost"], files)
