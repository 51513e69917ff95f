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


CALLS = """
import contextlib, io, json, sys
import composer_post_training as composer
from composer_cli.app import main
from composer_post_training.channels import CHANNELS, Config

def command(line):
    output = io.StringIO()
    sys.argv = ["composer", *line.split()]
    with contextlib.redirect_stdout(output), contextlib.redirect_stderr(output):
        try:
            main()
        except SystemExit as ended:
            return [ended.code or 0, " ".join(output.getvalue().split())]
    return [0, output.getvalue()]

lines = ["--help", "compare a.jsonl b.jsonl", "import --help", "train --help --all", "count-steps"]
rollouts = composer.collect(env="capitals", policy="parrot:Paris", tasks=3, samples=1, quiet=True)
steps = composer.count_steps(rollouts, at_least=1, quiet=True)
job = composer.run("demo", {"on.number": 7}, on="paper", quiet=True)
print(json.dumps({
    "mean_reward": rollouts.manifest.summary["mean_reward"],
    "steps": steps.manifest.summary["steps"],
    "weights": Config(weights={"unlikelihood": 0.1}).weights.active(),
    "loss": CHANNELS["unlikelihood"].load().__name__,
    "doc": composer.count_steps.__doc__,
    "setting": composer.train.settings()["weights.unlikelihood"],
    "job": job.status,
    **{line: command(line) for line in lines},
}))
"""


def test_one_package_adds_one_of_each_kind(plugin: Path, tmp_path: Path) -> None:
    """From Python and on the command line, in one process."""
    rows = [{"question": f"{number} + 1?", "answer": str(number + 1), "right": number % 2 == 0} for number in range(8)]
    jsonl(tmp_path / "a.jsonl", *rows)
    jsonl(tmp_path / "b.jsonl", *({**row, "right": True} for row in rows))
    environment = {**os.environ, "PYTHONPATH": f"{plugin}{os.pathsep}{ROOT}"}
    done = subprocess.run(
        [sys.executable, "-c", CALLS], cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["mean_reward"] == pytest.approx(1 / 3) and found["steps"] == 3
    assert found["weights"] == {"unlikelihood": 0.1} and found["loss"] == "Unlikelihood" and found["setting"] == 0.0
    assert "Count the steps of rollouts." in found["doc"] and found["job"] == "queued"
    assert "count-steps" in found["--help"][1] and "quiz" in found["import --help"][1]
    assert found["compare a.jsonl b.jsonl"][0] == 3 and "+50.0 points" in found["compare a.jsonl b.jsonl"][1]
    assert "The mean log-prob of the rejected action's tokens." in found["train --help --all"][1]
    assert found["count-steps"][0] == 0 and "3 steps in 3 rollouts" in found["count-steps"][1]
