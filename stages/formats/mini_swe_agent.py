"""mini-swe-agent `.traj.json`: one conversation a file, of versions 1 and 2.

Actions are text, tool calls or Responses objects. Version 2 leaves an assistant message that it could not parse out of
the conversation and keeps it beside the error that the agent was shown; it is put back in its place here, so that the
number of steps is the number of model calls.

Format read from SWE-agent/mini-swe-agent at a83fcae82 and from runs of 1.15.0.
"""

import re
from collections.abc import Iterator
from typing import Any

from stages.formats.base import INSTANCE, ImportedTurn, Origin, Reader, Record, Trajectory, family_of
from stages.formats.messages import exchanges, message, response_message
from stages.formats.reports import stem
from stages.messages import Message
from stages.rollouts import missing
from stages.runs import store

NAME = "mini-swe-agent"
MISSING = frozenset({missing.CALL_IDS})
BLOCK = re.compile(r"```(?:bash|mswea_bash_command)\s*\n(.*?)\n```", re.DOTALL)
STATEMENT = re.compile(
    r"<pr_description>\s*(?:Consider the following PR description:\n)?(.*?)\n?</pr_description>", re.DOTALL
)
RETURNED = re.compile(r"<returncode>(-?\d+)</returncode>")
ELIDED = re.compile(r"<elided_chars>\s*(\d+) characters elided")


def recognises(record: Any) -> bool:
    """Messages with the agent's own information beside them, or a bare list of messages."""
    if isinstance(record, list):
        return bool(record) and all(
            isinstance(item, dict) and ("role" in item or item.get("object") == "response") for item in record
        )
    if not isinstance(record, dict) or not isinstance(record.get("messages"), list):
        return False
    info = record.get("info")
    named = str(record.get("trajectory_format", "")).startswith("mini-swe-agent")
    return named or (isinstance(info, dict) and bool({"mini_version", "exit_status"} & info.keys()))


def trajectories(record: Any, origin: Origin) -> Iterator[Trajectory]:
    """The one rollout of a file. Whether it resolved its instance is known only from a report beside it."""
    record = {"messages": record} if isinstance(record, list) else record
    info, (opening, turns) = record.get("info") or {}, _conversation(record["messages"])
    asked = next((item["content"] for item in opening if item["role"] == "user"), "")
    statement = STATEMENT.search(asked)
    instance = record.get("instance_id") or _instance(origin)
    verdict = origin.sidecars.verdict(origin.path, instance)
    resolved = verdict.resolved if verdict else None
    config = (info.get("config") or {}).get("model") or {}
    yield Trajectory(
        task_id=instance or f"{NAME}/{store.digest(asked)[:12]}",
        env="swe-bench" if instance else NAME,
        opening=opening,
        turns=turns,
        missing=set(MISSING) | _unknown(turns, resolved),
        model=config.get("model_name") or (verdict.model if verdict else None),
        statement=statement.group(1) if statement else None,
        family=family_of(instance) if instance else None,
        reward=None if resolved is None else float(resolved),
        resolved=resolved,
        submission=info.get("submission"),
        terminated_by=str(info["exit_status"]).lower() if info.get("exit_status") else None,
        sampling=config.get("model_kwargs"),
        cost_usd=(info.get("model_stats") or {}).get("instance_cost"),
        extra={
            "agent": f"mini-swe-agent {info.get('mini_version', '')}".strip(),
            "info": {k: v for k, v in info.items() if k != "submission"},
        },
    )


def _instance(origin: Origin) -> str | None:
    """An instance id from the file's name."""
    match = INSTANCE.match(stem(origin.path))
    return match.group() if match else None


def _unknown(turns: list[ImportedTurn], resolved: bool | None) -> set[missing.Fact]:
    unjudged = {missing.REWARD} if resolved is None else set()
    unsaid = set() if any(turn.finish_reason for turn in turns) else {missing.FINISH}
    return unjudged | unsaid | (set() if any(turn.elided_chars is not None for turn in turns) else {missing.ELISION})


