import math
from pathlib import Path

import pytest
from needs import REAL
from support.grades import verdict
from support.limits import file_size_limit
from support.refusals import refused
from support.transcripts import jsonl

from composer_stages.envs.base import ComparesOutcomes, Grade, HasSize, HasSolutions, LeavesOut
from composer_stages.envs.code import rows
from composer_stages.envs.code.env import CodeEnv
from composer_stages.envs.code.rows import read_problems
from composer_stages.envs.programs import find_program
from composer_stages.envs.task_table import read_rows
from composer_stages.errors import BadInput, UsageError

ADD = "def add(a, b):\n    return a + b"
MBPP = {
    "text": "Add two numbers.",
    "code": "def add(a, b):\r\n    return a + b",
    "task_id": 601,
    "test_setup_code": "",
    "test_list": ["assert add(1, 2) == 3", "assert add(20, 22) == 42", "assert add(1.5, 1) == 2.5"],
    "challenge_test_list": [],
}
HUMANEVAL = {
    "task_id": "HumanEval/0",
    "prompt": 'from typing import List\n\n\ndef total(xs: List[int]) -> int:\n    """Sum.\n'
    '    >>> total([1])\n    1\n    """\n',
    "entry_point": "total",
    "canonical_solution": "    return sum(xs)\n",
    "test": "METADATA = {'author': 'x'}\n\n\ndef check(candidate):\n    assert candidate([1, 2]) == 3\n",
}
INPUTS = {name: value for name, value in HUMANEVAL.items() if name != "test"}
EVALPLUS = {**INPUTS, "base_input": [[[1]]], "plus_input": [[[2, 3]]], "atol": 0, "contract": ""}
HUMANEVAL_FILE = str(REAL / "code" / "HumanEval.jsonl.gz")
EVALPLUS_MBPP = {
    **EVALPLUS,
    "task_id": 2,
    "prompt": "'''\nSum.\n'''",
    "canonical_solution": "\ndef total(xs):\n  return 3",
}
"""As in EvalPlus' files: the id is a number or Mbpp/2, and the prompt a text alone."""
IMPORTS = {**MBPP, "test_list": ["import math", "assert math.isclose(add(1, 2), 3)"]}
"""The imports of the assertions are a text of the list."""
OWN = {"prompt": "Add two numbers.", "tests": MBPP["test_list"], "solution": ADD}


def write(path: Path, *rows: dict) -> str:
    return str(jsonl(path, *rows))


def opened(tmp_path: Path, row: dict = MBPP, **options: object) -> CodeEnv:
    """An environment that has begun with the problem of a row."""
    path = write(tmp_path / "rows.jsonl", row)
    other = write(tmp_path / "other.jsonl", {"prompt": "Other.", "tests": ["assert g(1) == 1"]})
    env = CodeEnv(path=path, eval_path=other, **options)  # type: ignore[arg-type]
    env.reset(env.tasks("train", 1, seed=0)[0])
    return env


def graded(env: CodeEnv, code: str) -> Grade:
    env.step(f"```python\n{code}\n```")
    return env.grade()


MBPP_PLUS = {
    **MBPP,
    "prompt": "Halve.",
    "code": "def half(a): return a / 2",
    "test_imports": ["import math"],
    "test_list": ["assert math.isclose(half(1), 0.5, rel_tol=0.001)"],
    "test": "import numpy as np\n\ndef assertion(out, exp):\n    assert np.allclose(out, exp)\n\n"
    "assertion(half(3), 1.5)",
}
"""As in EvalPlus' MbppPlus-OriginFmt.jsonl, where the imports are in no test."""


@pytest.mark.parametrize("row", [MBPP, MBPP_PLUS, IMPORTS, HUMANEVAL, EVALPLUS, OWN])
def test_the_solution_of_each_format_passes(tmp_path: Path, row: dict) -> None:
    env = opened(tmp_path, row)
    assert isinstance(env, HasSolutions) and isinstance(env, HasSize) and isinstance(env, ComparesOutcomes)
    seen = env.step(env.solution()[0])
    grade = env.grade()
    assert (seen.content, seen.stop) == ("", "answered") and verdict(grade) == (1.0, True, True, None, True)


