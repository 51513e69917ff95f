"""Tool calls in the dialects of models and of servers.

What a template of one of six families writes is read back, and prompts are prefixes of each other. Whatever was
recorded, a server that takes nothing beyond the protocol takes it. The templates are short ones of our own, from the
documented formats (tests/support/chat_templates).
"""

import json
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings, strategies as st
from support.models import tiny_tokenizer
from support.refusals import refused
from support.server import fault

from composer_stages.errors import UsageError
from composer_stages.messages import MessageParts, ToolCall, following_ids, opening_ids, read, write
from composer_stages.policy.base import PolicyConfig
from composer_stages.policy.local import LocalPolicy
from composer_stages.policy.model_checks import require_read_calls
from composer_stages.policy.tool_calls import FORMATS, chat_messages, declare_tools, normalise_calls
from composer_stages.runs.ledger import Budget

TEMPLATES = Path(__file__).parents[2] / "support" / "chat_templates"
ENDS = {
    "qwen3": "<|im_end|>",
    "qwen3-coder": "<|im_end|>",
    "llama3": "<|eot_id|>",
    "mistral": "</s>",
    "deepseek": "<｜end▁of▁sentence｜>",
}
BASH = {
    "name": "bash",
    "description": "Run a command.",
    "parameters": {"type": "object", "properties": {"command": {"type": "string"}}, "required": ["command"]},
}
ONE = ToolCall("bash", '{"command": "echo \\"ü; {x}\\" > a\\nls"}')
TWO = ToolCall("bash", '{"command": "pytest -q", "wait": [1, {"s": null}]}')
ASKED = [{"role": "user", "content": "Fix it."}]


def tokenizer_of(family: str):
    made = tiny_tokenizer()
    made.chat_template = (TEMPLATES / f"{family}.jinja").read_text()
    made.add_special_tokens({"eos_token": ENDS.get(family, "<|return|>")})
    made.add_special_tokens({"additional_special_tokens": ["<|call|>"]})
    return made


def rendered(family: str, messages: list[dict[str, str]]) -> str:
    made = tokenizer_of(family)
    return made.decode(opening_ids(made, messages, [BASH]))


@pytest.mark.parametrize("calls", [(ONE,), (ONE, TWO), ()])
@pytest.mark.parametrize("content", ["", "Let me look {here}."])
@pytest.mark.parametrize("family", sorted(FORMATS))
def test_calls_written_by_a_template_are_parsed(family: str, content: str, calls: tuple[ToolCall, ...]) -> None:
    if family == "llama3" and calls:
        content = ""  # it writes calls alone
    if not calls:
        content = content or "Done."
    spoken = MessageParts(content, calls)
    opening = rendered(family, ASKED)
    whole = rendered(family, [*ASKED, {"role": "assistant", "content": write(spoken)}, *ASKED])
    assert whole.startswith(opening) and '"name": "bash"' in opening
    answer = whole[len(opening) :]
    end = ENDS.get(family)
    answer = answer[: answer.index(end) + len(end)] if end else answer.partition("<|start|>user")[0]
    found = read(normalise_calls(family, answer))
    assert found.content == content and [call.name for call in found.calls] == ["bash"] * len(calls)
    arguments = [json.loads(call.arguments) for call in calls]
    if family == "qwen3-coder":  # which writes no types
        arguments = [
            {name: value if isinstance(value, str) else json.dumps(value) for name, value in each.items()}
            for each in arguments
        ]
    assert [json.loads(call.arguments) for call in found.calls] == arguments


@pytest.mark.parametrize("family", sorted(FORMATS))
def test_a_template_that_writes_calls_in_another_format_is_refused(family: str) -> None:
    """Answers would be calls that no reader finds: Qwen 3.5 and Nemotron 3 write XML, GLM and Gemma 4 others."""
    for form in FORMATS:
        config, made = PolicyConfig(model="x", tool_calls=form), tokenizer_of(family)
        if family in (form, "qwen3"):  # which writes calls as records hold them
            require_read_calls(config, made)
        else:
            refused(lambda: require_read_calls(config, made), UsageError, code="policy.calls-not-read", form=form)  # noqa: B023


