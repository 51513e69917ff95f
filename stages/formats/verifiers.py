"""verifiers before 0.4: `results.jsonl`, one rollout a line, with the run's description in `metadata.json` beside it.

The id of an example identifies neither the problem nor the question everywhere (it may be a row number, and one prompt
may hide several answers), so a task is known by its environment, the user's messages and the answer.

Format read from PrimeIntellect-ai/verifiers at a60a606ec, `verifiers/legacy/utils/save_utils.py`, and from its recorded
runs.
"""

from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Any

import orjson

from stages import messages as stages_messages
from stages.formats import messages
from stages.formats.base import ImportedTurn, Origin, Record, Trajectory
from stages.formats.transcripts import ExportedTranscript, ExportedTurn, File, json_lines
from stages.messages import Message
from stages.rollouts import missing
from stages.runs import store
from stages.runs.records import Row

NAME = "verifiers"
MISSING = frozenset({missing.PARSE, missing.ELISION, missing.CALL_IDS})
KNOWN = {
    "prompt",
    "completion",
    "info",
    "tool_defs",
    "trajectory",
    "answer",
    "reward",
    "error",
    "error_chain",
    "long_error_chain",
}


def recognises(record: Any) -> bool:
    """Prompt, completion and reward, and none of the columns that only TRL's logs have."""
    return (
        isinstance(record, dict)
        and {"prompt", "completion", "reward"} <= record.keys()
        and not {"advantage", "step", "rollout_id"} & record.keys()
    )


def trajectories(record: Record, origin: Origin) -> Iterator[Trajectory]:
    """One rollout.

    A completion that never came is a rollout without steps and with an error, whatever reward stands beside it.
    """
    about = origin.sidecars.description(origin.path)
    env, opening = _env(about, origin), _conversation(record["prompt"], "user")
    lead, turns = messages.turns(_conversation(record["completion"], "assistant"))
    _attach(turns, record)
    lacks = set(MISSING) | (set() if "is_truncated" in record else {missing.FINISH})
    timing, usage, info = record.get("timing") or {}, record.get("token_usage") or {}, record.get("info") or {}
    yield Trajectory(
        task_id=f"{env}/{_key(env, record)}",
        env=env,
        opening=[*opening, *lead],
        turns=turns,
        missing=lacks,
        model=about.get("model") or _named(origin, 1),
        reward=record["reward"],
        terminated_by=record.get("stop_condition"),
        error=_error(record, turns),
        sampling=about.get("sampling_args"),
        prompt_tokens=_whole(usage.get("input_tokens")),
        completion_tokens=_whole(usage.get("output_tokens")),
        wall_s=_seconds(record.get("total_ms"), timing),
        task_data={name: record[name] for name in ("answer", "info") if record.get(name)},
        tools=record.get("tool_defs") or (info.get("oai_tools") if isinstance(info, dict) else None) or [],
        extra={name: value for name, value in record.items() if name not in KNOWN},
    )


def _conversation(value: Any, role: str) -> list[Message]:
    """Messages, also where a base model has plain text instead."""
    if isinstance(value, str):
        return [{"role": role, "content": value}] if value else []
    return [messages.message(item) for item in value or []]


def _env(about: Record, origin: Origin) -> str:
    return about.get("env_id") or about.get("env") or _named(origin, 0) or "verifiers"


def _named(origin: Origin, part: int) -> str | None:
    """Environment (0) or model (1) from the folder that runs are kept in: `ENV--MODEL/ID` or `ENV--MODEL__ID`."""
    for folder in (origin.path.parent.name, origin.path.parent.parent.name):
        env, dashes, rest = folder.partition("--")
        if dashes:
            return (env, rest.split("__")[0].replace("--", "/"))[part]
    return None


def _key(env: str, record: Record) -> str:
    prompt = record["prompt"]
    asked = prompt if isinstance(prompt, str) else [item["content"] for item in prompt or [] if item["role"] == "user"]
    info = record.get("info")
    known_by = record.get("answer") or (
        {k: v for k, v in info.items() if k != "oai_tools"} if isinstance(info, dict) else info
    )
    return store.digest([env, asked, known_by])[:12]


def _attach(turns: list[ImportedTurn], record: Record) -> None:
    """What a run keeps of each call: the last finish reason, and token ids where it kept the column `trajectory`."""
    if turns and record.get("is_truncated"):
        turns[-1].finish_reason = "length"
    calls = record.get("trajectory") or []
    if len(calls) == len(turns):
        for turn, call in zip(turns, calls, strict=True):
            tokens = call.get("tokens") or {}
            turn.prompt_ids = tokens.get("prompt_ids") or None
            turn.completion_ids = tokens.get("completion_ids") or None
            turn.logprobs = tokens.get("completion_logprobs") or None


def _error(record: Record, turns: list[ImportedTurn]) -> tuple[str, str] | None:
    error = record.get("error")
    if isinstance(error, dict):
        return str(error.get("error") or "error"), str(error.get("message") or error)
    if error:
        return "error", str(error)
    return None if turns else ("empty_completion", "the run recorded no completion; its reward says nothing")


def _seconds(total_ms: float | None, timing: Record) -> float | None:
    total = timing.get("total_ms", total_ms)
    return total / 1000 if total else timing.get("total")


def _whole(number: float | None) -> int | None:
    return None if number is None else int(number)


# ---- verifiers
# verifiers 0.4 and PRIME-RL: `traces.jsonl`, one Episode with one Trace a line, token ids as what each message adds.
#
# Which of the tokens before an answer belong to which message is not known here, so all of them stand before the
# answer
# that followed.

