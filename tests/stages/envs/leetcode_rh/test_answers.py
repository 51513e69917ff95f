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


def test_a_method_is_cut_out() -> None:
    found = block(
        "class Solution:\n    x = 1\n    def run_tests(self):\n        # why\n        print(1)\n"
    ).test_function("run_tests")
    assert found is not None and found.is_method and found.call == "Solution().run_tests()"
    assert found.source == "def run_tests(self):\n    print(1)"


def test_a_function_beside_the_class_is_cut_out() -> None:
    found = block("def check_all():\n    pass\n").test_function("check_all")
    assert found is not None and not found.is_method and found.call == "check_all()"


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