@pytest.mark.parametrize("family", [*sorted(ENDS), "gpt-oss"])
def test_sampled_ids_stay_and_results_are_appended(family: str) -> None:
    made = tokenizer_of(family)
    opening, said = opening_ids(made, ASKED, [BASH]), write(MessageParts("", (ONE,)))
    results = [{"role": "tool", "content": "a\nb"}]
    whole = made.decode(opening_ids(made, [*ASKED, {"role": "assistant", "content": said}, *results], [BASH]))
    answer = whole[len(made.decode(opening)) :]
    end = ENDS.get(family, "<|call|>")
    answer = answer[: answer.index(end) + len(end)]
    sampled = made(answer, add_special_tokens=False)["input_ids"]
    new = following_ids(made, results, answer=said, last_id=sampled[-1], tools=[BASH])
    held = made.decode([*opening, *sampled, *new])
    assert held.replace("\n", "") == whole.replace("\n", "")


@pytest.mark.parametrize(
    ("family", "text", "calls"),
    [
        ("qwen3", '<tool_call>\n{"name": "bash", "arguments": {"command": "l', [("bash", '{"name": "bash", "arg')]),
        ("qwen3", "<tool_call>\nls\n</tool_call>", [("", "ls")]),
        ("llama3", '<|python_tag|>{"name": "bash", "parameters": {"command": "ls"}}<|eom_id|>', [("bash", '{"com')]),
        ("llama3", '{"name": "bash", "arguments": {"command": "ls"}}', [("bash", '{"com')]),
        ("qwen3", '<tool_call>{"name": "bash", "parameters": {"command": "ls"}}</tool_call>', [("bash", '{"com')]),
        ("qwen3", '<tool_call>{"name": "bash", "input": {"command": "ls"}}</tool_call>', [("bash", '{"name"')]),
        ("qwen3", '<tool_call>{"name": "bash"}</tool_call>', [("bash", "{}")]),
        ("llama3", '{"name": "bash", "parameters": ', [("bash", '{"name"')]),
        ("qwen3-coder", "<function=bash>\n<parameter=command>\n a\n\n</parameter>", [("bash", '{"command": " a\\n"}')]),
        ("qwen3-coder", "<tool_call><function=end></function></tool_call>", [("end", "{}")]),
        ("qwen3-coder", "<tool_call>\nls\n</tool_call>", [("", "ls")]),
        ("qwen3-coder", '<function=bash>{"command": "ls"}</function>', [("bash", '{"com')]),
        ("qwen3-coder", "<tool_call>\n<function=bash", [("", "<function=bash")]),
        ("mistral", '[TOOL_CALLS]bash[ARGS]{"command": "ls"}[TOOL_CALLS]end[ARGS]{}', [("bash", "{"), ("end", "{}")]),
        ("mistral", '[TOOL_CALLS]bash{"command": "ls"}[TOOL_CALLS]end{}', [("bash", '{"com'), ("end", "{}")]),
        ("mistral", "[TOOL_CALLS]bash[CALL_ID]123456789[ARGS]{oops", [("bash", "{oops")]),
        ("deepseek", "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>bash<｜tool▁sep｜>{}", [("bash", "{}")]),
        ("gpt-oss", "<|channel|>commentary to=functions.a <|constrain|>json<|message|>{oops<|call|>", [("a", "{oops")]),
        ("gpt-oss", " to=functions.bash<|channel|>commentary json<|message|>{}<|call|>", [("bash", "{}")]),
        ("gpt-oss", "<|channel|>final<|message|>Done.<|return|>", []),
    ],
)  # fmt: skip
def test_other_versions_and_malformed_calls_are_parsed(family: str, text: str, calls: list[tuple[str, str]]) -> None:
    found = read(normalise_calls(family, text)).calls
    assert [call.name for call in found] == [name for name, _ in calls]
    assert all(call.arguments.startswith(start) for call, (_, start) in zip(found, calls, strict=True))


def test_harmonys_analysis_is_reasoning() -> None:
    text = "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>final<|message|>Done.<|return|>"
    assert read(normalise_calls("gpt-oss", text)) == MessageParts("Done.", (), "Hm.")


def test_text_is_unchanged_without_a_format() -> None:
    text = '<|python_tag|>{"name": "bash"}<|eom_id|>'
    assert normalise_calls("none", text) == normalise_calls("native", text) == text