LOST = (
    "return codes, commands and what was elided",
    "what a tool's declaration has beyond name, description and parameters",
    "which message each token of a prompt belongs to",
    "token ids of rollouts in which a prompt does not go on from the one before",
)
ENDS = {"stop", "length", "tool_calls"}


def files(transcripts: Iterable[ExportedTranscript], dropped: Counter[str]) -> Iterable[File]:
    """All rollouts, also those that failed before they did anything."""

    def episodes() -> Iterator[Row]:
        for t in transcripts:
            dropped["token_ids_left_out"] += not t.has_tokens and any(turn.prompt is not None for turn in t.turns)
            yield _episode(t)

    yield json_lines("traces.jsonl", episodes())


def _episode(transcript: ExportedTranscript) -> Row:
    rollout, task = transcript.rollout, transcript.task
    fields = {
        "type": "Task",
        "data": {"prompt": task["prompt"], **orjson.loads(task["data_json"])},
        "key": task["task_id"],
    }
    ok = rollout["error_type"] is None
    errors = [] if ok else [{"type": rollout["error_type"], "message": rollout["error"] or ""}]
    episode = {
        "id": f"episode-{rollout['rollout_id']}",
        "env": {"id": rollout["env"]},
        "task": fields,
        "ok": ok,
        "errors": errors,
    }
    return {**episode, "group": {"id": rollout["group_id"]}, "traces": [_trace(transcript, fields, errors)]}


def _trace(transcript: ExportedTranscript, task: Row, errors: list[Row]) -> Row:
    rollout = transcript.rollout
    nodes = _nodes(transcript)
    unscored = {} if rollout["reward"] is None else {"reward": {"score": rollout["reward"], "weight": 1.0}}
    marked = {**transcript.mark, "gt_pass": rollout["gt_pass"], "submission": transcript.submission}
    return {
        "version": 1,
        "id": rollout["rollout_id"],
        "verifiers": {"version": "0.4.0"},
        "task": task,
        "agent": {"config": {"model": rollout["model"]}, "name": "agent", "trainable": True},
        "tools": [_tool(tool) for tool in transcript.tools],
        "nodes": nodes,
        "calls": _calls(transcript, [i for i, node in enumerate(nodes) if node["sampled"]]),
        "rewards": unscored,
        "metrics": {},
        "info": {"composer": marked},
        "is_completed": True,
        "ok": not errors,
        "stop_condition": rollout["terminated_by"],
        "errors": errors,
    }


def _tool(tool: Row) -> Row:
    """A tool as verifiers declares it, from OpenAI's nested or flat form."""
    inner = tool["function"] if isinstance(tool.get("function"), dict) else tool
    fields = {"name": str(inner.get("name") or tool.get("type")), "description": inner.get("description") or ""}
    return {**fields, "parameters": inner.get("parameters") or inner.get("inputSchema") or {}}


def _nodes(transcript: ExportedTranscript) -> list[Row]:
    """A chain of messages. Tokens that a state gained stand, unsampled, before the answer given in it."""
    nodes = [_node(message, sampled=False) for message in transcript.opening]
    for turn in transcript.turns:
        action: Message = {"role": "assistant", "content": turn.step["action"]}
        nodes.append(_node(action, sampled=True) | (_tokens(turn) if transcript.has_tokens else {}))
        nodes += [_node(message, sampled=False) for message in turn.observed]
    return [node if index == 0 else {"parent": index - 1, **node} for index, node in enumerate(nodes)]


def _node(message: Message, *, sampled: bool) -> Row:
    return {"message": _message(message), "sampled": sampled, "token_ids": [], "mask": [], "logprobs": []}


def _message(message: Message) -> Row:
    if message["role"] == "tool":
        return {"role": "tool", "tool_call_id": "", "content": message["content"]}
    if message["role"] != "assistant":
        return {"role": message["role"] if message["role"] == "system" else "user", "content": message["content"]}
    spoken = stages_messages.read(message["content"])
    calls = [{"id": f"call_{i}", "name": c.name, "arguments": c.arguments} for i, c in enumerate(spoken.calls)]
    thought = {} if spoken.reasoning is None else {"reasoning_content": spoken.reasoning}
    return {"role": "assistant", "content": spoken.content, **thought, **({"tool_calls": calls} if calls else {})}


def _tokens(turn: ExportedTurn) -> Row:
    gained, sampled = turn.step["prompt_delta_token_ids"], turn.step["completion_token_ids"]
    mask = [False] * len(gained) + [True] * len(sampled)
    return {"token_ids": [*gained, *sampled], "mask": mask, "logprobs": turn.step["logprobs"]}


def _calls(transcript: ExportedTranscript, nodes: list[int]) -> list[Row]:
    return [_call(turn.step, node) for turn, node in zip(transcript.turns, nodes, strict=True)]


def _call(step: Row, node: int) -> Row:
    """A call names the model, why it ended, and what it took, as far as is known."""
    fields = {"node": node, "model": step["model"], "sampling": orjson.loads(step["sampling_json"] or "null")}
    fields["finish_reason"] = step["finish_reason"] if step["finish_reason"] in ENDS else None
    if step["prompt_tokens"] is not None and step["completion_tokens"] is not None:
        fields["usage"] = {name: step[name] for name in ("prompt_tokens", "completion_tokens")} | {
            "cost": step["cost_usd"]
        }
    return {name: value for name, value in fields.items() if value is not None}
