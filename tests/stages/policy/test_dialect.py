"""The dialect of servers: whatever was recorded, a server that takes nothing beyond the protocol takes it."""

import json
from typing import Any

from hypothesis import given
from hypothesis import strategies as st
from support.server import fault

from stages.messages import Spoken, ToolCall, write
from stages.policy.dialect import conversation, declared

SEARCH = {"name": "search", "description": "Search.", "parameters": {"type": "object", "properties": {}}}
CALL = ToolCall("search", '{"query": "boat"}')


def said(content: str = "", *calls: ToolCall, reasoning: str | None = None) -> dict[str, str]:
    return {"role": "assistant", "content": write(Spoken(content, calls, reasoning))}


def told(content: str, role: str = "tool") -> dict[str, str]:
    return {"role": role, "content": content}


def test_calls_and_results_are_native() -> None:
    state = [told("Find it.", "user"), said("Let me see.", CALL, CALL, reasoning="hm"), told("a"), told("b")]
    _, assistant, *results = conversation(state, with_tools=True)
    assert assistant["content"] == "Let me see."
    assert [call["function"] for call in assistant["tool_calls"]] == [vars(CALL)] * 2
    ids = [call["id"] for call in assistant["tool_calls"]]
    assert results == [
        {"role": "tool", "tool_call_id": name, "content": text} for name, text in zip(ids, "ab", strict=True)
    ]
    assert len(set(ids)) == 2 and all(len(name) == 9 and name.isalnum() for name in ids)


def test_what_cannot_be_said_natively_stays_text() -> None:
    for state, with_tools in (
        ([said("", CALL), told("a")], False),
        ([said("", CALL, CALL), told("a")], True),
        ([said("", ToolCall("search", "no json")), told("a")], True),
        ([said("", ToolCall("a name", "{}")), told("a")], True),
        ([said("", CALL), told("seen", "user")], True),
    ):
        sent = conversation(state, with_tools=with_tools)
        assert sent == [{"role": "assistant", "content": state[0]["content"]}, {**state[1], "role": "user"}]


def test_reasoning_of_the_student_is_not_sent() -> None:
    for with_tools in (True, False):
        (sent,) = conversation([said("Done.", reasoning="secretly")], with_tools=with_tools)
        assert sent == {"role": "assistant", "content": "Done."}


def test_tools_of_other_spellings_are_declared_alike() -> None:
    nested = {"type": "function", "function": {**SEARCH, "strict": True}}
    anthropic = {"name": "search", "description": "Search.", "input_schema": SEARCH["parameters"]}
    expected = {"type": "function", "function": SEARCH}
    assert declared([nested, SEARCH, anthropic]) == [expected] * 3
    assert declared(["a word", {"name": "not a name"}, {"type": "web_search"}]) == []


TEXTS = st.sampled_from(["", "words", "<tool_call>\n", "[omitted: image_url]"])
CALLS = st.builds(ToolCall, st.sampled_from(["search", "x y", ""]), st.sampled_from(["{}", '{"a": 1}', "junk", ""]))
SPOKEN = st.builds(lambda text, calls, why: said(text, *calls, reasoning=why), TEXTS, st.lists(CALLS), TEXTS)
OTHERS = st.builds(told, TEXTS, st.sampled_from(["tool", "user", "system", "environment"]))


@given(st.lists(SPOKEN | OTHERS), st.sampled_from([[], [SEARCH]]))
def test_every_conversation_is_to_the_letter_of_the_protocol(state: list[dict[str, str]], tools: list[Any]) -> None:
    sent = conversation(state, with_tools=bool(tools))
    body = {"messages": sent, **({"tools": declared(tools)} if tools else {})}
    assert fault(json.loads(json.dumps(body))) is None
    assert len(sent) == len(state)
