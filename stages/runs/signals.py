"""Ctrl-C and SIGTERM (Slurm, Kubernetes, a spot machine going away) let a stage finish what is under way, then stop."""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from stages.runs.artifact import Interrupted, RunWriter

SIGNALS = (signal.SIGINT, signal.SIGTERM)


@contextmanager
def stop_on_signals(out: RunWriter) -> Iterator[list[int]]:
    """Ask the stage to stop between units at the first signal; a Ctrl-C after that raises KeyboardInterrupt at once.

    SIGTERM may come often: schedulers send it to every process of a job, and it never cuts a unit off. The first
    signal also calls the handler that the caller had set, so that it can tell people. Yields a list to which the number
    of the first signal is added.
    """
    caught: list[int] = []
    if threading.current_thread() is not threading.main_thread():
        yield caught
        return
    previous: dict[int, Any] = {number: signal.getsignal(number) for number in SIGNALS}

    def first(number: int, frame: object) -> None:
        caught.append(number)
        out.stop.set()
        signal.signal(signal.SIGINT, signal.default_int_handler)
        signal.signal(signal.SIGTERM, lambda *again: None)
        handler = previous[number]
        if callable(handler) and handler is not signal.default_int_handler:
            handler(number, frame)

    for number in SIGNALS:
        signal.signal(number, first)
    try:
        yield caught
    finally:
        for number in SIGNALS:
            signal.signal(number, previous[number])


def interrupted(number: int) -> Interrupted:
    """Return the exception to raise for a signal that no stage handles."""
    error = Interrupted()
    error.signal_number = number
    return error
