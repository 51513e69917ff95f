"""The filter, as data and in force."""

import struct
from pathlib import Path

import pytest
from support.refusals import refused

from composer_stages.errors import UsageError
from composer_stages.sandbox import Sandbox, bubblewrap
from composer_stages.sandbox.bubblewrap import ARCHITECTURES, SYSCALLS, syscall_filter
from tests.stages.sandbox.conftest import PROGRAMS, python


@pytest.mark.parametrize("machine", ARCHITECTURES)
def test_every_jump_stays_inside_the_program(machine: str) -> None:
    program = list(struct.iter_unpack("=HBBI", syscall_filter(machine)))
    for at, (_, if_true, if_false, _) in enumerate(program[:-1]):
        assert at + 1 + max(if_true, if_false) < len(program)
    assert program[-1] == (0x06, 0, 0, 0x7FFF0000)


def test_unknown_machine_is_refused() -> None:
    refused(lambda: syscall_filter("pdp11"), UsageError, code="sandbox.unknown-machine", machine="pdp11")


@pytest.mark.skipif("__import__('platform').machine() != 'x86_64'", reason="the numbers below are those of x86_64")
def test_refused_calls_are_refused(box: Sandbox) -> None:
    calls = [(numbers[0], (0, 0, 0, 0, 0, 0)) for numbers in SYSCALLS["refused"].values() if numbers[0] >= 0]
    for number, _, position, _, operand in SYSCALLS["refused_with"].values():
        calls.append((number, tuple(operand if at == position else 0 for at in range(6))))
    assert box.run(f"python3 -c '{PROGRAMS['system_calls'].format(calls=calls)}'").output.split() == ["1"] * len(calls)
    own = [(302, (0, 7, 0, 0)), (203, (0, 0, 0, 0)), (90, (0, 0o755)), (437, (0, 0))]
    own.append((0x40000000 + 39, ()))  # getpid, as of x32
    output = box.run(f"python3 -c '{PROGRAMS['system_calls'].format(calls=own)}'").output
    assert [*map(int, output.split())] == [0, 22, 14, 38, 38]


def test_no_call_clears_the_shared_page_cache_or_says_what_it_holds(box: Sandbox) -> None:
    assert box.run(python(PROGRAMS["page_cache"])).output.split() == ["refused"] * 3 + ["1", "None"]


def test_only_the_families_that_programs_need_are_open(box: Sandbox) -> None:
    """A family that the kernel lacks is refused as well, before it looks: what another kernel has is refused there."""
    output = box.run(python(PROGRAMS["socket_families"])).output
    assert {int(one.split()[0]) for one in output.strip(";\n").split(";")} == {1, 2, 10, 16}
    assert "netlink" not in output
    pairs = "import socket\nfor n in (1, 30):\n    try: socket.socketpair(n)\n    except OSError as e: print(e.errno)"
    assert box.run(python(pairs)).output == "1\n"
    needed = "import socket; print(len(socket.if_nameindex()), socket.getaddrinfo('localhost', 80)[0][4][0])"
    assert box.run(python(needed)).output == "1 127.0.0.1\n"


def test_mounts_do_not_show_the_path_of_the_guest_code(box: Sandbox) -> None:
    shown = box.run("cat /proc/self/mountinfo").output
    assert "/testbed" in shown and str(Path(bubblewrap.__file__).parent) not in shown