def test_a_wrong_answer_is_told_the_shown_assertion_and_nothing_of_the_others(tmp_path: Path) -> None:
    env = opened(tmp_path, answers=5)
    texts = [message["content"] for message in env.reset(env.tasks("train", 1, seed=0)[0])]
    seen = env.step("```python\ndef add(a, b):\n    return a - b\n```")
    assert (seen.content, seen.stop) == ("assert add(1, 2) == 3 fails: add(1, 2) returns -1.", None)
    texts += [env.step(f"def add(a, b):\n    {body}").content for body in ("raise ValueError", "1 / 0")]
    assert all("add(1, 2) == 3" in text for text in texts)
    assert not any("22" in text or "1.5" in text for text in texts), "hidden assertions are in no message"
    seen = env.step("```python\ndef add(a, b):\n    return 3\n```")
    assert (seen.content, seen.stop) == ("", "answered")
    grade = env.grade()
    assert (grade.reward, grade.hidden_pass, grade.visible_pass) == (0.0, False, True)
    assert grade.work.metrics == {"assertions_passed": pytest.approx(1 / 3)}


def test_the_last_answer_counts(tmp_path: Path) -> None:
    env = opened(tmp_path, answers=2)
    assert (env.grade().reward, env.grade().protocol_ok, env.grade().error_type) == (0.0, False, None)
    assert env.step("I do not know").stop is None
    assert env.step(ADD).stop == "answered"
    assert (env.grade().reward, env.grade().protocol_ok) == (1.0, False)


CASE = "import unittest\n\nclass T(unittest.TestCase):\n    "
SOLUTION = "class Solution:\n    def add(self, a, b):\n        return {}"
METHOD = {"tests": [f"assert Solution().add(1, {n}) == {n + 1}" for n in (1, 2)]}


@pytest.mark.parametrize(
    ("change", "program"),
    [
        ({"tests": ["def test_add():\n    assert add(1, 2) == 3\n    assert add(2, 2) == 4"]}, ADD),
        ({"tests": ["assert add(1, 2) == 3", "if __name__ == '__main__':\n    assert add(2, 2) == 4"]}, ADD),
        ({"tests": ["from solution import add\ndef test_add(n=2):\n    assert add(n, 2) == 4"]}, ADD),
        (
            {
                "tests": [
                    "from solution import *\ndef test_add():\n    assert add(2, 2) == 4",
                    "import unittest\nunittest.main()",
                ]
            },
            ADD,
        ),
        ({"tests": [f"{CASE}def test(self):\n        self.assertEqual(add(2, 2), 4)\n\nunittest.main()"]}, ADD),
        (
            {"tests": [f"{CASE}def setUp(self):\n        self.x = add(2, 2)\n    def test(self): assert self.x == 4"]},
            ADD,
        ),
        (
            {
                "tests": [
                    f"{CASE}def test(self):\n        with self.subTest():\n            self.assertEqual(add(2, 2), 4)"
                ]
            },
            ADD,
        ),
        (METHOD, SOLUTION.format("a + b")),
        (METHOD | {"entry_point": "Solution().add"}, SOLUTION.format("a + b")),
        (METHOD | {"entry_point": "Solution.add"}, SOLUTION.format("a + b")),
        (
            HUMANEVAL
            | {"prompt": "from typing import List\n", "entry_point": "Solution().add"}
            | {"test": "def check(candidate):\n    assert candidate(a=2, b=2) == 4\n"}
            | {"canonical_solution": SOLUTION.format("a + b")},
            SOLUTION.format("a + b"),
        ),
        (
            HUMANEVAL
            | {"prompt": "import math\n\ndef add(a, b):\n    # Adds.\n", "entry_point": "add"}
            | {"canonical_solution": "    return a + b", "test": "def test_add():\n    assert add(2, 2) == 4"},
            "def add(a, b):\n    return a + math.floor(b)",
        ),
    ],
)
def test_assertions_count_wherever_they_stand(tmp_path: Path, change: dict, program: str) -> None:
    solution = {} if "canonical_solution" in change else {"solution": program.replace("math.floor", "")}
    row = {"prompt": "Add.", **solution, **change}
    wrong = program.replace("return a + ", "return 3 or ")
    assert [graded(opened(tmp_path, row), code).reward for code in (program, wrong)] == [1.0, 0.0]


FORGERIES = [
    "import time\ndef add(a, b):\n    time.sleep(60)",
    "class Evil:\n    def __eq__(self, other):\n        return True\ndef add(a, b):\n    return Evil()",
    "class Evil(int):\n    def __eq__(self, other):\n        return True\n    __hash__ = int.__hash__\n"
    "def add(a, b):\n    return Evil(7)",
    "import builtins\nbuiltins.bool = lambda x: True\nbuiltins.isinstance = lambda *a: False\n"
    "def add(a, b):\n    return 0",
    "import sys\ndef add(a, b):\n    sys.exit(0)",
    "import os\ndef add(a, b):\n    os._exit(0)",
    "def add(a, b):\n    print('[\"v\",3]')\n    print('[\"v\",42]')",
    "import os\nfor fd in range(3, 30):\n    try:\n        os.write(fd, b'[\"v\",3]\\n' * 9)\n"
    "    except OSError:\n        pass\n"
    "def add(a, b):\n    return 0",
    "import glob\ndef add(a, b):\n    found = ''.join(open(x).read() for x in glob.glob('/tmp/**/*', recursive=True))\n"
    "    return int('42' in found)",
    "def add(a, b):\n    return {'__type__': 3}",
]


