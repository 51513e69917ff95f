"""Starts a job as a process of its own, and ends everything that it started.

`signal` and `ctypes` are taken by their cores in C: the modules around these would cost half of the start-up.
"""

from __future__ import annotations

import _ctypes
import os
import resource
import time

TYPE_CHECKING = False
if TYPE_CHECKING:
    import signal
    from collections.abc import Callable
    from typing import Any, NoReturn
else:
    import _signal as signal

MB = 1 << 20
PR_SET_DUMPABLE, PR_SET_CHILD_SUBREAPER = 4, 36
DEFAULTED_SIGNALS = (signal.SIGINT, signal.SIGPIPE, signal.SIGXFSZ)
OPEN_FILES = 256
STACK_BYTES = 8 * MB
COUNTED_PER_NAMESPACE = tuple(int(part) for part in os.uname().release.split(".")[:2]) >= (5, 14)
"""Older kernels count every process that the user has on the host against RLIMIT_NPROC."""


def protect_supervisor() -> None:
    """Close /proc/<pid>/fd and ptrace to the same user, adopt orphans, ignore an interrupt, keep priority to itself."""
    program = _ctypes.dlopen(None, 0)  # type: ignore[arg-type]  # None is the running program
    prctl = _ctypes.dlsym(program, "prctl")
    for option, value in ((PR_SET_DUMPABLE, 0), (PR_SET_CHILD_SUBREAPER, 1)):
        if _ctypes.call_function(prctl, (option, value, 0, 0, 0)) != 0:
            raise OSError(f"prctl({option}) failed")
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.sched_setscheduler(0, os.sched_getscheduler(0) | os.SCHED_RESET_ON_FORK, os.sched_getparam(0))


def start(begin: Callable[[int], NoReturn], limits: dict[str, Any]) -> tuple[int, int]:
    """Fork a child that runs `begin(write_end)`. Returns its pid and the read end of its pipe."""
    read_end, write_end = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            os.setsid()
            for number in DEFAULTED_SIGNALS:
                signal.signal(number, signal.SIG_DFL)
            _limit(limits)
            begin(write_end)
        except BaseException as error:
            os.write(write_end, f"{type(error).__name__}: {error}\n".encode(errors="replace"))
        finally:
            os._exit(126)  # the child must never return into the supervisor's loop
    os.close(write_end)
    os.set_blocking(read_end, False)
    return pid, read_end


def _limit(limits: dict[str, Any]) -> None:
    cpu, memory, size = limits["cpu_s"], limits["memory_mb"] * MB, limits["file_mb"] * MB
    # SIGXCPU at the soft limit, which a program may catch, SIGKILL a second later.
    resource.setrlimit(resource.RLIMIT_CPU, (cpu, cpu + 1))
    # RLIMIT_DATA and not RLIMIT_AS: runtimes reserve address space that they never touch.
    for kind, value in (
        (resource.RLIMIT_DATA, memory),
        (resource.RLIMIT_FSIZE, size),
        (resource.RLIMIT_NOFILE, OPEN_FILES),
        (resource.RLIMIT_STACK, STACK_BYTES),
        (resource.RLIMIT_CORE, 0),
    ):
        hard = resource.getrlimit(kind)[1]  # may be lower already, and only root may raise it
        value = value if hard == resource.RLIM_INFINITY else min(value, hard)
        resource.setrlimit(kind, (value, value))
    if os.getppid() == 1 and COUNTED_PER_NAMESPACE:
        # A backstop between two looks of the watchdog; the kernel does not enforce it where the host's user is root.
        resource.setrlimit(resource.RLIMIT_NPROC, (2 * limits["processes"], 2 * limits["processes"]))


def end_all(pid: int) -> int:
    """Kill and reap until nothing is left. Returns the wait status of `pid`."""
    status = 0
    while True:
        # As process 1 to the whole namespace, otherwise to the job's group and to our own children, which include
        # orphans, as we adopt them. In a loop: between two rounds a fork bomb has made new ones.
        if os.getpid() == 1:
            targets = [-1]
        else:
            with open(f"/proc/self/task/{os.getpid()}/children") as file:
                targets = [-pid, *map(int, file.read().split())]
        for target in targets:
            try:
                os.kill(target, signal.SIGKILL)
            except ProcessLookupError:
                continue
        try:
            exit_status = os.waitpid(-1, os.WNOHANG)
            while exit_status[0]:
                status = exit_status[1] if exit_status[0] == pid else status
                exit_status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return status
        time.sleep(0.0002)
