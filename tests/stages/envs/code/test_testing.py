"""Tests of a function are decided as Python decides them; those that copies of results cannot decide are left out."""

from typing import Any

import pytest

from composer_stages.envs.code.env import canonical_text
from composer_stages.envs.code.testing import CannotAsk, Tests, build_program, check_test, play, prepare
from composer_stages.sandbox.guest.values import Foreign

SET_HELPER = """
import numpy as np

def assertion(out, exp, atol):
    out, exp = set(out), set(exp)
    assert np.allclose(sorted(out), sorted(exp), atol=atol) if atol else out == exp

for inp, exp in zip([[[3, 1]]], [[1, 3]]):
    assertion(f(*inp), exp, 0)
"""
FLOATS = """
import numpy as np

def is_floats(x):
    return isinstance(x, float) or isinstance(x, list) and all(isinstance(i, float) for i in x)

def assertion(out, exp, atol):
    exact_match = out == exp
    if atol == 0 and is_floats(exp):
        atol = 1e-6
    if not exact_match and atol != 0:
        assert np.allclose(out, exp, rtol=1e-07, atol=atol)
    else:
        assert exact_match

for i, (inp, exp) in enumerate(zip([[1]], [[0.1]])):
    assertion(f(*inp), exp, 0)
"""
CHANGED = "l = [3, 1, 2]\nassert f(l) == [1, 2, 3]\nassert l == [3, 1, 2]"
FORMS: dict[str, tuple[str, str, str]] = {
    "an exception with arguments": (
        "try:\n    f(b'\\xff')\n    assert False\nexcept ValueError:\n    pass",
        "x.decode()",
        "x",
    ),
    "result": ("assert f(1) == 2", "2", "3"),
    "turned round": ("assert 2 == f(1)", "2", "3"),
    "truth": ("assert f(1)", "1", "0"),
    "None": ("assert f(1) is None", "None", "0"),
    "True": ("assert f(1) is True", "True", "1"),
    "not the argument": ("l = [1]\nassert f(l) is not l and f(l) == l", "x[:]", "x"),
    "the argument": ("l = [1]\nassert f(l) is l", "x", "x[:]"),
    "argument after the call": (CHANGED, "sorted(x)", "x.sort() or x"),
    "one list twice": ("l = [1, 2]\nassert f(l) == 3\nassert f(l) == 3", "sum(x)", "x.pop() + (x.pop() if x else 1)"),
    "a dictionary after the call": ("d = {}\nf(d)\nassert d == {1: 2}", "x.update({1: 2})", "{1: 2}"),
    "twice": ("assert f(f(1)) == 3", "x + 1", "x + 2"),
    "an argument from a result": ("y = f(1)\nassert f(y) == 4", "x * 2 if x > 1 else 2", "2"),
    "what an earlier call leaves": ("assert f(1) == [1]\nassert f(2) == [2]", "[x]", "KEPT.append(x) or KEPT"),
    "a chain": ("assert f(1) == 2 and f(2) == 3", "x + 1", "2"),
    "a comparison in a chain": ("assert 1 < f(1) < 3", "2", "3"),
    "tolerance": ("assert abs(f(1) - 0.5) < 1e-6", "0.5", "0.6"),
    "isclose": ("import math\nassert math.isclose(f(1), 0.5, rel_tol=0.001)", "0.5", "0.6"),
    "set": ("assert set(f(1)) == {1, 2}", "[2, 1, 1]", "[1]"),
    "message": ("assert tuple(f(1)) == (1, 2), 'said'", "[1, 2]", "[2, 1]"),
    "method": ("assert f(1).upper() == 'A'", "'a'", "'b'"),
    "slice": ("assert f(1)[1:] == [2]", "[1, 2]", "[1]"),
    "comprehension": ("assert [y + 1 for y in f(1)] == [2, 3]", "(1, 2)", "(2, 1)"),
    "isinstance": ("assert isinstance(f(1), set) and type(f(1)) is not list", "{1}", "[1]"),
    "Counter": ("assert f('aab') == {'a': 2, 'b': 1}", "__import__('collections').Counter(x)", "dict.fromkeys(x, 1)"),
    "Fraction": ("assert f(1) == 0.5", "__import__('fractions').Fraction(1, 2)", "'0.5'"),
    "range": ("assert list(f(3)) == [0, 1, 2] and len(f(2)) == 2", "range(x)", "range(1, x)"),
    "generator": ("assert list(f(3)) == [0, 1, 2]", "(y for y in range(x))", "(y for y in [x])"),
    "views": ("assert sorted(f(1)) == [1, 2]", "{2: 0, 1: 0}.keys()", "{2: 0}.keys()"),
    "named tuple": ("assert f(1) == (1,)", "__import__('collections').namedtuple('P', 'a')(x)", "(2,)"),
    "large": (
        "assert f(30) == 265252859812191058636308480000000",
        "__import__('math').factorial(x)",
        "2.6525285981e32",
    ),
    "an exception": ("try:\n    f(1)\n    assert False\nexcept ValueError:\n    pass", "int('a')", "x"),
    "a derived exception": ("try:\n    f(1)\n    assert False\nexcept LookupError:\n    pass", "{}[x]", "int('a')"),
    "the order of a set": (SET_HELPER, "[3, 1, 1]", "[3]"),
    "tolerance of a helper": (FLOATS, "[0.1 + 1e-8]", "[0.2]"),
    "check": ("def check(candidate):\n    assert candidate(1) == {'a': 2.5}\n\ncheck(f)", "{'a': 2.5}", "{'a': 2}"),
    "a loop": ("for x, y in [(1, 2), (2, 3)]:\n    assert f(x) == y", "x + 1", "2"),
    "a helper": ("def near(a, b):\n    return abs(a - b) < 0.1\n\nassert near(f(1), 0.5)", "0.55", "0.7"),
    "statements": ("if f(1) > 0:\n    assert f(2) == 2\nelse:\n    assert False", "x", "-x"),
}
"""A test, and what a right and a wrong function of x return."""


