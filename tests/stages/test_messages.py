"""Tool calls in the text of an action."""

import json

import pytest
from hypothesis import given, settings, strategies as st

from composer_stages.messages import MessageParts, ToolCall, is_object, read, write
from composer_stages.pairs.actions import canonical_call

TEXT = st.text(alphabet='ab \n<>/{}"\\tool_calhink:,é', max_size=40)


def test_a_message_is_written_in_the_documented_form() -> None:
    call = ToolCall("search_pages", '{"query": "Utsuro-bune"}')
    text = write(MessageParts("Let me search.", (call,), "I should look the term up."))
    assert text == (
        "<think>\nI should look the term up.\n</think>\n\nLet me search.\n"
        '<tool_call>\n{"name": "search_pages", "arguments": {"query": "Utsuro-bune"}}\n</tool_call>'
    )
    assert read(text) == MessageParts("Let me search.", (call,), "I should look the term up.")


ARGUMENTS = ['{"a": 1,   "b":[ 2 ]}', "{}", "", "not json", "[1, 2]", '{"a": 1', ' {"a": 1}', "null", '"quoted"']


@pytest.mark.parametrize("arguments", [*ARGUMENTS, '{"c": "</tool_call>"}'])
def test_arguments_round_trip(arguments: str) -> None:
    calls = (ToolCall("one", arguments), ToolCall("two", '{"x": "<tool_call>"}'))
    assert read(write(MessageParts("said", calls))).calls == calls
    assert read(write(MessageParts("", calls))).calls == calls


def test_calls_inside_text_are_content() -> None:
    for text in (
        "Use <tool_call>\n{broken}\n</tool_call> like this.",
        'x <tool_call>\n{"name": "a", "arguments": {}}\n</tool_call>',
        write(MessageParts("", (ToolCall("a", "{}"),))) + "\nand more",
        "<think>\n\n</think>\n\nIt is 42.",  # an empty thought
        "",
    ):
        assert read(text) == MessageParts(text)
    assert write(MessageParts("It is 42.", (), "")) == "It is 42."


@settings(max_examples=60)
@given(TEXT)
def test_any_text_round_trips(text: str) -> None:
    assert write(read(text)) == text


@settings(max_examples=60)
@given(
    TEXT,
    st.lists(st.tuples(TEXT, st.one_of(TEXT, st.dictionaries(TEXT, TEXT).map(json.dumps))), max_size=3),
    st.none() | TEXT,
)
def test_written_messages_round_trip(content: str, calls: list[tuple[str, str]], reasoning: str | None) -> None:
    text = write(MessageParts(content, tuple(ToolCall(*call) for call in calls), reasoning))
    assert write(read(text)) == text


def test_a_deeply_nested_object_is_text() -> None:
    """A model wrote it: as an object it would be walked and written again, beyond what Python and orjson take."""
    deep = '{"a":' + "[" * 900 + "]" * 900 + "}"
    text = write(MessageParts("", (ToolCall("f", deep),)))
    assert not is_object(deep) and read(text).calls == (ToolCall("f", deep),)
    assert canonical_call(ToolCall("f", deep)) == f"f({json.dumps(deep)})"


def test_is_object_accepts_only_a_single_object() -> None:
    assert is_object('{"a": {"b": []}}') and not is_object('{"a": 1} ') and not is_object("{") and not is_object("3")
