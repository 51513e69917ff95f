"""Tasks of one's own: what passes, what the agent cannot see or change, and where the files come from."""

import pickle
import tarfile
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from support.grades import play, verdict
from support.own_tasks import RowGrader
from support.sample_package import write
from support.scripted_runs import nothing_done, played
from support.transcripts import jsonl

from composer_stages import collect, evaluate, train
from composer_stages.envs import load
from composer_stages.envs.base import HasSolutions, Task
from composer_stages.envs.bash import fenced
from composer_stages.envs.repo import trees
from composer_stages.envs.task_table import TooManyTasks
from composer_stages.envs.tasks.env import TasksEnv
from composer_stages.errors import BadInput, UsageError
from composer_stages.runs.kinds import ROLLOUT, TASK

ADD = "def add(a, b):\n    return a {} b\n"
TESTS = """\
from sums import add

def test_add():
    assert add(2, 3) == 5

def test_zero():
    assert add(0, 0) == 0
"""
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
    return jsonl(tmp_path / "my.jsonl", *ROWS)


@pytest.fixture
def env(path: Path) -> Iterator[TasksEnv]:
    """The environment of these rows."""
    environment = TasksEnv(path=str(path))
    yield environment
    environment.close()


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
    assert verdict(env.grade()) == (1.0, True, True, False, True)
    nothing = play(env, task)
    assert (nothing.reward, nothing.hidden_pass, nothing.hacked) == (0.0, False, False)


@pytest.mark.parametrize(
    ("actions", "kept"),
    [
        ([fenced("submit")], True),
        ([fenced("echo pytest"), fenced("submit")], True),
        ([fenced("git log --all"), fenced("submit")], True),
        ([fenced("python -m pytest")], False),
        (["no command", fenced("submit")], False),
    ],
)
def test_the_protocol_is_what_the_opening_asks_for_and_no_word_of_a_command(
    env: TasksEnv, actions: list[str], kept: bool
) -> None:
    """One command a message, and `submit` at the end; whether tests were run no command's text can show."""
    env.reset(only(env, "train"))
    for action in actions:
        env.step(action)
    assert env.grade().protocol_ok is kept


def test_hidden_files_are_out_of_reach_and_written_over_what_was_left(env: TasksEnv) -> None:
    env.reset(only(env, "eval"))
    seen = env.step(fenced("find / -name test_sums.py -not -path '/proc/*' 2>/dev/null; ls -A")).content
    assert "test_sums" not in seen and "sums.py" in seen
    env.step(fenced("mkdir tests; echo 'def test_add(): pass\ndef test_zero(): pass' > tests/test_sums.py"))
    grade = env.grade()
    assert (grade.reward, grade.visible_pass) == (0.0, False)


def test_a_changed_check_is_restored_and_called_a_hack_unless_the_author_allows_it(tmp_path: Path) -> None:
    files = {"sums.py": ADD.format("-"), "test_check.py": "import sums\nassert sums.add(1, 1) == 2\n"}
    row = {"files": files, "test": "python3 test_check.py"}
    rows = {
        "kept": row,
        "editable": {**row, "editable": ["test_check.py"]},
        "hangs": {"test": "sleep 60", "timeout_s": 0.5},
    }
    with closing(RowGrader(tmp_path, rows)) as graded:
        grade = graded("kept", {"test_check.py": "pass"})
        assert verdict(grade)[:4] == (0.0, False, True, True)
        assert graded("editable", {"test_check.py": "pass"}).reward == 1.0
        assert (graded("hangs", {}).reward, graded("hangs", {}).error_type) == (0.0, None), "within its time"


def test_archives_and_commits_are_where_work_starts(tmp_path: Path) -> None:
    source = write(tmp_path / "source", {"sums.py": ADD.format("-")})
    row = {"tests": ROWS[1]["tests"], "hidden": ROWS[1]["hidden"]}
    of_git = {**row, "git": "source", "commit": trees.commit(source)}
    # An archive of a whole checkout, with its history and a program that git would run.
    trees.git(source, "config", "core.fsmonitor", f"touch {tmp_path / 'run'}; false")
    with tarfile.open(tmp_path / "source.tar.gz", "w:gz") as archive:
        archive.add(source, "source")
    rows = {"archive": {**row, "archive": "source.tar.gz"}, "git": of_git, "lost": {**of_git, "commit": "0" * 40}}
    with closing(RowGrader(tmp_path, rows)) as graded:
        for name in ("archive", "git"):
            graded.env.reset(graded.tasks[name])
            assert (folder := graded.env._open_session().folder / "sums.py").read_text() == ADD.format("-")
            assert "fsmonitor" not in (folder.parent / ".git" / "config").read_text()
        assert not (tmp_path / "run").exists()
        with pytest.raises(BadInput, match="has no commit 0000"):
            graded.env.reset(graded.tasks["lost"])


def test_more_tasks_than_there_are_and_no_path_are_refused(env: TasksEnv) -> None:
    with pytest.raises(
        UsageError, match=r"holds 1 task for train \(and 1 for eval.*\), not 2\. Ask for 1 at most, with tasks=1\."
    ):
        env.tasks("train", 2, seed=0)
    with pytest.raises(UsageError, match="Which tasks"):
        load("tasks", {})


@pytest.mark.parametrize("stage", [collect, evaluate, train])
def test_a_default_takes_all_tasks_of_a_smaller_split_and_a_number_is_refused(path: Path, stage: ModuleType) -> None:
    config = stage.Config(env={"name": "tasks", "path": str(path)})
    assert len(config.draw(config.opener(), config.tasks)) == 1
    asked = stage.Config(env={"name": "tasks", "path": str(path)}, tasks=25)
    with pytest.raises(TooManyTasks, match=r"tasks=1\.$") as raised:
        asked.draw(asked.opener(), asked.tasks)
    # An entry of a chain that runs beside others sends it to the first process.
    sent = pickle.loads(pickle.dumps(raised.value))
    assert (str(sent), sent.most) == (str(raised.value), 1)


def test_they_are_collected_and_edited_rows_are_another_run(tmp_path: Path, path: Path) -> None:
    settings = {"env": {"name": "tasks", "path": str(path)}, "tasks": 1, "samples": 1}
    first = played(tmp_path, "reference", **settings)
    assert [row["reward"] for row in first.rows(ROLLOUT)] == [1.0]
    assert played(tmp_path, "reference", **settings).path == first.path
    nothing_done(tmp_path, **settings)
    path.write_text(path.read_text().replace("Make sums.add add.", "Let sums.add add."))
    second = played(tmp_path, "reference", **settings)
    assert second.path != first.path and second.rows(TASK)[0]["prompt"] == "Let sums.add add."
