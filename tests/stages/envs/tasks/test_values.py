"""Tests of a row that values decide: what passes, what fails and why, and what no forgery changes."""

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.attacks import ATTACKS, RIGHT, WRONG
from support.own_tasks import RowGrader

from composer_stages.collect import task_row
from composer_stages.envs.task_table import read_task
from composer_stages.errors import InfrastructureError

COUNT = """\
import sys

words = sys.stdin.read().split()
print(len(words))
with open("words.txt", "w") as file:
    file.write("\\n".join(sorted(words)))
"""
ROWS: dict[str, dict[str, Any]] = {
    "calls": {
        "files": {"abacus/__init__.py": "from abacus.sums import add, total\n", "abacus/sums.py": WRONG},
        "calls": [
            {"function": "abacus:add", "args": [1, 2], "returns": 3},
            {"function": "abacus.sums:add", "args": [1], "kwargs": {"b": 0.2}, "returns": 1.2},
            {"function": "abacus:add", "args": [1, "a"], "raises": "TypeError"},
            {"function": "abacus:total", "args": [[1, 2]], "returns": 3},
        ],
        "solution": {"abacus/sums.py": RIGHT},
    },
    "methods": {
        "files": {"a.py": "class Old:\n    def f(self, x=0): return 0\n    g = staticmethod(f)\nclass S(Old): pass\n"},
        "calls": [
            {"function": "a:S.f", "args": [4], "returns": 5},
            {"function": "a:S.f", "returns": 1},
            {"function": "a:S.g", "args": [4], "returns": 9},
            {"function": "a:S.h", "args": [4], "returns": [4, "S"]},
        ],
        "solution": {
            "a.py": "class Old:\n    def f(self, x=0): return x + 1\n    @staticmethod\n    def g(x): return x + 5\n"
            "    @classmethod\n    def h(cls, x): return [x, cls.__name__]\nclass S(Old): pass\n"
        },
    },
    "script": {
        "files": {"count.py": "print(0)\n", "words.txt": "an old file"},
        "script": [
            {"command": "python3 count.py", "stdin": "b a", "stdout": "2", "files": {"words.txt": "a\nb"}},
            {"command": "python3 count.py; exit 3", "stdout": "0\n", "exit_code": 3},
        ],
        "solution": {"count.py": COUNT},
    },
}

LOOKS: dict[str, dict[str, Any]] = {
    "arguments-of-other-calls": {
        "files": {
            "sums.py": """\
import gc

def swap(text):
    groups = [one for one in gc.get_objects() if isinstance(one, list | tuple) and 0 < len(one) < 4]
    parts = [part for one in groups for part in one if isinstance(part, tuple) and len(part) == 1]
    words = [part[0] for part in (*groups, *parts) if isinstance(part[0], str) and part[0].startswith("w-")]
    return next(word for word in words if word != text)
"""
        },
        "calls": [
            {"function": "sums:swap", "args": ["w-abc"], "returns": "w-xyz"},
            {"function": "sums:swap", "args": ["w-xyz"], "returns": "w-abc"},
        ],
    },
    "memory-of-earlier-calls": {
        "files": {
            "sums.py": "import pathlib\nMARKS = [pathlib.Path(f'{one}/mark') for one in ('/tmp', '/dev/shm', '.')]\n"
            "def f(text):\n    seen = [one.read_text() for one in MARKS if one.exists()]\n"
            "    for one in MARKS:\n        try: one.write_text(text)\n        except OSError: pass\n"
            "    return seen[0] if seen else 'first'\n"
        },
        "calls": [
            {"function": "sums:f", "args": ["a"], "returns": "first"},
            {"function": "sums:f", "args": ["b"], "returns": "a"},
        ],
    },
    "hidden-files-beside-calls": {
        "files": {"sums.py": "def add(a, b):\n    return int(open('expected.txt').read())\n"},
        "calls": [{"function": "sums:add", "args": [4000, 125], "returns": 4125}],
        "hidden": {"expected.txt": "4125"},
    },
}
"""Forgeries as a task's files: code that looks for what another call is given, or a hidden file holds."""
CHECK = "from sums import add\nimport sys\nprint(add(*map(int, sys.argv[1:])))\n"
STATE = "n = 0\ndef f(by=1):\n    global n\n    n += by\n    return n\n"
OTHERS: dict[str, dict[str, Any]] = {
    "equal-calls": {"calls": [{"function": "m:f", "args": [], "returns": n} for n in (1, 2)]},
    "other-calls": {
        "calls": [{"function": "m:f", "args": [n], "returns": total} for n, total in ((3, 3), (4, 7), (10, 17))],
        "solution": {"m.py": STATE},
    },
    "hidden-module": {
        "calls": [{"function": "checks:f", "args": [2], "returns": 4}],
        "hidden": {"checks.py": "from sums import add\ndef f(x): return add(x, x)\n"},
    },
    "hidden-script": {"script": [{"command": "python3 check.py 20 22", "stdout": "42"}], "hidden": {"check.py": CHECK}},
    "links": {"script": [{"command": "bash run.sh", "files": {"a": "42"}}]},
    "folder-link": {"script": [{"command": "bash run.sh", "files": {"out/a": "42"}}]},
    "hidden-data": {"script": [{"command": "cat cases.txt", "stdout": "42"}], "hidden": {"cases.json": "42"}},
}


