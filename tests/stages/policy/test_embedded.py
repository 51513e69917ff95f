"""Models that environments bring along: recognised by name, told apart by their recipe, refused when unknown."""

from pathlib import Path

import pytest

from stages.envs.config import EnvStageConfig
from stages.envs.kata import checkpoints
from stages.envs.kata.env import KataEnv
from stages.errors import BadInput
from stages.policy import base, open_policy
from stages.policy.base import PolicyConfig
from stages.runs.activity import Notice, on_activity
from stages.runs.ledger import Budget


def test_a_name_with_an_environment_before_a_colon_is_embedded():
    assert base.is_embedded(base.EXAMPLE) and base.is_embedded("gsm8k:rows.jsonl")
    assert not any(map(base.is_embedded, ("kata", "Qwen/Qwen3-8B", "./kata", "other:name")))


def test_models_are_told_apart_and_an_unknown_one_is_refused():
    assert PolicyConfig(model="kata:student").identity() != PolicyConfig(model="kata:teacher-a").identity()
    with pytest.raises(BadInput, match=r"no embedded model kata:nobody\. There is kata:novice, kata:student"):
        base.weights_identity(PolicyConfig(model="kata:nobody"))


def test_a_build_is_announced_before_it_begins_and_the_models_opening_is_named(tmp_path: Path) -> None:
    class Told(Exception):
        """What was reported first."""

    def report(what: str, done: int, total: int) -> None:
        assert isinstance(what, Notice) and (done, total) == (0, 0)
        raise Told(what)

    with pytest.raises(Told, match=r"building the model kata-student, once; it is kept in "):
        checkpoints.ensure("student", tmp_path, report)
    told: list[str] = []
    config = PolicyConfig(model="big", base_url="http://127.0.0.1:9/v1")
    with on_activity(told.append):
        open_policy(config, cache=tmp_path, budget=Budget(), listener=lambda what, done, total: None)
        EnvStageConfig().draw(KataEnv, 1)
    assert told == ["opening the model big", "", "preparing the tasks", ""]
