"""The majority, what follows from it, why nothing follows; the canonical forms that it compares."""

import shlex
from typing import ClassVar

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.environments import GuessEnv

from stages.envs.base import Observation
from stages.messages import Spoken, ToolCall, write
from stages.pairs.actions import (
    Ballot,
    NotReproducible,
    StatePath,
    canonical,
    canonical_answer,
    canonical_command,
    decide,
    outcomes,
    text_form,
)
from stages.pairs.states import AnsweredState, vote
from tests.stages.pairs.answered import command


def ballot(student: str, *teachers: str | None, same: dict[str, str | None] | None = None) -> Ballot:
    return sampled(student, *([text] for text in teachers), same=same)


def sampled(student: str, *teachers: list[str | None], same: dict[str, str | None] | None = None) -> Ballot:
    """A ballot of teachers with several samples each."""
    texts = [student, *(text for texts in teachers for text in texts)]
    classes: dict[str, str | None] = {text: text for text in texts if text is not None}
    return Ballot(student, {f"t{i}": texts for i, texts in enumerate(teachers)}, {**classes, **(same or {})})


def test_majority_over_student() -> None:
    found, reason = decide(ballot("x", "y", "y", "z"))
    assert reason is None and len(found) == 1
    assert (found[0].rule, found[0].chosen, found[0].rejected) == ("majority_over_student", "y", "x")
    assert (found[0].votes_chosen, found[0].votes_rejected) == (2, 0)


def test_student_over_each_distinct_minority() -> None:
    found, _ = decide(ballot("y", "y", "y", "y", "z", "w"))
    assert [(p.rule, p.chosen, p.rejected, p.rejected_by) for p in found] == [
        ("student_over_minority", "y", "z", "t3"),
        ("student_over_minority", "y", "w", "t4"),
    ]


def test_reasons_for_nothing() -> None:
    assert decide(ballot("x", "x", "x", "x")) == ([], "unanimous")
    assert decide(ballot("x", "a", "b", "c")) == ([], "no_majority")
    assert decide(ballot("x", "a", "a", "b", "b")) == ([], "no_majority")
    assert decide(ballot("x", "a", None, None)) == ([], "missing_answers")


def test_half_is_no_majority_and_absent_teachers_still_count() -> None:
    assert decide(ballot("x", "a", "a", None, "b"))[1] == "no_majority"


def test_samples_of_one_teacher_are_one_vote() -> None:
    """Counted as voters, four samples of the first would outvote two teachers who agree with the student."""
    found, _ = decide(sampled("x", ["y"] * 4, ["x"], ["x"]))
    assert [(p.chosen, p.rejected, p.votes_chosen, p.votes_rejected) for p in found] == [("x", "y", 2.0, 1.0)]


def test_a_vote_is_divided_in_the_proportions_of_the_samples() -> None:
    found, _ = decide(sampled("x", ["y", "y", "y"], ["y", "y", "x"], ["x", "x", "y"]))
    assert [(p.chosen, p.rejected, p.votes_chosen, p.votes_rejected) for p in found] == [("y", "x", 2.0, 1.0)]
    assert decide(sampled("x", ["y", "x"], ["y", "x"], ["y", "z"]))[1] == "no_majority"
    assert decide(sampled("x", ["a", "b", None], ["a"], ["b"]))[1] == "no_majority"


def test_what_a_teacher_does_less_often_than_the_majority_is_not_rejected() -> None:
    assert decide(sampled("y", ["y", "y", "z"], ["y"], ["y"])) == ([], "unanimous")
    found, _ = decide(sampled("y", ["y", "z", "z"], ["y"], ["y"]))
    assert [(p.rejected, p.rejected_by) for p in found] == [("z", "t0")]


def test_thirds_do_not_make_half_a_majority() -> None:
    """Six teachers, three behind `a` in thirds: exactly half, whatever the rounding."""
    thirds = [["a", "b", "c"]] * 6
    assert decide(sampled("x", *thirds, ["a"], ["a"]))[1] == "no_majority"


def test_malformed_answers_vote_for_nothing_and_a_teachers_is_no_side() -> None:
    assert decide(ballot("y", "bad", "y", "y", same={"bad": None})) == ([], "unanimous")
    found, _ = decide(ballot("bad", "y", "y", "z", same={"bad": None}))
    assert (found[0].chosen, found[0].rejected, found[0].votes_rejected) == ("y", "bad", 0)
    assert decide(ballot("y", "bad", "bad", "y", same={"bad": None}))[1] == "no_majority"


class SumsEnv(GuessEnv):
    """The outcome of an action is the value of its sum."""

    ran: ClassVar[list[str]] = []

    def step(self, text: str) -> Observation:
        """Return the action itself."""
        self.ran.append(text)
        return Observation(text)

    def outcome(self, observation: Observation) -> str:
        """Return the value for x = 3 and y = 2."""
        return {command("x+y"): "5", command("y+x"): "5", command("x-y"): "1"}[observation.content]


def test_two_spellings_of_one_outcome_are_one_class() -> None:
    SumsEnv.ran.clear()
    steps = [{"action": command("x-y"), "truncated": False}]
    teachers: dict[str, list[str | None]] = {
        "a": [command("x+y")],
        "b": [command("y+x"), command("x+y")],
        "c": [None, command("x-y")],
    }
    task = GuessEnv().tasks("train", 1, 0)[0]
    found = vote(AnsweredState("d", steps, teachers), task, SumsEnv)
    (own,), ((one,), two, other) = found["students"], found["teachers"].values()
    assert two == [one, one] and other == [None, own] and one != own and found["compared_by"] == "outcome"
    assert SumsEnv.ran == [command("x-y"), command("x+y"), command("y+x")], "distinct forms, in order"


def test_the_form_of_a_text_keeps_its_blanks() -> None:
    assert text_form("<think>\n\n</think>\n\nIt is 42.\n") == text_form("It is 42.") != text_form("It is  42.")


def test_a_state_is_reached_where_durations_alone_differ() -> None:
    """A test report is never the same twice; another result of the tests is another state."""
    task = GuessEnv().tasks("train", 1, 0)[0]
    seen = f"2 passed in 0.31s {command('x+y')}"
    path = StatePath(task, (f"2 passed in 4.20s {command('x+y')}",), (seen,))
    candidates = [command("x+y"), command("x-y")]
    assert [one.digest for one in outcomes(SumsEnv, path, candidates)] == ["5", "1"]
    with pytest.raises(NotReproducible, match="action 0"):
        outcomes(SumsEnv, StatePath(task, (f"3 passed in 0.31s {command('x+y')}",), (seen,)), candidates)


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
