"""A candidate gets a passing outcome by returning the right values, and in no other way."""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.candidates import EXPECTED, LIMITS, RIGHT, write

from stages.errors import UsageError
from stages.sandbox import KINDS, Answer, Call, Outcome, judge

FORGERIES = {
    "exit": "import os\nos._exit(0)",
    "exit in the call": "import os\ndef add(a, b): os._exit(0)",
    "sys.exit": "import sys\ndef add(a, b): sys.exit(0)",
    "printing": 'def add(a, b):\n    print(\'["v",3]\\n["v",7]\', flush=True)\n    raise ValueError',
    "printing to every descriptor but its own": (
        "import os\ndef add(a, b):\n    for n in (0, 1, 2, *range(4, 64)):\n"
        '        try: os.write(n, b\'["v",3]\\n["v",7]\\n\')\n        except OSError: pass\n    os._exit(0)'
    ),
    "closing descriptors": "import os\ndef add(a, b):\n    os.closerange(0, 256)\n    return a + b",
    "infinite loop": "def add(a, b):\n    while True: pass",
    "infinite loop on import": "while True: pass",
    "sleeping": "import time\ndef add(a, b): time.sleep(60)",
    "equal to everything": "class Same:\n    __eq__ = lambda *_: True\ndef add(a, b): return Same()",
    "subclass of int": "class Int(int): pass\ndef add(a, b): return Int(a + b)",
    "nested subclass": "class List(list): pass\ndef add(a, b): return List([a + b])",
    "bool for int": "def add(a, b): return True",
    "float for int": "def add(a, b): return float(a + b)",
    "text for int": "def add(a, b): return str(a + b)",
    "patched builtins": (
        "import builtins\nbuiltins.type = lambda *_: int\n"
        "class Same: __eq__ = lambda *_: True\ndef add(a, b): return Same()"
    ),
    "patched os": "import os\nos.write = lambda *_: 0\ndef add(a, b): return a + b + 1",
    "atexit": "import atexit, os\natexit.register(os._exit, 0)\ndef add(a, b): raise SystemExit(0)",
    "no function": "",
    "not callable": "add = 3",
    "syntax error": "def add(a, b: return",
    "own exception": "class Odd(BaseException): pass\ndef add(a, b): raise Odd",
    "metaclass that lies": (
        "class Meta(type):\n    __name__ = property(lambda s: 3)\n"
        "class Odd(metaclass=Meta): pass\ndef add(a, b): return Odd()"
    ),
    "endless output": "import os\ndef add(a, b):\n    while True: os.write(3, b'[\"v\",3]\\n' * 1000)",
    "recursive value": "def add(a, b):\n    x = []\n    x.append(x)\n    return x",
    "deep answer": "import os\ndef add(a, b): os.write(3, b'[' * 3000 + b'\\n'); os._exit(0)",
    "no answer but bytes": "import os\ndef add(a, b): os.write(3, bytes(range(256)) + b'\\n{}\\n'); os._exit(0)",
    "stack overflow": "import sys\nsys.setrecursionlimit(10**9)\ndef add(a, b): return add(a, b)",
    "memory": "def add(a, b): return len(bytearray(1 << 30))",
    "fork bomb": "import os\nwhile True: os.fork()",
    "killing the supervisor": "import os\ndef add(a, b):\n    for n in range(1, 32): os.kill(os.getppid(), n)",
    "killing all": "import os\ndef add(a, b): os.kill(-1, 9); os.kill(os.getpid(), 9)",
    "one right, one exit": "import os\ndef add(a, b): return a + b if a == 1 else os._exit(0)",
}


@pytest.mark.parametrize("kind", KINDS)
def test_right_and_wrong(work: Path, kind: str) -> None:
    calls = write(work, right=RIGHT, wrong="def add(a, b): return a - b", raising="def add(a, b): return a / (b - 2)")
    right, wrong, raising = judge(kind, work, calls, LIMITS)
    assert right == Outcome((Answer(3), Answer(7))) and right.matches(EXPECTED)
    assert wrong == Outcome((Answer(-1), Answer(-1))) and not wrong.matches(EXPECTED)
    assert raising == Outcome((Answer(error="ZeroDivisionError"), Answer(1.5))) and not raising.matches(EXPECTED)


