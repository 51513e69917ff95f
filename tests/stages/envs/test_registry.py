import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.environments import GuessEnv

from composer_stages import envs
from composer_stages.envs import ENVIRONMENTS, Registered, code_sha256, foreign_file, load, load_attachment, register
from composer_stages.envs.config import EnvStageConfig
from composer_stages.errors import UsageError
from composer_stages.policy import base
from composer_stages.probe.extract_vhack import HackPairsConfig, load_pairs
from composer_stages.terms import SamplingUnit, sampling_unit_of


class OutsideEnv(GuessEnv):
    """An environment of another package."""

    name = "outside"
    sampling_unit = SamplingUnit("book")


def outside_pairs(count: int, seed: int) -> list[dict[str, str]]:
    return [{"prompt": f"{seed}", "hack": f"{index}!", "clean": f"{index}"} for index in range(count)]


@pytest.fixture
def outside() -> Iterator[Registered]:
    """An environment registered by another package, for one test."""
    entry = Registered(
        f"{__name__}:OutsideEnv", models="composer_stages.envs.kata.checkpoints", hack_pairs=f"{__name__}:outside_pairs"
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
def test_the_options_of_the_source_are_those_of_the_constructor(name: str) -> None:
    options = envs.constructor_options(name)
    assert all(envs.has_option(name, option) for option in options)


@pytest.mark.parametrize("name", sorted(ENVIRONMENTS))
def test_recorded_rollouts_have_the_sampling_unit_of_their_environment(name: str) -> None:
    assert sampling_unit_of(name) == envs.sampling_unit(name)


@pytest.mark.parametrize("name", sorted(ENVIRONMENTS))
@pytest.mark.parametrize("what", ["models", "hack_pairs", "hint", "system"])
def test_what_an_environment_brings_along_can_be_imported(name: str, what: envs.Attachment) -> None:
    if getattr(ENVIRONMENTS[name], what):
        assert load_attachment(name, what)
        return
    with pytest.raises(UsageError, match=f"'{name}' brings no {what} along. Environments that do: .*kata"):
        load_attachment(name, what)


def test_a_users_module_may_have_the_name_of_an_environment(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UsageError, match="no environment 'skills:Base'"):
        load("skills:Base", {})
    Path("skills.py").write_text("from support.environments import GuessEnv as Base")
    assert load("skills:Base", {"turns": 3}).turns == 3
    with pytest.raises(UsageError, match="has no attribute 'Bsae'"):
        load("skills:Bsae", {})
    sys.modules.pop("skills")


def test_models_and_pairs_registered_from_outside_are_found_by_name(outside: Registered) -> None:
    assert base.is_built_in("outside:student")
    registered, own = (base.PolicyConfig(model=f"{name}:student") for name in ("outside", "kata"))
    assert base.weights_identity(registered) == base.weights_identity(own)
    pairs = load_pairs(HackPairsConfig(source="outside", count=2, held_out=2), seed=7)
    assert [(pair.prompt, pair.hack, pair.clean) for pair in pairs] == [("7", f"{i}!", f"{i}") for i in range(4)]


def test_an_environment_from_outside_is_loaded_counts_with_its_file_and_keeps_its_name(outside: Registered) -> None:
    assert [load(name, {"turns": 3}).turns for name in ("outside", outside.environment)] == [3, 3]
    assert code_sha256("outside") == code_sha256(outside.environment)
    assert code_sha256("kata") is None and code_sha256("nowhere.at.all:Env") is None
    assert sampling_unit_of("outside") == OutsideEnv.sampling_unit and sampling_unit_of("unknown").noun == "family"
    register("outside", outside)
    with pytest.raises(UsageError, match=r"'kata' is taken by composer_stages\.envs\.kata\.env:KataEnv"):
        register("kata", outside)


@pytest.mark.parametrize(
    ("name", "options", "said"),
    [
        ("kat", {}, r"There is no environment 'kat'\. Did you mean 'kata'\? There is .*kata"),
        ("kata", {"max_char": 3}, "Did you mean 'max_chars'"),
        ("kata", {"max_chars": 0}, "from 2 on"),
        ("tasks", {"eval_share": "0.1"}, "Take a number"),
        ("nowhere.at.all:Env", {}, "could not be imported"),
        ("composer_stages.envs.kata.env:Missing", {}, "could not be imported"),
        ("os:system", {"command": "touch /tmp/never"}, "standard library"),
        ("code:mbpp", {}, "Did you mean 'code'.* in a module of another name"),
        ("subprocess:Popen", {"args": "true"}, "standard library"),
        ("antigravity:fly", {}, "standard library"),
        ("pytest:main", {"args": ["--version"]}, "is no class"),
        ("composer_stages.envs:importlib", {"name": "this"}, "is no class"),
    ],
)
def test_what_cannot_be_loaded_is_refused(name: str, options: dict, said: str) -> None:
    with pytest.raises(UsageError, match=said):
        load(name, options)


def test_the_file_of_an_environment_is_found_without_importing_anything(tmp_path: Path, monkeypatch) -> None:
    """`importlib.util.find_spec` would execute the packages around the module."""
    package = tmp_path / "unopened" / "inner"
    package.mkdir(parents=True)
    for folder in (package.parent, package):
        (folder / "__init__.py").write_text("raise SystemExit('imported')")
    (package / "env.py").write_text("raise SystemExit('imported')")
    monkeypatch.syspath_prepend(tmp_path)
    assert foreign_file("unopened.inner.env:Env") == package / "env.py"
    assert foreign_file("unopened.inner:Env") == package / "__init__.py"
    assert foreign_file("unopened.nothing.env:Env") is None and "unopened" not in sys.modules
    config = EnvStageConfig(env={"name": "unopened.inner.env:Env"})
    assert code_sha256(config.env.name) and config.identity()["env"]["code_sha256"]
    assert f"the run imports {package / 'env.py'}" in config.check()[0]
    with pytest.raises(UsageError, match="there is no such module"):
        EnvStageConfig(env={"name": "unopened.nothing:Env"}).check()


@pytest.mark.parametrize("source", ["os:kill", "os:system", "shutil:rmtree", "orjson:loads", "pytest:Item"])
def test_pairs_come_from_functions_of_the_users_own(source: str) -> None:
    with pytest.raises(UsageError, match=r"is not a function of \(count, seed\) in a module of yours"):
        load_pairs(HackPairsConfig(source=source, count=2, held_out=2), seed=7)


@pytest.mark.parametrize(
    ("name", "options", "steps"),
    [
        ("skills", {}, 1),
        ("skills", {"attempts": 3}, 3),
        ("skills", {"attempts": 30}, 8),
        ("kata", {}, 8),
        ("own:Env", {}, 8),
    ],
)
def test_a_rollout_has_no_more_steps_than_its_environment_takes_answers(name, options, steps):
    assert envs.most_steps(name, options, 8) == steps


def test_one_text_is_a_list_of_one() -> None:
    """As a list it had its letters: pip was asked for n, u, m, p and y."""
    one, listed = (load("swe-lite", {"instances": given}) for given in ("a__b-1", ["a__b-1"]))
    assert vars(one)["_only"] == vars(listed)["_only"] == ("a__b-1",)
    for value in (3, [3], {"a": 1}, None):
        with pytest.raises(UsageError, match=r"env\.instances of swe-lite"):
            load("swe-lite", {"instances": value})
