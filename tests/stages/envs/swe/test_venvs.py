"""Environments of repository versions: what is built, what must not be in them, and what cannot be built."""

import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from composer_stages.envs.repo import trees
from composer_stages.envs.swe import venvs
from composer_stages.envs.swe.env import SweEnv
from composer_stages.envs.swe.instances import require_mirror
from composer_stages.envs.swe.specs import HERE, EnvironmentSpec, spec_from_table
from composer_stages.envs.swe.venvs import Venv, remove_description
from composer_stages.errors import InfrastructureError

LOCAL = EnvironmentSpec(
    HERE, install="echo 'made = 1' > abacus/made.py; echo '# changed' >> abacus/sums.py; echo x >> setup.cfg"
)


@pytest.mark.slow
def test_an_environment_is_built_once_and_keeps_only_what_was_made(
    row: dict[str, Any], repos: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOMEBREW_GITHUB_API_TOKEN", "ghp_of_the_user")
    mirror, spec = require_mirror(repos, row["repo"]), replace(LOCAL, install=f"{LOCAL.install}; env")
    with caplog.at_level(logging.WARNING):
        built = venvs.prepare_venv(row, spec, mirror, tmp_path)
    assert "acme__abacus-1.0 is not in a table of swebench here" in caplog.text
    assert built.overlay is not None and list(trees.walk(built.overlay)) == ["abacus/made.py"]
    assert not list(built.folder.glob("lib/python3*/site-packages/pip*")), "pip brings copies of packages along"
    log = tmp_path / "acme__abacus-1.0.log"
    assert "HOME=" in log.read_text() and "ghp_of_the_user" not in log.read_text()
    log.unlink()
    assert venvs.prepare_venv(row, spec, mirror, tmp_path) == built and not log.exists()


@pytest.mark.parametrize(
    ("spec", "reason"),
    [
        (replace(LOCAL, python="2.3"), "needs Python 2.3, which is not installed"),
        (replace(LOCAL, needs_conda=True), "is a conda environment. Build it yourself"),
    ],
)
def test_what_cannot_be_built_is_no_score_and_is_not_tried_again(
    spec: EnvironmentSpec, reason: str, row: dict[str, Any], repos: Path, tmp_path: Path
) -> None:
    mirror = require_mirror(repos, row["repo"])
    for attempt in (spec, LOCAL):
        with pytest.raises(InfrastructureError, match=reason):
            venvs.prepare_venv(row, attempt, mirror, tmp_path)


@pytest.mark.parametrize(
    ("install", "in_place"),
    [
        ("python -m pip install .", "python -m pip install -e ."),
        ("python -m pip install -v --no-deps .[x]", "python -m pip install -v --no-deps -e .[x]"),
        ("python -m pip install -e .[test] --verbose", "python -m pip install -e .[test] --verbose"),
        ("python -m pip install -v --no-build-isolation -e .", "python -m pip install -v --no-build-isolation -e ."),
    ],
)
def test_a_repository_is_installed_in_place(install: str, in_place: str) -> None:
    assert spec_from_table("a/b", {"install": install}).install == in_place


def given(folder: Path, package: str) -> Path:
    """A virtual environment, by the look of it, that holds a package."""
    inside = folder / "acme__abacus-1.0/lib/python3.11/site-packages" / package
    inside.mkdir(parents=True)
    (inside / "__init__.py").touch()
    python = folder / "acme__abacus-1.0/bin/python"
    python.parent.mkdir()
    python.touch()
    return folder


def test_a_given_environment_that_holds_the_repository_is_not_used(path: Path, repos: Path, tmp_path: Path) -> None:
    env = SweEnv(path=str(path), repos=str(repos), venvs=str(given(tmp_path, "abacus")))
    with pytest.raises(InfrastructureError, match=r"holds a copy of abacus at .*site-packages/abacus"):
        env.reset(env.tasks("eval", 1, seed=0)[0])


def test_a_package_named_as_the_repositorys_tests_is_no_copy(row: dict[str, Any], repos: Path, tmp_path: Path) -> None:
    def venv(name: str) -> Venv:
        return venvs.open_venv(given(tmp_path / name, name) / "acme__abacus-1.0")

    delivered = tmp_path / "delivered"
    for package in ("tests", "src/abacus"):
        (delivered / package).mkdir(parents=True)
        (delivered / package / "__init__.py").touch()
    venvs.refuse_copies(venv("tests"), delivered, "it")
    with pytest.raises(InfrastructureError, match="copy of abacus"):
        venvs.refuse_copies(venv("abacus"), delivered, "it")


def test_metadata_loses_the_changelog_in_its_description() -> None:
    old = "Name: a\nDescription: Text\n        1.1 (2030)\n        \n        * Fixed it.\n        \nRequires-Dist: b\n"
    assert remove_description(old) == "Name: a\nRequires-Dist: b\n"
    new = "Name: a\nRequires-Dist: b\n\n# Text\n\n1.1: Fixed it.\n"
    assert remove_description(new) == "Name: a\nRequires-Dist: b\n"
