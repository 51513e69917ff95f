"""A kind of policy from outside the package: one class and one line, and `open_policy` opens it."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.models import save_tiny

from stages.errors import UsageError
from stages.policy import KINDS, Policy, PolicyConfig, Sample, Turn, kind_of, open_policy
from stages.runs.ledger import Budget
from stages.runs.run import Listener

BASE_URL = "http://127.0.0.1:9/v1"


class EchoPolicy:
    """Answers with what it was asked, in capitals."""

    capture_level = "text"
    batch_size = 2

    def __init__(self, config: PolicyConfig, cache: Path) -> None:
        self.config, self.cache = config, cache

    @classmethod
    def open(cls, config: PolicyConfig, *, cache: Path, budget: Budget, listener: Listener) -> "EchoPolicy":
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
    return open_policy(config, cache=cache, budget=Budget(), listener=lambda what, done, total: noted.append(what))


@pytest.mark.usefixtures("echo")
def test_a_kind_from_outside_is_opened_by_its_word(tmp_path: Path) -> None:
    progress: list[str] = []
    policy = opened(PolicyConfig(model="echo:loud"), tmp_path, progress)
    assert policy.sample([Turn([{"role": "user", "content": "hello"}], seed=0)])[0].text == "HELLO"
    assert policy.facts() == {"model": "echo:loud"} and progress == ["opening"]


@pytest.mark.usefixtures("echo")
def test_a_folder_behind_the_word_counts_by_its_bytes(tmp_path: Path) -> None:
    save_tiny(tmp_path / "one", seed=1)
    save_tiny(tmp_path / "other", seed=2)
    identities = [PolicyConfig(model=f"echo:{tmp_path / name}").identity()["weights"] for name in ("one", "other")]
    assert len(set(identities)) == 2 and "hub" not in identities


@pytest.mark.usefixtures("echo")
def test_a_base_url_is_an_endpoint_whatever_the_model_is_called() -> None:
    assert kind_of(PolicyConfig(model="echo:loud", base_url=BASE_URL)) == "endpoint"


@pytest.mark.parametrize("model", ["kata:student", "Qwen/Qwen3-8B", "./model", "echo:loud", "echo", "local"])
def test_without_base_url_and_registered_word_a_model_is_local(model: str) -> None:
    assert kind_of(PolicyConfig(model=model)) == "local"


def test_our_own_kinds_open(tmp_path: Path) -> None:
    local = opened(PolicyConfig(model=str(save_tiny(tmp_path / "model"))), tmp_path)
    endpoint = opened(PolicyConfig(model="big", base_url=BASE_URL), tmp_path)
    assert (local.capture_level, endpoint.capture_level) == ("tokens", "text")


def test_an_endpoint_without_a_server_says_what_to_set(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="base_url is not set"):
        opened(PolicyConfig(model="endpoint:big"), tmp_path)
