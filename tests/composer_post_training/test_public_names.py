"""What a package of a user's own imports: every name is the one of its origin, and little is imported for it."""

import ast
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest
from needs import package

import composer_post_training as composer
from composer_post_training import environments
from composer_stages import envs
from composer_stages.envs import ENVIRONMENTS, Registered
from composer_stages.errors import UsageError

PACKAGE = Path(composer.__file__).parent
INTERNAL = {"__init__", "deferred", "interface", "messages", "results", "stage_functions"}
"""Modules from which nobody else imports; `composer_post_training` itself has what is public of them."""
NEED_TORCH = {"channels", "prime_rl", "trl"}
MODULES = sorted({path.stem for path in PACKAGE.glob("*.py")} - INTERNAL)
UNLOADED = "torch transformers trl pyarrow duckdb numpy typer rich openai openenv minisweagent verifiers prime_rl"
"""Packages that a server of environments under another interpreter lacks, or that take long."""


def reexports(name: str) -> dict[str, tuple[str, str]]:
    """Public name -> the module that a source imports it from, if only for type checkers, and its name there."""
    tree = ast.parse((PACKAGE / f"{name}.py").read_text())
    imported = (
        (node.module or "", alias)
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    )
    names = {alias.name: (module, alias.name) for module, alias in imported if alias.asname}
    own = {node.name: (f"composer_post_training.{name}", node.name) for node in tree.body if hasattr(node, "name")}
    return names | own


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] * (name in NEED_TORCH)) for name in MODULES]
)
def test_every_public_name_is_that_of_its_origin(name: str) -> None:
    origins = reexports(name)
    if name == "verifiers" and not package("verifiers")():
        with pytest.raises(UsageError, match="pip install verifiers"):
            import_module("composer_post_training.verifiers")
        return
    module = import_module(f"composer_post_training.{name}")
    assert origins
    for public, (origin, own) in origins.items():
        try:
            expected = getattr(import_module(origin), own)
        except UsageError:  # openenv is not installed
            with pytest.raises(UsageError, match="pip install"):
                getattr(module, public)
        else:
            assert getattr(module, public) is expected
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        module.nothing  # noqa: B018


def test_all_modules_are_named_for_users() -> None:
    text = (composer.__doc__ or "") + (PACKAGE.parent / "docs" / "python.md").read_text()
    assert [name for name in MODULES if text.count(name) < 2] == []


def test_environment_modules_import_nothing_heavy(tmp_path: Path) -> None:
    """The package, its modules and an environment that ships, without what reads runs, trains, or serves."""
    script = f"""
import sys
sys.modules.update(dict.fromkeys({UNLOADED.split()!r}))  # an import of any is an error
import composer_post_training as composer
from composer_post_training import checks, environments, formats, grading, kinds, mini_swe_agent, policies, sandbox
from composer_post_training.channels import CHANNELS, ChannelSpec
from composer_post_training.environments import AnsweredEnv, KataEnv, ShellEnvironment, TooManyTasks, load
from composer_post_training.openenv import ServedEnvironment
from composer_post_training.stages import STAGES, Stage
print(load("repairs:KataEnv", {{}}).name, composer.environments.Task is environments.Task)
"""
    (tmp_path / "repairs.py").write_text("from composer_post_training.environments import KataEnv\n")
    env = {"PYTHONPATH": f"{PACKAGE.parent}", "PATH": ""}
    done = subprocess.run([sys.executable, "-c", script], cwd=tmp_path, env=env, capture_output=True, text=True)
    assert (done.returncode, done.stdout.split()) == (0, ["kata", "True"]), done.stderr


def test_every_environment_that_ships_has_a_public_class() -> None:
    classes = {entry.environment.partition(":")[2] for name, entry in ENVIRONMENTS.items() if envs.is_shipped(name)}
    assert classes <= reexports("environments").keys()


def test_an_environment_by_its_public_name_is_the_one_that_ships() -> None:
    public = f"{envs.PUBLIC}:KataEnv"
    assert environments.__name__ == envs.PUBLIC
    assert envs.is_same_environment("kata", public) and envs.is_same_environment(
        public, ENVIRONMENTS["kata"].environment
    )
    assert not envs.is_same_environment("skills", public) and not envs.is_same_environment(
        "kata", f"{envs.PUBLIC}:NoEnv"
    )
    assert envs.foreign_file(public) == Path(import_module("composer_stages.envs.kata.env").__file__ or "")
    assert type(envs.load(public, {})) is environments.KataEnv
    ENVIRONMENTS["repairs"] = Registered(public)
    try:
        assert (
            envs.is_shipped("repairs")
            and envs.is_same_environment("repairs", "kata")
            and envs.code_sha256("repairs") is None
        )
    finally:
        del ENVIRONMENTS["repairs"]
