"""Whether a model can be had, before anything is paid for; and what is said while a server is silent."""

import sys
import time
from pathlib import Path
from typing import Any

import pytest
from support.models import save_tiny
from support.server import Reply, answer, serving

from stages.envs.kata.recipes import recipe_fingerprint
from stages.errors import BadInput, InfrastructureError, UsageError
from stages.policy import ask_all
from stages.policy.available import check
from stages.policy.base import PolicyConfig, Turn
from stages.policy.endpoint import EndpointPolicy
from stages.runs.ledger import Budget


def listing(*names: str) -> Reply:
    return Reply(body={"object": "list", "data": [{"id": name, "object": "model"} for name in names]})


def never(body: dict[str, Any], number: int) -> Reply:
    raise AssertionError("no answer is to be asked for")


def test_a_server_that_lists_the_model_passes_and_one_that_does_not_is_refused() -> None:
    with serving(never, listing("big", "small")) as server:
        assert "lists the model" in check(PolicyConfig(model="big", base_url=server.url), Path())
        with pytest.raises(BadInput, match="has no model 'bgi'; it lists 2, for example 'big'"):
            check(PolicyConfig(model="bgi", base_url=server.url), Path())
    assert server.requests == []


def test_a_server_without_a_list_is_only_said_to_answer() -> None:
    with serving(never) as server:
        assert "lists no models" in check(PolicyConfig(model="big", base_url=server.url), Path())


def test_a_refused_key_and_a_server_that_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SOME_KEY", "k-123456789")
    with (
        serving(never, Reply(401, {"error": {"message": "bad key"}})) as server,
        pytest.raises(UsageError, match=r"refuses the key \(status 401\). Check SOME_KEY"),
    ):
        check(PolicyConfig(model="big", base_url=server.url, api_key_env="SOME_KEY"), Path())
    with pytest.raises(InfrastructureError, match=r"http://127\.0\.0\.1:9/v1 cannot be reached"):
        check(PolicyConfig(model="big", base_url="http://127.0.0.1:9/v1"), Path())


def test_a_model_for_vllm_has_a_server_that_answers_or_a_vllm_to_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A dry run says both, of the tokenizer that is read here and of the server, before anything is loaded."""
    model = f"vllm:{save_tiny(tmp_path / 'tiny')}"
    with serving(never, listing("base")) as server:
        assert "its folder is whole; " in (said := check(PolicyConfig(model=model, base_url=server.url), Path()))
        assert said.endswith(f"{server.url}, which is to sample from it, answers")
    with pytest.raises(InfrastructureError, match=r"http://127\.0\.0\.1:9/v1 cannot be reached"):
        check(PolicyConfig(model=model, base_url="http://127.0.0.1:9/v1"), Path())
    monkeypatch.delenv("COMPOSER_VLLM", raising=False)
    assert sys.executable in check(PolicyConfig(model=model, server={"python": sys.executable}), Path())
    with pytest.raises(UsageError, match="/no/python, which is to run vLLM, does not exist"):
        check(PolicyConfig(model=model, server={"python": "/no/python"}), Path())
    for weights in (tmp_path / "tiny").glob("*.safetensors"):
        weights.unlink()
    with pytest.raises(BadInput, match=r"holds no \*.safetensors"):
        check(PolicyConfig(model=model, server={"python": sys.executable}), Path())


def test_folders_are_read_as_loading_would_and_weights_must_be_there(tmp_path: Path) -> None:
    save_tiny(tmp_path / "tiny")
    config = PolicyConfig(model=str(tmp_path / "tiny"))
    assert "its folder is whole" in check(config, Path())
    for weights in (tmp_path / "tiny").glob("*.safetensors"):
        weights.unlink()
    with pytest.raises(BadInput, match=r"holds no \*.safetensors"):
        check(config, Path())
    with pytest.raises(BadInput, match=r"no model folder \./nowhere"):
        check(PolicyConfig(model="./nowhere"), Path())
    made = check(PolicyConfig(model="kata:student"), tmp_path)
    assert made.endswith("kata-novice, then from it kata-student, each in up to a minute on an idle core")


def test_a_model_that_was_made_is_there(tmp_path: Path) -> None:
    said = {"novice": "use: kata-student, in up to a minute on an idle core", "student": f": is there, in {tmp_path}"}
    for name, end in said.items():
        (tmp_path / f"kata-{name}-{recipe_fingerprint(name)[:6]}").mkdir()
        assert check(PolicyConfig(model="kata:student"), tmp_path).endswith(end)


def test_what_is_waited_for_is_said_while_a_server_is_silent(tmp_path: Path) -> None:
    heard: list[tuple[str, int, int]] = []
    with serving(lambda body, n: Reply(body=answer("x"), delay_s=0.5)) as server:
        config = PolicyConfig(model="big", base_url=server.url)
        policy = EndpointPolicy(
            config, budget=Budget(), cache=tmp_path, listener=lambda *said: heard.append(said), quiet_s=0.1
        )
        ask_all(policy, [Turn([{"role": "user", "content": text}], seed=0) for text in "ab"])
        told = len(heard)
        time.sleep(0.3)
    assert told and len(heard) == told, "nothing is said once all answers are there"
    what, done, total = heard[0]
    assert what.startswith("waiting for 2 answers of big at http://127.0.0.1:") and ", the oldest since " in what
    assert (done, total) == (0, 0)
