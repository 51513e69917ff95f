import json
import re
from functools import cache

import pytest

from composer_stages.envs.base import Split, Task
from composer_stages.envs.kata.tasks import (
    FAMILIES,
    MODIFIERS,
    OPERATIONS,
    expression,
    family,
    generate,
    rename_arguments,
    split_family,
)

SPLITS: tuple[Split, ...] = ("train", "eval")


@cache
def drawn(split: Split) -> list[Task]:
    """A thousand tasks, which are drawn once."""
    return generate(split, 1000, seed=3)


def passes(code: str, cases: list) -> bool:
    """Is one of our own expressions in x and y right on every case?"""
    function = eval(f"lambda x, y: {code}")
    return all(function(*args) == want for args, want in cases)


def starting_code(task: Task) -> str:
    """What the wrong function returns, in x and y."""
    first, second = task.data["arguments"]
    code = task.data["original"].split("return ")[1].strip()
    return re.sub(r"[a-z]+", lambda word: {first: "x", second: "y"}.get(word[0], word[0]), code)


def test_splits_share_no_family_and_hold_every_part() -> None:
    assert len(FAMILIES["train"]) == 72 and len(FAMILIES["eval"]) == 24
    seen = {split: {task.family for task in drawn(split)} for split in SPLITS}
    assert seen == FAMILIES and not seen["train"] & seen["eval"]
    for names in seen.values():
        assert {name.split("/")[0] for name in names} == {operation.name for operation in OPERATIONS}
        assert {name.split("/")[1] for name in names} == {modifier.name for modifier in MODIFIERS}


def test_misconceptions_are_the_code_of_no_family() -> None:
    answers = {expression(o.code, m, "x", "y", 3): family(o, m) for o in OPERATIONS for m in MODIFIERS}
    assert len(answers) == 96
    assert not answers.keys() & {expression(o.misconception, m, "x", "y", 3) for o in OPERATIONS for m in MODIFIERS}


def test_training_files_never_start_as_the_answer_to_an_eval_family() -> None:
    for task in drawn("train")[:500]:
        answers = {
            expression(o.code, m, "x", "y", task.data["constant"]) for o, m in map(split_family, FAMILIES["eval"])
        }
        assert starting_code(task) not in answers


@pytest.mark.parametrize("split", SPLITS)
def test_tasks_depend_on_the_seed_and_their_index(split: Split) -> None:
    many = drawn(split)
    assert many[:12] == generate(split, 12, seed=3) != generate(split, 12, seed=6)
    assert len({task.task_id for task in many}) == 1000 and len({task.prompt for task in many}) > 985
    assert json.loads(json.dumps(many[0].data)) == many[0].data


@pytest.mark.parametrize("split", SPLITS)
@pytest.mark.parametrize("kind", ["visible", "hidden"])
def test_cases_reject_misconception_and_starting_code(split: Split, kind: str) -> None:
    for task in drawn(split)[:300]:
        (operation, modifier), k = split_family(task.family), task.data["constant"]
        cases = task.data[kind]
        assert passes(expression(operation.code, modifier, "x", "y", k), cases)
        assert not passes(expression(operation.misconception, modifier, "x", "y", k), cases)
        assert not passes(starting_code(task), cases)


def test_renamed_replaces_whole_names() -> None:
    assert rename_arguments("max(x, y) + x", ("y", "next")) == "max(y, next) + y"
