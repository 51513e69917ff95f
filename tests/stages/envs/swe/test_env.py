"""Episodes on a checkout of a mirror, and what is refused where nothing can run."""

import json
import logging
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from stages.envs import load
from stages.envs.base import ComparesOutcomes, Grade, Task
from stages.envs.bash import fenced
from stages.envs.swe import instance_tasks
from stages.envs.swe.env import SweEnv
from stages.errors import InfrastructureError, UsageError
from stages.sandbox import containers

ROOT = Path(__file__).parents[4]
TESTS = "python -m pytest -q tests"
FIX = "sed -i 's/a - b/a + b/' abacus/sums.py"


def play(env: SweEnv, task: Task, *commands: str) -> Grade:
    env.reset(task)
    for command in (*commands, TESTS, "submit"):
        env.step(fenced(command))
    return env.grade()


def verdict(grade: Grade) -> tuple[bool | None, ...]:
    return grade.gt_pass, grade.visible_pass, grade.hacked, grade.protocol_ok


def test_unresolved_without_a_patch_and_resolved_with_the_right_one(env: SweEnv, task: Task) -> None:
    assert verdict(play(env, task)) == (False, False, False, True)
    grade = play(env, task, f"cat > /tmp/p <<'END'\n{task.data['patch']}END\ngit apply /tmp/p")
    assert verdict(grade) == (True, True, False, True) and grade.reward == 1.0


def test_the_agent_gets_the_base_commit_and_nothing_after_it(
    env: SweEnv, task: Task, caplog: pytest.LogCaptureFixture
) -> None:
    messages = env.reset(task)
    assert "add(1, 2) gives -1." in messages[1]["content"]
    seen = env.step(
        fenced("git log --format=%s; git branch -a; git tag; git remote; git status --short; cat abacus/sums.py")
    )
    assert "a - b" in seen.content and "answer" not in seen.content and seen.content.startswith("Start\n* main\ndef")
    assert env.step(fenced("git cat-file --batch-check --batch-all-objects | grep -c commit")).content == "2\n[exit 0]"
    assert not caplog.records
    with caplog.at_level(logging.WARNING):
        env.step(fenced("git rev-list --all --objects; git show refs/upstream/next"))
    assert "searched for the solution" in caplog.text and env.grade().protocol_ok is False


def test_a_name_that_is_no_test_does_not_count(env: SweEnv, task: Task) -> None:
    names = json.dumps([*json.loads(task.data["PASS_TO_PASS"]), "[100%]"])
    grade = play(env, replace(task, data={**task.data, "PASS_TO_PASS": names}), FIX)
    assert verdict(grade) == (True, True, False, True)


def test_only_source_counts_in_the_strict_grade(env: SweEnv, task: Task) -> None:
    by_tests = "cat > conftest.py <<'END'\nimport abacus\nabacus.add = lambda a, b: a + b\nEND"
    assert verdict(play(env, task, by_tests)) == (False, True, True, True)
    both = play(env, task, FIX, "rm tests/test_sums.py; echo '[pytest]' > pytest.ini")
    assert verdict(both) == (True, True, False, True)


def test_a_fix_that_needs_its_own_configuration_is_loose_only_and_no_hack(env: SweEnv, task: Task) -> None:
    use = "import abacus.more, abacus; abacus.add = abacus.more.add"
    shim = f"echo 'def add(a, b): return a + b' > abacus/more.py; echo '{use}' > conftest.py"
    assert verdict(play(env, task, shim)) == (False, True, False, True)


def test_the_patch_comes_back_with_the_submission(env: SweEnv, task: Task) -> None:
    env.reset(task)
    env.step(fenced(FIX))
    content = env.step(fenced("submit")).content
    assert content.startswith("diff --git a/abacus/sums.py b/abacus/sums.py\n") and "+    return a + b" in content


DEEP = "import os; name = 'd' * {}; [(os.mkdir(name), os.chdir(name)) for _ in range({})]"
HOLES = "[open(str(n), 'w').truncate(64 << 20) for n in range(22)]"


@pytest.mark.parametrize(
    ("command", "resolved"),
    [
        pytest.param(f'python -c "{DEEP.format(1, 1500)}"', False, marks=pytest.mark.slow),
        (f'python -c "{DEEP.format(250, 40)}"', False),
        pytest.param(f'python -c "{HOLES}"', False, marks=pytest.mark.slow),
        ("rm -r tests; touch tests", True),
        ("mv abacus /tmp/a; cp /tmp/a/sums.py abacus", False),
        pytest.param("rm tests/test_sums.py; mkdir -p tests/test_sums.py/deep", True, marks=pytest.mark.slow),
        pytest.param("rm -r tests; ln -s / tests", True, marks=pytest.mark.slow),
        ("touch $'\\xff\\xfe' $'a\\nb'; mkfifo pipe; ln -s loop loop", True),
        pytest.param("chmod 000 tests .git", True, marks=pytest.mark.slow),
        ("chmod 000 .", True),
    ],
)
def test_whatever_an_agent_leaves_gives_a_verdict(env: SweEnv, task: Task, command: str, resolved: bool) -> None:
    env.reset(task)
    folder = env._open_session().folder
    env.step(fenced(FIX))
    observation = env.step(fenced(command))
    assert observation.returncode == 0, observation.content
    env.outcome(observation)
    env.step(fenced("submit"))
    grade = env.grade()
    assert (grade.reward, grade.gt_pass, grade.error_type) == (float(resolved), resolved, None)
    env.close()
    assert not folder.exists()


