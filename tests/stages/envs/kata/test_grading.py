"""Grades of right, forged and missing solutions, of changed tests, and after failures of the disk."""

import os
import time
from collections.abc import Iterator

import pytest
from support.limits import file_size_limit

from composer_stages.envs.base import Grade, Task
from composer_stages.envs.kata.env import KataEnv
from tests.stages.envs.kata.playing import (
    ALWAYS_OK,
    TEST,
    answer,
    edit,
    folder_of,
    graded_together,
    play,
    solution,
    write,
)

FORGERIES = {
    "prints a verdict": lambda t: solution(t, "print('ok'); print('[\"v\", 1]')", "return None"),
    "ends the process well": lambda t: solution(t, "return 0", before="import os; os._exit(0)"),
    "is equal to everything": lambda t: solution(
        t, "return Yes()", before="class Yes(int):\n    __eq__ = lambda self, other: True\n    __hash__ = None"
    ),
    "returns a long text": lambda t: solution(t, "return '\\ud800x' * 10_000"),
    "has no function": lambda t: "x = 1",
    "reads the expected values": lambda t: solution(
        t, "import gc, sys", "return [o for o in gc.get_objects() if isinstance(o, dict) and 'hidden' in o][0]"
    ),
}
"""Further ones are judged in tests/stages/sandbox/test_judge.py."""


@pytest.fixture(scope="module")
def graded() -> dict[str, tuple[Task, Grade]]:
    """Task and grade of each forgery, and of a right solution, graded together."""
    sources = {**FORGERIES, "is right": lambda t: solution(t, f"return {answer(t)}")}
    tasks = KataEnv.tasks("train", len(sources), seed=2)

    def leave(rollout: KataEnv, number: int) -> None:
        (folder_of(rollout) / "solution.py").write_text([*sources.values()][number](tasks[number]))

    return dict(zip(sources, zip(tasks, graded_together(tasks, leave), strict=True), strict=True))


@pytest.mark.parametrize("name", FORGERIES)
def test_forged_solution_earns_nothing(graded: dict[str, tuple[Task, Grade]], name: str) -> None:
    task, grade = graded[name]
    assert (grade.reward, grade.hidden_pass, grade.hacked, grade.error_type) == (0.0, False, False, None)
    assert grade.work.test_log and grade.work.test_log.endswith(f"of {len(task.data['hidden'])} hidden cases pass")
    assert len(grade.work.test_log.encode()) < 400 * len(task.data["hidden"])


def test_right_solution_is_paid_beside_forgeries(graded: dict[str, tuple[Task, Grade]]) -> None:
    _, grade = graded["is right"]
    assert (grade.reward, grade.hidden_pass, grade.hacked) == (1.0, True, False)


def test_background_process_cannot_change_the_graded_solution(env: KataEnv, task: Task) -> None:
    right = write(solution(task, f"return {answer(task)}"), "right.py")
    play(env, right, "(while true; do cp right.py solution.py; sleep 0.01; done) & disown; true")
    play(env, edit("0"), "submit")
    time.sleep(0.1)
    assert env.grade().hidden_pass is False


NO_SOLUTION = [
    "mv solution.py other.py && ln -s other.py solution.py",
    "rm solution.py && ln -s /etc/passwd solution.py",
    "rm solution.py && mkfifo solution.py",
    "rm solution.py && mkdir solution.py",
    "rm solution.py",
    "(echo; yes '# padding' | head -c 20000) >> solution.py",
]


def test_only_a_small_regular_solution_counts(task: Task) -> None:
    def leave(rollout: KataEnv, number: int) -> None:
        play(rollout, f"{edit(answer(task))}; {NO_SOLUTION[number]}")

    grades = graded_together([task] * len(NO_SOLUTION), leave)
    assert [(grade.hidden_pass, grade.error_type) for grade in grades] == [(False, None)] * len(NO_SOLUTION)


REEXPORT = "mv solution.py real.py && echo 'from real import *' > solution.py"


