import pytest

from stages.envs.leetcode_rh.grading import CodeAnswer


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
