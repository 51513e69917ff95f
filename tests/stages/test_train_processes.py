"""`composer train` under torchrun: one run, one voice, and nothing left waiting."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from stages.runs.kinds import ROLLOUT
from stages.runs.run import Run

TESTS = Path(__file__).resolve().parents[1]
pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


def torchrun(artifacts: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """Two processes of the command."""
    paths = os.pathsep.join([str(TESTS), str(TESTS.parent)])
    program = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "composer_cli"]
    return subprocess.run(
        [sys.executable, *program, *words, "--artifacts", str(artifacts)],
        env={**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=280,
    )


def test_one_run_by_two_processes(tmp_path: Path, tiny: Path) -> None:
    settings = [f"policy.model={tiny}", "policy.max_tokens=10", "tasks=2"]
    settings += ["optimisation.steps=1", "optimisation.prompts_per_step=2", "optimisation.generations=2"]
    words = ["train", "--env", "support.environments:GuessEnv", *(word for s in settings for word in ("--set", s))]
    trained = torchrun(tmp_path, *words)
    assert trained.returncode == 0, trained.stderr
    (folder,) = tmp_path.glob("train/2*")
    run = Run(folder)
    assert trained.stdout.strip().endswith(str(folder)) and trained.stdout.count("arm A") == 1
    assert trained.stderr.count("train: starts") == 1
    assert run.manifest.models["policy"]["training"]["processes"] == 2
    assert len(run.rows(ROLLOUT)) == 4

    again = torchrun(tmp_path, *words)
    assert again.returncode == 0 and again.stderr.count("up to date") == 1, again.stderr

    refused = torchrun(tmp_path, *words, "--set", "optimisation.loss_type=bnpo")
    assert refused.returncode != 0 and refused.stderr.count("processes would take another step than one") == 1
    assert len(list(tmp_path.glob("train/2*"))) == 1

    other = torchrun(tmp_path, "collect", "--limit", "1")
    assert other.returncode != 0 and "composer collect runs in one process, and this is one of 2" in other.stderr
    assert not (tmp_path / "collect").exists()