@pytest.mark.parametrize("name", FORMS)
def test_a_test_is_decided_as_python_decides_it(name: str) -> None:
    test, *returned = FORMS[name]
    check_test(test, "f")
    verdicts = []
    tests = prepare("bubblewrap", Tests("", "", test, "f"), f"def f(x):\n    return {returned[0]}")
    for value in returned:
        code = f"KEPT = []\ndef f(x):\n    return {value}"
        played = play("bubblewrap", build_program("", code, "f"), tests)
        verdicts.append(bool(played.deciding) and all(outcome.holds for outcome in played.deciding))
        names: dict[str, Any] = {}
        try:
            exec(f"{code}\n{test}", names)  # of this test's own texts
            assert verdicts[-1]
        except Exception:
            assert not verdicts[-1]
    assert verdicts == [True, False]


def test_a_test_is_played_without_a_solution_and_tells_its_calls() -> None:
    tests = prepare("bubblewrap", Tests("", "assert f(1) == 2", "assert f(f(1)) == 3\nassert f(x=5) == 6", "f"), "")
    played = play("bubblewrap", "def f(x): return x + 1\n" + build_program("", "", "f"), tests)
    assert [outcome.holds for outcome in (*played.shown, *played.deciding)] == [True] * 3
    assert [[answer.value for answer in part] for part in played.answers] == [[2], [2, 3, 6]]


def test_a_test_that_cannot_be_played_with_an_answer_fails() -> None:
    tests = prepare("bubblewrap", Tests("", "", "assert f(f(1)) == 1", "f"), "def f(x): return 1")
    for code in ("from fractions import Fraction\ndef f(x): return Fraction(2)", "def f(x): return object()"):
        played = play("bubblewrap", build_program("", code, "f"), tests)
        assert [outcome.holds for outcome in played.deciding] == [False]


