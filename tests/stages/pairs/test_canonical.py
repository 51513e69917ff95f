"""The canonical form of commands, tool calls and answers."""

import shlex

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stages.messages import Spoken, ToolCall, write
from stages.pairs.voting import canonical, canonical_answer, canonical_command


def call(name: str, arguments: str, content: str = "", reasoning: str | None = None) -> str:
    return write(Spoken(content, (ToolCall(name, arguments),), reasoning))


def test_bash_blocks_keep_their_form() -> None:
    assert canonical("I look.\n```bash\nls   -la  'a'\n```") == "ls -la a"
    assert canonical("no block") is None


@pytest.mark.parametrize(
    "other",
    [
        call("search", '{"top":3,"query":"bo\\u0061t"}'),
        call("search", '{"query": "boat", "top": 3.0}', content="Let me see."),
        call("search", '{"query": "boat", "top": 3}', reasoning="hm"),
    ],
)
def test_spelling_words_and_thoughts_do_not_make_calls_different(other: str) -> None:
    assert canonical(other) == canonical(call("search", '{"query": "boat", "top": 3}'))


@pytest.mark.parametrize(
    "other",
    [
        call("search", '{"query": "Boat"}'),
        call("search", '{"query": "boat "}'),
        call("find", '{"query": "boat"}'),
        call("search", '{"query": "boat", "top": null}'),
        call("search", "boat"),
        write(Spoken("", (ToolCall("search", '{"query": "boat"}'),) * 2)),
    ],
)
def test_what_a_tool_could_understand_differently_stays_different(other: str) -> None:
    assert canonical(other) != canonical(call("search", '{"query": "boat"}'))


def test_the_command_of_a_shell_tool_is_compared_as_a_command() -> None:
    assert canonical(call("bash", '{"command": "ls  -la"}')) == canonical(call("bash", '{"command": "ls -la "}'))
    assert canonical(call("bash", '{"command": "ls | wc"}')) != canonical(call("bash", '{"command": "ls  | wc"}'))


def test_answers_are_compared_without_reasoning_and_blanks() -> None:
    assert (
        canonical_answer("<think>\na\n</think>\n\nIt is  42.\n")
        == canonical_answer("It is 42.")
        != canonical_answer("It is 43.")
    )
    assert canonical_answer("<think>\n\n</think>\n\nIt is 42.") == canonical_answer("It is 42.")


@given(st.text("ab/-.=,:@%+_ \t", max_size=20))
def test_plain_words_are_what_the_shell_would_split_and_quote(command: str) -> None:
    assert canonical_command(command) == shlex.join(shlex.split(command))
