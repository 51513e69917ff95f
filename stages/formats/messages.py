"""Chat messages of every dialect as role and text: content parts, reasoning, tool calls in their usual spellings."""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from stages.formats.base import ImportedTurn
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


# ---- responses
# OpenAI Responses items as chat messages: all that the model gives between two inputs is one assistant message.

BOOKKEEPING = {"type", "id", "call_id", "status", "output", "outputs", "results"}


@dataclass
class Exchange:
    """One assistant message in the making, with the items it is made of; for other roles, a finished message."""

    reasoning: list[str] = field(default_factory=list)
    content: list[str] = field(default_factory=list)
    calls: list[ToolCall] = field(default_factory=list)
    items: list[Mapping[str, Any]] = field(default_factory=list)
    other: Message | None = None

    def message(self) -> Message:
        """Role and text."""
        if self.other is not None:
            return self.other
        spoken = Spoken("\n".join(self.content), tuple(self.calls), "\n".join(self.reasoning) or None)
        return {"role": "assistant", "content": write(spoken)}


def exchanges(items: Iterable[Mapping[str, Any]]) -> list[Exchange]:
    """Items grouped into messages.

    A new assistant message begins after an input, and where the model speaks or thinks after it has spoken or called.
    """
    grouped: list[Exchange] = []
    for item in items:
        kind = item.get("type") or "message"
        if kind in ("function_call_output", "custom_tool_call_output", "local_shell_call_output"):
            grouped.append(_other({"role": "tool", "content": _output(item.get("output"))}))
        elif kind == "message" and item.get("role") != "assistant":
            grouped.append(_other(message(item)))
        else:
            _say(grouped, kind, item)
    return grouped


def one_message(items: Iterable[Mapping[str, Any]]) -> Message:
    """The items of one response as one assistant message."""
    whole = Exchange()
    for item in items:
        _add(whole, item.get("type") or "message", item)
    return whole.message()


def _other(finished: Message) -> Exchange:
    return Exchange(other=finished)


def _output(output: Any) -> str:
    return output if isinstance(output, str) else text(output) if isinstance(output, list) else json.dumps(output)


def _say(grouped: list[Exchange], kind: str, item: Mapping[str, Any]) -> None:
    speaks = kind in ("message", "reasoning")
    last = grouped[-1] if grouped else None
    if last is None or last.other or (speaks and (last.calls or last.content)):
        grouped.append(Exchange())
    _add(grouped[-1], kind, item)


def _add(current: Exchange, kind: str, item: Mapping[str, Any]) -> None:
    current.items.append(item)
    if kind == "message":
        current.content.append(text(item.get("content")))
    elif kind == "reasoning":
        current.reasoning += [part for part in (text(item.get("summary")), text(item.get("content"))) if part]
    else:
        current.calls.append(_call(kind, item))


def _call(kind: str, item: Mapping[str, Any]) -> ToolCall:
    """A call of a function, of a free-form tool, or of one of the provider's own tools (named by the item's type)."""
    if "name" in item and ("arguments" in item or "input" in item):
        return ToolCall(item["name"], arguments_text(item.get("arguments", item.get("input"))))
    arguments = {key: value for key, value in item.items() if key not in BOOKKEEPING and value is not None}
    return ToolCall(kind.removesuffix("_call"), arguments_text(arguments))