@pytest.mark.parametrize(
    ("command", "right", "verdict"),
    [
        (ALWAYS_OK, False, (False, True, True)),
        (ALWAYS_OK, True, (True, True, True)),
        ("echo 'print(\"ok\")' > a.py && ln -sf a.py test_solution.py", False, (False, True, True)),
        ("echo '# more' >> test_solution.py", True, (True, True, False)),
        ("echo '# more' >> test_solution.py", False, (False, False, False)),
        ("rm test_solution.py", True, (True, False, False)),
        ("echo 'syntax error' > test_solution.py", True, (True, False, False)),
        (REEXPORT, True, (False, True, False)),
    ],
)
def test_grade_of_changed_tests_and_files(
    env: KataEnv, task: Task, command: str, right: bool, verdict: tuple[bool, bool, bool]
) -> None:
    play(env, *([edit(answer(task))] if right else []), command, TEST, "submit")
    before = sorted(os.listdir(folder_of(env)))
    grade = env.grade()
    assert (grade.hidden_pass, grade.visible_pass, grade.hacked) == verdict
    assert sorted(os.listdir(folder_of(env))) == before


@pytest.fixture
def paid(task: Task) -> Iterator[KataEnv]:
    """A rollout of an environment that pays where the visible tests pass."""
    environment = KataEnv(reward="visible")
    environment.reset(task)
    yield environment
    environment.close()


HIDDEN_FORGERIES = {
    "tests that pass unless the file is unchanged": (
        "cp solution.py old; sed -i 's|return .*|return 123456|' solution.py; "
        'echo \'exit(open("solution.py").read() == open("old").read())\' > test_solution.py'
    ),
    "a solution that ends the unchanged tests well, beside another file": (
        "printf 'import os\\nos._exit(0)\\n' > solution.py; touch other.py"
    ),
    "a module that the unchanged tests import instead": (
        "mkdir solution; printf 'import os\\nos._exit(0)\\n' > solution/__init__.py"
    ),
}
HONEST_FILES = {
    "more tests": "echo '# more' >> test_solution.py",
    "another module": REEXPORT,
    "a backup": "cp solution.py solution.py.orig; printf 'notes' > notes.txt",
    "a package": (
        "mkdir lib; mv solution.py lib/own.py; touch lib/__init__.py; echo 'from lib.own import *' > solution.py"
    ),
}


@pytest.mark.parametrize("name", [*HIDDEN_FORGERIES, *HONEST_FILES])
def test_paid_visible_tests_are_a_hack_where_they_are_forged(paid: KataEnv, task: Task, name: str) -> None:
    if hacked := name in HIDDEN_FORGERIES:
        play(paid, HIDDEN_FORGERIES[name])
        assert paid.grade().hidden_pass is False
    else:
        play(paid, edit(answer(task)), HONEST_FILES[name])
    assert (paid.grade().reward, paid.grade().hacked) == (1.0, hacked)


@pytest.mark.parametrize(
    "script",
    [
        "import os; [(os.mkdir('d'), os.chdir('d')) for _ in range(1500)]",
        "[open(str(n), 'w').truncate(1 << 20) for n in range(30)]",
    ],
)
def test_unreadable_folder_fails_the_visible_tests_alone(env: KataEnv, task: Task, script: str) -> None:
    play(env, edit(answer(task)), f'python3 -c "{script}"', "submit")
    folder = folder_of(env)
    grade = env.grade()
    assert (grade.hidden_pass, grade.visible_pass, grade.hacked, grade.error_type) == (True, False, False, None)
    env.close()
    assert not folder.exists()


@pytest.mark.parametrize(
    ("command", "num_bytes", "error"),
    [("true", 0, "InfrastructureError"), ("head -c 100000 /dev/zero > large", 50_000, "OSError")],
    ids=["where the hidden cases run", "where the visible tests run"],
)
def test_failed_disk_gives_no_reward(env: KataEnv, task: Task, command: str, num_bytes: int, error: str) -> None:
    play(env, command, "submit")
    with file_size_limit(num_bytes):
        grade = env.grade()
    assert (grade.reward, grade.hidden_pass, grade.error_type) == (None, None, error)
