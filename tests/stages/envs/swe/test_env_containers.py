"""Rollouts in containers, for rows of both shapes, with a program that stands in for an engine and isolates nothing."""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from composer_stages.envs.bash import fenced
from composer_stages.envs.swe.env import SweEnv
from composer_stages.envs.swe.instance_tasks import task_of
from composer_stages.envs.swe.instances import check_out

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
    "eval_script": SCRIPT,
    "log_parser": "parse_log_pytest",
    "eval_type": "pass_and_fail",
    "PASS_TO_PASS": ["tests/test_sums.py::test_total"],
}


@pytest.fixture
def image(
    put_docker: Callable[..., Path], repos: Path, row: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> str:
    """An image that holds the base commit, with history that nobody may see."""
    image, state = tmp_path / "image", tmp_path / "state"
    for folder in (image / ".git", state):
        folder.mkdir(parents=True)
    (image / ".git/answer").touch()
    check_out(repos / "acme__abacus.git", row["base_commit"], image)
    program = put_docker(STAND_IN.format(python=sys.executable, state=str(state), image=str(image)))
    (program.parent / "python").symlink_to(sys.executable)
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
    # The fix has as many bytes as the bug and is written within the same second: bytecode of the bug would pass for it.
    monkeypatch.setenv("PYTHONDONTWRITEBYTECODE", "1")
    return "mine:1"


@pytest.mark.parametrize("further", [{}, pytest.param(NEWER, marks=pytest.mark.slow)], ids=["classic", "newer"])
def test_both_shapes_are_unresolved_without_the_fix_and_resolved_with_it(
    further: dict[str, Any], image: str, contained: SweEnv, row: dict[str, Any], tmp_path: Path
) -> None:
    data = {**row, **further, "image": image, "instance_id": f"acme__abacus-{tmp_path.name}"}
    task = task_of(data, contained.name, "eval")
    verdicts = []
    for commands in (["ls -a .git; git log --oneline"], ["ls", "sed -i 's/a - b/a + b/' abacus/sums.py", "git diff"]):
        contained.reset(task)
        shown = [contained.step(fenced(command)).content for command in commands]
        assert not any("answer" in text for text in shown)
        grade = contained.grade()
        verdicts.append((grade.hidden_pass, grade.visible_pass, grade.hacked, grade.error))
    assert "+    return a + b" in shown[-1]
    assert verdicts == [(False, False, False, None), (True, True, False, None)], grade
