"""Tables are aligned by the width of their characters in a terminal, and numbers to the right."""

from stages.layout import LEFT, RIGHT, aligned, counted, singular


def test_columns_of_numbers_stand_to_the_right_and_wide_characters_take_two_columns() -> None:
    assert aligned([("修复", 5), ("ae\u0301", 10)], ("task", "n")) == "task   n\n修复   5\nae\u0301    10"


def test_sides_are_those_that_were_asked_for() -> None:
    assert aligned([("1", "a"), ("10", "b")], ("x", "y"), (RIGHT, LEFT)) == " x  y\n 1  a\n10  b"


def test_without_rows_the_head_alone_is_left() -> None:
    assert aligned([], ("a", "b")) == "a  b" and aligned([]) == ""


def test_a_number_and_its_noun_agree() -> None:
    assert [counted(number, "family") for number in (0, 1, 1200)] == ["0 families", "1 family", "1,200 families"]
    assert [singular(noun) for noun in ("rollouts", "runs of rollouts", "table")] == [
        "rollout",
        "run of rollouts",
        "table",
    ]