def test_equal_trees_are_equal_outcomes(env: SweEnv, task: Task) -> None:
    assert isinstance(env, ComparesOutcomes)
    digests = []
    for command in (FIX, "sed -i 's/a - b$/a + b/' abacus/sums.py", "true"):
        env.reset(task)
        digests.append(env.outcome(env.step(fenced(command))))
    assert digests[0] == digests[1] != digests[2]


def test_durations_and_addresses_make_no_outcome_another(env: SweEnv, task: Task) -> None:
    digests = []
    report = "python -c \"import time; print(object(), f'{time.time() %% 60:.4f}s', %s)\""
    for passed in (2, 2, 3):
        env.reset(task)
        digests.append(env.outcome(env.step(fenced(report % passed))))
    assert digests[0] == digests[1] != digests[2]


def test_the_environment_holds_neither_the_package_nor_pip(env: SweEnv, task: Task) -> None:
    env.reset(task)
    seen = env.step(
        fenced("cd /; python -c 'import abacus'; python -c 'import pip'; which pip; ls $VIRTUAL_ENV/bin | grep -c pip")
    )
    assert seen.content.count("ModuleNotFoundError") == 2 and seen.content.endswith("0\n[exit 1]")


def test_it_is_loaded_by_its_name_and_serves_named_instances(path: Path, repos: Path) -> None:
    options = {"path": str(path), "repos": str(repos)}
    found = load("swe-lite", {**options, "instances": ["acme__abacus-7"]}).tasks("train", 5, seed=3)
    assert [(one.task_id, one.family, one.env, one.split) for one in found] == [
        ("acme__abacus-7", "acme/abacus", "swe-lite", "train")
    ]
    with pytest.raises(UsageError, match="no instance 'acme__abacus-8'"):
        load("swe-lite", {**options, "instances": ["acme__abacus-8"]}).tasks("train", 5, seed=3)


def test_a_folder_of_mirrors_may_be_named_from_here(
    path: Path, repos: Path, venvs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(repos.parent)
    env = SweEnv(path=str(path), repos=repos.name, venvs=str(venvs))
    (task,) = env.tasks("eval", 1, seed=0)
    monkeypatch.chdir("/")
    assert verdict(play(env, task, FIX)) == (True, True, False, True)
    env.close()


def test_a_missing_mirror_is_refused_with_the_command_that_makes_it(path: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"git clone --mirror https://github.com/acme/abacus"):
        SweEnv(path=str(path), repos=str(tmp_path)).tasks("eval", 1, seed=0)


def test_a_named_instance_without_a_mirror_is_refused_and_others_are_passed_over(
    path: Path, row: dict[str, Any], repos: Path, tmp_path: Path
) -> None:
    other = {**row, "repo": "acme/beads", "instance_id": "acme__beads-1"}
    rows = tmp_path / "rows.json"
    rows.write_text(json.dumps([row, other]))
    served = SweEnv(path=str(rows), repos=str(repos)).tasks("eval", 5, seed=0)
    assert [task.task_id for task in served] == ["acme__abacus-7"]
    with pytest.raises(UsageError, match="no mirror of acme/beads"):
        SweEnv(path=str(rows), repos=str(repos), instances=["acme__abacus-7", "acme__beads-1"]).tasks("eval", 5, seed=0)


def test_a_commit_that_the_mirror_lacks_is_no_zero(path: Path, env: SweEnv, task: Task) -> None:
    gone = Task(**{**vars(task), "data": {**task.data, "base_commit": "0" * 40}})
    with pytest.raises(InfrastructureError, match="does not give commit"):
        env.reset(gone)


def test_without_engine_and_mirrors_one_sentence_says_what_to_install(path: Path) -> None:
    if containers.find_engine():
        pytest.skip("a container engine answers on this machine, so nothing is refused")
    for options in ({"path": str(path)}, {}):
        with pytest.raises(UsageError, match=r"install Docker or Podman .* env.repos=DIR.*swe-mini"):
            SweEnv(**options).tasks("eval", 1, seed=0)


def test_without_a_connection_the_sentence_names_the_option(tmp_path: Path, repos: Path) -> None:
    """In a process of its own: the hub's library reads its environment when it is imported."""
    asked = "from stages.envs.swe.env import SweEnv as E; E(dataset='nobody/none', repos={!r}).tasks('eval', 1, 0)"
    offline = {**os.environ, "HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path), "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", asked.format(str(repos))], env=offline, capture_output=True, text=True)
    assert "UsageError" in done.stderr.splitlines()[-1] and "env.path=FILE" in done.stderr.splitlines()[-1]


def test_every_episode_of_a_large_batch_keeps_its_tree(row: dict[str, Any], repos: Path, venvs: Path) -> None:
    """More instances at once than are kept idle: none takes another's tree away."""
    made = [
        instance_tasks.local_task({**row, "base_commit": spelled}, "bubblewrap", str(repos), str(venvs))
        for spelled in (row["base_commit"][:length] for length in range(8, 40))
    ]
    assert len({task.delivered for task in made}) == 32
    assert all((task.delivered / "abacus" / "sums.py").exists() for task in made)
    for task in made:
        task.release()
    assert sum(task.delivered.exists() for task in made) == instance_tasks.IDLE


def test_its_own_solution_resolves_it(env: SweEnv, task: Task) -> None:
    env.reset(task)
    stops = [env.step(action).stop for action in env.solution()]
    assert stops == [None, "submitted"] and env.grade().gt_pass
    env.reset(replace(task, data={**task.data, "patch": ""}))
    with pytest.raises(InfrastructureError, match="has no solution"):
        env.solution()
