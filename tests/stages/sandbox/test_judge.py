"""A candidate gets a passing outcome by returning the right values, and in no other way."""

import gc
import math
import os
import time
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support.refusals import refused

from stages.errors import UsageError
from stages.sandbox import KINDS, Answer, Answers, Call, Limits, judge, match
from stages.sandbox.guest.protocol import HEAD
from stages.sandbox.judge import _parsed
from tests.stages.sandbox.conftest import count_processes

LIMITS = Limits(wall_s=1.0, cpu_s=2, memory_mb=256, processes=16, output_bytes=4096)
RIGHT = "def add(a, b):\n    return a + b\n"
EXPECTED = [3, 7]


def adding(*candidates: str) -> list[Call]:
    """The calls to each candidate."""
    return [Call(source.encode(), "add", [(1, 2), (3, 4)]) for source in candidates]


def alone(source: str, function: str, *arguments: tuple[Any, ...]) -> list[Call]:
    """The calls to a candidate that has no other beside it."""
    return [Call(source.encode(), function, arguments or [()])]


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
    "sleeping on import": "import time\ntime.sleep(60)",
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
    source = "class L(list): pass\ndef odd(): return [1j, {1}, b'x', object(), L([1])]"
    outcome, odd = judge("bubblewrap", [*calls, *alone(source, "odd")])
    assert [repr(answer.value) for answer in outcome] == list(map(repr, VALUES)) and match(outcome, VALUES)
    assert odd[0].value == [{"__type__": name} for name in ("complex", "set", "bytes", "object", "L")]


@pytest.mark.parametrize(
    ("returned", "expected"),
    [(1, True), (1, 1.0), ((1,), [1]), ({"a": 1}, {"a": True}), ({1: 2}, {True: 2}), ([1], [1, 2]), ("1", 1)],
)
def test_match_compares_types(returned: Any, expected: Any) -> None:
    assert not match((Answer(returned),), [expected])
    assert match((Answer({"b": math.nan, "a": 1}),), [{"a": 1, "b": math.nan}]), "the order of keys counts for nothing"


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


TELL = {
    "a folder": "os.mkdir('/tmp/x'); os.rmdir('/tmp/x')",
    "a time": "os.utime('/dev/shm', ns=(1, 123456789))",
    "a mode": "os.chmod('/home/agent', 0o711)",
    "a terminal": "os.utime('/dev/pts/ptmx', ns=(1, 123456789))",
    "a device": "os.utime('/dev/zero', ns=(1, 123456789))",
    "process numbers": "[os.waitpid(os.fork() or os._exit(0), 0) for _ in range(7)]",
    "packets": "s = socket.socket(type=socket.SOCK_DGRAM); [s.sendto(b'x', ('127.0.0.1', 9)) for _ in range(7)]",
    "flags of an open file": "fcntl.fcntl(0, fcntl.F_SETFL, os.O_NONBLOCK | os.O_APPEND)",
    "a message queue": "ctypes.CDLL(None).mq_open(b'/plan', os.O_CREAT | os.O_RDWR, 0o600, None)",
    "shared memory": "ctypes.CDLL(None).shm_open(b'/plan', os.O_CREAT | os.O_RDWR, 0o600)",
    "System V": "ctypes.CDLL(None).shmget(77, 4096, 0o1600)",
}


HEAR = """
import ctypes, fcntl, os, socket
PLACES = ("/tmp", "/dev/shm", "/home/agent", "/dev/pts", "/dev/pts/ptmx", "/dev/zero", "/testbed")
def hear():
    libc = ctypes.CDLL(None)
    return [
        [[os.stat(path).st_mode, os.stat(path).st_mtime_ns == 123456789] for path in PLACES],
        [os.listdir(path) for path in PLACES if os.path.isdir(path)],
        os.stat("/tmp").st_mtime_ns > os.stat("/etc/hosts").st_mtime_ns,
        os.getpid() > 3,
        [line for line in open("/proc/self/net/snmp") if line.startswith("Udp:")],
        fcntl.fcntl(0, fcntl.F_GETFL),
        [libc.mq_open(b"/plan", os.O_RDWR), libc.shm_open(b"/plan", os.O_RDWR, 0), libc.shmget(77, 4096, 0o600)],
    ]
"""


def heard(tell: str) -> Answer:
    """What a candidate hears after another one that does something."""
    telling = f"import ctypes, fcntl, os, socket\ndef tell():\n    {tell}\n    return 1\n"
    patient = replace(LIMITS, wall_s=20.0)  # a busy machine is no news
    return judge("bubblewrap", [*alone(telling, "tell"), *alone(HEAR, "hear")], patient)[1][0]


def test_no_candidate_hears_another() -> None:
    """What the second hears is the same whether the first tells it something or not."""
    silence = heard("pass")
    assert silence.error is None
    assert {way: heard(tell) for way, tell in TELL.items()} == dict.fromkeys(TELL, silence)


SEARCH = """
def hear():
    found = 0
    for line in open("/proc/self/maps"):
        place, mode = line.split()[:2]
        if mode[0] == "r" and "[v" not in line:
            low, high = (int(one, 16) for one in place.split("-"))
            with open("/proc/self/mem", "rb", 0) as memory:
                memory.seek(low)
                data = memory.read(high - low)
            found += sum(data.translate(FLIPPED).count(word) for word in WORDS)
    return found
"""


def test_supervisor_memory_holds_nothing_of_a_candidate() -> None:
    """The source of the first, what it was called with, and what it answered."""
    tell = "# told-by-source\ndef tell(x): return 'told-by-' + x\n"
    flipped = bytes(range(255, -1, -1))  # so that whoever searches does not hold what it searches for
    words = [b"told-by-source", b"questioned", b"told-by-questioned".hex().encode()]
    known = f"FLIPPED = {flipped}\nWORDS = {[word.translate(flipped) for word in words]}\n"
    told, heard = judge("bubblewrap", [*alone(tell, "tell", ("questioned",)), *alone(known + SEARCH, "hear")], LIMITS)
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
