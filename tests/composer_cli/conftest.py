"""Commands in this process, beside files that are of no use, and presets of chains."""

import io
from collections.abc import Callable
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path

import pytest
from support.chains import POLICY
from support.command_line import TEACHERS

from composer_cli.app import main

ENVS = """
from composer_stages.envs.base import Task
from support.environments import GuessEnv

class Broken(GuessEnv):
    def __init__(self):
        raise ZeroDivisionError("oh")

class Needs(GuessEnv):
    def __init__(self, words, turns=2, *, size, **more):
        pass

class NoTasks(GuessEnv):
    def tasks(self, split, count, seed):
        return {}["no such key"]

class WrongTasks(GuessEnv):
    def tasks(self, split, count, seed):
        return ["a", "b"]

class Twice(GuessEnv):
    def tasks(self, split, count, seed):
        return super().tasks(split, 1, seed) * 2

class NoJson(GuessEnv):
    def tasks(self, split, count, seed):
        return [Task("a", "e", split, "f", "p", {"x": object()})]
"""
"""Environments that cannot be played, each for a fault of its own, as the text of a module."""


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Files that are of no use, and a folder for artifacts."""
    tmp = tmp_path_factory.mktemp("bad")
    (tmp / "bad.toml").write_text("tasks = = 3")
    (tmp / "other.toml").write_text("x = 3")
    (tmp / "binary").write_bytes(bytes(range(256)))
    (tmp / "empty.jsonl").write_text("")
    (tmp / "torn.eval").write_bytes(b"PK\x03\x04torn")
    (tmp / "other-run").mkdir()
    (tmp / "empty-manifest").mkdir()
    (tmp / "empty-manifest" / "manifest.json").write_text("")
    (tmp / "bad_env.py").write_text(ENVS)
    (tmp / "syntax_env.py").write_text("class Env(\n")
    return tmp


@pytest.fixture
def run_command(place: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[int, str, str]]:
    """Runs a command in this process: (exit code, stdout, stderr)."""
    monkeypatch.setenv("COMPOSER_ARTIFACTS", str(place / "artifacts"))
    monkeypatch.syspath_prepend(place)

    def run(*words: object) -> tuple[int, str, str]:
        out, err = io.StringIO(), io.StringIO()
        with redirect_stdout(out), redirect_stderr(err), pytest.raises(SystemExit) as end:
            main([str(word).replace("{tmp}", str(place)) for word in words])
        return int(end.value.code or 0), out.getvalue(), err.getvalue()

    return run


@pytest.fixture
def write(server, tmp_path):
    """Write a preset; in its text SCRIPTED, SLOW stand for policies and TEACHERS for a teacher table."""

    def writing(text: str) -> str:
        policies = {name.upper(): POLICY.format(model=name, url=server) for name in ("scripted", "slow")}
        tables = [
            f'{{ name = "{n}", model = "{m}", base_url = "{server}", max_tokens = 64 }}' for n, m in TEACHERS.items()
        ]
        for word, value in {**policies, "TEACHERS": f"teachers = [{', '.join(tables)}]"}.items():
            text = text.replace(word, value)
        (tmp_path / "preset.toml").write_text(text)
        return str(tmp_path / "preset.toml")

    return writing
