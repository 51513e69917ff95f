"""A folder that cannot be written, and one that two processes want: a sentence, and whoever was first loses nothing."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from support.models import save_tiny

from stages.runs.kinds import ROLLOUT
from stages.runs.run import Run
from stages.sandbox.bubblewrap import find_bwrap

TESTS = Path(__file__).resolve().parents[1]
pytestmark = pytest.mark.slow
ENVIRONMENT = {**os.environ, "PYTHONPATH": os.pathsep.join([str(TESTS), str(TESTS.parent)]), "OMP_NUM_THREADS": "1"}


def collect(model: Path, artifacts: Path) -> list[str]:
    words = ["collect", "--env", "support.environments:SlowEnv", "--policy", str(model), "-q", "--artifacts"]
    sizes = ["-s", "policy.max_tokens=60", "-s", "tasks=6", "-s", "samples=4"]
    return [sys.executable, "-m", "composer_cli", *words, str(artifacts), *sizes]


def test_a_file_system_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    model, kept = save_tiny(tmp_path / "model"), tmp_path / "kept"
    kept.mkdir()
    wrap = [find_bwrap(), "--dev-bind", "/", "/", "--ro-bind", str(kept), str(kept)]
    done = subprocess.run([*wrap, *collect(model, kept)], env=ENVIRONMENT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 2 and "Traceback" not in done.stderr
    assert f"Nothing can be written to {kept}" in done.stderr and not list(kept.iterdir())


def test_two_at_once_do_the_work_once(tmp_path: Path) -> None:
    """Both are started together: one does it, the other is refused or finds it done."""
    words = collect(save_tiny(tmp_path / "model"), tmp_path / "artifacts")
    both = [subprocess.Popen(words, env=ENVIRONMENT, stderr=subprocess.PIPE, text=True) for _ in range(2)]
    said = [process.communicate(timeout=150)[1] for process in both]
    codes = sorted(process.returncode for process in both)
    assert codes in ([0, 0], [0, 2]), said
    if codes == [0, 2]:
        assert any("in use by another process" in each or "already holds this run" in each for each in said), said
    (folder,) = tmp_path.glob("artifacts/collect/2*")
    assert Run(folder).manifest.attempts == 1 and len(Run(folder).rows(ROLLOUT)) == 24