def test_a_model_in_this_process_needs_a_format(tmp_path: Path) -> None:
    config = PolicyConfig(model="x", tool_calls="native")
    with pytest.raises(UsageError, match="no server reads the calls"):
        LocalPolicy.open(config, cache=tmp_path, budget=Budget(), listener=lambda *told: None)


def test_long_whitespace_is_parsed_in_linear_time() -> None:
    """A degenerate model writes them up to `max_tokens`; a regular expression took 15 s for the first."""
    call = "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>"
    began = time.process_time()
    for text in (" " * 50_000, "\n" * 50_000, "\n" * 25_000 + "bash\n" * 5_000):
        assert [one.name for one in FORMATS["deepseek"](call + text).calls] == ["function"]
    assert time.process_time() - began < 5


# Servers

SEARCH = {"name": "search", "description": "Search.", "parameters": {"type": "object", "properties": {}}}
CALL = ToolCall("search", '{"query": "boat"}')


def assistant(content: str = "", *calls: ToolCall, reasoning: str | None = None) -> dict[str, str]:
    return {"role": "assistant", "content": write(MessageParts(content, calls, reasoning))}


def told(content: str, role: str = "tool") -> dict[str, str]:
    return {"role": role, "content": content}


def test_calls_and_results_are_native() -> None:
    state = [told("Find it.", "user"), assistant("Let me see.", CALL, CALL, reasoning="hm"), told("a"), told("b")]
    _, spoke, *results = chat_messages(state, with_tools=True)
    assert spoke["content"] == "Let me see."
    assert [call["function"] for call in spoke["tool_calls"]] == [vars(CALL)] * 2
    ids = [call["id"] for call in spoke["tool_calls"]]
    assert results == [
        {"role": "tool", "tool_call_id": name, "content": text} for name, text in zip(ids, "ab", strict=True)
    ]
    assert len(set(ids)) == 2 and all(len(name) == 9 and name.isalnum() for name in ids)


def test_calls_outside_the_protocol_stay_text() -> None:
    for state, with_tools in (
        ([assistant("", CALL), told("a")], False),
        ([assistant("", CALL, CALL), told("a")], True),
        ([assistant("", ToolCall("search", "no json")), told("a")], True),
        ([assistant("", ToolCall("a name", "{}")), told("a")], True),
        ([assistant("", CALL), told("seen", "user")], True),
    ):
        sent = chat_messages(state, with_tools=with_tools)
        assert sent == [{"role": "assistant", "content": state[0]["content"]}, {**state[1], "role": "user"}]


def test_reasoning_of_the_student_is_not_sent() -> None:
    for with_tools in (True, False):
        (sent,) = chat_messages([assistant("Done.", reasoning="secretly")], with_tools=with_tools)
        assert sent == {"role": "assistant", "content": "Done."}


def test_tool_declarations_of_other_apis_are_converted() -> None:
    nested = {"type": "function", "function": {**SEARCH, "strict": True}}
    anthropic = {"name": "search", "description": "Search.", "input_schema": SEARCH["parameters"]}
    expected = {"type": "function", "function": SEARCH}
    assert declare_tools([nested, SEARCH, anthropic]) == [expected] * 3
    assert declare_tools(["a word", {"name": "not a name"}, {"type": "web_search"}]) == []


TEXTS = st.sampled_from(["", "words", "<tool_call>\n", "[omitted: image_url]"])
CALLS = st.builds(ToolCall, st.sampled_from(["search", "x y", ""]), st.sampled_from(["{}", '{"a": 1}', "junk", ""]))
SPOKEN = st.builds(lambda text, calls, why: assistant(text, *calls, reasoning=why), TEXTS, st.lists(CALLS), TEXTS)
OTHERS = st.builds(told, TEXTS, st.sampled_from(["tool", "user", "system", "environment"]))


@settings(max_examples=40)
@given(st.lists(SPOKEN | OTHERS), st.sampled_from([[], [SEARCH]]))
def test_every_conversation_follows_the_protocol(state: list[dict[str, str]], tools: list[Any]) -> None:
    sent = chat_messages(state, with_tools=bool(tools))
    body = {"messages": sent, **({"tools": declare_tools(tools)} if tools else {})}
    assert fault(json.loads(json.dumps(body))) is None
    assert len(sent) == len(state)