@pytest.mark.parametrize("name", FORGERIES)
def test_forgery_fails_and_harms_no_neighbour(work: Path, name: str, count_processes: Callable[[str], int]) -> None:
    first, forged, last = judge("bubblewrap", work, write(work, a=RIGHT, b=FORGERIES[name], c=RIGHT), LIMITS)
    assert not forged.matches(EXPECTED) and len(forged.answers) == 2
    assert first.matches(EXPECTED) and last.matches(EXPECTED)
    assert count_processes(str(work)) == 0


@pytest.mark.parametrize(
    ("name", "errors"),
    [
        ("exit", ["crash", "crash"]),
        ("infinite loop", ["timeout", "timeout"]),
        ("sys.exit", ["SystemExit", "SystemExit"]),
        ("no function", ["AttributeError", "AttributeError"]),
        ("not callable", ["TypeError", "TypeError"]),
        ("syntax error", ["SyntaxError", "SyntaxError"]),
        ("recursive value", ["RecursionError", "RecursionError"]),
        ("endless output", ["timeout", "timeout"]),
        ("memory", ["MemoryError", "MemoryError"]),
        ("one right, one exit", [None, "crash"]),
    ],
)
def test_errors_are_named(work: Path, name: str, errors: list[str | None]) -> None:
    [outcome] = judge("bubblewrap", work, write(work, a=FORGERIES[name]), LIMITS)
    assert [answer.error for answer in outcome.answers] == errors


def test_a_stack_that_overflows_is_no_answer(work: Path) -> None:
    """It crashes, or on a busy machine is still descending when its time is up."""
    [outcome] = judge("bubblewrap", work, write(work, a=FORGERIES["stack overflow"]), LIMITS)
    assert {answer.error for answer in outcome.answers} <= {"crash", "timeout"}


@pytest.mark.parametrize(
    "value",
    [None, True, 0, -(10**30), 1.5, math.inf, -0.0, "", 'é\ud800\n"', [], (), [1, (2.0, [None])], {"a": (), (2,): 3}],
    ids=repr,
)
def test_values_survive_with_their_types(work: Path, value: Any) -> None:
    (work / "echo.py").write_text("def echo(value): return value")
    [outcome] = judge("bubblewrap", work, [Call("echo.py", "echo", [(value,)])])
    assert repr(outcome.answers[0].value) == repr(value) and outcome.matches([value])


def test_other_values_come_back_as_the_name_of_their_type(work: Path) -> None:
    (work / "odd.py").write_text("class L(list): pass\ndef odd(): return [1j, {1}, b'x', object(), L([1])]")
    [outcome] = judge("bubblewrap", work, [Call("odd.py", "odd", [()])])
    assert outcome.answers[0].value == [{"__type__": name} for name in ("complex", "set", "bytes", "object", "L")]


@pytest.mark.parametrize(
    ("returned", "expected"),
    [(1, True), (1, 1.0), ((1,), [1]), ({"a": 1}, {"a": True}), ({1: 2}, {True: 2}), ([1], [1, 2]), ("1", 1)],
)
def test_equal_in_python_is_not_the_same(returned: Any, expected: Any) -> None:
    assert not Outcome((Answer(returned),)).matches([expected])


def test_nan_and_order_of_keys() -> None:
    assert Outcome((Answer({"b": math.nan, "a": 1}),)).matches([{"a": 1, "b": math.nan}])


def test_many_candidates_are_cheap(work: Path) -> None:
    outcomes = judge("bubblewrap", work, write(work, **{f"c{n}": RIGHT for n in range(64)}), LIMITS)
    assert len(outcomes) == 64 and all(outcome.matches(EXPECTED) for outcome in outcomes)


def test_arguments_must_be_built_in(work: Path) -> None:
    (work / "solution.py").write_text(RIGHT)
    with pytest.raises(UsageError, match="built-in"):
        judge("bubblewrap", work, [Call("solution.py", "add", [(object(), 1)])])
