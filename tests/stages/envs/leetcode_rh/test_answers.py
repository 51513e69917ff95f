"""What is read of an answer and of the real tests before anything is judged."""

import math

import pytest

from stages.envs.leetcode_rh.env import Problem
from stages.envs.leetcode_rh.grading import CodeAnswer, read_assertions


@pytest.mark.parametrize(
    ("text", "code"),
    [
        ("no block", None),
        ("```python\n```", None),
        ("```python\nx = 1\n```", "x = 1"),
        ("```\nx = 1\n```", "x = 1"),
        ("```Python\nx = 1", "x = 1"),
        ("one\n```python\nx = 1\n```\ntwo\n```python\ny = 2\n```\n", "x = 1\n\ny = 2"),
        ("```bash\nls\n", None),
    ],
)
def test_code_is_what_the_python_blocks_hold(text: str, code: str | None) -> None:
    assert CodeAnswer(text).code == code


@pytest.mark.parametrize(
    ("code", "compiles"),
    [
        ("x = 1", True),
        ("x = '\\d'", True),
        ("x = ", False),
        ("return 1", False),
        ("x\0", False),
        ("-" * 100_000 + "1", False),
        ("x" + ".a" * 100_000, False),
    ],
)
def test_compiles(code: str, compiles: bool) -> None:
    assert CodeAnswer(f"```python\n{code}\n```").compiles is compiles


def block(code: str) -> CodeAnswer:
    return CodeAnswer(f"```python\n{code}\n```")


@pytest.mark.parametrize(
    ("code", "name", "call", "source"),
    [
        (
            "class Solution:\n    x = 1\n    def run_tests(self):\n        # why\n        print(1)\n",
            *("run_tests", "Solution().run_tests()", "def run_tests(self):\n    print(1)"),
        ),
        ("def check_all():\n    pass\n", "check_all", "check_all()", "def check_all():\n    pass"),
    ],
    ids=["a method", "a function beside the class"],
)
def test_a_test_function_is_cut_out(code: str, name: str, call: str, source: str) -> None:
    found = block(code).test_function(name)
    assert found is not None and found.is_method == ("self" in source) and (found.call, found.source) == (call, source)


@pytest.mark.parametrize(
    "code",
    [
        "class Solution:\n    def f(self): pass",
        "class Solution:\n    def run_test(self): pass",
        "class Solution:\n    def run_tests(self): pass\n  x",
        "def run_tests():\n    if __name__ == '__main__':\n        f()",
        "def run_tests():\n    return " + "+".join("x" * 900),
    ],
    ids=["none", "another name", "no program", "main guard", "too deep to cut out"],
)
def test_no_test_function(code: str) -> None:
    assert block(code).test_function("run_tests") is None


def test_calls_and_expected_values() -> None:
    text = "def check(candidate):\n    assert candidate(a = [1, -2], b = 'x') == 2.0\n    assert candidate(3) == inf"
    first, second = read_assertions([text]) or []
    assert first.arguments == ("plain", (), {"a": ("plain", [1, -2]), "b": ("plain", "x")})
    assert second.arguments == ("plain", (("plain", 3),), {}) and second.expected == ("plain", math.inf)


def test_statements_of_any_callee() -> None:
    found = read_assertions(["assert Solution().f(n = 1) == -inf", "assert Solution().f(n = 2) == [None, True]"])
    assert found is not None and [one.expected[1] for one in found] == [-math.inf, [None, True]]


def test_nodes() -> None:
    one, two = (read_assertions(["assert is_same_list(candidate(head = list_node([1, 2])), list_node([2]))"]) or []) + (
        read_assertions(["assert is_same_tree(candidate(root = tree_node([1])), tree_node([1, None, 2, None]))"]) or []
    )
    assert one.arguments == ("list_node", (), {"head": ("list_node", [1, 2])})
    assert one.holds([2]) and not one.holds([2, 1])
    assert two.holds([1, None, 2]) and not two.holds([1, 2])


@pytest.mark.parametrize(
    ("returned", "holds"), [([2], True), ([2.0], True), ((2,), False), ([2, 2], False), ({"__type__": "Yes"}, False)]
)
def test_equality_is_that_of_python(returned: object, holds: bool) -> None:
    assert (read_assertions(["assert candidate() == [2]"]) or [])[0].holds(returned) is holds


@pytest.mark.parametrize(
    "statements",
    [
        [],
        ["assert candidate(1)"],
        ["assert candidate(1) != 2"],
        ["assert candidate(1) == open('x')"],
        ["assert candidate(**x) == 1"],
        ["assert is_same_tree(candidate(1), list_node([1]))"],
        ["x = candidate(1)"],
        ["assert candidate(1 == "],
        ["assert candidate(1) == 1", "print()"],
    ],
)
def test_what_cannot_be_read_is_not_half_read(statements: list[str]) -> None:
    assert read_assertions(statements) is None


PROMPT = """Mutate a gene with the method of the class Solution called minMutation. Starter code:
```python
class Solution:
    def minMutation(self, startGene: str, endGene: str,
                    bank: List[str]) -> int:
        # Add your code here
```
"""


@pytest.mark.parametrize(
    ("call", "is_a_test"),
    [
        ("startGene = 'A', endGene = 'B', bank = ['B']", True),
        ("'A', 'B', ['B']", True),
        ("'A', 'B', bank = ['B']", True),
        ("start = 'A', end = 'B', bank = ['B']", False),
        ("'A', 'B', ['B'], 1", False),
        ("'A', endGene = 'B'", False),
        ("'A', startGene = 'A', bank = ['B']", False),
    ],
)
def test_a_call_that_the_signature_of_the_prompt_contradicts_is_no_test(call: str, is_a_test: bool) -> None:
    good = "assert candidate('A', 'A', []) == 0"
    problem = Problem(433, "", PROMPT, "minMutation", (good, f"assert candidate({call}) == 1"))
    assert problem.parameters == ("startGene", "endGene", "bank")
    assert (problem.assertions is not None) is is_a_test


def test_without_a_signature_any_call_is_a_test() -> None:
    for prompt in ("No code.", "```python\nclass Solution:\n    def minMutation(self, *genes):\n        \n```"):
        assert Problem(1, "", prompt, "minMutation", ("assert candidate(start = 1) == 1",)).assertions is not None
