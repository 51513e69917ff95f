"""Chat messages and Responses items of every dialect."""

from typing import Any

import pytest

from stages.formats.messages import exchanges, message, response_message, split_turns, spoken
from stages.messages import Spoken, ToolCall

CALL = ToolCall("f", '{"a":  1}')


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
    assert spoken({"role": "assistant", "content": None, "tool_calls": [raw]}) == Spoken("", (CALL,))


def test_arguments_that_are_an_object_become_json() -> None:
    said = spoken({"role": "assistant", "content": "", "tool_calls": [{"function": "f", "arguments": {"a": "é"}}]})
    assert said.calls == (ToolCall("f", '{"a": "é"}'),)


def test_anthropic_parts() -> None:
    parts = [
        {"type": "thinking", "thinking": "hm", "signature": "s"},
        {"type": "text", "text": "I look."},
        {"type": "tool_use", "id": "1", "name": "f", "input": {"a": 1}},
    ]
    assert spoken({"role": "assistant", "content": parts}) == Spoken("I look.", (ToolCall("f", '{"a": 1}'),), "hm")
    result = {
        "role": "user",
        "content": [{"type": "tool_result", "tool_use_id": "1", "content": [{"type": "text", "text": "ok"}]}],
    }
    assert message(result) == {"role": "user", "content": "ok"}


def test_roles_parts_and_what_is_no_text() -> None:
    assert message({"role": "developer", "content": "x"}) == {"role": "system", "content": "x"}
    seen = message(
        {
            "role": "user",
            "content": [{"type": "text", "text": "a"}, {"type": "image_url", "image_url": {"url": "data:"}}],
        }
    )
    assert seen["content"] == "a\n[omitted: image_url]"
    assert message({"role": "tool", "content": None})["content"] == ""
    assert message({"role": "assistant", "content": "", "function_call": {"name": "f", "arguments": "{}"}})[
        "content"
    ].startswith("<tool_call>")


def test_turns_begin_with_the_first_answer() -> None:
    opening, found = split_turns(
        [
            {"role": r, "content": c}
            for r, c in (
                ("system", "s"),
                ("user", "q"),
                ("assistant", "a"),
                ("tool", "t"),
                ("tool", "u"),
                ("assistant", "b"),
            )
        ]
    )
    assert [m["content"] for m in opening] == ["s", "q"] and [t.action for t in found] == ["a", "b"]
    assert [m["content"] for m in found[0].observed] == ["t", "u"] and found[1].observed == []
    assert split_turns([{"role": "user", "content": "q"}]) == ([{"role": "user", "content": "q"}], [])


def test_responses_items_group_into_messages() -> None:
    items = [
        {"role": "user", "content": "q"},
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
    found = [one.message() for one in exchanges(items)]
    assert [m["role"] for m in found] == ["user", "assistant", "tool", "assistant", "assistant"]
    assert found[1]["content"] == (
        '<think>\none\n</think>\n\nI call.\n<tool_call>\n{"name": "f", "arguments": {"a":  1}}\n</tool_call>'
        '\n<tool_call>\n{"name": "g", "arguments": "free text"}\n</tool_call>'
        '\n<tool_call>\n{"name": "web_search", "arguments": {"action": {"query": "q"}}}\n</tool_call>'
    )
    assert [m["content"] for m in found[2:]] == ["out", "Done.", "Really."]
    assert response_message(items[8:])["content"] == "Done.\nReally."
