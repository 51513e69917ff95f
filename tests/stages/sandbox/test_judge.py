"""A candidate gets a passing outcome by returning the right values, and in no other way."""

import datetime
import gc
import math
import os
import time
from collections import deque
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support.refusals import refused

from composer_stages.errors import UsageError
from composer_stages.sandbox import KINDS, Answer, Answers, Call, Limits, judge, match
from composer_stages.sandbox.equality import equal, formatted, is_raised
from composer_stages.sandbox.guest.protocol import HEAD
from composer_stages.sandbox.judge import _parsed
from tests.stages.sandbox.conftest import PROGRAMS, count_processes

LIMITS = Limits(wall_s=1.0, cpu_s=2, memory_mb=256, processes=16, output_bytes=4096)
RIGHT = "def add(a, b):\n    return a + b\n"
EXPECTED = [3, 7]


def adding(*candidates: str) -> list[Call]:
    """The calls to each candidate."""
    return [Call(source.encode(), "add", [(1, 2), (3, 4)]) for source in candidates]


def alone(source: str, function: str, *arguments: tuple[Any, ...]) -> list[Call]:
    """The calls to a candidate that has no other beside it."""
    return [Call(source.encode(), function, arguments or [()])]


FORGERIES: dict[str, str] = PROGRAMS["forgeries"]


LINES = {
    "an integer for a float's text": b'["v",["f",1' + b"0" * 400 + b"]]",
    "a bottomless list": b"[" * 100_000,
    "a deep value": b'["v",' + b'["l",' * 300 + b"1" + b"]" * 301,
    "a deep error": b'["e",' + b'["l",' * 300 + b"1" + b"]" * 301,
    "a deep key": b'["v",["d",[' + b'["t",' * 300 + b"1" + b"]" * 300 + b",1]]]",
    "NaN": b'["v",NaN]',
    "Infinity": b'["v",["f",Infinity]]',
    "an integer beyond the limit of digits": b'["v",' + b"9" * 5000 + b"]",
    "no UTF-8": b'["v",["s","ff"]] \xff\xfe',
    "half a character": b'["e",["s","eda080"]]',
    "an unhashable tag": b'["v",[[1],2]]',
    "an unhashable key": b'["v",["d",[["l"],1]]]',
    "a text that is no hexadecimal": b'["v",["s",true]]',
    "pairs that are none": b'["v",["d",5]]',
    "no pair": b"5",
    "a deque of more than was sent": b'["v",["x",["s","636f6c6c656374696f6e732e6465717565"],["l",["x",["s","'
    + b"builtins.range".hex().encode()
    + b'"],["l",0,1000000000000,1]]]]]',
    "a fraction of a text": b'["v",["x",["s","'
    + b"fractions.Fraction".hex().encode()
    + b'"],["l",["s","316539393939"]]]]',
    "a counter of a range": b'["v",["u",["s","'
    + b"collections.Counter".hex().encode()
    + b'"],["v","keys",["x",["s","'
    + b"builtins.range".hex().encode()
    + b'"],["l",0,1000000000000,1]]],null]]',
    "a type of another module": b'["v",["x",["s","' + b"os.system".hex().encode() + b'"],["l",["s","6c73"]]]]',
    "keys with one hash": b'["v",["d",' + b",".join(b"[%d,1]" % (n * (2**61 - 1)) for n in range(60_000)) + b"]]",
}
"""What a candidate may write on descriptor 3 in place of an answer."""


@pytest.fixture(scope="module")
def no_garbage() -> None:
    """Garbage of other modules' tests that is finalized at the limit of recursion fails there."""
    gc.collect()


@pytest.mark.usefixtures("no_garbage")
@pytest.mark.parametrize("name", LINES)
def test_malformed_answer_is_a_crash(name: str) -> None:
    began = time.process_time()
    assert _parsed(LINES[name]) == Answer(error="crash")
    assert time.process_time() - began < 5.0  # quadratic in the keys: minutes


