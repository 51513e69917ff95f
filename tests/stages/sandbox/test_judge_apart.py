"""No candidate can change, hear or answer for another, nor see the host."""

import os
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import pytest
from support.candidates import EXPECTED, LIMITS, RIGHT, write

from stages.sandbox import Answer, Call, judge
from stages.sandbox.guest.protocol import HEAD


def test_background_process_of_a_candidate_ends(work: Path, mark: str, count_processes: Callable[[str], int]) -> None:
    spawn = f"import subprocess\nsubprocess.Popen(['setsid', 'sleep', '{mark}'])\n"
    outcomes = judge("bubblewrap", work, write(work, a=spawn + RIGHT, b=RIGHT), LIMITS)
    assert all(outcome.matches(EXPECTED) for outcome in outcomes)
    assert count_processes(mark) == 0


def test_candidates_cannot_change_one_another(work: Path) -> None:
    attack = (
        "import os, pathlib\nfor path in ['/testbed/b/solution.py', '/testbed/a/new', '/tmp/plan', '/dev/shm/plan']:\n"
        "    try: pathlib.Path(path).write_text('def add(a, b): return 0')\n    except OSError: pass\n"
    )
    look = "import os\ndef add(a, b): return a + b if os.listdir('/tmp') + os.listdir('/dev/shm') == [] else 0"
    outcomes = judge("bubblewrap", work, write(work, a=attack + RIGHT, b=look), LIMITS)
    assert all(outcome.matches(EXPECTED) for outcome in outcomes)
    assert sorted(os.listdir(work / "a")) == ["solution.py"]


def test_hash_seed_is_fixed_and_a_candidate_is_alone(work: Path) -> None:
    (work / "protocol.py").write_text("import protocol\nNAME = 'own'\ndef f(): return [hash('x'), protocol.NAME]")
    (work / "other.py").write_text("")
    (work / "solution.py").write_text(
        "import os, sys\ndef f(): return [os.listdir(), sys.argv, __name__]\nimport other"
    )
    calls = [Call("protocol.py", "f", [()]), Call("solution.py", "f", [()])]
    first, second = (judge("bubblewrap", work, calls) for _ in range(2))
    assert first == second and first[0].answers[0].value[1] == "own"
    assert first[1].answers[0].error == "ModuleNotFoundError"


@pytest.mark.parametrize("open_files", [0, 500], ids=["few open files", "many open files"])
def test_no_candidate_answers_for_the_next(work: Path, open_files: int) -> None:
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
        outcomes = judge("bubblewrap", work, write(work, a=attack + RIGHT, b=RIGHT, c=RIGHT), LIMITS)
    assert [outcome.matches(EXPECTED) for outcome in outcomes] == [False, True, True]


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


@pytest.mark.parametrize("way", TELL)
def test_no_candidate_hears_another(work: Path, way: str) -> None:
    """What the second hears is the same whether the first tells it something or not."""
    heard = []
    for tell in ("pass", TELL[way]):
        (work / "tell.py").write_text(f"import ctypes, fcntl, os, socket\ndef tell():\n    {tell}\n    return 1\n")
        (work / "hear.py").write_text(HEAR)
        calls = [Call("tell.py", "tell", [()]), Call("hear.py", "hear", [()])]
        patient = replace(LIMITS, wall_s=20.0)  # a busy machine is no news
        heard.append(judge("bubblewrap", work, calls, patient)[1].answers[0])
    assert heard[0].error is None and heard[0] == heard[1]


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


def test_nothing_of_a_candidate_is_left_in_the_memory_that_the_next_is_forked_from(work: Path) -> None:
    """The source of the first, what it was called with, and what it answered."""
    (work / "tell.py").write_text("# told-by-source\ndef tell(x): return 'told-by-' + x\n")
    flipped = bytes(range(255, -1, -1))  # so that whoever searches does not hold what it searches for
    words = [b"told-by-source", b"questioned", b"told-by-questioned".hex().encode()]
    known = f"FLIPPED = {flipped}\nWORDS = {[word.translate(flipped) for word in words]}\n"
    (work / "hear.py").write_text(known + SEARCH)
    calls = [Call("tell.py", "tell", [("questioned",)]), Call("hear.py", "hear", [()])]
    told, heard = judge("bubblewrap", work, calls, LIMITS)
    assert told.answers[0].value == "told-by-questioned" and heard.answers[0] == Answer(0)


def test_a_candidate_sees_nothing_of_the_host(work: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SECRET", "host-only")
    (work / "look.py").write_text("import os\ndef look(): return [dict(os.environ), os.listdir('/home'), os.getcwd()]")
    [outcome] = judge("bubblewrap", work, [Call("look.py", "look", [()])])
    variables, homes, folder = outcome.answers[0].value
    assert "SECRET" not in variables and homes == ["agent"] and folder == "/testbed"


def test_much_output_of_a_candidate_does_no_harm(work: Path) -> None:
    loud = "import sys\nprint('x' * 10**6)\nprint('x' * 10**6, file=sys.stderr)\n"
    [outcome] = judge("bubblewrap", work, write(work, a=loud + RIGHT), LIMITS)
    assert outcome.matches(EXPECTED)
