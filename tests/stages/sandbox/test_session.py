"""The supervisor cannot be stopped, read or spoken for; when it is lost all the same, that is noticed."""

import os
import subprocess
import sys
import threading
from contextlib import nullcontext
from pathlib import Path

import pytest

from composer_stages.sandbox import Limits, Sandbox, open_sandbox
from composer_stages.sandbox.session import SupervisorLost, SupervisorSession
from tests.stages.sandbox.conftest import PROGRAMS, count_processes, python

ROOT = Path(__file__).parents[3]
ATTACKS: dict[str, str] = {
    **PROGRAMS["supervisor_attacks"],
    "its limits": python(PROGRAMS["limits"]),
    "its precedence": python(PROGRAMS["priorities"]),
}


@pytest.mark.parametrize("attack", ATTACKS)
def test_attack_does_not_reach_the_supervisor(box: Sandbox, work: Path, attack: str) -> None:
    before = supervisor_of(work)
    result = box.run(ATTACKS[attack] + "\necho; echo over; exit 9")
    assert (result.returncode, result.killed_for) == (9, None) and result.output.endswith("\nover\n")
    assert "DONE" not in result.output and "Traceback" not in result.output
    assert box.run("echo same").output == "same\n" and supervisor_of(work) == before


@pytest.mark.skipif(os.getuid() != 0, reason="only root may give the supervisor precedence, and only root needs it")
def test_supervisor_has_realtime_priority(box: Sandbox, work: Path) -> None:
    assert os.sched_getscheduler(0) == os.SCHED_OTHER
    assert os.sched_getscheduler(supervisor_of(work)) == os.SCHED_RR | os.SCHED_RESET_ON_FORK
    assert box.run("python3 -c 'import os; print(os.sched_getscheduler(0))'").output == f"{os.SCHED_OTHER}\n"


def test_supervisor_cannot_be_traced(box: Sandbox) -> None:
    assert box.run(python(PROGRAMS["trace"])).output == "-1 1\n" * 4


def test_output_cannot_forge_a_frame(box: Sandbox) -> None:
    frame = r"\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x04\x00\x00\x00\x04fake"
    result = box.run(f"printf '{frame}'; printf 'ready\\n\\x00\\x00' >&2; exit 7")
    assert (result.returncode, result.output_bytes) == (7, 30)
    assert box.run("echo next").output == "next\n"


def test_a_lost_supervisor_is_noticed_and_replaced(box: Sandbox, work: Path) -> None:
    box.run("echo kept > file")
    victim = supervisor_of(work)
    threading.Timer(0.2, os.kill, (victim, 9)).start()
    result = box.run("sleep 60")
    assert (result.returncode, result.killed_for) == (137, "sandbox") and result.duration_s < 5
    assert "lost" in result.output
    assert box.run("cat file").output == "kept\n" and supervisor_of(work) != victim


@pytest.mark.slow
def test_a_stopped_supervisor_does_not_hang_the_host(work: Path) -> None:
    with open_sandbox("bubblewrap", work) as sandbox:
        os.kill(supervisor_of(work), 19)
        result = sandbox.run("echo never", wall_s=0.1)
        assert (result.returncode, result.killed_for) == (137, "sandbox") and result.duration_s < 12
        assert sandbox.run("echo back").output == "back\n"


@pytest.mark.parametrize(
    "answer",
    ["HEAD.pack(0, 0, 0, 9, 2**30)", "HEAD.pack(0, 0, 9, 0, 0)", "b'short'", "HEAD.pack(0, 0, 0, 9, 9) + b'x'", "b''"],
)
def test_malformed_reply_loses_the_supervisor(answer: str) -> None:
    """A stand-in for a supervisor that was taken over, in spite of everything."""
    script = f"""
import sys; sys.path.insert(0, {str(ROOT)!r})
import os; from composer_stages.sandbox.guest.protocol import HEAD, READY, read_request
channel = int(sys.argv[1])
read_request(channel); os.write(channel, READY); read_request(channel); os.write(channel, {answer})
"""
    command = nullcontext(([sys.executable, "-c", script], []))
    session = SupervisorSession(command, {}, Limits(), {})
    with pytest.raises(SupervisorLost):
        session.ask({}, 1.0)
    session.close()


def test_without_isolation_a_killed_supervisor_is_replaced(work: Path) -> None:
    with open_sandbox("none", work) as sandbox:
        assert sandbox.run("kill -9 $PPID; exit").killed_for == "sandbox"
        assert sandbox.run("echo back").output == "back\n"


def test_dead_host_leaves_no_process(work: Path, mark: str) -> None:
    script = (
        "import os, threading; from pathlib import Path; from composer_stages.sandbox import open_sandbox\n"
        f"box = open_sandbox('bubblewrap', Path({str(work)!r}))\n"
        f"threading.Timer(0.3, os._exit, (0,)).start(); box.run('sleep {mark}')"
    )
    subprocess.run([sys.executable, "-c", script], check=True, cwd=ROOT, timeout=30)
    assert count_processes(mark) == 0 and count_processes(str(work)) == 0


def supervisor_of(work: Path) -> int:
    """The host's pid of the supervisor that shows `work`: the only child of its bwrap."""
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            words = path.read_bytes().split(b"\0")
        except OSError:
            continue
        if str(work).encode() in words:
            pid = path.parent.name
            return int(Path(f"/proc/{pid}/task/{pid}/children").read_text().split()[0])
    raise AssertionError(f"no sandbox shows {work}")
