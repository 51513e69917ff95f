"""Signals of this process: which of them asks work to stop, which ends it, and which is a repeat."""

import signal
import time
from threading import Event

import pytest

from composer_stages.stopping import REPEATS_S, Interrupted, on_signals, stop_requested, stopped_by


def get(*waits_and_signals: float | signal.Signals) -> None:
    """Get signals in this thread, with seconds between them."""
    for one in waits_and_signals:
        signal.raise_signal(one) if isinstance(one, signal.Signals) else time.sleep(one)


def test_second_signal_after_the_repeats_drops_work() -> None:
    stop, told, reached = Event(), list[int](), list[bool]()

    def work() -> None:
        with on_signals(told.append), stopped_by(stop):
            get(signal.SIGTERM, signal.SIGTERM, signal.SIGINT)
            reached.append(stop.is_set() and stop_requested())
            get(REPEATS_S + 0.1, signal.SIGINT)
            reached.append(False)

    with pytest.raises(Interrupted) as ended:
        work()
    assert ended.value.signal_number == signal.SIGINT
    assert told == [signal.SIGTERM] and reached == [True] and not stop_requested()


def test_first_signal_interrupts_idle_work() -> None:
    before, told = signal.getsignal(signal.SIGTERM), list[int]()

    def work() -> None:
        with on_signals(told.append):
            get(signal.SIGTERM)
            told.append(0)

    with pytest.raises(Interrupted):
        work()
    assert signal.getsignal(signal.SIGTERM) is before and not told


def test_nested_block_uses_the_outer_handler() -> None:
    told, also = list[int](), list[int]()
    with on_signals(told.append) as caught:
        with on_signals(also.append), stopped_by(Event()):
            signal.raise_signal(signal.SIGTERM)
        assert caught == told == [signal.SIGTERM] and not also
    with on_signals() as anew:
        assert not anew
