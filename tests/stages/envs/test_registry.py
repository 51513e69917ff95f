from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.environments import GuessEnv

from stages import envs
from stages.envs import ENVIRONMENTS, Registered, attached, code_sha256, load, register
from stages.errors import UsageError
from stages.policy import base
from stages.policy.base import PolicyConfig, Sample, Turn
from stages.probe.extract_vhack import PairsConfig, load_pairs
from stages.rollouts.agent_loop import Episode, play


class Bare:
    """An environment's constructor, as somebody else may have written it."""

    def __init__(self, size: int = 1) -> None:
        self.size = size


class OutsideEnv(GuessEnv):
    """An environment of another package."""

    name = "outside"


class SaysA:
    """A policy that answers "a" to everything."""

    config = PolicyConfig()
    capture_level = "text"
    batch_size = 4

    def sample(self, turns: list[Turn]) -> list[Sample]:
        return [Sample("a") for _ in turns]

    def facts(self) -> dict[str, Any]:
        return {}


def outside_pairs(count: int, seed: int) -> list[dict[str, str]]:
    return [{"prompt": f"{seed}", "hack": f"{index}!", "clean": f"{index}"} for index in range(count)]


@pytest.fixture
def outside() -> Iterator[Registered]:
    """An environment registered by another package, for one test."""
    entry = Registered(
        f"{__name__}:OutsideEnv",
        models="stages.envs.kata.checkpoints",
        hack_pairs=f"{__name__}:outside_pairs",
    )
    register("outside", entry)
    yield entry
    del ENVIRONMENTS["outside"]


@pytest.mark.parametrize("name", sorted(ENVIRONMENTS))
def test_every_environment_loads_and_knows_its_name(name: str) -> None:
    try:
        environment = load(name, {})
    except UsageError as error:
        assert "--set env." in str(error), "one that needs data says how to give it"  # noqa: PT017 - either is right
        return
    assert environment.name == name
    environment.close()
    environment.close()


@pytest.mark.parametrize("name", sorted(ENVIRONMENTS))
@pytest.mark.parametrize("what", ["models", "hack_pairs", "hint", "system"])
def test_what_an_environment_brings_along_can_be_imported(name: str, what: envs.Attachment) -> None:
    if getattr(ENVIRONMENTS[name], what):
        assert attached(name, what)
        return
    with pytest.raises(UsageError, match=f"'{name}' brings no {what} along. Environments that do: .*kata"):
        attached(name, what)


def test_a_class_of_somebody_else_loads_by_its_path() -> None:
    assert load(f"{__name__}:Bare", {"size": 3}).size == 3


def test_an_episode_in_an_environment_registered_from_outside(outside: Registered) -> None:
    tasks = load("outside", {}).tasks("train", 2, 0)
    episodes = [Episode(task, 0, 0) for task in tasks]
    play(lambda: load("outside", {"turns": 3}), SaysA(), episodes, max_steps=5)
    assert [(len(episode.steps), episode.terminated_by) for episode in episodes] == [(3, "answered")] * 2
    assert [episode.grade.reward for episode in episodes] == [1.0, 0.0]


def test_models_and_pairs_registered_from_outside_are_found_by_name(outside: Registered) -> None:
    assert base.is_embedded("outside:student")
    registered, own = (base.PolicyConfig(model=f"{name}:student") for name in ("outside", "kata"))
    assert base.weights_identity(registered) == base.weights_identity(own)
    pairs = load_pairs(PairsConfig(source="outside", count=2, held_out=2), seed=7)
    assert [(pair.prompt, pair.hack, pair.clean) for pair in pairs] == [("7", f"{i}!", f"{i}") for i in range(4)]


def test_a_registered_environment_counts_with_its_file_unless_it_ships(outside: Registered, tmp_path: Path) -> None:
    assert code_sha256("outside") == code_sha256(outside.environment)
    assert code_sha256("kata") is None and code_sha256("nowhere.at.all:Env") is None


def test_a_name_is_given_once(outside: Registered) -> None:
    register("outside", outside)
    with pytest.raises(UsageError, match=r"'kata' is taken by stages\.envs\.kata\.env:KataEnv"):
        register("kata", outside)


@pytest.mark.parametrize(
    ("name", "options", "said"),
    [
        ("kat", {}, "There is no environment 'kat'. There is .*kata"),
        ("kata", {"max_char": 3}, "Did you mean 'max_chars'"),
        ("nowhere.at.all:Env", {}, "could not be imported"),
        ("stages.envs.kata.env:Missing", {}, "could not be imported"),
    ],
)
def test_what_cannot_be_loaded_is_refused(name: str, options: dict, said: str) -> None:
    with pytest.raises(UsageError, match=said):
        load(name, options)
