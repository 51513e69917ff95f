from stages.plurals import counted, singular


def test_a_number_and_its_noun_agree() -> None:
    assert [counted(number, "family") for number in (0, 1, 1200)] == ["0 families", "1 family", "1,200 families"]
    assert [singular(noun) for noun in ("rollouts", "runs of rollouts", "table")] == [
        "rollout",
        "run of rollouts",
        "table",
    ]