@pytest.mark.parametrize("kind", KINDS)
def test_judge_returns_values_and_exceptions(kind: str) -> None:
    calls = adding(RIGHT, "def add(a, b): return a - b", "def add(a, b): return a / (b - 2)")
    right, wrong, raising = judge(kind, calls, LIMITS)
    assert right == (Answer(3), Answer(7)) and match(right, EXPECTED)
    assert wrong == (Answer(-1), Answer(-1)) and not match(wrong, EXPECTED)
    assert raising == (Answer(error="ZeroDivisionError"), Answer(1.5)) and not match(raising, EXPECTED)


@pytest.fixture(scope="module")
def judged() -> dict[str, Answers]:
    """The outcome of each forgery, judged together with a right candidate before and after each."""
    order = ["first", *(name for forgery in FORGERIES for name in (forgery, f"after {forgery}"))]
    outcomes = judge("bubblewrap", adding(*(FORGERIES.get(name, RIGHT) for name in order)), LIMITS)
    return dict(zip(order, outcomes, strict=True))


ERRORS = {
    "exit": "crash",
    "infinite loop": "timeout",
    "sys.exit": "SystemExit",
    "no function": "AttributeError",
    "not callable": "TypeError",
    "syntax error": "SyntaxError",
    "recursive value": "RecursionError",
    "endless output": "timeout",
    "memory": "MemoryError",
}


@pytest.mark.parametrize("name", FORGERIES)
def test_forgery_fails_and_harms_no_neighbour(judged: dict[str, Answers], name: str) -> None:
    assert not match(judged[name], EXPECTED) and len(judged[name]) == 2
    assert match(judged["first"], EXPECTED) and match(judged[f"after {name}"], EXPECTED)
    errors = [answer.error for answer in judged[name]]
    if name in ERRORS:
        assert errors == [ERRORS[name]] * 2
    elif name == "one right, one exit":
        assert errors == [None, "crash"]
    elif name == "stack overflow":  # on a busy machine it is still descending when its time is up
        assert {*errors} <= {"crash", "timeout"}


VALUES: list[Any] = [
    *(None, True, 0, -(10**30), 1.5, math.inf, -0.0, "", 'é\ud800\n"'),
    *([], (), [1, (2.0, [None])], {"a": (), (2,): 3}),
]


def test_values_keep_their_types() -> None:
    calls = alone("def echo(value): return value", "echo", *((value,) for value in VALUES))
    [outcome] = judge("bubblewrap", calls)
    assert [repr(answer.value) for answer in outcome] == list(map(repr, VALUES)) and match(outcome, VALUES)


STANDARD = """\
import datetime
from pathlib import Path
from collections import Counter, OrderedDict, defaultdict, deque, namedtuple
from decimal import Decimal
from enum import IntEnum, StrEnum
from fractions import Fraction

Point = namedtuple("Point", "x y")
Size = IntEnum("Size", {"big": 3})
Name = StrEnum("Name", {"first": "a"})
def value(number): return eval(VALUES[number])
"""
RETURNED: dict[str, tuple[Any, str]] = {
    "Counter('aab')": ({"a": 2, "b": 1}, "Counter({'a': 2, 'b': 1})"),
    "list(OrderedDict(a=1).items())": ([("a", 1)], "[('a', 1)]"),
    "defaultdict(int, a=1)": ({"a": 1}, "defaultdict(None, {'a': 1})"),
    "Point(1, 2)": ((1, 2), "(1, 2)"),
    "[Size.big, Name.first]": ([3, "a"], "[3, 'a']"),
    "Fraction(1, 2)": (0.5, "Fraction(1, 2)"),
    "Decimal('0.1')": (0.1, "Decimal('0.1')"),
    "range(0, 6, 2)": (range(0, 5, 2), "range(0, 6, 2)"),
    "deque([1, 2], 2)": (deque([1, 2]), "deque([1, 2], maxlen=2)"),
    "{1: 'a'}.keys()": ({1}, "dict_keys([1])"),
    "{1: 'a'}.items()": ({(1, "a")}, "dict_items([(1, 'a')])"),
    "{1, 2}": (frozenset({2, 1}), "{1, 2}"),
    "b'x\\n'": (b"x\n", "b'x\\n'"),
    "1j": (1j, "1j"),
    "datetime.date(2020, 1, 31)": (datetime.date(2020, 1, 31), "datetime.date(2020, 1, 31)"),
    "datetime.timedelta(1, 2, 3)": (
        datetime.timedelta(1, 2, 3),
        "datetime.timedelta(days=1, seconds=2, microseconds=3)",
    ),
    "Path('a/b')": (Path("a/b"), "PosixPath('a/b')"),
    "10**5000": (10**5000, "<int of more than 4300 digits>"),
}
"""What a program returns, a value that it equals, and how it is shown."""
FOREIGN = {
    "object()": "<object>",
    "{1: 'a'}.values()": "dict_values(['a'])",
    "(n for n in [1, 2])": "<generator of [1, 2]>",
    "map(int, '12')": "<map of [1, 2]>",
    "type('Counter', (), {})()": "<Counter>",
}


