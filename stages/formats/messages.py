"""Chat messages of every dialect as role and text: content parts, reasoning, tool calls, OpenAI Responses items."""

import json
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import compress
from operator import itemgetter, not_
from typing import Any

from composer_stages import json_text
from composer_stages.formats.base import FIELDS, ImportedTurn, Record
from composer_stages.messages import (
    OMITTED,
    Message,
    MessageParts,
    ToolCall,
    thought_of,
    thoughts_beside,
    without_calls,
    write,
)
from composer_stages.words import Sentence

ROLES = {name: role for role, names in FIELDS["roles"].items() for name in (role, *names)}
RESULTS = ("function_call_output", "custom_tool_call_output", "local_shell_call_output")
"""Types of Responses items that hold the result of a call."""
BOOKKEEPING = {"type", "id", "call_id", "status", "output", "outputs", "results"}
"""Keys of a provider's own tool call in a Responses item that are no arguments."""


def message(raw: Mapping[str, Any]) -> Message:
    """Return one message as role and text; a part that is neither text nor a tool call leaves a mark.

    `ValueError` for a role that no dialect has.
    """
    role = ROLES.get(str(raw["role"]).lower())
    if role is None:
        raise ValueError(Sentence("formats.unknown-role", role=f"{raw['role']!r:.40}", roles=[*FIELDS["roles"]]))
    return {"role": role, "content": write(spoken(raw)) if role == "assistant" else text(raw.get("content"))}


def conversation(raw: Iterable[Record]) -> list[Message]:
    """Return messages as role and text, the results of every answer's calls in the order of the calls."""
    return [message(item) for item in in_order_of_calls(raw)]


def in_order_of_calls(raw: Iterable[Record]) -> list[Record]:
    """Return messages, or Responses items, with the results of every answer's calls in the order of the calls.

    As ids are not kept, that order alone says which call a result is of, and programs that run the calls of an answer
    at the same time write each result when it is there.
    """
    ordered, numbers, results = list(raw), dict[str, int](), list[tuple[int, int, Record]]()
    groups = [results]
    for position, item in enumerate(ordered):
        calls, answered = _call_ids(item), str(item.get("tool_call_id") or item.get("call_id"))
        if calls or ROLES.get(str(item.get("role")).lower()) == "assistant":
            # A later call counts where ids are used again, as by programs that number the calls of each answer.
            numbers |= {call_id: position + number for number, call_id in enumerate(calls)}
            groups.append(results := [])
        elif answered in numbers:
            results.append((numbers[answered], position, item))
    for results in groups:
        for (_, position, _), (_, _, result) in zip(results, sorted(results, key=itemgetter(0)), strict=True):
            ordered[position] = result
    return ordered


def _call_ids(item: Mapping[str, Any]) -> list[str]:
    """Return the ids of the calls of a message; of the one that a Responses item is."""
    if "call_id" in item:
        return [] if item.get("type") in RESULTS else [str(item["call_id"])]
    parts, calls = item.get("content"), item.get("tool_calls")
    parts = [part for part in parts if isinstance(part, Mapping)] if isinstance(parts, list) else []
    calls = [json_text.loads(it) if isinstance(it, str) else it for it in calls] if isinstance(calls, list) else []
    calls_made = [*(part for part in parts if part.get("type") == "tool_use"), *calls]
    return [str(it.get("id") or it.get("call_id")) for it in calls_made if isinstance(it, Mapping)]


def user_messages(content: Any) -> Iterator[Record]:
    """Yield a user's content in Anthropic's form as messages: the results of calls, then all other parts."""
    parts = content if isinstance(content, list) else [content]
    results = [isinstance(part, Mapping) and part.get("type") == "tool_result" for part in parts]
    for part in compress(parts, results):
        yield {"role": "tool", "tool_call_id": part.get("tool_use_id"), "content": part.get("content")}
    if other_parts := list(compress(parts, map(not_, results))):
        yield {"role": "user", "content": other_parts}


def spoken(raw: Mapping[str, Any]) -> MessageParts:
    """Return the parts of an assistant message."""
    parts = raw["content"] if isinstance(raw.get("content"), list) else []
    typed = [(str(part.get("type", "")) if isinstance(part, Mapping) else "", part) for part in parts]
    visible = [part for kind, part in typed if kind != "tool_use" and thought_of(part) is None]
    calls = [call(part) for kind, part in typed if kind == "tool_use" and "input" in part]
    # Tables hold calls as JSON text; `function_call` is OpenAI's form before tools, one call a message.
    for value in (raw.get("tool_calls"), raw.get("function_call")):
        beside = json_text.loads(value) if isinstance(value, str) and value.strip() else value
        beside = beside if isinstance(beside, list) else [beside]
        # A column of structs has every field in every row: a message without a call may have one of nulls.
        calls += [read for item in beside if item and (read := call(item)) != ToolCall("", "{}")]
    thought = thoughts_beside({**raw, "thought": None})  # SWE-agent's is a part of the content
    content = text(visible) if parts else text(raw.get("content") or raw.get("refusal"))
    return MessageParts(without_calls(content) if calls else content, tuple(calls), thought)