@pytest.mark.parametrize("code", FORGERIES)
def test_forged_answers_fail(tmp_path: Path, code: str) -> None:
    grade = graded(opened(tmp_path), code)
    assert (grade.reward, grade.hidden_pass, grade.error_type) == (0.0, False, None)


LOOP, CONDITION = "for n in add(2, 3):\n    assert n == 5", "if add(2, 3):\n    assert add(4, 4) == 8"
ENDS = "def add(a, b):\n    if a == 1: return 3\n    raise SystemExit"


@pytest.mark.parametrize(
    ("test", "code"),
    [
        *((test, code) for test in (LOOP, CONDITION) for code in (ENDS, "def add(a, b): return []")),
        *((f"assert add(1, 2) == 3\n{test}", ENDS) for test in (LOOP, CONDITION)),
    ],
)
def test_an_answer_that_skips_assertions_fails(tmp_path: Path, test: str, code: str) -> None:
    grade = graded(opened(tmp_path, {"prompt": "Add.", "tests": [test]}), code)
    assert (grade.reward, grade.hidden_pass, grade.error_type) == (0.0, False, None)


def test_a_subclass_compares_as_its_base(tmp_path: Path) -> None:
    row = {"prompt": "Count.", "tests": ["assert count('aab') == {'a': 2, 'b': 1}"]}
    code = "from __future__ import annotations\nfrom collections import Counter\ndef count(s):\n    return Counter(s)"
    assert graded(opened(tmp_path, row), code).reward == 1.0


def test_a_failed_disk_gives_no_reward(tmp_path: Path) -> None:
    env = opened(tmp_path)
    env._source = "def add(a, b):\n    return 'never judged before'"
    with file_size_limit(0):
        grade = env.grade()
    assert (grade.reward, grade.hidden_pass, grade.error_type) == (None, None, "InfrastructureError")


def test_equal_behaviour_is_one_outcome(tmp_path: Path) -> None:
    env = opened(tmp_path)
    digests = []
    for code in (ADD, "def add(x, y):\n    return y + x", "def add(a, b):\n    return 3", "no code"):
        env.reset(env.tasks("train", 1, seed=0)[0])
        digests.append(env.outcome(env.step(code)))
    assert digests[0] == digests[1] and len(set(digests)) == 3


@pytest.mark.parametrize(
    ("text", "code"),
    [
        ("```python\nimport os\n```\nthen\n```py\ndef f(): pass\n```", "def f(): pass\n"),
        ("```\nf = len\n```", "f = len\n"),
        ("```python\ndef f(): pass", "def f(): pass"),
        ("def f(): pass", "def f(): pass\n"),
        ("```python\ndef g(): pass\n```", None),
        ("```python\ndef f(: pass\n```", None),
        ("The function f.", None),
    ],
)
def test_the_code_of_an_answer(text: str, code: str | None) -> None:
    assert find_program(text, "f") == code


@pytest.mark.parametrize("kind", [int, str, float])
def test_published_ids_are_the_splits_of_mbpp(tmp_path: Path, kind: type) -> None:
    """Numbers of a column with a null are floats in pandas, and texts elsewhere."""
    published = {row["task_id"]: row for row in read_rows(rows.MBPP, measured=False)}
    numbers = (1, 10, 12, 509, 511, 600, 602, 974)
    own = [{**published[n], "task_id": kind(n)} for n in numbers]
    env = CodeEnv(path=write(tmp_path / "mbpp.jsonl.gz", *own))
    for split, ids in (("train", {"code-602", "code-974"}), ("eval", {"code-12", "code-509"})):
        assert {task.task_id for task in env.tasks(split, 2, seed=0)} == ids
    refused(lambda: env.tasks("eval", 3, seed=0), UsageError, "2 problems for eval, not 3")


def test_own_rows_in_the_shape_of_mbpp_are_all_in_a_split(tmp_path: Path) -> None:
    """By their numbers from 1 on they were in none, or held out."""
    own = [{**MBPP, "text": f"Add {n}.", "task_id": n} for n in (*range(1, 40), 2001, 2002)]
    env = CodeEnv(path=write(tmp_path / "own.jsonl", *own))
    assert env.size("train") + env.size("eval") == 41 and 3 <= env.size("eval") <= 20