@pytest.fixture(scope="module")
def graded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RowGrader]:
    """The grade of files in the place of those of a row's task."""
    made = RowGrader(tmp_path_factory.mktemp("rows"), {**ROWS, **LOOKS, **OTHERS})
    yield made
    made.close()


@pytest.mark.parametrize("name", ROWS)
def test_the_solution_passes_by_values_and_the_delivered_code_does_not(graded: RowGrader, name: str) -> None:
    row = ROWS[name]
    right, wrong = graded(name, row["solution"]), graded(name, {})
    assert (right.reward, right.ground, right.hacked) == (1.0, "values", False)
    assert (wrong.reward, wrong.hidden_pass, wrong.hacked) == (0.0, False, False)
    assert (right.work.f2p_passed, right.work.f2p_total) == (len(row.get("calls") or row.get("script")),) * 2


def test_the_log_says_what_was_returned_and_what_was_expected(graded: RowGrader) -> None:
    log = graded("calls", {}).work.test_log
    assert log is not None and "FAIL call 1: abacus:add(1, 2): returned -1, expected 3\n" in log
    assert "ok   call 4: abacus:total([1, 2])\n" in log
    raises = "def add(a, b=0): return 3\ndef total(numbers): raise KeyError(3)\n"
    log = graded("calls", {"abacus/sums.py": raises}).work.test_log
    assert log is not None and "returned 3, expected TypeError\n" in log and "ended with KeyError, expected 3\n" in log
    log = graded("script", {}).work.test_log
    assert log is not None and "it printed '0\\n', not '2'" in log and "ok   script 2" in log
    log = graded("script", {"count.py": "print(2)"}).work.test_log
    assert log is not None and "words.txt holds no such file, not 'a\\nb'" in log


@pytest.mark.parametrize(
    ("command", "reward"),
    [
        ("mkdir d; echo 42 >d/b; ln -s d/b a", 1.0),
        ("mkdir d; echo 42 >d/a; ln -s $PWD/d e; ln -s ./e/../d/a a", 1.0),
        ("ln -s 42 a", 0.0),
        ("ln -s ./42 42; ln -s 42 a", 0.0),
        ("ln -s $PWD/a a", 0.0),
        ("echo 42 >/tmp/b; ln -s /tmp/b a", 0.0),
    ],
)
def test_a_file_of_a_script_is_read_through_links_inside_the_folder(
    graded: RowGrader, command: str, reward: float
) -> None:
    assert graded("links", {"run.sh": command}).reward == reward


@pytest.mark.parametrize(
    ("row", "link", "command", "reward"),
    [
        ("folder-link", "out", "true", 0.0),
        ("folder-link", "out", "echo 42 >out/a", 1.0),
        ("links", "a", "cat d/a >a", 1.0),
        ("links", "a", "true", 0.0),
    ],
)
def test_a_file_behind_an_earlier_link_is_not_one_that_the_script_wrote(
    graded: RowGrader, row: str, link: str, command: str, reward: float
) -> None:
    graded.env.reset(graded.tasks[row])
    folder = graded.env._open_session().folder
    (folder / "d").mkdir()
    (folder / "d" / "a").write_text("42")
    (folder / link).symlink_to("d" if link == "out" else "d/a")
    (folder / "run.sh").write_text(command)
    assert graded.env.grade().reward == reward


