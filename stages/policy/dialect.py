"""The chat dialect of servers: calls, their results and `tools` as chat completions have them.

A recorded conversation holds calls in the text of its assistant messages (`stages.messages`). A server gets them as
`tool_calls`, each answered by a message of role `tool` with its id, and beside them the tools that the source declared.
What cannot be said so stays text, and its results come from the user: calls of undeclared tools (no `tools` at all),
arguments that are no JSON object, calls without a result each. Reasoning is not sent: it was the student's own, and
servers refuse it or leave it out. Pictures and sounds are gaps: a mark in the text says where one was.
"""

import re
from collections.abc import Sequence
from itertools import takewhile
from typing import Any

from stages.messages import Message, Spoken, is_object, read, write

NAME = re.compile(r"[a-zA-Z0-9_-]{1,64}")
"""What servers take as the name of a function."""
ROLES = {"system", "user", "assistant"}
NO_PARAMETERS = {"type": "object", "properties": {}}


def declared(tools: Sequence[Any]) -> list[dict[str, Any]]:
    """Tools as chat completions declare them, from OpenAI's nested or flat form or Anthropic's.

    One whose name no server would take is left out.
    """
    functions = [tool.get("function", tool) if isinstance(tool, dict) else {} for tool in tools]
    return [
        {"type": "function", "function": _function(function)}
        for function in functions
        if isinstance(function, dict) and NAME.fullmatch(str(function.get("name", "")))
    ]


def _function(function: dict[str, Any]) -> dict[str, Any]:
    parameters = function.get("parameters") or function.get("input_schema") or NO_PARAMETERS
    about = {"description": function["description"]} if isinstance(function.get("description"), str) else {}
    return {"name": function["name"], **about, "parameters": parameters}


def conversation(messages: Sequence[Message], *, with_tools: bool) -> list[dict[str, Any]]:
    """Messages as a server reads them: no role, field or order that the protocol does not have."""
    sent: list[dict[str, Any]] = []
    answering: list[str] = []
    for index, message in enumerate(messages):
        role, content = message["role"], message["content"]
        if role == "assistant":
            spoken = read(content)
            results = takewhile(lambda following: following["role"] == "tool", messages[index + 1 :])
            native = with_tools and _sayable(spoken, sum(1 for _ in results))
            answering = [f"call{len(sent):03d}{n:02d}" for n in range(len(spoken.calls))] if native else []
            sent.append(_assistant(spoken, answering))
        elif role == "tool" and answering:
            sent.append({"role": "tool", "tool_call_id": answering.pop(0), "content": content})
        else:
            sent.append({"role": role if role in ROLES else "user", "content": content})
    return sent


def _sayable(spoken: Spoken, num_results: int) -> bool:
    """Whether all calls of a message can be said natively: named and spelled as servers want, each with a result."""
    calls = spoken.calls
    return num_results == len(calls) > 0 and all(NAME.fullmatch(c.name) and is_object(c.arguments) for c in calls)


def _assistant(spoken: Spoken, ids: Sequence[str]) -> dict[str, Any]:
    """`ids`, nine letters and digits each (some servers want exactly that), name native calls; without any, text."""
    if not ids:
        return {"role": "assistant", "content": write(Spoken(spoken.content, spoken.calls))}
    calls = [
        {"id": name, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
        for name, call in zip(ids, spoken.calls, strict=True)
    ]
    return {"role": "assistant", "content": spoken.content or None, "tool_calls": calls}
