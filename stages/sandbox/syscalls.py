"""A seccomp filter for what namespaces and rlimits leave open.

Refused are system calls that take memory no limit sees (anonymous files, System V objects, message queues), that reach
across the sandboxes of one user (keyrings), that have no place in an agent's shell (bpf, io_uring); those by which a
process may lower the limits, the priority or the processors of process 1, the supervisor, and so of every later job;
and modes with set-user-id or set-group-id, since the files in the work folder belong to the host's user, which may be
root.
"""

import platform
import struct

from stages.errors import UsageError

EPERM, ENOSYS = 1, 38
ALLOW, ERRNO = 0x7FFF0000, 0x00050000
LOAD, EQUAL, AT_LEAST, ANY_BIT, RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
NUMBER_AT, ARCHITECTURE_AT, ARGUMENTS_AT = 0, 4, 16
X32_BIT = 0x40000000
SET_ID = 0o6000
PRIO_USER, IOPRIO_WHO_USER = 2, 3

ARCHITECTURES = {"x86_64": (0xC000003E, 0), "aarch64": (0xC00000B7, 1)}
"""The kernel's audit number, and the column in the tables below; a call that an architecture lacks is None there."""

REFUSED = {
    "memfd_create": (319, 279),
    "memfd_secret": (447, 447),
    "shmget": (29, 194),
    "msgget": (68, 186),
    "semget": (64, 190),
    "mq_open": (240, 180),
    "mq_unlink": (241, 181),
    "add_key": (248, 217),
    "request_key": (249, 218),
    "keyctl": (250, 219),
    "io_uring_setup": (425, 425),
    "userfaultfd": (323, 282),
    "bpf": (321, 280),
    "perf_event_open": (298, 241),
}
ABSENT = {"openat2": (437, 437)}  # its mode is behind a pointer; programs fall back to openat
REFUSED_WITH: dict[str, tuple[int, int | None, int, int, int]] = {
    "prlimit64 of process 1": (302, 261, 0, EQUAL, 1),
    "sched_setaffinity of process 1": (203, 122, 0, EQUAL, 1),
    "sched_setscheduler of process 1": (144, 119, 0, EQUAL, 1),
    "sched_setparam of process 1": (142, 118, 0, EQUAL, 1),
    "sched_setattr of process 1": (314, 274, 0, EQUAL, 1),
    "setpriority of process 1": (141, 140, 1, EQUAL, 1),
    "setpriority of a user": (141, 140, 0, EQUAL, PRIO_USER),
    "ioprio_set of process 1": (251, 30, 1, EQUAL, 1),
    "ioprio_set of a user": (251, 30, 0, EQUAL, IOPRIO_WHO_USER),
    "chmod with set-id": (90, None, 1, ANY_BIT, SET_ID),
    "fchmod with set-id": (91, 52, 1, ANY_BIT, SET_ID),
    "fchmodat with set-id": (268, 53, 2, ANY_BIT, SET_ID),
    "fchmodat2 with set-id": (452, 452, 2, ANY_BIT, SET_ID),
    "open with set-id": (2, None, 2, ANY_BIT, SET_ID),
    "openat with set-id": (257, 56, 3, ANY_BIT, SET_ID),
    "creat with set-id": (85, None, 1, ANY_BIT, SET_ID),
    "mknod with set-id": (133, None, 1, ANY_BIT, SET_ID),
    "mknodat with set-id": (259, 33, 2, ANY_BIT, SET_ID),
}
"""Name -> numbers on x86_64 and aarch64, position of an argument, test, operand."""


def syscall_filter(machine: str = "") -> bytes:
    """The filter as bwrap's --seccomp reads it: an array of `struct sock_filter` (linux/filter.h).

    `machine` is a name of ARCHITECTURES, by default this one's; `UsageError` for any other.
    """
    machine = machine or platform.machine()
    if machine not in ARCHITECTURES:
        raise UsageError(f"The sandbox knows the system calls of {' and '.join(ARCHITECTURES)}, not of {machine!r}.")
    audit, column = ARCHITECTURES[machine]
    program = [_load(ARCHITECTURE_AT), _instruction(EQUAL, audit, 1, 0), _fail_with(ENOSYS), _load(NUMBER_AT)]
    program += _unless(AT_LEAST, X32_BIT, _fail_with(ENOSYS))
    for table, error in ((REFUSED, EPERM), (ABSENT, ENOSYS)):
        for numbers in table.values():
            program += _unless(EQUAL, numbers[column], _fail_with(error))
    for x86_64, aarch64, position, test, operand in REFUSED_WITH.values():
        number = (x86_64, aarch64)[column]
        if number is not None:
            program += _unless_argument(number, position, test, operand)
    return b"".join([*program, _instruction(RETURN, ALLOW)])


def _unless(test: int, operand: int, verdict: bytes) -> list[bytes]:
    return [_instruction(test, operand, 0, 1), verdict]


def _unless_argument(number: int, position: int, test: int, operand: int) -> list[bytes]:
    """EPERM when the low half of an argument, all that the kernel reads of an int, passes the test."""
    check = [_load(ARGUMENTS_AT + 8 * position), *_unless(test, operand, _fail_with(EPERM)), _load(NUMBER_AT)]
    return [_instruction(EQUAL, number, 0, len(check)), *check]


def _instruction(code: int, operand: int, if_true: int = 0, if_false: int = 0) -> bytes:
    return struct.pack("=HBBI", code, if_true, if_false, operand)


def _load(offset: int) -> bytes:
    return _instruction(LOAD, offset)


def _fail_with(error: int) -> bytes:
    return _instruction(RETURN, ERRNO | error)
