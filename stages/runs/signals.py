"""Ctrl-C and SIGTERM (Slurm, Kubernetes, a spot machine going away) let a stage finish what is under way, then stop."""

import signal
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from stages.runs.artifact import Interrupted, RunWriter

DRAINING = (signal.SIGINT, signal.SIGTERM)


@contextmanager
def draining(out: RunWriter) -> Iterator[list[int]]:
    """The first of them asks the stage to stop between units; a Ctrl-C after that raises KeyboardInterrupt at once.

    SIGTERM may come often: schedulers send it to every process of a job, and it never cuts a unit off. A handler that
    the caller had set is called at the first, so that it can tell people. Yields a list for the first's number.
    """
    caught: list[int] = []
    if threading.current_thread() is not threading.main_thread():
        yield caught
        return
    previous: dict[int, Any] = {number: signal.getsignal(number) for number in DRAINING}

    def first(number: int, frame: object) -> None:
        caught.append(number)
        out.stop.set()
        signal.signal(signal.SIGINT, signal.default_int_handler)
        signal.signal(signal.SIGTERM, lambda *again: None)
        told = previous[number]
        if callable(told) and told is not signal.default_int_handler:
            told(number, frame)

    for number in DRAINING:
        signal.signal(number, first)
    try:
        yield caught
    finally:
        for number in DRAINING:
            signal.signal(number, previous[number])


def stopped_by(caught: Sequence[int]) -> tuple[int, str]:
    """The signal that stopped a run, Ctrl-C where none was seen, and what the manifest says of it."""
    number = caught[0] if caught else signal.SIGINT
    return number, "stopped by the user" if number == signal.SIGINT else f"stopped by {signal.Signals(number).name}"


def interrupted(number: int) -> Interrupted:
    """What to raise for a signal that no stage handles."""
    error = Interrupted()
    error.signal_number = number
    return error