NUMBERS: dict[str, tuple[Any, Any, str, float]] = {
    "nan": (1, math.nan, "return float('nan')", 1.0),
    "none for nan": (1, math.nan, "pass", 0.0),
    "inf": (1, math.inf, "return float('inf')", 1.0),
    "none for inf": (1, math.inf, "return None", 0.0),
    "nan for inf": (1, -math.inf, "return float('nan')", 0.0),
    "nan in an argument": ([1.0, math.nan], True, "return x[1] != x[1]", 1.0),
    "nan is not none": ([math.nan], 0, "return sum(one is None for one in x)", 1.0),
    "large": (30, 265252859812191058636308480000000, "import math; return math.factorial(x)", 1.0),
    "large, off by one": (30, 265252859812191058636308480000001, "import math; return math.factorial(x)", 0.0),
    "as a float": (1, 10**22 + 1, "return 1e22", 0.0),
    "a large argument": ({"a": [-(10**40) - 7]}, 7, "return -x['a'][0] % 10", 1.0),
    "more digits than Python writes": (1, 1, "return 10**5000", 0.0),
    "a set and a tuple": ({"$python": "({1: 'a'}, {2})"}, {"$python": "{1: {2, 3}}"}, "return {1: x[1] | {3}}", 1.0),
    "a list is no set": (1, {"$python": "{1}"}, "return [1]", 0.0),
    "a tuple for an array": (1, [1, {"a": [2]}], "return 1, {'a': (2,)}", 1.0),
    "a list for a tuple": (1, {"$python": "(1,)"}, "return [1]", 0.0),
    "nan in a literal": (1, {"$python": "[nan, -inf]"}, "return [float('nan'), float('-inf')]", 1.0),
    "written as a number is kept": ({"$number": "5"}, {"$number": "nan"}, "return {'$number': 'nan'}", 1.0),
}
"""An argument, what is expected, the body of a function of x, and its reward."""


def test_numbers_that_json_and_tables_lack_are_those_of_the_row(tmp_path: Path) -> None:
    rows = {
        name.replace(" ", "-").replace(",", ""): {
            "calls": [{"function": "m:f", "args": [argument], "kwargs": {}, "returns": returns}]
        }
        for name, (argument, returns, _, _) in NUMBERS.items()
    }
    grader = RowGrader(tmp_path, rows)
    played = {name: read_task(task_row(one)) for name, one in grader.tasks.items()}
    assert played == grader.tasks, "read from the table of a run, the tasks are the same"
    grades = [
        grader(name, {"m.py": f"def f(x):\n    {body}\n"})
        for name, (_, _, body, _) in zip(rows, NUMBERS.values(), strict=True)
    ]
    assert [grade.reward for grade in grades] == [reward for *_, reward in NUMBERS.values()]
    log = grades[1].work.test_log
    assert log is not None and "m:f(1): returned None, expected nan" in log
    grader.close()


@pytest.mark.parametrize("attack", ATTACKS)
def test_no_attack_on_a_test_process_is_paid(graded: RowGrader, attack: str) -> None:
    assert graded("calls", {"abacus/sums.py": f"{WRONG}{ATTACKS[attack]}\n"}).reward == 0.0


def test_an_end_without_an_answer_a_hang_and_a_missing_module_are_no_pass(graded: RowGrader) -> None:
    for text in ("import os; os._exit(0)", "raise SystemExit(0)", "def add(*a, **k): raise TypeError"):
        assert graded("calls", {"abacus/sums.py": text}).reward == 0.0


@pytest.mark.parametrize("way", LOOKS)
def test_no_process_of_a_call_is_given_what_another_expects(graded: RowGrader, way: str) -> None:
    assert graded(way, {}).reward == 0.0


@pytest.mark.parametrize("row", ["equal-calls", "other-calls"])
def test_calls_that_need_what_earlier_ones_left_pass_by_a_report(graded: RowGrader, row: str) -> None:
    grade = graded(row, {"m.py": STATE})
    assert (grade.reward, grade.ground) == (1.0, "report")
    assert grade.work.test_log and "one process" in grade.work.test_log
    assert graded(row, {"m.py": "def f(by=1): return by\n"}).reward == 0.0


@pytest.mark.parametrize(("row", "reward"), [("hidden-module", 1.0), ("hidden-script", 1.0), ("hidden-data", 0.0)])
def test_hidden_files_are_there_where_a_call_or_script_runs_one(graded: RowGrader, row: str, reward: float) -> None:
    grade = graded(row, {"sums.py": RIGHT})
    assert (grade.reward, grade.ground) == (reward, "report" if reward else "values")


LINES = b'["v",["any"]]\n["v",["approx",1,["f","inf"],true]]\n["e",["s",""]]\n["v",3,3]\n'
"""Answers as no process gives them, in the form in which a judge reads them."""


@pytest.mark.parametrize("data", [LINES, b"\0" * 64 + LINES, b"2\n" * 9], ids=["lines", "frames", "numbers"])
def test_bytes_of_the_judges_protocol_are_no_pass_and_no_lost_sandbox(graded: RowGrader, data: bytes) -> None:
    writes = f"import os\nfor n in range(3, 64):\n    try: os.write(n, {data!r})\n    except OSError: pass\n"
    assert graded("calls", {"abacus/sums.py": writes + WRONG}).reward == 0.0
    assert graded("script", {"count.py": writes}).reward == 0.0


def test_a_task_that_values_decide_cannot_be_played_elsewhere(graded: RowGrader) -> None:
    graded.env.reset(graded.tasks["calls"])
    with pytest.raises(InfrastructureError, match="`calls` or `script`"):
        graded.env.packed()
