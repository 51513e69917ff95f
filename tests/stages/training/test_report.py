"""The table shows what was logged, evenly spaced, the last step among it."""

from composer_stages.training.report import training_table


def test_only_logged_columns_in_the_order_of_the_registry() -> None:
    header = training_table("B", [{"step": 1, "sft/loss": 1.0, "dpo/accuracy": 0.5, "dpo/loss": 0.7, "reward": 0.0}])
    assert header.splitlines()[1].split() == ["step", "reward", "dpo", "dpo", "acc", "sft"]


def test_long_courses_are_thinned_and_end_with_the_last_step() -> None:
    lines = training_table("A", [{"step": i + 1, "loss": float(i)} for i in range(100)], rows=4).splitlines()
    assert [line.split()[0] for line in lines[2:-1]] == ["1", "26", "51", "76", "100"]
    assert lines[-1].startswith("5 of 100 steps")


def test_a_value_that_one_step_lacks_is_a_dash() -> None:
    lines = training_table("A", [{"step": 1, "loss": 1.0, "reward": 0.5}, {"step": 2, "loss": 2.0}]).splitlines()
    assert lines[-1].split() == ["2", "-", "2.0000"]


def test_a_table_without_steps_has_no_rows() -> None:
    assert training_table("A", []) == "arm A\n  step\n"