def test_a_slow_solution_gets_three_times_its_own_time() -> None:
    test = Tests("", "", "assert f(1) == 1", "f")
    code = "import time\ndef f(x):\n    while time.process_time() < {seconds}: pass\n    return 1"
    slow, fast = (prepare("bubblewrap", test, code.format(seconds=seconds)).limits.cpu_s for seconds in (1.7, 0))
    assert slow >= 5 > fast


def test_a_solution_may_return_what_takes_megabytes() -> None:
    test = Tests("", "", "assert len(f(10**6)) == 10**6", "f")
    tests = prepare("bubblewrap", test, "def f(x): return [*range(x)]")
    [[outcome]] = [play("bubblewrap", build_program("", "def f(x): return [0] * x", "f"), tests).deciding]
    assert outcome.holds and tests.limits.output_bytes > 1 << 24


@pytest.mark.parametrize(
    ("test", "solution", "code"),
    [
        ("assert f(1) == 2", "def f(x): return 3", "solution-fails-test"),
        ("assert False\nassert f(1)", "", "false-assertion"),
        ("import fractions\nassert f(fractions.Fraction(1)) == 1", "", "argument-not-plain"),
        ("assert len(f(9)) == 9", "def f(x): return '.' * (1 << 27)", "solution-fails-test"),
        (
            "import unittest\n@unittest.skip('')\nclass T(unittest.TestCase):\n    def test(self): assert f(1)",
            "",
            "no-call",
        ),
        ("x = []\nwhile True:\n    x = [f(x)]", "", "loops-too-long"),
        ("y = 1\nfor _ in range(9):\n    y = f(y)\nassert y == 10", "def f(x): return x + 1", "solution-fails-test"),
    ],
)
def test_what_cannot_be_played_is_refused(test: str, solution: str, code: str) -> None:
    with pytest.raises(CannotAsk) as raised:
        prepare("bubblewrap", Tests("", "", test, "f"), solution)
    assert raised.value.args[0].code == f"envs.code.{code}"


@pytest.mark.parametrize(
    "text",
    [
        "assert f(Node(1)) == 1",
        "assert f(lambda x: x) == 1",
        "def g(): pass\nassert f(g) == 1",
        "class Node: pass\nassert f(Node()) == 1",
        "assert f(1).amount == 1",
        "s = f()\ns.push(1)\nassert s.pop() == 1",
        "from contextlib import redirect_stdout\nwith redirect_stdout(None) as out:\n    f(1)\nassert out",
        "from unittest.mock import patch\nwith patch('builtins.print'):\n    assert f(1) == 1",
        "assert f(1) is 5",
        "assert f(1)[0] is f(1)[1]",
        "assert g(1) == 1",
        "x = 3",
        "def assertion(out, exp):\n    right = out == exp\n\nassertion(f(1), 2)",
        "assert f(1) == 2\ndef check_f():\n    assert f(2) == 3",
        "assert f(1) == 2\nasync def test_f():\n    assert f(2) == 3",
        "assert f(1) == 2\ndef test_f(x):\n    assert f(x) == 3",
        "assert f(1) == 2\nclass TestF:\n    def test_f(self):\n        assert f(2) == 3",
        "import pytest\ndef test_f():\n    assert f(1) == pytest.approx(2)",
        "assert f(",
        f"assert f({'[' * 500}{']' * 500}) == 1",
    ],
)
def test_what_cannot_be_asked_is_refused(text: str) -> None:
    with pytest.raises(CannotAsk):
        check_test(text, "f")


def test_equal_values_have_one_text() -> None:
    assert (
        canonical_text({"b": {3, 1}, "a": (1,)})
        == canonical_text({"a": (1,), "b": {1, 3}})
        == "{'a': (1,), 'b': {1, 3}}"
    )
    assert canonical_text([Foreign("Evil")]) == "[<Evil>]"