def test_values_of_other_types_are_those_that_a_caller_sees() -> None:
    names = [*RETURNED, *FOREIGN]
    source = f"{STANDARD}VALUES = {names!r}\n"
    [answers] = judge("bubblewrap", alone(source, "value", *((number,) for number in range(len(names)))))
    assert [formatted(answer.value) for answer in answers] == [
        *(text for _, text in RETURNED.values()),
        *FOREIGN.values(),
    ]
    for answer, (expected, _) in zip(answers, RETURNED.values(), strict=False):
        assert equal(answer.value, expected) and not equal(answer.value, [expected]), expected
    generator = answers[names.index("(n for n in [1, 2])")].value
    assert not equal(generator, [1, 2]) and list(generator) == [1, 2] and list(generator) == []


def test_exceptions_are_those_of_their_class_or_a_base() -> None:
    source = """\
class Bad(KeyError): pass
class ValueError(Exception): pass
def fail(name): exec(f"import json, struct; raise {name}")
"""
    names = ("Bad(1)", "ValueError(1)", "json.JSONDecodeError('', '', 0)", "struct.error", "OSError", "SystemExit")
    [answers] = judge("bubblewrap", alone(source, "fail", *((name,) for name in names)))
    raised = {
        expected: [is_raised(answer.classes, expected) for answer in answers]
        for expected in (
            "Bad",
            "LookupError",
            "ValueError",
            "JSONDecodeError",
            "struct.error",
            "IOError",
            "Exception",
            "rror",
        )
    }
    assert [[*map(int, row)] for row in raised.values()] == [
        *([1, 0, 0, 0, 0, 0], [1, 0, 0, 0, 0, 0], [0, 0, 1, 0, 0, 0], [0, 0, 1, 0, 0, 0], [0, 0, 0, 1, 0, 0]),
        *([0, 0, 0, 0, 1, 0], [1, 1, 1, 1, 1, 0], [0, 0, 0, 0, 0, 0]),
    ]


def test_arguments_must_be_built_in() -> None:
    calls = alone(RIGHT, "add", (object(), 1))
    refused(lambda: judge("bubblewrap", calls), UsageError, code="sandbox.arguments-not-built-in")


def test_processes_of_candidates_are_ended(work: Path, mark: str) -> None:
    spawn = f"import subprocess\nsubprocess.Popen(['setsid', 'sleep', '{mark}'])\n"
    names = ("fork bomb", "killing all", "killing the supervisor", "infinite loop")
    calls = adding(spawn + RIGHT, RIGHT, *(FORGERIES[name] for name in names))
    outcomes = judge("bubblewrap", calls, LIMITS, folder=work)
    assert [match(outcome, EXPECTED) for outcome in outcomes] == [True] * 2 + [False] * len(names)
    assert count_processes(mark) == 0 and count_processes(str(work)) == 0


