"""A small repository with a bug: a git mirror, an instance of it, and an environment with pytest, nothing fetched."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from composer_stages.envs.base import Task
from composer_stages.envs.repo import runner
from composer_stages.envs.swe.env import SweEnv
from composer_stages.sandbox import containers

BASE = {
    "abacus/__init__.py": "from abacus.sums import add, total\n",
    "abacus/sums.py": "def add(a, b):\n    return a - b\n\n\ndef total(values):\n    return sum(values)\n",
    "tests/test_sums.py": "import abacus\n\n\ndef test_total():\n    assert abacus.total([1, 2]) == 3\n",
    "setup.cfg": "[metadata]\nname = abacus\n",
}
GOLD = """\
diff --git a/abacus/sums.py b/abacus/sums.py
--- a/abacus/sums.py
+++ b/abacus/sums.py
@@ -1,5 +1,5 @@
 def add(a, b):
-    return a - b
+    return a + b
 
 
 def total(values):
"""
TEST_PATCH = """\
diff --git a/tests/test_sums.py b/tests/test_sums.py
--- a/tests/test_sums.py
+++ b/tests/test_sums.py
@@ -3,3 +3,7 @@
 
 def test_total():
     assert abacus.total([1, 2]) == 3
+
+
+def test_add():
+    assert abacus.add(1, 2) == 3
"""


def git(folder: Path, *arguments: str) -> str:
    """A git command with a name and a date."""
    who = {f"GIT_{role}_{what}": "someone" for role in ("AUTHOR", "COMMITTER") for what in ("NAME", "EMAIL")}
    env = {"PATH": os.environ["PATH"], "GIT_CONFIG_GLOBAL": "/dev/null", **who}
    return subprocess.run(
        ["git", *arguments], cwd=folder, env=env, check=True, capture_output=True, text=True
    ).stdout.strip()


@pytest.fixture(scope="session")
def repos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with one mirror, whose history goes on after the base commit to the fix."""
    work, folder = tmp_path_factory.mktemp("work"), tmp_path_factory.mktemp("repos")
    git(work, "init", "-q", "-b", "main")
    for path, text in BASE.items():
        (work / path).parent.mkdir(exist_ok=True)
        (work / path).write_text(text)
    git(work, "add", ".")
    git(work, "commit", "-qm", "base")
    git(work, "tag", "v1")
    (work / "fix").write_text(GOLD)
    git(work, "apply", "fix")
    (work / "fix").unlink()
    git(work, "commit", "-qam", "Fix add: the answer")
    git(work, "clone", "-q", "--mirror", ".", str(folder / "acme__abacus.git"))
    return folder


@pytest.fixture(scope="session")
def row(repos: Path) -> dict[str, Any]:
    """An instance of the classic shape."""
    base = git(repos / "acme__abacus.git", "rev-parse", "v1")
    return {
        "repo": "acme/abacus",
        "instance_id": "acme__abacus-7",
        "base_commit": base,
        "patch": GOLD,
        "test_patch": TEST_PATCH,
        "problem_statement": "add(1, 2) gives -1.",
        "hints_text": "",
        "created_at": "2026-01-01T00:00:00Z",
        "version": "1.0",
        "FAIL_TO_PASS": json.dumps(["tests/test_sums.py::test_add"]),
        # Rows of SWE-bench hold names that are no tests, which do not count.
        "PASS_TO_PASS": json.dumps(["tests/test_sums.py::test_total", "[100%]"]),
        "environment_setup_commit": base,
    }


@pytest.fixture(scope="session")
def venvs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a given environment of that version."""
    folder = tmp_path_factory.mktemp("venvs")
    place = folder / "acme__abacus-1.0"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(place)], check=True)
    site = next(place.glob("lib/python3*/site-packages"))
    for path in runner.distribution_paths(runner.RUNNER):
        (shutil.copytree if path.is_dir() else shutil.copy)(path, site / path.name)
    return folder


@pytest.fixture(scope="session")
def path(row: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The instance as a file."""
    file = tmp_path_factory.mktemp("rows") / "rows.jsonl"
    file.write_text(json.dumps(row) + "\n")
    return file


@pytest.fixture
def env(path: Path, repos: Path, venvs: Path) -> Iterator[SweEnv]:
    environment = SweEnv(path=str(path), repos=str(repos), venvs=str(venvs))
    yield environment
    environment.close()


@pytest.fixture
def task(env: SweEnv) -> Task:
    return env.tasks("eval", 1, seed=0)[0]


@pytest.fixture
def put_docker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Path]]:
    """Puts a program called docker first on the path, or alone there."""

    def put(text: str, *, alone: bool = False) -> Path:
        program = tmp_path / "bin" / "docker"
        program.parent.mkdir(exist_ok=True)
        program.write_text(text)
        program.chmod(0o755)
        folders = [str(program.parent), *([] if alone else [str(Path(sys.executable).parent), os.environ["PATH"]])]
        monkeypatch.setenv("PATH", ":".join(folders))
        containers.find_engine.cache_clear()
        return program

    yield put
    containers.find_engine.cache_clear()


@pytest.fixture
def contained() -> Iterator[SweEnv]:
    """An environment in containers of the engine that is found."""
    environment = SweEnv(runs_in="containers")
    yield environment
    environment.close()
