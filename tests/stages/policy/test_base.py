"""Which kind of policy a model is: ours, one of an environment, or one from outside by a class and a line."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.models import save_tiny
from support.server import kept_in

from composer_stages.envs.config import EnvStageConfig
from composer_stages.envs.kata.env import KataEnv
from composer_stages.errors import BadInput, UsageError
from composer_stages.policy import KINDS, base, kind_of, open_policy
from composer_stages.policy.base import Policy, PolicyConfig, Sample, Turn
from composer_stages.runs.activity import on_activity
from composer_stages.runs.ledger import Budget
from composer_stages.runs.run import AnswerFolders, Listener

BASE_URL = "http://127.0.0.1:9/v1"
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}


class EchoPolicy:
    """Answers with what it was asked, in capitals."""

    capture_level = "text"
    batch_size = 2

    def __init__(self, config: PolicyConfig, cache: AnswerFolders) -> None:
        self.config, self.cache = config, cache

    @classmethod
    def open(cls, config: PolicyConfig, *, cache: AnswerFolders, budget: Budget, listener: Listener) -> "EchoPolicy":
        del budget
        listener("opening", 1, 1)
        return cls(config, cache)

    def sample(self, turns: list[Turn]) -> list[Sample]:
        return [Sample(text=turn.messages[-1]["content"].upper()) for turn in turns]

    def facts(self) -> dict[str, Any]:
        return {"model": self.config.model}


@pytest.fixture(params=["class", "import string"])
def echo(request: pytest.FixtureRequest) -> Iterator[None]:
    KINDS["echo"] = EchoPolicy if request.param == "class" else f"{__name__}:EchoPolicy"
    yield
    del KINDS["echo"]


def opened(config: PolicyConfig, cache: Path, progress: list[str] | None = None) -> Policy:
    noted = [] if progress is None else progress
    return open_policy(
        config, cache=kept_in(cache), budget=Budget(), listener=lambda what, done, total: noted.append(what)
    )


@pytest.mark.usefixtures("echo")
def test_a_registered_kind_is_opened_by_its_prefix(tmp_path: Path) -> None:
    progress: list[str] = []
    policy = opened(PolicyConfig(model="echo:loud"), tmp_path, progress)
    assert policy.sample([Turn([{"role": "user", "content": "hello"}], seed=0)])[0].text == "HELLO"
    assert policy.facts() == {"model": "echo:loud"} and progress == ["opening"]
    assert kind_of(PolicyConfig(model="echo:loud", base_url=BASE_URL)) == "endpoint"
    assert kind_of(PolicyConfig(model="echo")) == "local", "the word alone is a name"


def test_a_model_is_local_unless_its_prefix_is_a_kind() -> None:
    for model in ("kata:student", "Qwen/Qwen3-8B", "./model", "echo:loud", "local"):
        assert kind_of(PolicyConfig(model=model)) == "local"


@pytest.mark.usefixtures("echo")
def test_a_folder_after_the_prefix_is_identified_by_its_bytes(tmp_path: Path) -> None:
    save_tiny(tmp_path / "one", seed=1)
    save_tiny(tmp_path / "other", seed=2)
    identities = [PolicyConfig(model=f"echo:{tmp_path / name}").identity()["weights"] for name in ("one", "other")]
    assert len(set(identities)) == 2 and "hub" not in identities


def test_built_in_kinds_open(tmp_path: Path) -> None:
    local = opened(PolicyConfig(model=str(save_tiny(tmp_path / "model"))), tmp_path)
    endpoint = opened(PolicyConfig(model="big", base_url=BASE_URL), tmp_path)
    assert (local.capture_level, endpoint.capture_level) == ("tokens", "text")
    with pytest.raises(UsageError, match="base_url"):
        opened(PolicyConfig(model="endpoint:big"), tmp_path)


def test_a_name_with_an_environment_before_a_colon_is_built_in():
    assert base.is_built_in(base.EXAMPLE)
    assert not any(map(base.is_built_in, ("kata", "Qwen/Qwen3-8B", "./kata", "other:name", "gsm8k:rows.jsonl")))


def test_built_in_models_have_identities_and_unknown_names_are_refused():
    assert PolicyConfig(model="kata:student").identity() != PolicyConfig(model="kata:teacher-a").identity()
    with pytest.raises(BadInput, match=r"no built-in model kata:nobody\. There is kata:honest, kata:loophole"):
        base.weights_identity(PolicyConfig(model="kata:nobody"))


def test_opening_a_model_reports_its_activity(tmp_path: Path) -> None:
    told: list[str] = []
    config = PolicyConfig(model="big", base_url="http://127.0.0.1:9/v1")
    with on_activity(told.append):
        open_policy(config, cache=kept_in(tmp_path), budget=Budget(), listener=lambda what, done, total: None)
        EnvStageConfig().draw(KataEnv, 1)
    assert told == ["importing the libraries for big", "", "opening the model big", "", "preparing the tasks", ""]


@pytest.mark.parametrize(
    ("shape", "tokens"),
    [
        ({"max_position_embeddings": 64}, 64),
        ({"max_position_embeddings": 64, "rope_scaling": None}, 64),
        ({"max_position_embeddings": 64, "rope_scaling": {"type": "linear", "factor": 4.0}}, 256),
        ({"max_position_embeddings": 64, "rope_parameters": {"rope_type": "dynamic", "factor": 2.0}}, 64),
        ({"max_position_embeddings": 64, "rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, 64),
        ({"max_position_embeddings": 64, "rope_scaling": {"rope_type": "longrope", "factor": 8.0}}, 64),
        *(
            ({"max_position_embeddings": most, "rope_scaling": YARN}, 256)
            for most in (64, 256)  # a card tells to add the scaling alone, or both
        ),
        ({"max_position_embeddings": 64, "rope_parameters": {"full": YARN, "sliding": {"rope_type": "default"}}}, 256),
        ({"max_position_embeddings": "many"}, None),
        ({}, None),
    ],
)
def test_the_context_is_what_scaled_positions_reach(shape: dict[str, Any], tokens: int | None) -> None:
    assert base.declared_context(shape) == tokens
