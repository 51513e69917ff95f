"""The stop of work by signals: what Ctrl-C, SIGTERM and SIGHUP do, in every stage, chain and process.

The first signal asks: paid calls in flight come home, what is finished is sealed, and `Interrupted` ends the stage and
the chain that it belongs to. The second drops what is in flight: `Dropped` is raised in the main thread, and where a
library holds that thread, a process of the command line ends without it (`ending_process_on_second_signal`). A run
can be resumed after either. The exit code is 128 plus the signal's number.

Signals within `REPEATS_S` of the first are the same request: a terminal, a scheduler and a parent process may each send
one.
"""

import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

REPEATS_S = 2.0
GRACE_S = 3.0
"""Seconds that the main thread has to end the process after the second signal."""
SHOW_CURSOR = b"\x1b[?25h"
"""Progress bars hide the cursor of a terminal."""


@dataclass(eq=False, repr=False)
class Interrupted(Exception):
    """A signal asked the run to stop; finished units are saved.

    notice: what remains to be done, as a sentence, from a command that is not a run.
    """

    signal_number: int = signal.SIGINT
    notice: str = ""


class Dropped(KeyboardInterrupt):
    """A signal ended work that is not kept. No `Exception`, which libraries catch."""


def stop_signals() -> list[signal.Signals]:
    """Return the signals that stop a run: Ctrl-C, SIGTERM of schedulers, and SIGHUP of a terminal that was closed.

    SIGHUP is left out where it is ignored: `nohup` asks for a program that outlives its terminal.
    """
    is_ignored = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    return [signal.SIGINT, signal.SIGTERM, *([] if is_ignored else [signal.SIGHUP])]


_stops: list[threading.Event] = []
"""Of all work in progress in this process: set by the first signal."""
_dropped = threading.local()
"""Per thread: in how many blocks of `dropped_on_stop` it is."""
_handled: list[int] | None = None
"""The signals caught in the block of `on_signals` that the main thread is in; None outside of one."""


@contextmanager
def stopped_by(stop: threading.Event) -> Iterator[None]:
    """Let the first signal set this event until the block ends, in which work asks it whether to stop."""
    _stops.append(stop)
    try:
        yield
    finally:
        _stops.remove(stop)


def stop_requested() -> bool:
    """Return whether any work in progress was asked to stop, for code that knows no run; takes under a microsecond."""
    return any(stop.is_set() for stop in _stops)


@contextmanager
def dropped_on_stop() -> Iterator[None]:
    """Mark work of which nothing is kept when it is ended, so that the first signal ends it at once.

    Raises `Dropped` where the signal has come already.
    """
    if stop_requested():
        raise Dropped
    _dropped.depth = getattr(_dropped, "depth", 0) + 1
    try:
        yield
    finally:
        _dropped.depth -= 1


@contextmanager
def handling(numbers: Sequence[int], handler: Callable[[int, Any], None] | signal.Handlers) -> Iterator[None]:
    """Handle signals by a function until the block ends; outside of the main thread Python allows none."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    previous = {number: signal.signal(number, handler) for number in numbers}
    try:
        yield
    finally:
        for number, earlier in previous.items():
            signal.signal(number, earlier)


@contextmanager
def on_signals(tell: Callable[[int], None] = lambda number: None) -> Iterator[list[int]]:
    """Handle the signals that stop work until the block ends; yields a list to which the caught ones are added.

    Raises `Interrupted` where a signal ends the block, and at the first one where nothing is in progress that could end
    by itself. tell: called with the first signal otherwise; so is the handler that was set before. A block within
    another belongs to it. Outside of the main thread nothing is handled.
    """
    global _handled
    if threading.current_thread() is not threading.main_thread():
        yield []
        return
    caught, outermost = ([], True) if _handled is None else (_handled, False)
    try:
        if not outermost:
            yield caught
            return
        _handled = caught
        with handling(stop_signals(), _handler(caught, tell)):
            yield caught
    except Dropped:
        raise Interrupted(caught[-1] if caught else signal.SIGINT) from None
    finally:
        if outermost:
            _handled = None


def _handler(caught: list[int], tell: Callable[[int], None]) -> Callable[[int, Any], None]:
    """Return the handler of `on_signals`."""
    first_at = 0.0
    previous = {number: signal.getsignal(number) for number in stop_signals()}

    def handle(number: int, frame: Any) -> None:
        nonlocal first_at
        if caught:
            if time.monotonic() - first_at < REPEATS_S:
                return
            caught.append(number)
            raise Dropped
        first_at = time.monotonic()
        caught.append(number)
        if not _stops:
            raise Interrupted(number)
        for stop in _stops:
            stop.set()
        if getattr(_dropped, "depth", 0):
            raise Dropped
        tell(number)
        handler = previous[signal.Signals(number)]
        if callable(handler) and handler is not signal.default_int_handler:
            handler(number, frame)

    return handle


@contextmanager
def ending_process_on_second_signal() -> Iterator[None]:
    """End this process `GRACE_S` after a second signal that came within the block, should it still be there.

    Python calls handlers between two bytecodes of the main thread, which one backward pass can hold for minutes; the
    number of a signal is written to a file descriptor at once, and read by a thread here.
    """
    receiving, sending = socket.socketpair()
    sending.setblocking(False)
    previous_fd = signal.set_wakeup_fd(sending.fileno(), warn_on_full_buffer=False)
    _close_in_forks()
    threading.Thread(target=_end_on_second, args=(receiving,), name="signals", daemon=True).start()
    try:
        yield
    finally:
        signal.set_wakeup_fd(previous_fd)
        sending.close()


@cache
def _close_in_forks() -> None:
    # A fork would write its own signals to the socket that it shares with this process.
    os.register_at_fork(after_in_child=partial(signal.set_wakeup_fd, -1))


def _end_on_second(receiving: socket.socket) -> None:
    """Read the numbers of signals until the other end is closed."""
    first_at: float | None = None
    with receiving:
        while numbers := receiving.recv(64):
            for number in numbers:
                if number not in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
                    continue
                if first_at is None:
                    first_at = time.monotonic()
                elif time.monotonic() - first_at >= REPEATS_S:
                    time.sleep(GRACE_S)
                    with suppress(OSError):
                        prefix = SHOW_CURSOR if sys.stderr.isatty() else b""
                        os.write(2, prefix + b"Stopped at once. What was finished is saved.\n")
                    os._exit(128 + number)
