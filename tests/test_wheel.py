"""A wheel is whole: built, installed into an environment of its own, and used from another folder."""

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from benchmarks.kata_models import RECIPES

ROOT = Path(__file__).parents[1]
pytestmark = pytest.mark.slow


def say(program: Path, folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    env = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "COMPOSER_ARTIFACTS")}
    return subprocess.run([program, *words], cwd=folder, env=env, capture_output=True, text=True, timeout=280)


def test_the_wheel_holds_presets_examples_and_pages(wheel: Path) -> None:
    names = set(zipfile.ZipFile(wheel).namelist())
    for folder, pattern in (("presets", "*.toml"), ("examples", "*"), ("view/pages", "*"), ("view/static", "*")):
        files = [path for path in (ROOT / "composer_cli" / folder).glob(pattern) if path.is_file()]
        assert files and {f"composer_cli/{folder}/{path.name}" for path in files} <= names, folder
    tops = {name.partition("/")[0] for name in names}
    assert tops == {"composer_cli", "composer_post_training", "composer_stages", *(one for one in tops if "-0" in one)}
    assert all(f"{top}/py.typed" in names for top in tops if "-0" not in top)
    for name in RECIPES:
        assert {
            f"composer_stages/envs/kata/models/{name}/{file}" for file in ("model.safetensors", "tokenizer.json")
        } <= names


def test_there_is_no_package_called_stages(installed: Path, tmp_path: Path) -> None:
    script = "import composer_stages, importlib.util; print(importlib.util.find_spec('stages'))"
    done = say(installed.with_name("python"), tmp_path, "-c", script)
    assert (done.returncode, done.stdout.strip()) == (0, "None"), done.stderr


def test_every_module_is_imported_beside_another_package_called_stages(wheel: Path, installed: Path) -> None:
    """No import, name of a class in a text, or subprocess of it means the common name `composer_stages`."""
    names = [name.removesuffix(".py") for name in zipfile.ZipFile(wheel).namelist() if name.endswith(".py")]
    names = [name for name in names if "/guest/" not in name and not name.endswith("__main__")]
    modules = [name.removesuffix("/__init__").replace("/", ".") for name in names]
    script = f"""
import importlib, sys
sys.modules["stages"] = None  # an import of it is an error
left = []
for name in {modules!r}:
    try:
        importlib.import_module(name)
    except Exception as error:  # of an integration, a sentence about the package that it lacks
        left.append((error.__cause__ or error).name)
print(*left)
"""
    python = installed.parent / "python"
    done = subprocess.run([python, "-c", script], cwd=wheel.parent, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr  # an error without a name is none of these
    optional = {"prime_rl", "verifiers", "openenv", "renderers", "minisweagent"}
    assert {name.partition(".")[0] for name in done.stdout.split()} <= optional


def test_it_is_used_from_any_folder(installed: Path, tmp_path: Path) -> None:
    version = say(installed, tmp_path, "--version")
    assert version.returncode == 0 and str(installed.parent.parent) in version.stdout
    served = ("--policy", "kata:student-served", "-s", f"policy.server.python={sys.executable}")
    for preset, words in (("demo", ()), ("examples/real-model.toml", served)):
        done = say(installed, tmp_path, "run", "--preset", preset, "--dry-run", *words)
        assert done.returncode == 0 and "checked: " in done.stdout, (preset, done.stderr)
    assert list(tmp_path.iterdir()) == []
    played = say(installed, tmp_path, "collect", "--policy", "kata:student", "-n", "1")
    assert played.returncode == 0, played.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["artifacts"]
