"""Thoughts and tool calls in the text of an action."""

import json

import pytest
from hypothesis import given, settings, strategies as st

from composer_stages.messages import (
    MessageParts,
    ToolCall,
    answer_text,
    is_object,
    read,
    split_thoughts,
    thought_of,
    thoughts_apart,
    with_thought,
    write,
)
from composer_stages.pairs.actions import canonical_call
from composer_stages.policy.tool_calls import normalise_calls

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


DRAFT, ANSWER = "```bash\nrm -rf x\n```", "```bash\nls\n```"
HARMONY = "<|start|>assistant<|channel|>"
ONE_THOUGHT = {
    "think": f"<think>\n{DRAFT}\n</think>\n\n{ANSWER}",
    "opened by the template": f"{DRAFT}\n</think>\n\n{ANSWER}",
    "opened by the template, a block open": f"```bash\nrm -rf x\n</think>\n\n{ANSWER}",
    "another tag": f"<Thought>{DRAFT}</Thought>{ANSWER}",
    "reasoning": f"<reasoning>\n{DRAFT}\n</reasoning>\n{ANSWER}",
    "Seed-OSS": f"<seed:think>{DRAFT}</seed:think>{ANSWER}",
    "Magistral": f"[THINK]{DRAFT}[/THINK]{ANSWER}",
    "Magistral, opened": f"{DRAFT}[/THINK]{ANSWER}",
    "Command A": f"<|START_THINKING|>{DRAFT}<|END_THINKING|><|START_RESPONSE|>{ANSWER}<|END_RESPONSE|>",
    "OpenThinker": f"<|begin_of_thought|>{DRAFT}<|end_of_thought|>\n\n<|begin_of_solution|>{ANSWER}<|end_of_solution|>",
    "Kimi": f"◁think▷{DRAFT}◁/think▷{ANSWER}",
    "Kimi K3": f"{DRAFT}<|close|>think<|sep|><|open|>response<|sep|>{ANSWER}<|close|>response<|sep|>",
    "Apriel": f"Here are my reasoning steps:\n{DRAFT}\n[BEGIN FINAL RESPONSE]\n{ANSWER}\n[END FINAL RESPONSE]",
    "Apriel, opened": f"{DRAFT}\n[BEGIN FINAL RESPONSE]\n{ANSWER}",
    "Hunyuan": f"{DRAFT}</think:opensource>{ANSWER}",
    "Gemma 4": f"<|channel>thought\n{DRAFT}<channel|>{ANSWER}",
    "Apertus": f"<|inner_prefix|>{DRAFT}<|inner_suffix|>{ANSWER}",
    "Granite": f"Here is my thought process:\n{DRAFT}\nHere is my response:\n{ANSWER}",
    "GPT-OSS": f"<|channel|>analysis<|message|>{DRAFT}<|end|>{HARMONY}final<|message|>{ANSWER}<|return|>",
    "GPT-OSS, opened": f"{DRAFT}<|end|>{HARMONY}final<|message|>{ANSWER}",
    "GPT-OSS without its tokens": f"analysis{DRAFT}assistantfinal{ANSWER}",
    "Muse": f"to=self<|message|>{DRAFT}<|eom|><|start|>assistant to=user<|message|>{ANSWER}<|eot|>",
    "the tag twice": f"<think>a</think>{DRAFT}</think>{ANSWER}",
    "a quoted mark in the thought": f"<think>\nNot '</think>' yet. {DRAFT}\n</think>{ANSWER}",
}


@pytest.mark.parametrize("text", ONE_THOUGHT.values(), ids=ONE_THOUGHT)
def test_an_answer_is_what_follows_a_thought(text: str) -> None:
    answer, [thought] = split_thoughts(text)
    assert answer.strip() == ANSWER and "rm -rf x" in thought


def test_thoughts_may_be_several_or_have_no_answer() -> None:
    assert split_thoughts("<think>a</think>b\n<think>c</think>d") == ("b\nd", ["a", "c"])
    assert split_thoughts(f"<think>\n{DRAFT}") == ("", [DRAFT])
    plan = f"<|channel|>analysis<|message|>a<|end|>{HARMONY}commentary<|message|>b<|end|>{HARMONY}final<|message|>c"
    assert split_thoughts(plan) == ("b\nc", ["a"])
    assert split_thoughts("<|channel|>final<|message|>c<|return|>") == ("c", [])


@pytest.mark.parametrize(
    "text",
    [
        ANSWER,
        "```python\nreturn text.split('</think>')[-1]\n```",
        "```bash\ncat > chat.jinja <<'EOF'\n<think>\n{{ thought }}\n</think>\nEOF\n```",
        'I write it.\n<tool_call>\n{"name": "w", "arguments": {"text": "<think>a</think> b"}}\n</tool_call>',
        "analysis of the final assistant",
        "A thought stands between `<think>` and `</think>`.",
        "Models that write <think> think. 5",
        "`<|channel|>analysis` is GPT-OSS's.",
        "  5\n",
    ],
)
def test_an_answer_about_thoughts_has_none(text: str) -> None:
    assert split_thoughts(text) == (text, [])


def test_a_call_in_a_thought_is_none() -> None:
    draft, call = (write(MessageParts("", (ToolCall(name, "{}"),))) for name in ("rm", "ls"))
    for text in (f"<think>\n{draft}", f"<think>\n{draft}\n</think>\n\nNo.", f"{draft}\n</think>\n\nNo."):
        assert read(text).calls == read(normalise_calls("qwen3", text)).calls == ()
    for form, text in {
        "qwen3": f"{draft}\n</think>\n\n{call}",
        "mistral": "[THINK][TOOL_CALLS]rm[ARGS]{}[/THINK][TOOL_CALLS]ls[ARGS]{}",
        "gpt-oss": f"I may call rm<|end|>{HARMONY}commentary to=functions.ls<|message|>{{}}<|call|>",
    }.items():
        parts = read(normalise_calls(form, text))
        assert [made.name for made in parts.calls] == ["ls"] and "rm" in (parts.reasoning or "") and not parts.content
    assert [made.name for made in read(f"{draft}\n</think>\n\n{call}").calls] == ["ls"]


def test_parts_of_a_message_are_thoughts_by_their_kind() -> None:
    parts = [
        {"type": "thinking", "thinking": "a", "signature": "s"},
        {"type": "thinking", "thinking": [{"type": "text", "text": "a"}]},
        {"type": "reasoning", "summary": [{"type": "summary_text", "text": "a"}]},
        {"type": "reasoning.text", "text": "a"},
        {"text": "a", "thought": True},
        {"type": "redacted_thinking", "data": "xyz"},
        {"type": "text", "text": "a"},
        "a",
    ]
    assert [thought_of(part) for part in parts] == ["a", "a", "a", "a", "a", "", None, None]


@pytest.mark.parametrize(
    ("thought", "text"),
    [
        (None, "a"),
        ("", "a"),
        ("why", "<think>\nwhy\n</think>\n\na"),
        ("why\n</think>\nnot", "a"),  # of which the end would be read as the answer
    ],
)
def test_a_thought_of_a_server_stands_before_its_answer(thought: str | None, text: str) -> None:
    assert with_thought("a", thought) == text and answer_text(text) == "a"
    [asked, said] = thoughts_apart([{"role": "user", "content": text}, {"role": "assistant", "content": text}])
    assert asked == {"role": "user", "content": text} and said["content"] == "a"
    assert said.get("reasoning_content") == ("why" if text != "a" else None)
