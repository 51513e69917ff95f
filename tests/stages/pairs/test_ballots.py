"""The vote in a state is the vote on its texts, however often its pattern was there before."""

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from stages.pairs.states import AnsweredState, step_vote
from stages.pairs.voting import Ballot, backers, decide

TEXTS = st.sampled_from(["a", "A", "b", "B", "c", "malformed"])
CLASSES = {"a": "x", "A": "x", "b": "y", "B": "y", "c": "z", "malformed": None}
TEACHERS = st.fixed_dictionaries({name: st.lists(st.none() | TEXTS, max_size=3) for name in ("t", "u", "v")})


@given(student=TEXTS, teachers=TEACHERS)
def test_a_vote_by_pattern_is_the_vote_itself(student: str, teachers: dict[str, list[str | None]]) -> None:
    step: dict[str, Any] = {"action": student, "truncated": False}
    found = step_vote(AnsweredState("d", [step], teachers), step, CLASSES)
    if not any(teachers.values()):
        assert found == {"pairs": [], "reason": "not_asked"}
        return
    ballot = Ballot(student, teachers, CLASSES)
    preferences, reason = decide(ballot)
    assert found["reason"] == reason
    assert found["pairs"] == [{**vars(one), "chosen_by": backers(ballot, one)} for one in preferences]
