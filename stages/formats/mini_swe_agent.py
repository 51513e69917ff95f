"""mini-swe-agent `.traj.json`: one conversation a file, of versions 1 and 2.

Actions are text, tool calls or Responses objects. Version 2 leaves an assistant message that it could not parse out of
the conversation and keeps it beside the error that the agent was shown; it is put back in its place here, so that the
number of steps is the number of model calls.

Format read from SWE-agent/mini-swe-agent at a83fcae82 and from runs of 1.15.0.
"""

import re
from collections.abc import Iterator
from typing import Any

from composer_stages.formats.base import INSTANCE, ImportedTurn, Origin, Reader, Record, Trajectory
from composer_stages.formats.messages import exchanges, first_question, in_order_of_calls, message, response_message
from composer_stages.formats.reports import stem
from composer_stages.messages import Message
from composer_stages.words import Sentence

NAME = "mini-swe-agent"
BLOCK = re.compile(r"```(?:bash|mswea_bash_command)\s*\n(.*?)\n```", re.DOTALL)
STATEMENT = re.compile(
    r"<pr_description>\s*(?:Consider the following PR description:\n)?(.*?)\n?</pr_description>", re.DOTALL
)
RETURNED = re.compile(r"<returncode>(-?\d+)</returncode>")
ELIDED = re.compile(r"<elided_chars>\s*(\d+) characters elided")


def recognises(record: Any) -> bool:
    """Whether a record has messages and the agent's own information, or is a bare list of messages."""
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
    """Yield the one rollout of a file. Its verdict is known only from a report."""
    record = {"messages": record} if isinstance(record, list) else record
    info, (opening, turns) = record.get("info") or {}, _conversation(record["messages"])
    statement = STATEMENT.search(first_question(opening))
    # Only batch runs write `instance_id`; the name of a file may begin with the instance.
    of_name = INSTANCE.match(stem(origin.path))
    instance = record.get("instance_id") or (of_name.group() if of_name else None)
    config = (info.get("config") or {}).get("model") or {}
    yield Trajectory(
        task_id=instance or "",
        opening=opening,
        turns=turns,
        model=config.get("model_name"),
        statement=statement.group(1) if statement else None,
        submission=info.get("submission"),
        terminated_by=str(info["exit_status"]).lower() if info.get("exit_status") else None,
        sampling=config.get("model_kwargs"),
        cost_usd=(info.get("model_stats") or {}).get("instance_cost"),
        extra={
            "agent": f"mini-swe-agent {info.get('mini_version', '')}".strip(),
            "info": {k: v for k, v in info.items() if k != "submission"},
        },
    )


def _conversation(raw: list[Record]) -> tuple[list[Message], list[ImportedTurn]]:
    opening: list[Message] = []
    turns: list[ImportedTurn] = []
    for item in in_order_of_calls(raw):
        extra = item.get("extra") or {}
        if item.get("role") == "exit":
            continue  # version 2 ends with a message that repeats the exit status and the submission
        if item.get("role") == "assistant" or item.get("object") == "response":
            turns.append(_turn(item, extra))
            continue
        response = extra.get("response")
        if extra.get("interrupt_type") == "FormatError" and isinstance(response, dict):
            # The assistant message that was left out of the conversation, from Chat Completions or the Responses API.
            choices = response.get("choices") or []
            if lost := choices[0]["message"] if choices else response if "output" in response else None:
                turns.append(_turn(lost, {**extra, "actions": []}))
        # With the Responses API, outputs of commands are items without a role.
        is_result = item.get("type") == "function_call_output"
        observed = exchanges([item])[0].message() if is_result else message(item)
        if turns:
            turns[-1].observed.append(observed)
            _add_output(turns[-1], observed["content"], extra)
        else:
            opening.append(observed)
    return opening, turns


def _turn(item: Record, extra: Record) -> ImportedTurn:
    """Return the turn of an assistant message or response, with the raw reply's finish reason, tokens and cost."""
    is_response = "output" in item
    response = item if is_response else extra.get("response")
    if is_response:
        answer = response_message(item["output"])
    else:
        thoughts: Record = {}
        choices = response.get("choices") if isinstance(response, dict) else None
        if choices and not (item.get("reasoning_content") or item.get("reasoning")):
            # Version 1 leaves the reasoning of the raw reply out of the conversation.
            reply = choices[0].get("message") or {}
            thoughts = {k: reply[k] for k in ("reasoning_content", "reasoning") if isinstance(reply.get(k), str)}
        answer = message({"role": "assistant", **item, **thoughts})
    # Version 2 notes the actions that it parsed; for version 1 its own pattern is applied to the text again.
    actions = extra.get("actions")
    commands = [a["command"] for a in actions] if actions is not None else BLOCK.findall(answer["content"])
    turn = ImportedTurn(answer["content"], commands=commands, cost_usd=extra.get("cost"))
    if len(commands) != 1 and not (commands and (item.get("tool_calls") or is_response)):
        turn.parse_error = Sentence("formats.not-one-action", num_commands=len(commands))
    if isinstance(response, dict):
        choice, usage = (response.get("choices") or [{}])[0], response.get("usage") or {}
        # LiteLLM moves fields that OpenAI's schema lacks, such as vLLM's token ids, to `provider_specific_fields`.
        provider_fields = choice.get("provider_specific_fields") or {}
        turn.finish_reason = choice.get("finish_reason") or response.get("status")
        turn.prompt_ids = response.get("prompt_token_ids") or None
        turn.completion_ids = choice.get("token_ids") or provider_fields.get("token_ids") or None
        content = (choice.get("logprobs") or {}).get("content") or []
        turn.logprobs = [token["logprob"] for token in content] or None
        turn.prompt_tokens = usage.get("prompt_tokens", usage.get("input_tokens"))
        turn.completion_tokens = usage.get("completion_tokens", usage.get("output_tokens"))
        turn.cost_usd = turn.cost_usd if turn.cost_usd is not None else usage.get("cost")
    return turn


def _add_output(turn: ImportedTurn, content: str, extra: Record) -> None:
    """Add what is known of a command's output, from the record or else from the text that the agent was shown."""
    returned, elided = RETURNED.search(content), ELIDED.search(content)
    if extra.get("returncode") is not None:
        turn.returncode = extra["returncode"]
    elif returned:
        turn.returncode = int(returned.group(1))
    # Version 2 keeps the output as it was; what the observation left out of it is in the text that was shown.
    if isinstance(extra.get("raw_output"), str):
        turn.raw_chars, turn.elided_chars = len(extra["raw_output"]), 0
    if elided or returned:
        turn.elided_chars = int(elided.group(1)) if elided else 0
    if extra.get("interrupt_type") == "FormatError" and turn.parse_error is None:
        turn.parse_error = content.split("\n")[0]


READERS = (Reader(NAME, recognises, trajectories),)
