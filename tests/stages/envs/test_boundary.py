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
from composer_stages.messages import ToolCall
from composer_stages.terms import grounds_in_words

PASSED = Grade(1.0, hidden_pass=True)


def graded(grade: Grade, **attributes: Any) -> Grade:
    environment: Any = SimpleNamespace(**attributes)
    return boundary.check_grade(grade, environment)


def test_shares_that_add_up_to_one_are_a_full_reward() -> None:
    """0.7 + 0.2 + 0.1 is the number before 1."""
    summed = graded(Grade(0.7 + 0.2 + 0.1))
    assert (summed.reward, summed.passed) == (1.0, True) and not graded(Grade(0.999)).passed


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


@pytest.mark.parametrize(
    ("schema", "given", "value"),
    [
        ({"type": ["integer", "null"]}, "null", None),
        ({"type": ["integer", "null"]}, "7", 7),
        ({"type": ["integer", "null"]}, '"None"', None),
        ({"type": ["integer", "string"]}, '"7"', "7"),
        ({"type": "integer"}, "265252859812191058636308480000000", 265252859812191058636308480000000),
        ({"type": "integer"}, "5.0", 5),
        ({"type": "number"}, "5.0", 5.0),
        ({}, "36893488147419103233", 2**65 + 1),
        ({"anyOf": [{"type": "integer"}, {"type": "null"}]}, "null", None),
        (True, "[1]", [1]),
    ],
)
def test_what_fits_a_schema_reaches_the_tool_as_it_is(schema: Any, given: str, value: Any) -> None:
    tools = [{"name": "f", "parameters": {"type": "object", "properties": {"n": schema}}}]
    problem, arguments = boundary.check_call(ToolCall("f", f'{{"n": {given}}}'), tools)
    assert (problem, arguments) == ("", {"n": value}) and type(arguments["n"]) is type(value)


@pytest.mark.parametrize(
    ("schema", "given"),
    [
        ({"type": ["integer", "null"]}, "true"),
        ({"type": "integer"}, "5.5"),
        ({"type": "integer"}, "null"),
        ({}, "NaN"),
        ({}, "1" + "0" * 30 + ","),
        ({}, '"\\ud800"'),
    ],
)
def test_what_does_not_fit_is_the_models_mistake(schema: Any, given: str) -> None:
    tools = [{"name": "f", "parameters": {"properties": {"n": schema}}}]
    assert boundary.check_call(ToolCall("f", f'{{"n": {given}}}'), tools)[0]


@pytest.mark.parametrize(
    ("more", "given", "fits"),
    [
        ({}, '{"b": 1}', False),
        ({"additionalProperties": False}, '{"b": 1}', False),
        ({"additionalProperties": True}, '{"b": 1}', True),
        ({"additionalProperties": {"type": "string"}}, '{"b": "1"}', True),
        ({"additionalProperties": {"type": "string"}}, '{"b": 1}', False),
        ({"patternProperties": {"^b": {}}}, '{"b": 1}', True),
    ],
)
def test_arguments_that_a_schema_allows_beside_its_own_are_taken(more: Any, given: str, fits: bool) -> None:
    problem, arguments = boundary.check_call(ToolCall("f", given), [{"name": "f", "parameters": more}])
    assert bool(problem) is not fits and bool(arguments) is fits
    assert boundary.check_call(ToolCall("g", "{}"), [{"name": "g"}]) == ("", {}), "a tool without parameters"
