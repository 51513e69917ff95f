"""A folder that cannot be written, and one that two processes want: a sentence, and whoever was first loses nothing."""

import subprocess
from pathlib import Path

import pytest
from support.command_line import PATHS, command, environment, settings
from support.models import save_tiny

from composer_stages.runs.kinds import ROLLOUT
from composer_stages.runs.run import Run
from composer_stages.sandbox.bubblewrap import find_bwrap

pytestmark = pytest.mark.slow


def collect(model: Path) -> list[str]:
    sizes = settings("policy.max_tokens=60", "tasks=6", "samples=4")
    return command("collect", "--env", "support.environments:SlowEnv", "--policy", model, "-q", *sizes)


def test_a_file_system_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    model, kept = save_tiny(tmp_path / "model"), tmp_path / "kept"
    kept.mkdir()
    wrap = [find_bwrap(), "--dev-bind", "/", "/", "--ro-bind", str(kept), str(kept)]
    env = environment(kept, PYTHONPATH=PATHS)
    done = subprocess.run([*wrap, *collect(model)], env=env, capture_output=True, text=True, timeout=120)
    assert done.returncode == 2 and "Traceback" not in done.stderr
    assert f"Nothing can be written to {kept}" in done.stderr and not list(kept.iterdir())


def test_two_concurrent_processes_do_the_work_once(tmp_path: Path) -> None:
    """Both are started together: one does it, the other is refused or finds it done."""
    words, env = collect(save_tiny(tmp_path / "model")), environment(tmp_path / "artifacts", PYTHONPATH=PATHS)
    both = [subprocess.Popen(words, env=env, stderr=subprocess.PIPE, text=True) for _ in range(2)]
    said = [process.communicate(timeout=150)[1] for process in both]
    codes = sorted(process.returncode for process in both)
    assert codes in ([0, 0], [0, 2]), said
    if codes == [0, 2]:
        assert any("in use by another process" in each or "already holds this run" in each for each in said), said
    (folder,) = tmp_path.glob("artifacts/collect/2*")
    assert Run(folder).manifest.attempts == 1 and len(Run(folder).rows(ROLLOUT)) == 24
