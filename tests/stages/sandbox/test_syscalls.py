"""The filter, as data and in force."""

import struct

import pytest

from stages.errors import UsageError
from stages.sandbox import Sandbox
from stages.sandbox.bubblewrap import ARCHITECTURES, REFUSED, REFUSED_WITH, syscall_filter

CALLS = """
import ctypes, os
libc = ctypes.CDLL(None, use_errno=True)
for number, arguments in {calls}:
    ctypes.set_errno(0)
    libc.syscall(number, *arguments)
    print(ctypes.get_errno(), end=" ")
"""


@pytest.mark.parametrize("machine", ARCHITECTURES)
def test_every_jump_stays_inside_the_program(machine: str) -> None:
    program = list(struct.iter_unpack("=HBBI", syscall_filter(machine)))
    for at, (_, if_true, if_false, _) in enumerate(program[:-1]):
        assert at + 1 + max(if_true, if_false) < len(program)
    assert program[-1] == (0x06, 0, 0, 0x7FFF0000)


def test_unknown_machine_is_refused() -> None:
    with pytest.raises(UsageError, match="x86_64 and aarch64, not of 'pdp11'"):
        syscall_filter("pdp11")


@pytest.mark.skipif("__import__('platform').machine() != 'x86_64'", reason="the numbers below are those of x86_64")
def test_refused_calls_are_refused(box: Sandbox) -> None:
    calls = [(numbers[0], (0, 0, 0, 0)) for numbers in REFUSED.values()]
    for number, _, position, _, operand in REFUSED_WITH.values():
        calls.append((number, tuple(operand if at == position else 0 for at in range(4))))
    assert box.run(f"python3 -c '{CALLS.format(calls=calls)}'").output.split() == ["1"] * len(calls)
    own = [(302, (0, 7, 0, 0)), (203, (0, 0, 0, 0)), (90, (0, 0o755)), (437, (0, 0))]
    assert box.run(f"python3 -c '{CALLS.format(calls=own)}'").output.split() == ["0", "22", "14", "38"]


@pytest.mark.skipif("__import__('platform').machine() != 'x86_64'", reason="int 0x80 is of x86")
def test_calls_of_other_architectures_are_refused(box: Sandbox) -> None:
    x32 = [(0x40000000 + 39, ())]  # getpid
    assert box.run(f"python3 -c '{CALLS.format(calls=x32)}'").output.split() == ["38"]