def test_other_rows_are_split_by_a_digest(tmp_path: Path) -> None:
    env = CodeEnv(path=write(tmp_path / "own.jsonl", *({**OWN, "prompt": f"Add {n}."} for n in range(60))))
    assert env.size("train") + env.size("eval") == 60 and 4 <= env.size("eval") <= 25


def test_splits_of_a_data_set_are_kept() -> None:
    parts = {name: [{**OWN, "prompt": name}] for name in ("train", "test", "extra")}
    problems, splits = read_problems("a/b", parts)
    assert [splits.get(problem.problem_id) for problem in problems] == ["train", "eval", None]
    assert read_problems("a/b", {"test": parts["test"]})[1] == {}, "a digest decides"


def test_a_problem_that_cannot_be_asked_is_left_out_and_counted(tmp_path: Path) -> None:
    bad = {"prompt": "Walk.", "tests": ["assert walk(1) == 1", "assert walk(Node(1)) == 2"]}
    env = CodeEnv(path=write(tmp_path / "a.jsonl", OWN, bad), eval_path=write(tmp_path / "b.jsonl", HUMANEVAL))
    assert isinstance(env, LeavesOut) and env.size("train") == 1 and env.left_out("eval") == ""
    assert "1 problem of 2 left out" in env.left_out("train") and "it calls Node" in env.left_out("train")
    # Inputs without tuples are left out too.
    env = CodeEnv(path=write(tmp_path / "c.jsonl", EVALPLUS_MBPP), eval_path=write(tmp_path / "d.jsonl", EVALPLUS))
    assert (env.size("train"), env.size("eval")) == (0, 1) and "take evalplus/mbppplus" in env.left_out("train")


def test_inputs_are_the_numbers_that_the_row_holds(tmp_path: Path) -> None:
    """As EvalPlus' own: NaN, infinities, and integers beyond 64 bits."""
    row = {**EVALPLUS, "base_input": [[[1]]], "plus_input": [[[math.nan, 1]], [[math.inf]], [[10**30]]]}
    row["canonical_solution"] = "    return repr(sum(xs))\n"
    env = opened(tmp_path, row)
    assert graded(env, "def total(xs): return repr(sum(xs))").reward == 1.0
    lost = "def total(xs): return repr(sum(xs)) if xs != [10**30] else repr(float(10**30))"
    assert graded(env, lost).reward == 0.0
    none = "def total(xs): return repr(sum(xs)) if xs[0] == xs[0] else 'None'"
    assert graded(env, none).reward == 0.0


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ({"question": "?"}, "did you mean prompt by question?"),
        ({**OWN, "entry_pont": "add"}, "did you mean entry_point?"),
        ({**EVALPLUS, "atol": math.inf}, "atol"),
        ({**OWN, "tests": []}, "tests"),
        ({**OWN, "tests": "assert add(1, 2) == 3"}, "tests"),
        ({**MBPP, "text": None}, "text"),
        ({**HUMANEVAL, "test": 3}, "test"),
        ({**EVALPLUS, "base_input": [3]}, "base_input"),
    ],
)
def test_a_damaged_row_is_named(tmp_path: Path, row: dict, said: str) -> None:
    env = CodeEnv(path=write(tmp_path / "rows.jsonl", OWN, row))
    refused(lambda: env.tasks("train", 1, seed=0), BadInput, "row 2", said)


def test_options_are_refused_in_a_sentence(tmp_path: Path) -> None:
    refused(lambda: CodeEnv(path="rows.jsonl", answers=0), UsageError, "env.answers is 0")
    refused(lambda: CodeEnv(path=str(tmp_path / "no.jsonl")).size("train"), BadInput, "no.jsonl cannot be read")
    env = CodeEnv(path=write(tmp_path / "a.jsonl", OWN), eval_path=write(tmp_path / "b.jsonl", OWN))
    refused(lambda: env.size("train"), BadInput, "1 problems are in")


@pytest.mark.parametrize(("path", "train", "held_out"), [("", 372, 499), (HUMANEVAL_FILE, 129, 35)])
def test_the_solutions_of_the_real_sets_pass(path: str, train: int, held_out: int) -> None:
    """All pass (`collect --policy reference`); three are played here."""
    if path and not Path(path).exists():
        pytest.skip("needs HumanEval beside this checkout")
    env = CodeEnv(path=path)
    assert (env.size("train"), env.size("eval")) == (train, held_out)
    for task in env.tasks("eval", 3, seed=0):
        env.reset(task)
        env.step(env.solution()[0])
        assert env.grade().reward == 1.0, task.task_id
