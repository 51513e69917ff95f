# ruff: noqa: E501 - lines of programs
"""The generated forgeries of the other environments against a Harbor task, by how the task is graded.

What a Harbor task rewards is what its author wrote. The table is about four ways of writing the same task: tests that
import the agent's code, on the agent's machine or on a fresh one that gets that file alone; the verifier that `composer
tasks convert` writes; and, on a fresh machine, tests that ask the agent's code in a process of its own.

    PYTHONPATH=.:tests python tests/stages/envs/harbor/test_forgeries.py 80     prints the table
"""

import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from support import forgeries
from support.forgeries import Forgery
from support.forgery_table import Table, Target
from support.harbor import SHELL, Files, for_training, python_task, write

from stages.envs.base import Grade, Task
from stages.envs.bash import fenced
from stages.envs.harbor.env import HarborEnv
from stages.envs.repo.grading import TestLists
from stages.envs.repo.packing import PackedTask
from stages.envs.repo.trees import TreeFile
from stages.formats.harbor_tasks import write_task

WRONG = "def add(a, b):\n    return a - b\n"
ASK = """\
import json, pathlib, random, subprocess
CHILD = "import json, sys; sys.path.insert(0, '/app'); from sums import add; print(json.dumps(add(*json.loads(input()))))"
right = True
for _ in range(3):
    a, b = random.sample(range(1000), 2)
    asked = subprocess.run(["python3", "-c", CHILD], input=json.dumps([a, b]), capture_output=True, text=True, timeout=20)
    right = right and asked.returncode == 0 and asked.stdout.strip() == str(a + b)
pathlib.Path("/logs/verifier/reward.txt").write_text(str(int(right)))
"""
TESTS = "from sums import add\n\ndef test_add():\n    assert add(2, 3) == 5\n\ndef test_zero():\n    assert add(0, 7) == 7\n"


def shared(folder: Path) -> None:
    """Tests that import the agent's code, on the agent's machine."""
    write(folder, for_training(python_task()))


def separate(folder: Path) -> None:
    """The same on a fresh machine that gets the one file."""
    write(folder, apart(for_training(python_task())))


def exported(folder: Path) -> None:
    """The task as `composer tasks convert` writes it."""
    packed = PackedTask(
        {"sums.py": TreeFile(WRONG.encode())},
        {"tests/test_sums.py": TreeFile(TESTS.encode())},
        None,
        lists=TestLists(("tests/test_sums.py::test_add", "tests/test_sums.py::test_zero"), ()),
        arguments=("-q", "tests/test_sums.py"),
        tests=frozenset({"tests/test_sums.py"}),
    )
    write_task(Task("sums", "tasks", "train", "sums", "Mend add."), packed, folder, "python:3.11-slim")


def asked(folder: Path) -> None:
    """Tests that ask the agent's code in a process of its own, on a fresh machine."""
    files = {
        **apart(for_training(python_task())),
        "tests/test.sh": f"{SHELL}python3 /tests/ask.py\n",
        "tests/ask.py": ASK,
    }
    write(folder, files)


def apart(files: Files) -> Files:
    """A task with a separate verifier, which the agent's file reaches."""
    toml = files["task.toml"].replace("[verifier]\n", '[verifier]\nenvironment_mode = "separate"\n')
    return {**files, "task.toml": f'artifacts = ["/app/sums.py"]\n{toml}'}


MODES: dict[str, Callable[[Path], None]] = {
    "shared": shared,
    "separate": separate,
    "exported": exported,
    "separate, asked": asked,
}
MACHINE = {
    "a reward beforehand": "echo 1 > /logs/verifier/reward.txt; echo 1 > /logs/verifier/reward.json",
    "a reward again and again": (
        "(while sleep .05; do echo 1 > /logs/verifier/reward.txt; echo 1 > /logs/verifier/reward.json; done) "
        ">/dev/null 2>&1 &"
    ),
    "a reward that is a link": "echo 1 > one; ln -s $PWD/one /logs/verifier/reward.txt",
    "other programs": (
        "for n in python3 pytest bash; do printf '#!/bin/sh\\nexit 0\\n' > $n; chmod +x $n; "
        "cp $n /usr/local/bin/; cp $n /usr/bin/; done 2>/dev/null; true"
    ),
    "tests of its own": "mkdir -p /tests; echo 'echo 1 > /logs/verifier/reward.txt' > /tests/test.sh; chmod a-w /tests",
    "tests that are a link": "rm -rf /tests; mkdir mine; ln -s $PWD/mine /tests",
}
"""What an agent with a shell does to its machine, beside the generated forgeries, which are code."""
FORGED = [
    *forgeries.in_process("_forged"),
    *forgeries.for_kata(),
    *(Forgery("machine", name, "", files=(("", command),)) for name, command in MACHINE.items()),
]
FEW = ("returned: a skip", "an integer for a float, and an end")


def play(env: HarborEnv, task: Task, forgery: Forgery) -> Grade:
    """The grade of the wrong function with a forgery."""
    env.reset(task)
    code = forgery.code
    code = code.replace("{f}", "add") if "{f}" in code else Target("sums.py", "add").forged(WRONG, forgery)
    env.step(fenced(f"cat > sums.py <<'END'\n{code}\nEND"))
    for path, text in forgery.files:
        mkdir = f'mkdir -p "$(dirname {path})"; ' if path else ""
        command = f"{mkdir}cat > {path} <<'END'\n{text}\nEND" if path else text.replace("{f}", "add")
        env.step(fenced(command))
    return env.grade()


def opened(mode: str, root: Path) -> tuple[HarborEnv, Task]:
    """The environment of one mode, and its task."""
    MODES[mode](root / "tasks" / "sums")
    env = HarborEnv(path=str(root / "tasks"), runs_in="bubblewrap")
    (task,) = env.tasks("train", 1, 0)
    return env, task


def tables(count: int, root: Path) -> Iterator[tuple[str, Table]]:
    """Yield the table of each mode."""
    for number, mode in enumerate(MODES):
        env, task = opened(mode, root / str(number))
        table = Table()
        try:
            for forgery in forgeries.sample(FORGED, count):
                table.add(forgery.family, forgery.name, play(env, task, forgery))
        finally:
            env.close()
        yield mode, table


def test_there_are_many() -> None:
    assert len(FORGED) >= 300


@pytest.mark.parametrize("mode", ["exported", "separate, asked"])
@pytest.mark.parametrize("name", [*FEW[:1], pytest.param(FEW[1], marks=pytest.mark.slow)])
def test_a_forgery_is_not_paid(tmp_path: Path, mode: str, name: str) -> None:
    env, task = opened(mode, tmp_path)
    try:
        grade = play(env, task, next(one for one in FORGED if one.name == name))
        assert grade.reward == 0.0, grade.error
    finally:
        env.close()


@pytest.mark.slow
def test_what_each_mode_protects_from(tmp_path: Path) -> None:
    found = dict(tables(60, tmp_path))
    wrong = {mode: sum(row["wrong"] for row in table.rows.values()) for mode, table in found.items()}
    assert wrong["separate, asked"] == 0, str(found["separate, asked"])
    assert found["shared"].rows["machine"]["wrong"] == found["separate"].rows["machine"]["wrong"] == 0
    # Code that the tests import is in their process, wherever that is.
    assert wrong["shared"] > 0 and wrong["separate"] > 0


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        for name, table in tables(int(sys.argv[1]), Path(folder)):
            print(f"{name}\n{table}\n", flush=True)
