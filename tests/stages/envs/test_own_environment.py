"""The environment in the documents, as a user would run it: one file, outside the repository, by its import path."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from support.command_line import call
from support.server import Reply, answer, serving

from composer_stages.envs.config import EnvConfig

ROOT = Path(__file__).parents[3]
EXAMPLE = re.compile(r'^```python title="riddles\.py"\n(.*?)^```$', re.M | re.S)


@pytest.fixture
def example() -> str:
    """The file `riddles.py` of docs/environments.md."""
    found = EXAMPLE.search((ROOT / "docs" / "environments.md").read_text())
    assert found is not None
    return found[1]


def collecting(url: str, env: str, *more: str) -> list[str]:
    """The words of the command."""
    policy = ["--policy", "scripted", "-s", f"policy.base_url={url}"]
    return ["collect", "--env", env, *policy, "-s", "tasks=3", "-s", "samples=2", *more, "--json"]


def collect(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """The installed program in a folder: unlike `python -m`, it does not find modules there by itself."""
    program = [sys.executable, "-P", "-c", "from composer_cli.__main__ import main; main()"]
    return subprocess.run(
        [*program, *words],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT), "COMPOSER_ARTIFACTS": str(folder / "artifacts")},
        capture_output=True,
        text=True,
        timeout=120,
    )


def test_the_documented_environment_runs_from_its_folder(tmp_path: Path, example: str):
    assert len(example.splitlines()) <= 56
    (tmp_path / "riddles.py").write_text(example)
    (tmp_path / "json.py").write_text("raise SystemExit('a module of this folder hides an installed one')")

    def guess(asked, earlier):
        told = asked["messages"][-1]["content"]
        return Reply(body=answer({"l": "Lamp", "r": "sun"}.get(told.removeprefix("No. It begins with ")[:1], "stone")))

    with serving(guess) as server:
        done = collect(tmp_path, *collecting(server.url, "riddles:Riddles", "-s", "env.guesses=2"))
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    assert told["counts"] == {"planned": 6, "done": 6, "failed": 0, "steps": 10}
    assert told["ok"] and told["summary"]["mean_reward"] == pytest.approx(2 / 3)


def test_the_documented_environment_takes_calls(tmp_path: Path, example: str, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "riddles_by_calls.py").write_text(example)
    monkeypatch.chdir(tmp_path)

    def guess(asked, earlier):
        assert asked["tools"][0]["function"]["name"] == "guess"
        assert asked["messages"][0]["content"].endswith("letters? Call guess.")
        words = {"word": "lamp"} if len(asked["messages"]) > 1 else {"wrong": "lamp"}
        call = {"id": "c", "type": "function", "function": {"name": "guess", "arguments": json.dumps(words)}}
        reply = answer("")
        reply["choices"][0]["message"] = {"role": "assistant", "content": None, "tool_calls": [call]}
        return Reply(body=reply)

    with serving(guess) as server:
        words = collecting(server.url, "riddles_by_calls:Riddles", "-s", "env.guesses=1")
        done = call(tmp_path / "artifacts", *words, "-s", "policy.tool_calls=native")
    assert done.returncode in (0, 1), done.stderr
    told = json.loads(done.stdout)
    # A call without its argument is answered, and the next one is the guess: two steps a rollout.
    assert told["counts"] == {"planned": 6, "done": 6, "failed": 0, "steps": 12}
    assert told["summary"]["mean_reward"] == pytest.approx(1 / 3)


def test_an_edited_environment_is_another_run(tmp_path: Path, example: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "puzzles.py").write_text(example)
    before = EnvConfig(name="puzzles:Riddles").identity()
    assert (
        EnvConfig(name="puzzles:Riddles").identity() == before
        and "code_sha256" not in EnvConfig(name="kata").identity()
    )
    (tmp_path / "puzzles.py").write_text(example.replace("lamp", "bulb"))
    assert EnvConfig(name="puzzles:Riddles").identity() != before
    assert EnvConfig(name="nowhere.at.all:Riddles").identity().keys() == EnvConfig(name="kata").identity().keys()
