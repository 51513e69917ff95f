"""Who is a majority, what follows from it, and why nothing follows."""

from stages.pairs.voting import Ballot, decide, distinct, merged


def ballot(student: str | None, *teachers: str | None, same: dict[str, str | None] | None = None) -> Ballot:
    answers = {"student": student, **{f"t{i}": text for i, text in enumerate(teachers)}}
    classes: dict[str, str | None] = {text: text for text in answers.values() if text is not None}
    return Ballot(answers, {**classes, **(same or {})}, num_teachers=len(teachers))


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


def test_malformed_answers_vote_for_nothing_but_can_be_rejected() -> None:
    found, _ = decide(ballot("bad", "y", "y", "z", same={"bad": None}))
    assert (found[0].chosen, found[0].rejected, found[0].votes_rejected) == ("y", "bad", 0)
    assert decide(ballot("y", "bad", "bad", "y", same={"bad": None}))[1] == "no_majority"


def test_two_spellings_of_one_outcome_are_one_class() -> None:
    classes = merged({"x+y": "x+y", "y+x": "y+x", "x-y": "x-y"}, {"x+y": "5", "y+x": "5", "x-y": "1"})
    found, _ = decide(Ballot({"student": "x-y", "a": "x+y", "b": "y+x", "c": "x-y"}, classes, 3))
    assert (found[0].chosen, found[0].rejected) == ("x+y", "x-y")


def test_distinct_forms_in_order() -> None:
    assert distinct(["b", None, "a", "b"]) == ["b", "a"]