def text(content: Any) -> str:
    """Return the text of a message's content: a string, one part, a list of parts, or nothing."""
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if isinstance(content, Mapping):
        return _part_text(content)
    if isinstance(content, Sequence):
        return "\n".join(_part_text(part) for part in content)
    return json.dumps(content)


def _part_text(part: Any) -> str:
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
    """Return a tool call from OpenAI's nested or flat form, Anthropic's, Inspect's, or any of them as JSON text."""
    # verifiers before 0.4 writes each call as JSON text, whose arguments are JSON text again.
    raw = json_text.loads(raw) if isinstance(raw, str) else raw
    # OpenAI nests name and arguments under `function`; Inspect has the name there.
    inner = raw["function"] if isinstance(raw.get("function"), Mapping) else raw
    of_inspect = raw.get("function") if inner is raw else ""
    name = inner.get("name") or inner.get("tool_name") or of_inspect or ""
    arguments = next((inner[key] for key in ("arguments", "input", "args", "parameters") if key in inner), None)
    return ToolCall(str(name), arguments_text(arguments))


def arguments_text(arguments: Any) -> str:
    """Return arguments as text: text as it is, anything else as JSON."""
    if isinstance(arguments, str):
        return arguments
    return json.dumps({} if arguments is None else arguments, ensure_ascii=False)


def split_turns(messages: Sequence[Message], masked: Container[int] = ()) -> tuple[list[Message], list[ImportedTurn]]:
    """Return the opening messages, and one turn for every assistant message after them.

    masked: positions of assistant messages that are no turns, as the model is not to learn them.
    """
    opening, turns = list[Message](), list[ImportedTurn]()
    for position, item in enumerate(messages):
        if item["role"] == "assistant" and position not in masked:
            turns.append(ImportedTurn(item["content"]))
        else:
            context(opening, turns).append(item)
    return opening, turns


def context(opening: list[Message], turns: Sequence[ImportedTurn]) -> list[Message]:
    """Return the list to which the next message without an action belongs: of the last turn, else the opening."""
    return turns[-1].observed if turns else opening


def first_question(opening: Sequence[Message]) -> str:
    """Return the text of the first user message, empty without one; it identifies a task that has no name."""
    return next((item["content"] for item in opening if item["role"] == "user"), "")


@dataclass
class Exchange:
    """One assistant message built of Responses items; for other roles, a finished message.

    Everything that the model returns between two inputs is one assistant message.
    """

    reasoning: list[str] = field(default_factory=list)
    content: list[str] = field(default_factory=list)
    calls: list[ToolCall] = field(default_factory=list)
    items: list[Mapping[str, Any]] = field(default_factory=list)
    input_message: Message | None = None

    def add(self, kind: str, item: Mapping[str, Any]) -> None:
        """Add an item of the model."""
        self.items.append(item)
        if kind == "message":
            self.content.append(text(item.get("content")))
        elif kind == "reasoning":
            self.reasoning += [part for part in (text(item.get("summary")), text(item.get("content"))) if part]
        elif "name" in item and ("arguments" in item or "input" in item):
            # A function has `arguments`, a custom (free-form) tool `input`.
            arguments = item.get("arguments", item.get("input"))
            self.calls.append(ToolCall(item["name"], arguments_text(arguments)))
        else:
            # One of the provider's own tools (web search, local shell), named by the item's type.
            fields = {key: value for key, value in item.items() if key not in BOOKKEEPING and value is not None}
            self.calls.append(ToolCall(kind.removesuffix("_call"), arguments_text(fields)))

    def message(self) -> Message:
        """Return role and text."""
        if self.input_message is not None:
            return self.input_message
        parts = MessageParts("\n".join(self.content), tuple(self.calls), "\n".join(self.reasoning) or None)
        return {"role": "assistant", "content": write(parts)}


def exchanges(items: Iterable[Record]) -> list[Exchange]:
    """Return Responses items grouped into messages.

    A new assistant message begins after an input, and where the model speaks or thinks after it has spoken or called.
    """
    grouped: list[Exchange] = []
    for item in in_order_of_calls(items):
        kind = item.get("type") or "message"
        if kind in RESULTS:
            # The output of a function may be text, a list of parts or, from programs that skip the schema, an object.
            output = item.get("output")
            result = text(output) if isinstance(output, str | list) else json.dumps(output)
            grouped.append(Exchange(input_message={"role": "tool", "content": result}))
        elif kind == "message" and item.get("role") != "assistant":
            grouped.append(Exchange(input_message=message(item)))
        else:
            last = grouped[-1] if grouped else None
            speaks = kind in ("message", "reasoning")
            if last is None or last.input_message or (speaks and (last.calls or last.content)):
                grouped.append(Exchange())
            grouped[-1].add(kind, item)
    return grouped


def response_message(items: Iterable[Mapping[str, Any]]) -> Message:
    """Return all items of one response as one assistant message."""
    response = Exchange()
    for item in items:
        response.add(item.get("type") or "message", item)
    return response.message()