def _conversation(raw: list[Record]) -> tuple[list[Message], list[ImportedTurn]]:
    opening: list[Message] = []
    turns: list[ImportedTurn] = []
    for item in raw:
        extra = item.get("extra") or {}
        if item.get("role") == "exit":
            continue
        if item.get("role") == "assistant" or item.get("object") == "response":
            turns.append(_turn(item, extra))
            continue
        if lost := _lost(extra):
            turns.append(_turn(lost, {**extra, "actions": []}))
        observed = _input(item)
        if turns:
            turns[-1].observed.append(observed)
            _observe(turns[-1], observed["content"], extra)
        else:
            opening.append(observed)
    return opening, turns


def _lost(extra: Record) -> Record | None:
    """The assistant message that a format error stands for, where it was left out of the conversation."""
    response = extra.get("response")
    if extra.get("interrupt_type") != "FormatError" or not isinstance(response, dict):
        return None
    choices = response.get("choices") or []
    return choices[0]["message"] if choices else response if "output" in response else None


def _input(item: Record) -> Message:
    if item.get("type") == "function_call_output":
        return exchanges([item])[0].message()
    return message(item)


def _turn(item: Record, extra: Record) -> ImportedTurn:
    answer = (
        response_message(item["output"])
        if "output" in item
        else message({"role": "assistant", **item, **_thoughts(item, extra)})
    )
    actions = extra.get("actions")
    commands = [a["command"] for a in actions] if actions is not None else BLOCK.findall(answer["content"])
    calls = item.get("tool_calls") or "output" in item
    turn = ImportedTurn(answer["content"], commands=commands, cost_usd=extra.get("cost"))
    turn.parse_error = (
        None if len(commands) == 1 or (calls and commands) else f"expected one action, found {len(commands)}"
    )
    response = item if "output" in item else extra.get("response")
    return _with_reply(turn, response) if isinstance(response, dict) else turn


def _thoughts(item: Record, extra: Record) -> Record:
    """The reasoning of the raw reply where the conversation leaves it out, as version 1 does."""
    if item.get("reasoning_content") or item.get("reasoning"):
        return {}
    response = extra.get("response")
    choices = response.get("choices") if isinstance(response, dict) else None
    said = (choices[0].get("message") or {}) if choices else {}
    return {key: said[key] for key in ("reasoning_content", "reasoning") if isinstance(said.get(key), str)}


def _with_reply(turn: ImportedTurn, response: Record) -> ImportedTurn:
    """What the raw reply says: why it ended, its tokens, its cost."""
    choice, usage = (response.get("choices") or [{}])[0], response.get("usage") or {}
    held = choice.get("provider_specific_fields") or {}
    turn.finish_reason = choice.get("finish_reason") or response.get("status")
    turn.prompt_ids = response.get("prompt_token_ids") or None
    turn.completion_ids = choice.get("token_ids") or held.get("token_ids") or None
    content = (choice.get("logprobs") or {}).get("content") or []
    turn.logprobs = [token["logprob"] for token in content] or None
    turn.prompt_tokens = usage.get("prompt_tokens", usage.get("input_tokens"))
    turn.completion_tokens = usage.get("completion_tokens", usage.get("output_tokens"))
    turn.cost_usd = turn.cost_usd if turn.cost_usd is not None else usage.get("cost")
    return turn


def _observe(turn: ImportedTurn, content: str, extra: Record) -> None:
    """What is known about the output of a command, from the record or else from the text that the agent saw."""
    returned, elided = RETURNED.search(content), ELIDED.search(content)
    if extra.get("returncode") is not None:
        turn.returncode = extra["returncode"]
    elif returned:
        turn.returncode = int(returned.group(1))
    if isinstance(extra.get("raw_output"), str):
        turn.raw_chars, turn.elided_chars = len(extra["raw_output"]), 0
    if elided or returned:
        turn.elided_chars = int(elided.group(1)) if elided else 0
    if extra.get("interrupt_type") == "FormatError" and turn.parse_error is None:
        turn.parse_error = content.split("\n")[0]


READERS = (Reader(NAME, MISSING, recognises, trajectories),)
