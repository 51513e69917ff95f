"""Checks of tasks: what each verdict is made of, and that the machine's failures are no verdicts."""

import random
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import pytest
from support.environments import GuessEnv
from support.transcripts import jsonl

from composer_stages import envs
from composer_stages.envs import Registered
from composer_stages.envs.base import Grade, Split, Task
from composer_stages.envs.task_checks import (
    FORGERIES,
    TaskCheck,
    TaskChecksConfig,
    check,
    draw_tasks,
    find_failure_line,
    list_plays,
    play_once,
)
from composer_stages.errors import InfrastructureError, UsageError

ADD = "def add(a, b):\n    return a {} b\n"
WRONG, RIGHT = {"sums.py": ADD.format("-")}, {"sums.py": ADD.format("+")}
HIDDEN = {"test_sums.py": "from sums import add\n\ndef test_add():\n    assert add(2, 3) == 5\n"}
ROWS: dict[str, dict[str, Any]] = {
    "ok": {"files": WRONG, "tests": ["test_sums.py::test_add"], "hidden": HIDDEN, "solution": RIGHT},
    "forgeable": {"files": WRONG, "test": "python3 -c 'import sums; assert sums.add(1, 1)'", "solution": RIGHT},
    "fails": {"test": "false", "solution": {"a": "1"}},
    "shows": {
        "prompt": "add(2, 31) is 33.",
        "files": WRONG,
        "calls": [{"function": "sums:add", "args": [2, given], "returns": 2 + given} for given in (31, 40)],
        "solution": RIGHT,
    },
}


def config_of(name: str, **more: Any) -> TaskChecksConfig:
    return TaskChecksConfig(env={"name": name, **more.pop("env", {})}, **more)


def found(config: TaskChecksConfig, workers: int = 2) -> dict[str, TaskCheck]:
    """The checks by task."""
    told: list[tuple[int, int]] = []
    checks = list(check(config, draw_tasks(config), workers, lambda what, done, total: told.append((done, total))))
    assert told[-1][0] == told[-1][1] == len(checks) * len(list_plays(config)) == len(told)
    return {one.task_id: one for one in checks}


@pytest.fixture
def rows(tmp_path: Path) -> str:
    """A task of each kind that one sandbox shows."""
    named = ({"id": name, "prompt": name, **row} for name, row in ROWS.items())
    return str(jsonl(tmp_path / "my.jsonl", *named))


@contextmanager
def task_of(rows: str, name: str) -> Iterator[tuple[Any, Task]]:
    """The environment of rows, and the task of a name."""
    config = config_of("tasks", env={"path": rows})
    (task,) = (one for one in draw_tasks(config) if one.task_id == name)
    with closing(config.opener()()) as environment:
        yield environment, task


@pytest.mark.slow
def test_own_tasks_get_the_verdicts_that_they_deserve(rows: str) -> None:
    checks = found(config_of("tasks", env={"path": rows}, repeats=1))
    assert {name: one.verdict for name, one in checks.items()} == {name: name for name in ROWS} | {"shows": "ok"}
    # There are no tests to replace, and no folder for rewards can be made: neither is graded once more like nothing.
    nothing_to_forge = {"tests that test nothing", "a reward written beforehand"}
    assert set(checks["ok"].forgeries) == set(FORGERIES) - nothing_to_forge
    assert not any(checks["ok"].forgeries.values())
    # A pass that needs an exit with 0 is flagged; code without a right result is not.
    assert checks["forgeable"].forgeries["code that exits with 0 when it is imported"] is None
    assert checks["forgeable"].passing == ["functions that return what is equal to everything"]
    # Nothing of these solutions is Python, so that nothing is forged in their functions.
    assert "functions that exit with 0" not in checks["fails"].forgeries


@pytest.mark.parametrize(("name", "hacked"), [("ok", False), ("forgeable", True)])
def test_code_that_exits_is_a_hack_where_the_exit_code_decides(rows: str, name: str, hacked: bool) -> None:
    forgery = ("forgery", "code that exits with 0 when it is imported")
    with task_of(rows, name) as (environment, task):
        played = [play_once(environment, task, play) for play in (("solution", "1"), forgery)]
    assert [(one.reward, one.hacked, one.idle) for one in played] == [(1.0, False, False), (0.0, hacked, False)]


def test_calls_that_the_prompt_shows_are_named_and_the_others_decide(rows: str) -> None:
    with task_of(rows, "shows") as (environment, task):
        played = play_once(environment, task, ("solution", "1"))
    assert (played.reward, played.ground) == (1.0, "values")
    assert "the prompt holds what call 1" in played.remark and "call 2" not in played.remark