def test_candidates_cannot_change_one_another(work: Path) -> None:
    attack = (
        "import os, pathlib\nfor path in ['/testbed/solution.py', '/testbed/new', '/tmp/plan', '/dev/shm/plan']:\n"
        "    try: pathlib.Path(path).write_text('def add(a, b): return 0')\n    except OSError: pass\n"
    )
    look = "import os\ndef add(a, b): return a + b if os.listdir('/tmp') + os.listdir('/dev/shm') == [] else 0"
    (work / "solution.py").write_text("kept")
    outcomes = judge("bubblewrap", adding(attack + RIGHT, look), LIMITS, folder=work)
    assert all(match(outcome, EXPECTED) for outcome in outcomes)
    assert os.listdir(work) == ["solution.py"] and (work / "solution.py").read_text() == "kept"


def test_hash_seed_is_fixed_and_candidates_share_no_modules() -> None:
    own = b"import protocol\nNAME = 'own'\ndef f(): return [hash('x'), protocol.NAME]"
    calls = [Call(own, "f", [()], "protocol.py"), *alone("def f(): return 1\nimport other", "f")]
    first, second = (judge("bubblewrap", calls) for _ in range(2))
    assert first == second and first[0][0].value[1] == "own"
    assert first[1][0].error == "ModuleNotFoundError"


@pytest.mark.parametrize("open_files", [0, 500], ids=["few open files", "many open files"])
def test_no_candidate_answers_for_the_next(open_files: int) -> None:
    """A frame of the supervisor's own form, written to whatever descriptor a candidate can find."""
    output = b'["v",0]\n["v",0]\n'
    frame = HEAD.pack(0, False, 0, 16, len(output)) + output
    attack = f"""
import os
for n in range(1024):
    for find in (lambda: n, lambda: os.open(f"/proc/1/fd/{{n}}", os.O_WRONLY)):
        try: os.write(find(), {3 * frame!r})
        except OSError: pass
"""
    with ExitStack() as stack:
        for _ in range(open_files):  # so that the number of the channel on the host is high
            stack.enter_context(open(os.devnull))
        outcomes = judge("bubblewrap", adding(attack + RIGHT, RIGHT, RIGHT), LIMITS)
    assert [match(outcome, EXPECTED) for outcome in outcomes] == [False, True, True]


def heard(tell: str) -> Answer:
    """What a candidate hears after another one that does something."""
    telling = f"import ctypes, fcntl, os, socket\ndef tell():\n    {tell}\n    return 1\n"
    patient = replace(LIMITS, wall_s=20.0)  # a busy machine is no news
    return judge("bubblewrap", [*alone(telling, "tell"), *alone(PROGRAMS["hear"], "hear")], patient)[1][0]


def test_no_candidate_hears_another() -> None:
    """What the second hears is the same whether the first tells it something or not."""
    silence = heard("pass")
    assert silence.error is None
    assert {way: heard(tell) for way, tell in PROGRAMS["tell"].items()} == dict.fromkeys(PROGRAMS["tell"], silence)


def test_supervisor_memory_holds_nothing_of_a_candidate() -> None:
    """The source of the first, what it was called with, and what it answered."""
    tell = "# told-by-source\ndef tell(x): return 'told-by-' + x\n"
    flipped = bytes(range(255, -1, -1))  # so that whoever searches does not hold what it searches for
    words = [b"told-by-source", b"questioned", b"told-by-questioned".hex().encode()]
    known = f"FLIPPED = {flipped}\nWORDS = {[word.translate(flipped) for word in words]}\n"
    told, heard = judge(
        "bubblewrap", [*alone(tell, "tell", ("questioned",)), *alone(known + PROGRAMS["search_memory"], "hear")], LIMITS
    )
    assert told[0].value == "told-by-questioned" and heard[0] == Answer(0)


def test_candidate_sees_no_environment_of_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SECRET", "host-only")
    look = "import os\ndef look(): return [dict(os.environ), os.listdir('/home'), os.getcwd()]"
    [outcome] = judge("bubblewrap", alone(look, "look"))
    variables, homes, folder = outcome[0].value
    assert "SECRET" not in variables and homes == ["agent"] and folder == "/testbed"


def test_printed_output_does_not_disturb_answers() -> None:
    loud = "import sys\nprint('x' * 10**6)\nprint('x' * 10**6, file=sys.stderr)\n"
    [outcome] = judge("bubblewrap", adding(loud + RIGHT), LIMITS)
    assert match(outcome, EXPECTED)
