"""Rollouts in containers, for rows of both shapes, with a program that stands in for an engine and isolates nothing."""

import os
import stat
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from stages.envs.bash import fenced
from stages.envs.swe.env import SweEnv
from stages.envs.swe.instance_tasks import task_of
from stages.envs.swe.instances import check_out
from stages.sandbox import containers

STAND_IN = """\
#!{python}
import os, shutil, subprocess, sys
verb, words = sys.argv[1], sys.argv[2:]
state = {state!r}
def after(option):
    return [words[i + 1] for i, word in enumerate(words) if word == option]
if verb == "run":
    folder = next(v for v in after("--volume") if v.endswith(":/testbed")).partition(":")[0]
    open(os.path.join(state, after("--name")[0]), "w").write(folder)
elif verb == "cp":
    shutil.copytree({image!r}, words[1], dirs_exist_ok=True)
elif verb == "exec" and "timeout" in words:
    at = words.index("timeout")
    env = dict(os.environ, **dict(v.split("=", 1) for v in after("--env")))
    folder = open(os.path.join(state, words[at - 1])).read()
    sys.exit(subprocess.run(words[at:], cwd=folder, env=env).returncode)
"""
SCRIPT = """\
set -uxo pipefail
git checkout base tests/test_sums.py
: '>>>>> Start Test Output'
python -m pytest -rA -p no:cacheprovider tests/test_sums.py
: '>>>>> End Test Output'
"""
NEWER = {
    "image": "mine:1",
    "eval_script": SCRIPT,
    "log_parser": "parse_log_pytest",
    "eval_type": "pass_and_fail",
    "PASS_TO_PASS": ["tests/test_sums.py::test_total"],
}


@pytest.fixture
def env(repos: Path, row: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[SweEnv]:
    """An environment in containers whose image holds the base commit, with history that nobody may see."""
    image, state = tmp_path / "image", tmp_path / "state"
    for folder in (image / ".git", state):
        folder.mkdir(parents=True)
    (image / ".git/answer").touch()
    check_out(repos / "acme__abacus.git", row["base_commit"], image)
    program = tmp_path / "bin/docker"
    program.parent.mkdir()
    program.write_text(STAND_IN.format(python=sys.executable, state=str(state), image=str(image)))
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    (tmp_path / "bin/python").symlink_to(sys.executable)
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
    # The fix has as many bytes as the bug and is written within the same second: bytecode of the bug would pass for it.
    monkeypatch.setenv("PYTHONDONTWRITEBYTECODE", "1")
    monkeypatch.setenv("PATH", f"{program.parent}:{Path(sys.executable).parent}:{os.environ['PATH']}")
    containers.find_engine.cache_clear()
    environment = SweEnv(runs_in="containers")
    yield environment
    environment.close()
    containers.find_engine.cache_clear()


@pytest.mark.parametrize("further", [{}, pytest.param(NEWER, marks=pytest.mark.slow)], ids=["classic", "newer"])
def test_both_shapes_are_unresolved_without_the_fix_and_resolved_with_it(
    further: dict[str, Any], env: SweEnv, row: dict[str, Any], tmp_path: Path
) -> None:
    task = task_of({**row, **further, "instance_id": f"acme__abacus-{tmp_path.name}"}, env.name, "eval")
    verdicts = []
    for command in ("ls -a .git; git log --oneline", "sed -i 's/a - b/a + b/' abacus/sums.py"):
        env.reset(task)
        assert "answer" not in env.step(fenced(command)).content
        grade = env.grade()
        verdicts.append((grade.hidden_pass, grade.visible_pass, grade.hacked, grade.error))
    assert verdicts == [(False, False, False, None), (True, True, False, None)], grade
