"""A package that is installed beside this one adds one of each kind, and each works like what ships.

The package is `examples/plugin`. It is installed into a folder of its own, which processes of these tests search.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from support.shared import made_once
from support.transcripts import jsonl

ROOT = Path(__file__).parents[1]
PLUGIN = ROOT / "examples" / "plugin"


@pytest.fixture(scope="module")
def plugin(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the installed package."""

    def install(folder: Path) -> None:
        words = ["install", "--quiet", "--no-deps", "--no-build-isolation", "--disable-pip-version-check"]
        source = folder / "source"
        subprocess.run(["cp", "-r", PLUGIN, source], check=True)
        subprocess.run([sys.executable, "-m", "pip", *words, "--target", folder / "site", source], check=True)

    return made_once(tmp_path_factory, "plugin", install) / "site"


def run(plugin: Path, folder: Path, *words: str, code: int = 0) -> str:
    """What a process with the package prints on stdout."""
    environment = {**os.environ, "PYTHONPATH": f"{plugin}{os.pathsep}{ROOT}", "PYTHONWARNINGS": "default::UserWarning"}
    done = subprocess.run([sys.executable, *words], cwd=folder, env=environment, capture_output=True, text=True)
    assert done.returncode == code, done.stderr
    return done.stdout + done.stderr


CALLS = """
import json, composer_post_training as composer
from composer_post_training.channels import CHANNELS, Config
rollouts = composer.collect(env="capitals", policy="parrot:Paris", tasks=3, samples=1, quiet=True)
steps = composer.count_steps(rollouts, at_least=1, quiet=True)
job = composer.run("demo", {"on.number": 7}, on="paper", quiet=True)
print(json.dumps({
    "mean_reward": rollouts.manifest.summary["mean_reward"],
    "steps": steps.manifest.summary["steps"],
    "weights": Config(weights={"unlikelihood": 0.1}).weights.active(),
    "loss": CHANNELS["unlikelihood"].load().__name__,
    "help": composer.count_steps.__doc__,
    "settings": composer.train.settings()["weights.unlikelihood"],
    "job": [job.status, job.name],
}))
"""


def test_one_package_adds_one_of_each_kind_to_python(plugin: Path, tmp_path: Path) -> None:
    done = json.loads(run(plugin, tmp_path, "-c", CALLS).splitlines()[-1])
    assert done["mean_reward"] == pytest.approx(1 / 3) and done["steps"] == 3
    assert done["weights"] == {"unlikelihood": 0.1} and done["loss"] == "Unlikelihood" and done["settings"] == 0.0
    assert "Count the steps of rollouts." in done["help"] and done["job"][0] == "queued"


def test_the_same_names_work_on_the_command_line(plugin: Path, tmp_path: Path) -> None:
    composer = ("-m", "composer_cli")
    rows = [{"question": f"{number} + 1?", "answer": str(number + 1), "right": number % 2 == 0} for number in range(8)]
    jsonl(tmp_path / "a.jsonl", *rows)
    jsonl(tmp_path / "b.jsonl", *({**row, "right": True} for row in rows))
    assert "count-steps" in run(plugin, tmp_path, *composer, "--help")
    assert "+50.0 points" in run(plugin, tmp_path, *composer, "compare", "a.jsonl", "b.jsonl", code=3)
    assert "quiz" in run(plugin, tmp_path, *composer, "import", "--help")
    help_text = run(plugin, tmp_path, *composer, "train", "--help", "--all")
    assert "The mean log-prob of the rejected action's tokens." in " ".join(help_text.split())
    run(
        plugin,
        tmp_path,
        *composer,
        "collect",
        "--env",
        "capitals",
        "--policy",
        "reference",
        "--set",
        "tasks=2",
        "--set",
        "samples=1",
    )
    assert "2 steps in 2 rollouts" in run(plugin, tmp_path, *composer, "count-steps")