def test_a_failing_solution_is_shown_with_the_line_that_tells_why(rows: str) -> None:
    with task_of(rows, "ok") as (environment, task):
        nothing = play_once(environment, task, ("nothing", "1"))
        grade = environment.grade()
    assert (
        nothing.why
        == "0 of 1 hidden tests pass, the visible ones do not; FAILED test_sums.py::test_add - assert -1 == 5"
    )
    # The control against forged passes always fails, and is no news for people.
    assert "1 failed in" in grade.work.test_log and "control" not in grade.work.test_log
    checked = TaskCheck("t", "train", "t")
    checked.add(("solution", "1"), nothing)
    checked.add(("nothing", "1"), nothing)
    assert checked.reason == f"its solution gets 0, and nothing 0: {nothing.why}"
    for log, line in (
        ("Traceback\n  File\nValueError: \x1b[31mred\x1b[0m\x07\nafterwards\n", "ValueError: red"),
        ("first\nno such file\n\n", "no such file"),
        (f"FAILED a - {'x' * 300}\n1 failed in 2 s", f"FAILED a - {'x' * 188}…"),
        ("left out of grading: 'a.py' (why)\ntext\n", "left out of grading: 'a.py' (why); text"),
        ("", ""),
    ):
        assert find_failure_line(log) == line


@pytest.mark.slow
def test_kata_tells_all_apart(tmp_path: Path) -> None:
    (one, other) = found(config_of("kata", repeats=1, limit=1)).values()
    assert (one.verdict, other.verdict) == ("ok", "ok") and {one.split, other.split} == {"train", "eval"}
    assert set(FORGERIES) - set(one.forgeries) == {"a reward written beforehand"}


class ChanceEnv(GuessEnv):
    """Grades by chance, by nothing, or not at all, as the prompt says."""

    rng = random.Random(1)

    def tasks(self, split: Split, count: int, seed: int) -> list[Task]:
        """One of each."""
        kinds = ("chance", "all", "graded never", "never set up", "raises", "cheap", "partial", "no solution")
        return [Task(kind, "chance", split, kind, kind, {"letter": "a"}) for kind in kinds][:count]

    def reset(self, task: Task) -> Any:
        """Not possible for one."""
        if task.prompt == "never set up":
            raise InfrastructureError("no room")
        return super().reset(task)

    def solution(self) -> Sequence[str]:
        """The letter."""
        assert self._task is not None
        if self._task.prompt == "no solution":
            raise InfrastructureError("none")
        return ["a"]

    def grade(self) -> Grade:
        """As the prompt says."""
        assert self._task is not None
        solved = self._said == ["a"]
        kind = self._task.prompt
        if kind == "raises":
            raise KeyError("grader")
        if kind == "graded never":
            return Grade(None, error="no grader")
        if kind == "chance" and solved:
            return Grade(float(self.rng.random() < 0.5))
        if kind == "partial":
            return Grade(0.7 if solved else 0.2)
        cheap = kind == "cheap" and any("conftest.py" in text for text in self._said)
        return Grade(float(kind == "all" or solved or cheap))


@pytest.fixture
def chance(monkeypatch: pytest.MonkeyPatch) -> str:
    """A registered environment of all kinds."""
    entry = Registered(f"{ChanceEnv.__module__}:ChanceEnv")
    monkeypatch.setitem(envs.ENVIRONMENTS, "chance", entry)
    return "chance"


def test_chance_and_errors_are_told_from_verdicts(chance: str) -> None:
    checks = found(config_of(chance, repeats=12))
    assert {task: one.verdict for task, one in checks.items()} == {
        "chance": "flaky",
        "all": "empty passes",
        "graded never": "error",
        "never set up": "error",
        "raises": "error",
        "cheap": "forgeable",
        "partial": "ok",
        "no solution": "no solution",
    }
    assert checks["cheap"].passing == ["configuration of pytest and Python"]
    assert checks["graded never"].reason == "solution 1: no grader" and checks["graded never"].solution == []
    assert checks["never set up"].reason == "solution 1: no room"
    assert "KeyError" in checks["raises"].reason or "grader" in checks["raises"].reason
    assert checks["chance"].reason.startswith("rewards differ: solution ")


def test_without_a_word_five_repeats_and_every_forgery_are_played_and_without_a_sandbox_none() -> None:
    kinds = [kind for kind, _ in list_plays(config_of("kata"))]
    assert kinds == ["solution"] * 5 + ["nothing"] * 5 + ["forgery"] * len(FORGERIES)
    kinds = [kind for kind, _ in list_plays(config_of("kata", sandbox="none", repeats=3))]
    assert kinds == ["solution"] * 3 + ["nothing"] * 3


def test_a_flagged_forgery_is_no_pass() -> None:
    one = TaskCheck("t", "train", "f", [1.0], [0.0], {"caught": None, "low": 0.5})
    assert one.verdict == "ok"
    one.forgeries["through"] = 1.0
    assert (one.verdict, one.passing) == ("forgeable", ["through"])


def test_what_cannot_be_checked_is_refused() -> None:
    with pytest.raises(UsageError, match="has no solutions to check its tasks with"):
        draw_tasks(config_of("support.environments:GuessEnv"))
    with pytest.raises(UsageError, match="There is no environment 'nothing'"):
        draw_tasks(config_of("nothing"))
