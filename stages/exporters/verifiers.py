"""verifiers 0.4 and PRIME-RL: `traces.jsonl`, one Episode with one Trace a line, token ids as what each message adds.

Which of the tokens before an answer belong to which message is not known here, so all of them stand before the answer
that followed.
"""

from collections import Counter
from collections.abc import Iterable, Iterator

import orjson

from stages import messages
from stages.exporters.transcripts import ExportedTranscript, ExportedTurn, File, json_lines
from stages.messages import Message
from stages.runs.records import Row

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
    spoken = messages.read(message["content"])
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
