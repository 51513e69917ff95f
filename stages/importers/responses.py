"""OpenAI Responses items as chat messages: all that the model gives between two inputs is one assistant message."""

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from stages.importers.messages import arguments_text, message, text
from stages.messages import Message, Spoken, ToolCall, write

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
