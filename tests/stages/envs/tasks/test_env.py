"""Tasks of one's own: what passes, what the agent cannot see or change, and where the files come from."""

import json
import pickle
import subprocess
import tarfile
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from support.scripted_runs import nothing_done

from stages import collect, evaluate, train
from stages.envs import load
from stages.envs.base import Grade, HasSolutions, Task
from stages.envs.bash import fenced
from stages.envs.task_table import TooManyTasks
from stages.envs.tasks.env import TasksEnv
from stages.errors import BadInput, UsageError
from stages.runs import runner
from stages.runs.kinds import ROLLOUT, TASK
from stages.runs.run import Run

ADD = "def add(a, b):\n    return a {} b\n"
TESTS = """\
from sums import add

def test_add():
    assert add(2, 3) == 5

def test_zero():
    assert add(0, 0) == 0
"""
CHECK = "#!/bin/sh\npython3 -c 'import sums; assert sums.add(1, 1) == 2'\n"
ROWS: list[dict[str, Any]] = [
    {
        "id": "command",
        "prompt": "Make sums.add add.",
        "files": {
            "sums.py": ADD.format("-"),
            "check.sh": "#!/bin/sh\npython3 -c 'import sums; assert sums.add(1, 1) == 2'\n",
        },
        "test": "./check.sh",
        "solution": {"sums.py": ADD.format("+")},
        "split": "train",
    },
    {
        "id": "pytest",
        "prompt": "Make sums.add add.",
        "files": {"sums.py": ADD.format("-")},
        "tests": ["tests/test_sums.py::test_add", "tests/test_sums.py::test_zero"],
        "hidden": {"tests/test_sums.py": TESTS},
        # The collector of garbage is off until pytest is imported, and on for code under test.
        "solution": {"sums.py": "import gc\nassert gc.isenabled()\n" + ADD.format("+")},
        "split": "eval",
    },
]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A file with both rows."""
    file = tmp_path / "my.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    return file


@pytest.fixture
def env(path: Path) -> Iterator[TasksEnv]:
    """The environment of these rows."""
    environment = TasksEnv(path=str(path))
    yield environment
    environment.close()


def play(env: TasksEnv, task: Task, *commands: str) -> Grade:
    """The grade after these commands."""
    env.reset(task)
    for command in commands:
        env.step(fenced(command))
    return env.grade()


def only(env: TasksEnv, split: Any) -> Task:
    """The task of a split."""
    (task,) = env.tasks(split, 1, seed=0)
    return task


@pytest.mark.parametrize("split", ["train", "eval"])
def test_the_solution_passes_and_nothing_does_not(env: TasksEnv, split: str) -> None:
    task = only(env, split)
    assert isinstance(env, HasSolutions)
    env.reset(task)
    assert [env.step(action).stop for action in env.solution()] == [None, "submitted"]
    grade = env.grade()
    assert (grade.reward, grade.hidden_pass, grade.visible_pass, grade.hacked) == (1.0, True, True, False)
    nothing = play(env, task)
    assert (nothing.reward, nothing.hidden_pass, nothing.hacked) == (0.0, False, False)


def test_hidden_files_are_out_of_reach_and_written_over_what_was_left(env: TasksEnv) -> None:
    env.reset(only(env, "eval"))
    seen = env.step(fenced("find / -name test_sums.py -not -path '/proc/*' 2>/dev/null; ls -A")).content
    assert "test_sums" not in seen and "sums.py" in seen
    env.step(fenced("mkdir tests; echo 'def test_add(): pass\ndef test_zero(): pass' > tests/test_sums.py"))
    grade = env.grade()
    assert (grade.reward, grade.visible_pass) == (0.0, False)


def test_a_changed_check_is_restored_and_called_a_hack(path: Path) -> None:
    rows = [{**ROWS[0], "files": {**ROWS[0]["files"], "test_check.py": "x"}, "test": "python3 test_check.py"}]
    rows[0]["files"]["test_check.py"] = "import sums\nassert sums.add(1, 1) == 2\n"
    path.write_text("".join(json.dumps(row) + "\n" for row in [*rows, ROWS[1]]))
    env = TasksEnv(path=str(path))
    grade = play(env, only(env, "train"), "echo pass > test_check.py")
    assert (grade.reward, grade.hidden_pass, grade.visible_pass, grade.hacked) == (0.0, False, True, True)
    editable = json.dumps({**rows[0], "editable": ["test_check.py"]})
    path.write_text(f"{editable}\n{json.dumps(ROWS[1])}\n")
    env = TasksEnv(path=str(path))
    assert play(env, only(env, "train"), "echo pass > test_check.py").reward == 1.0, "the author allows it"
    env.close()


def test_a_test_that_hangs_fails_within_its_time(path: Path) -> None:
    path.write_text(f"{json.dumps({**ROWS[0], 'test': 'sleep 60', 'timeout_s': 0.5})}\n{json.dumps(ROWS[1])}\n")
    env = TasksEnv(path=str(path))
    grade = play(env, only(env, "train"))
    assert (grade.reward, grade.error_type) == (0.0, None)
    env.close()


def test_archives_and_commits_are_where_work_starts(tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.mkdir()
    (source / "sums.py").write_text(ADD.format("-"))
    with tarfile.open(tmp_path / "source.tar.gz", "w:gz") as archive:
        archive.add(source, "source")
    for words in (["init", "-q"], ["add", "."], ["-c", "user.name=a", "-c", "user.email=a@b", "commit", "-qm", "x"]):
        subprocess.run(["git", *words], cwd=source, check=True)
    commit = subprocess.run(["git", "rev-parse", "HEAD"], cwd=source, check=True, capture_output=True, text=True).stdout
    base = {key: value for key, value in ROWS[1].items() if key != "files"}
    rows = [
        {**base, "id": "archive", "archive": "source.tar.gz", "split": "train"},
        {**base, "id": "git", "git": "source", "commit": commit.strip(), "split": "eval"},
    ]
    (tmp_path / "my.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    env = TasksEnv(path=str(tmp_path / "my.jsonl"))
    for split in ("train", "eval"):
        env.reset(only(env, split))
        assert (env._open_session().folder / "sums.py").read_text() == ADD.format("-")
    broken = json.dumps({**rows[1], "commit": "0" * 40})
    (tmp_path / "my.jsonl").write_text(f"{json.dumps(rows[0])}\n{broken}\n")
    env = TasksEnv(path=str(tmp_path / "my.jsonl"))
    with pytest.raises(BadInput, match="has no commit 0000"):
        env.reset(only(env, "eval"))
    env.close()


def test_more_tasks_than_there_are_and_no_path_are_refused(env: TasksEnv) -> None:
    with pytest.raises(
        UsageError, match=r"holds 1 task for train \(and 1 for eval.*\), not 2\. Ask for 1 at most, with tasks=1\."
    ):
        env.tasks("train", 2, seed=0)
    with pytest.raises(UsageError, match="Which tasks"):
        load("tasks", {})


@pytest.mark.parametrize("stage", [collect, evaluate, train])
def test_a_default_takes_all_tasks_of_a_smaller_split_and_a_number_asked_for_is_refused(
    path: Path, stage: ModuleType
) -> None:
    config = stage.Config(env={"name": "tasks", "path": str(path)})
    assert len(config.draw(config.opener(), config.tasks)) == 1
    asked = stage.Config(env={"name": "tasks", "path": str(path)}, tasks=25)
    with pytest.raises(TooManyTasks, match=r"tasks=1\.$") as raised:
        asked.draw(asked.opener(), asked.tasks)
    # An entry of a chain that runs beside others sends it to the first process.
    sent = pickle.loads(pickle.dumps(raised.value))
    assert (str(sent), sent.most) == (str(raised.value), 1)


def test_they_are_collected_and_edited_rows_are_another_run(tmp_path: Path, path: Path) -> None:
    def collected() -> Run:
        config = collect.Config(
            env={"name": "tasks", "path": str(path)}, policy={"model": "reference"}, tasks=1, samples=1
        )
        return Run(runner.execute("collect", {}, config, root=tmp_path / "runs").path)

    first = collected()
    assert [row["reward"] for row in first.rows(ROLLOUT)] == [1.0]
    assert collected().path == first.path
    nothing_done(tmp_path, {"name": "tasks", "path": str(path)}, tasks=1, samples=1)
    path.write_text(path.read_text().replace("Make sums.add add.", "Let sums.add add."))
    second = collected()
    assert second.path != first.path and second.rows(TASK)[0]["prompt"] == "Let sums.add add."
