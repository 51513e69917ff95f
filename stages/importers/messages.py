"""Chat messages of every dialect as role and text: content parts, reasoning, tool calls in their usual spellings."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from stages.importers.base import ImportedTurn
from stages.messages import OMITTED, Message, Spoken, ToolCall, write

ROLES = {
    "developer": "system",
    "function": "tool",
    "ipython": "tool",
    "human": "user",
    "ai": "assistant",
    "gpt": "assistant",
    "model": "assistant",
}


def message(raw: Mapping[str, Any]) -> Message:
    """One message as role and text; what is neither text nor a tool call leaves a mark in its place."""
    role = ROLES.get(raw["role"], raw["role"])
    if role == "assistant":
        return {"role": role, "content": write(spoken(raw))}
    return {"role": role, "content": text(raw.get("content"))}


def spoken(raw: Mapping[str, Any]) -> Spoken:
    """The parts of an assistant message."""
    parts = raw["content"] if isinstance(raw.get("content"), list) else []
    reasoning = [raw.get("reasoning_content") or raw.get("reasoning")]
    reasoning += [_thought(part) for part in parts if _type(part) in ("reasoning", "thinking")]
    shown = [part for part in parts if _type(part) not in ("reasoning", "thinking", "redacted_thinking", "tool_use")]
    calls = [call(part) for part in parts if _type(part) == "tool_use" and "input" in part]
    calls += [call(item) for item in raw.get("tool_calls") or []]
    calls += [call(raw["function_call"])] if raw.get("function_call") else []
    content = text(shown) if parts else text(raw.get("content"))
    thoughts = [thought for thought in reasoning if isinstance(thought, str) and thought]
    return Spoken(content, tuple(calls), "\n".join(thoughts) or None)


def _type(part: Any) -> str:
    return str(part.get("type", "")) if isinstance(part, Mapping) else ""


def _thought(part: Mapping[str, Any]) -> str | None:
    return part.get("reasoning") or part.get("thinking") or part.get("summary")


def text(content: Any) -> str:
    """The text of a message's content: a string, a list of parts, or nothing."""
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if isinstance(content, Mapping):
        return _part(content)
    if isinstance(content, Sequence):
        return "\n".join(_part(part) for part in content)
    return json.dumps(content)


def _part(part: Any) -> str:
    if isinstance(part, str):
        return part
    if not isinstance(part, Mapping):
        return json.dumps(part)
    for key in ("text", "refusal", "reasoning", "thinking"):
        if isinstance(part.get(key), str):
            return part[key]
    if "content" in part:
        return text(part["content"])
    return f"{OMITTED}{part.get('type', 'part')}]"


def call(raw: Any) -> ToolCall:
    """A tool call: OpenAI's nested or flat form, Anthropic's, Inspect's, or any of them as JSON text."""
    raw = json.loads(raw) if isinstance(raw, str) else raw
    inner = raw["function"] if isinstance(raw.get("function"), Mapping) else raw
    name = inner.get("name") or inner.get("tool_name") or raw.get("function") or ""
    arguments = next((inner[key] for key in ("arguments", "input", "args", "parameters") if key in inner), None)
    return ToolCall(str(name), arguments_text(arguments))


def arguments_text(arguments: Any) -> str:
    """Arguments as text: what is text already stays as it is, anything else becomes JSON."""
    if isinstance(arguments, str):
        return arguments
    return json.dumps({} if arguments is None else arguments, ensure_ascii=False)


def turns(messages: Sequence[Message]) -> tuple[list[Message], list[ImportedTurn]]:
    """The opening messages, and one turn for every assistant message after them."""
    first = next((i for i, m in enumerate(messages) if m["role"] == "assistant"), len(messages))
    divided: list[ImportedTurn] = []
    for item in messages[first:]:
        if item["role"] == "assistant":
            divided.append(ImportedTurn(item["content"]))
        else:
            divided[-1].observed.append(item)
    return list(messages[:first]), divided
