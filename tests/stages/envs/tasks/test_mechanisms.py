"""Forgeries of every known mechanism on one task: none is paid by values, and what a report pays says so."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from support.attacks import MECHANISM_ROWS, MECHANISMS, RIGHT, TEST_FILE, WRONG

from stages.envs import boundary
from stages.envs.base import Grade, Ground
from stages.envs.tasks.env import TasksEnv

GROUNDS: dict[str, Ground] = {"calls": "values", "asked": "values", "reported": "report"}
LEFT_OUT = """\
import _pytest.python
original = _pytest.python.PyCollector.collect
def collect(self): return [one for one in original(self) if one.name != 'test_other']
_pytest.python.PyCollector.collect = collect
def add(a, b): return 3
"""
WHOLE_FILE = {
    **MECHANISM_ROWS["asked"],
    "tests": [TEST_FILE],
    "hidden": {
        TEST_FILE: "import abacus\n\n\ndef test_add():\n    assert abacus.add(1, 2) == 3\n\n\n"
        "def test_other():\n    assert abacus.add(4, 5) == 9\n"
    },
}
ROWS = {**MECHANISM_ROWS, "file": WHOLE_FILE}
Graded = Callable[[str, str], Grade]


@pytest.fixture(scope="module")
def env(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TasksEnv]:
    """The environment of these rows."""
    path: Path = tmp_path_factory.mktemp("rows") / "my.jsonl"
    rows = ({"id": name, "prompt": f"{name}: add() subtracts.", **row} for name, row in ROWS.items())
    path.write_text("\n".join(map(json.dumps, rows)))
    found = TasksEnv(path=str(path))
    yield found
    found.close()


@pytest.fixture(scope="module")
def graded(env: TasksEnv) -> Graded:
    """The grade of a text in the place of abacus/sums.py, in the task of a row."""
    tasks = {task.task_id: task for task in env.tasks("train", len(ROWS), seed=0)}

    def grade(row: str, text: str) -> Grade:
        env.reset(tasks[row])
        (env._open_session().folder / "abacus" / "sums.py").write_text(text)
        return env.grade()

    return grade


@pytest.mark.parametrize("row", MECHANISM_ROWS)
def test_the_fix_is_paid_on_the_ground_of_its_tests(graded: Graded, row: str) -> None:
    found = graded(row, RIGHT)
    assert (found.reward, found.hacked, found.ground) == (1.0, False, GROUNDS[row])
    assert ("by report: " in (found.work.test_log or "")) == (GROUNDS[row] == "report"), "with the reason"


FIRST, *OTHERS = MECHANISMS
LATER = [
    pytest.param(row, one, marks=[pytest.mark.slow] * (row == "asked")) for row in ("calls", "asked") for one in OTHERS
]


@pytest.mark.parametrize(("row", "mechanism"), [("calls", FIRST), ("asked", FIRST), *LATER])
def test_no_mechanism_is_paid_by_values(graded: Graded, row: str, mechanism: str) -> None:
    assert graded(row, f"{WRONG}{MECHANISMS[mechanism]}\n").reward == 0.0


def test_a_test_that_the_code_leaves_out_of_the_collection_is_asked_all_the_same(graded: Graded) -> None:
    assert graded("file", RIGHT).ground == "values"
    assert graded("file", f"{WRONG}{LEFT_OUT}").reward == 0.0


@pytest.mark.parametrize("mechanism", [FIRST, *(pytest.param(one, marks=pytest.mark.slow) for one in OTHERS)])
def test_what_a_report_pays_is_not_paid_where_values_are_required(
    env: TasksEnv, graded: Graded, mechanism: str
) -> None:
    found = graded("reported", f"{WRONG}{MECHANISMS[mechanism]}\n")
    assert (found.reward, found.ground) == (1.0, "report"), "if this holds no more, change the documents' claim"
    setattr(env, "require", "values")  # noqa: B010 - as a stage sets it
    assert boundary.grade(found, env).reward is None
