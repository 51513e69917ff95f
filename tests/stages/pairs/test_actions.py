"""The majority, what follows from it, why nothing follows; the canonical forms that it compares."""

import shlex
from typing import ClassVar

import pytest
from hypothesis import given, strategies as st
from support.environments import GuessEnv
from support.transcripts import action

from composer_stages.envs.base import Observation
from composer_stages.pairs.actions import (
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
from composer_stages.pairs.states import AnsweredState, vote
from tests.stages.pairs.answered import command


def ballot(student: str, *teachers: str | None, same: dict[str, str | None] | None = None) -> Ballot:
    return sampled(student, *([text] for text in teachers), same=same)


def sampled(student: str, *teachers: list[str | None], same: dict[str, str | None] | None = None) -> Ballot:
    """A ballot of teachers with several samples each."""
    texts = [student, *(text for texts in teachers for text in texts)]
    classes: dict[str, str | None] = {text: text for text in texts if text is not None}
    return Ballot(student, {f"t{i}": texts for i, texts in enumerate(teachers)}, {**classes, **(same or {})})


BAD = {"bad": None}
"""An answer that is malformed votes for nothing."""
STUDENT, MINORITY = "majority_over_student", "student_over_minority"
DECIDED: dict[str, tuple[Ballot, list[tuple[str, str, str, str, float, float]]]] = {
    # rule, chosen, rejected, who said that, votes of both
    "a majority over the student": (ballot("x", "y", "y", "z"), [(STUDENT, "y", "x", "student", 2, 0)]),
    "the student over each distinct minority": (
        ballot("y", "y", "y", "y", "z", "w"),
        [(MINORITY, "y", "z", "t3", 3, 1), (MINORITY, "y", "w", "t4", 3, 1)],
    ),
    "four samples of one teacher would outvote two": (
        sampled("x", ["y"] * 4, ["x"], ["x"]),
        [(MINORITY, "x", "y", "t0", 2, 1)],
    ),
    "a vote is divided in the proportions of the samples": (
        sampled("x", ["y", "y", "y"], ["y", "y", "x"], ["x", "x", "y"]),
        [(STUDENT, "y", "x", "student", 2, 1)],
    ),
    "what a teacher does more often than the majority": (
        sampled("y", ["y", "z", "z"], ["y"], ["y"]),
        [(MINORITY, "y", "z", "t0", pytest.approx(7 / 3), pytest.approx(2 / 3))],
    ),
    "a malformed student": (ballot("bad", "y", "y", "z", same=BAD), [(STUDENT, "y", "bad", "student", 2, 0)]),
}
UNDECIDED: list[tuple[str, Ballot]] = [
    ("unanimous", ballot("x", "x", "x", "x")),
    ("no_majority", ballot("x", "a", "b", "c")),
    ("no_majority", ballot("x", "a", "a", "b", "b")),
    ("missing_answers", ballot("x", "a", None, None)),
    ("no_majority", ballot("x", "a", "a", None, "b")),  # half: absent teachers count
    ("no_majority", sampled("x", ["y", "x"], ["y", "x"], ["y", "z"])),
    ("no_majority", sampled("x", ["a", "b", None], ["a"], ["b"])),
    ("unanimous", sampled("y", ["y", "y", "z"], ["y"], ["y"])),  # of what it does less often nothing is rejected
    ("no_majority", sampled("x", *[["a", "b", "c"]] * 6, ["a"], ["a"])),  # exactly half, whatever the rounding
    ("unanimous", ballot("y", "bad", "y", "y", same=BAD)),
    ("no_majority", ballot("y", "bad", "bad", "y", same=BAD)),
]


@pytest.mark.parametrize("name", DECIDED)
def test_a_majority_decides(name: str) -> None:
    votes, expected = DECIDED[name]
    found, reason = decide(votes)
    told = [(p.rule, p.chosen, p.rejected, p.rejected_by, p.votes_chosen, p.votes_rejected) for p in found]
    assert (told, reason) == (expected, None)


@pytest.mark.parametrize(("reason", "votes"), UNDECIDED)
def test_undecided_ballots_have_a_reason(reason: str, votes: Ballot) -> None:
    assert decide(votes) == ([], reason)


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
    teachers: dict[str, list[str | None]] = {"a": [command("x+y")], "b": [command("y+x"), command("x+y")]}
    teachers["c"] = [None, command("x-y")]
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


def test_bash_blocks_keep_their_form() -> None:
    assert canonical("I look.\n```bash\nls   -la  'a'\n```") == "ls -la a"
    assert canonical("no block") is None


@pytest.mark.parametrize(
    "other",
    [
        action("", ("search", '{"top":3,"query":"bo\\u0061t"}')),
        action("Let me see.", ("search", '{"query": "boat", "top": 3.0}')),
        action("", ("search", '{"query": "boat", "top": 3}'), thought="hm"),
    ],
)
def test_spelling_words_and_thoughts_do_not_make_calls_different(other: str) -> None:
    assert canonical(other) == canonical(action("", ("search", '{"query": "boat", "top": 3}')))


@pytest.mark.parametrize(
    "others",
    [
        [("search", '{"query": "Boat"}')],
        [("search", '{"query": "boat "}')],
        [("find", '{"query": "boat"}')],
        [("search", '{"query": "boat", "top": null}')],
        [("search", "boat")],
        [("search", '{"query": "boat"}')] * 2,
    ],
)
def test_different_calls_have_different_forms(others: list[tuple[str, str]]) -> None:
    assert canonical(action("", *others)) != canonical(action("", ("search", '{"query": "boat"}')))


def test_the_command_of_a_shell_tool_is_compared_as_a_command() -> None:
    plain, spaced, piped, other = (
        canonical(action("", ("bash", f'{{"command": "{text}"}}')))
        for text in ("ls -la ", "ls  -la", "ls | wc", "ls  | wc")
    )
    assert plain == spaced and piped != other


def test_answers_are_compared_without_reasoning_and_blanks() -> None:
    same = ("<think>\na\n</think>\n\nIt is  42.\n", "<think>\n\n</think>\n\nIt is 42.", "It is 42.")
    (form,) = {canonical_answer(text) for text in same}
    assert canonical_answer("It is 43.") != form
    program = "So:\n```python\nfor a in b:\n    c()\n{}return a\n```\ndone"
    inside, behind = (canonical_answer(program.format(" " * blanks)) for blanks in (4, 0))
    assert inside != behind == canonical_answer(program.format("").replace("So:", "So: ").replace("c()", "c()  "))


@given(st.text("ab/-.=,:@%+_ \t", max_size=20))
def test_plain_words_are_what_the_shell_would_split_and_quote(command: str) -> None:
    assert canonical_command(command) == shlex.join(shlex.split(command))
