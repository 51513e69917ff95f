"""Options of an environment, in full and in short."""

from dataclasses import replace
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from pydantic import ValidationError
from support.environments import GuessEnv
from support.refusals import refused

from composer_stages.envs.base import Split, Task
from composer_stages.envs.config import EnvConfig, EnvStageConfig
from composer_stages.errors import BadInput, UsageError


def test_an_option_may_be_set_without_the_word_options() -> None:
    short = EnvConfig.model_validate({"name": "swe-lite", "repos": "DIR", "options": {"path": "rows.jsonl"}})
    assert short == EnvConfig(name="swe-lite", options={"path": "rows.jsonl", "repos": "DIR"})
    assert EnvConfig.model_validate({"split": "eval"}) == EnvConfig(split="eval")
    with pytest.raises(ValidationError):
        EnvConfig.model_validate({"options": 3, "repos": "DIR"})


@pytest.mark.parametrize(
    ("env", "told"),
    [
        (GuessEnv, "support.environments:GuessEnv"),
        (GuessEnv(), "support.environments:GuessEnv"),
        ({"name": "skills", "shots": {2}}, "not JSON serializable: set"),
    ],
)
def test_what_no_manifest_can_hold_is_refused(env: object, told: str) -> None:
    with pytest.raises(ValidationError, match=told):
        EnvStageConfig.model_validate({"env": env})


def test_the_file_that_an_option_names_is_a_part_of_the_work(tmp_path: Path) -> None:
    rows = tmp_path / "rows.jsonl"

    def identity(name: str) -> object:
        return EnvConfig.model_validate({"name": name, "path": rows, "text": "x" * 1000}).identity()

    absent = identity("own:Env")
    for name in ("own:Env", "gsm8k"):
        rows.write_text('{"question": "1", "answer": "1"}\n')
        before = identity(name)
        rows.write_text('{"question": "1", "answer": "2"}\n')
        assert before not in (absent, identity(name))


class Unseeded(GuessEnv):
    """Other tasks each time that it is asked."""

    drawn = count(1)

    def tasks(self, split: Split, count: int, seed: int) -> list[Task]:
        """Tasks of one draw."""
        draw = next(self.drawn)
        return [replace(task, prompt=f"{draw}") for task in super().tasks(split, count, seed)]


def test_a_resumed_run_plays_the_tasks_with_which_it_began(tmp_path: Path) -> None:
    out: Any = SimpleNamespace(scratch=lambda name: tmp_path)
    names = ("support.environments:GuessEnv", f"{__name__}:Unseeded")
    steady, unseeded = (EnvStageConfig.model_validate({"env": name}) for name in names)
    assert steady.draw(steady.opener(), 2, out) == steady.draw(steady.opener(), 2, out)
    refused(lambda: unseeded.draw(unseeded.opener(), 2, out), BadInput, code="envs.other-tasks")


class GivesAll(GuessEnv):
    """Gives all its tasks, however many are asked for."""

    def tasks(self, split: Split, count: int, seed: int) -> list[Task]:
        """Nine tasks."""
        return super().tasks(split, 9, seed)


def test_no_more_tasks_are_drawn_than_were_asked_for() -> None:
    config = EnvStageConfig(env=EnvConfig(name=f"{__name__}:GivesAll"))
    assert [len(config.draw(config.opener(), count)) for count in (1, 9, 10)] == [1, 9, 9]


class InContainers(GuessEnv):
    """Takes the name of a sandbox and works elsewhere."""

    def __init__(self, sandbox: str = "bubblewrap", anyway: bool = False) -> None:
        super().__init__()
        self.sandbox = sandbox if anyway else "container"


def test_the_sandbox_is_tried_only_where_it_is_used() -> None:
    def config(**options: bool) -> EnvStageConfig:
        env = EnvConfig(name=f"{__name__}:InContainers", options=options)
        return EnvStageConfig(env=env, sandbox="no-such-sandbox")

    assert config().opener()().sandbox == "container"
    with pytest.raises(UsageError, match="no-such-sandbox"):
        config(anyway=True).opener()
