"""`composer tasks feature-deletion PACKAGE` as it is written, and mistakes in it."""

from collections.abc import Callable
from pathlib import Path

import pytest

from composer_cli.stage_command import read_positionals
from composer_post_training.words import PYTHON
from composer_stages.words import Command
from tests.composer_cli.test_mistakes import assert_one_sentence, folder

__all__ = ["folder"]


@pytest.mark.parametrize(
    ("words", "code", "part"),
    [
        (["tasks", "feature-deletion"], 2, "From which package?"),
        (["tasks", "feature-deletion", "/no/such/package"], 4, "/no/such/package"),
        (["tasks", "feature-deletion", "x", "y"], 2, "one word too many"),
        (["tasks", "rows.jsonl"], 2, "`composer tasks check rows.jsonl`"),
        (["collect", "--env", "feature-deletion", "-s", "env.package=nowhere"], 4, "no package at"),
    ],
)
def test_a_mistake_is_one_clear_sentence(
    run_command: Callable[..., tuple[int, str, str]], folder: Path, words: list[str], code: int, part: str
) -> None:
    assert_one_sentence(run_command, folder, words, code, part)


def test_words_are_the_environment_and_the_package() -> None:
    layers = [{"env": "feature-deletion"}, {"package": "./toolz"}]
    assert read_positionals("tasks", ["feature-deletion", "./toolz"]) == (layers, [])
    call = PYTHON.remedy(Command(("tasks", "feature-deletion", "PACKAGE")))
    assert call == "tasks(env='feature-deletion', package='PACKAGE')"
