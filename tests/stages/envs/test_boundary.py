"""What is made of the grade of an environment: the ground of a pass, and what is not paid."""

import math
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from support.refusals import refused

from composer_stages.envs import boundary
from composer_stages.envs.base import Grade, Task
from composer_stages.envs.config import EnvConfig, EnvStageConfig
from composer_stages.errors import UsageError
from composer_stages.terms import grounds_in_words

PASSED = Grade(1.0, hidden_pass=True)


def graded(grade: Grade, **attributes: Any) -> Grade:
    environment: Any = SimpleNamespace(**attributes)
    return boundary.check_grade(grade, environment)


@pytest.mark.parametrize(("number", "said"), [(math.nan, "nan"), (-math.inf, "-inf"), (10**30, "64-bit")])
def test_data_that_a_table_would_change_is_refused(number: float, said: str) -> None:
    tasks = [Task("t1", "own", "train", "f", "p", {"limits": {"of": [1, number]}})]
    refused(lambda: boundary.check_tasks(tasks, "own"), UsageError, "'t1'", said)


@pytest.mark.parametrize(
    ("field", "content", "needed"),
    [("task_id", 7, "text"), ("family", None, "text"), ("prompt", ["p"], "text"), ("data", [1], "a dictionary")],
)
def test_a_field_of_a_task_that_no_table_holds_is_refused(field: str, content: Any, needed: str) -> None:
    tasks = [replace(Task("t1", "own", "train", "f", "p", {}), **{field: content})]
    values = {"field": field, "needed": needed}
    refused(lambda: boundary.check_tasks(tasks, "own"), UsageError, code="envs.task-field", **values)


@pytest.mark.parametrize(
    ("grade", "attributes", "ground"),
    [
        (PASSED, {}, None),
        (PASSED, {"ground": "values"}, "values"),
        (Grade(1.0, True, ground="report"), {"ground": "values"}, "report"),
        (Grade(1.0, False), {"ground": "values"}, "values"),  # paid by another rule than the hidden tests
        (Grade(0.0, False, ground="report"), {"ground": "values"}, None),
        (Grade(0.5), {"ground": "values"}, None),
    ],
)
def test_a_pass_has_the_ground_of_its_grade_or_environment(
    grade: Grade, attributes: dict[str, str], ground: str | None
) -> None:
    assert graded(grade, **attributes).ground == ground


@pytest.mark.parametrize(
    ("grade", "ground", "reward"),
    [
        (Grade(0.9, hidden_pass=False), "report", None),  # a share by report is not paid either
        (Grade(0.5, hidden_pass=False), "values", 0.5),
        (Grade(1.0, True), "report", None),
        (Grade(1.0, True), None, None),
        (Grade(1.0, True), "values", 1.0),
        (Grade(0.0, False), None, 0.0),
    ],
)
def test_a_pass_by_report_is_neither_paid_nor_zero_under_values(
    grade: Grade, ground: str | None, reward: float | None
) -> None:
    found = graded(grade, require="values", ground=ground)
    assert found.reward == reward
    if reward is None:
        assert (found.hidden_pass, found.ground, found.error_type) == (None, ground, None)
        assert found.error is not None and "env.require=values" in found.error


def test_another_ground_than_the_two_is_refused() -> None:
    wrong: Any = "trust"
    with pytest.raises(boundary.WrongValue, match="ground='trust'"):
        graded(Grade(1.0, ground=wrong))


def test_the_setting_reaches_every_environment_that_a_stage_opens_and_the_fingerprint() -> None:
    config = EnvStageConfig(env=EnvConfig(name="gsm8k", require="values", options={"path": __file__}))
    assert getattr(config.opener()(), "require", None) == "values"
    usual, strict = (EnvConfig(name="kata", require=ground).identity() for ground in ("report", "values"))
    assert usual == EnvConfig(name="kata").identity() and strict == {**usual, "require": "values"}


def test_shares_of_passes_are_given_where_a_ground_is_known() -> None:
    assert grounds_in_words({"report": 1, "values": 3}) == "passes: 75.0 % by values, 25.0 % by report"
    assert grounds_in_words({"": 2}) == grounds_in_words({}) == ""
