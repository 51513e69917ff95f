"""Chat messages and Responses items of every dialect."""

import json
from typing import Any

import pytest
from support.transcripts import action, assistant, system, tool, user

from composer_stages.formats.messages import conversation, exchanges, message, response_message, split_turns, spoken
from composer_stages.messages import MessageParts, ToolCall, write

CALL = ToolCall("f", '{"a":  1}')


def test_columns_of_nulls_are_no_calls_and_thoughts_have_many_names() -> None:
    null = {"function": {"name": None, "arguments": None}}
    for more in ({"tool_calls": [null]}, {"tool_calls": "[]"}, {"function_call": null["function"]}):
        assert spoken(assistant("x", **more)) == MessageParts("x")
    unnamed = spoken(assistant("", tool_calls=[{"function": {"name": "", "arguments": "{"}}]))
    assert unnamed.calls == (ToolCall("", "{"),)
    details = [{"type": "reasoning.text", "text": "why"}]
    named = {"reasoning_details": details, "thinking_blocks": details, "reasoning_content": ["why"], "thinking": "why"}
    for name, thought in named.items():
        assert spoken(assistant("x", **{name: thought, "reasoning": True, "thought": "x"})).reasoning == "why"


@pytest.mark.parametrize(
    "raw",
    [
        {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"a":  1}'}},
        {"id": "1", "name": "f", "arguments": '{"a":  1}'},
        '{"id": "1", "function": {"name": "f", "arguments": "{\\"a\\":  1}"}, "type": "function"}',
        {"id": "1", "function": "f", "arguments": '{"a":  1}', "type": "function"},
        {"name": "f", "args": '{"a":  1}'},
    ],
)
def test_every_spelling_of_a_call(raw: Any) -> None:
    assert spoken(assistant(None, tool_calls=[raw])) == MessageParts("", (CALL,))
    assert spoken(assistant(None, tool_calls=json.dumps([raw]))) == MessageParts("", (CALL,))
    beside = write(MessageParts("Hm.", (CALL,), "why"))
    assert spoken(assistant(beside, tool_calls=[raw])).content == write(MessageParts("Hm.", (), "why"))


def test_arguments_that_are_an_object_become_json() -> None:
    parts = spoken(assistant("", tool_calls=[{"function": "f", "arguments": {"a": "é"}}]))
    assert parts.calls == (ToolCall("f", '{"a": "é"}'),)


def test_anthropic_parts() -> None:
    parts = [
        {"type": "thinking", "thinking": "hm", "signature": "s"},
        {"type": "text", "text": "I look."},
        {"type": "tool_use", "id": "1", "name": "f", "input": {"a": 1}},
    ]
    assert spoken(assistant(parts)) == MessageParts("I look.", (ToolCall("f", '{"a": 1}'),), "hm")
    result = {"type": "tool_result", "tool_use_id": "1", "content": [{"type": "text", "text": "ok"}]}
    assert message(user([result])) == user("ok")


def test_roles_and_parts_without_text_are_normalised() -> None:
    assert message({"role": "developer", "content": "x"}) == {"role": "system", "content": "x"}
    parts = [{"type": "text", "text": "a"}, {"type": "image_url", "image_url": {"url": "data:"}}]
    assert message(user(parts)) == user("a\n[omitted: image_url]") and message(tool(None)) == tool("")
    called = message(assistant("", function_call={"name": "f", "arguments": "{}"}))
    assert called["content"].startswith("<tool_call>")


@pytest.mark.parametrize(
    "raw",
    [
        [assistant("", tool_calls=[{"id": name, "function": {"name": name}} for name in "ab"])],
        [assistant([{"type": "tool_use", "id": name, "name": name, "input": {}} for name in "ab"])],
        ["function_call", "function_call_output"],
    ],
)
def test_results_follow_in_the_order_of_their_calls_as_ids_are_not_kept(raw: list[Any]) -> None:
    if isinstance(raw[0], str):
        items = [{"type": raw[0], "name": name, "call_id": name, "arguments": "{}"} for name in "ab"]
        results = [{"type": raw[1], "call_id": name, "output": f"of {name}"} for name in "ba"]
        ordered = [exchange.message() for exchange in exchanges([*items, *results, *items, *results])]
    else:
        results = [tool("of b", tool_call_id="b"), user("between"), tool("of a", tool_call_id="a"), tool("unknown")]
        ordered = conversation([*raw, *results, *raw, *results])  # ids that are used again, as programs do
    observed = [item["content"] for item in ordered if item["role"] == "tool"]
    assert [text for text in observed if text != "unknown"] == ["of a", "of b"] * 2
    assert conversation([tool("alone", tool_call_id="z"), *results[:0]]) == [tool("alone")]


def test_turns_begin_with_the_first_answer() -> None:
    request = [system("s"), user("q")]
    opening, turns = split_turns([*request, assistant("a"), tool("t"), tool("u"), assistant("b")])
    assert opening == request and [t.action for t in turns] == ["a", "b"]
    assert turns[0].observed == [tool("t"), tool("u")] and turns[1].observed == []
    assert split_turns(request) == (request, [])


def test_responses_items_group_into_messages() -> None:
    items = [
        user("q"),
        {"type": "reasoning", "summary": [{"text": "one"}]},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "I call."}]},
        {"type": "function_call", "name": "f", "arguments": '{"a":  1}', "call_id": "1"},
        {"type": "custom_tool_call", "name": "g", "input": "free text", "call_id": "2"},
        {"type": "web_search_call", "id": "ws", "status": "completed", "action": {"query": "q"}},
        {"type": "function_call_output", "call_id": "1", "output": [{"type": "output_text", "text": "out"}]},
        {"type": "reasoning", "summary": []},
        {"type": "message", "role": "assistant", "content": "Done."},
        {"type": "message", "role": "assistant", "content": "Really."},
    ]
    messages = [exchange.message() for exchange in exchanges(items)]
    assert [m["role"] for m in messages] == ["user", "assistant", "tool", "assistant", "assistant"]
    calls = (("f", '{"a":  1}'), ("g", "free text"), ("web_search", '{"action": {"query": "q"}}'))
    assert messages[1]["content"] == action("I call.", *calls, thought="one")
    assert [m["content"] for m in messages[2:]] == ["out", "Done.", "Really."]
    assert response_message(items[8:])["content"] == "Done.\nReally."
