"""The activity of a stage between two finished units: installing, contacting a server, loading a model.

Code far below a stage (an environment that installs packages, a loader of models) has no listener. It names what takes
long by `activity`, and whatever shows the progress of this process gets the name: `RunWriter.progress` is for units.
`repeating` looks after something beside the work.
"""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

ActivityListener = Callable[[str], None]
"""Called with an activity when it begins, and with the one before it (empty for none) when it ends."""


class Notice(str):
    """What people should read at once, and not with the next line of progress; a listener gets it as a remark."""


class Checking(str):
    """What is done before it is known that the settings can be carried out: the work itself has not begun with it."""


class Preparation(str):
    """What is counted before the work itself, such as the training steps of a small model that is made on first use."""


class Figures(str):
    """What was measured so far, such as the mean reward: a listener shows it until the next ones."""


class Detailed(str):
    """The activity that has begun already, in more words: `ACTIVITY: WORDS`."""


DETAILS_S = 1.0
"""Least seconds between two details."""
_listeners: list[ActivityListener] = []
_begun: list[str] = []
"""The activities that have not ended, the newest last."""
_detailed = [-DETAILS_S]
"""When the last detail was told."""


@contextmanager
def on_activity(listener: ActivityListener) -> Iterator[None]:
    """Pass every activity of this process to `listener` until the block ends, from any thread."""
    _listeners.append(listener)
    try:
        yield
    finally:
        _listeners.remove(listener)


@contextmanager
def activity(text: str) -> Iterator[None]:
    """Name what this process does, such as "installing pytest", until the block ends."""
    listeners = list(_listeners)
    _begun.append(text)
    for listener in listeners:
        _tell(listener, text)
    try:
        yield
    finally:
        _begun.remove(text)
        for listener in listeners:
            _tell(listener, _begun[-1] if _begun else "")


def detail(words: str) -> None:
    """Tell more about the newest activity, such as how many tokens were sampled; may be called often."""
    if _begun and time.monotonic() - _detailed[0] >= DETAILS_S:
        _detailed[0] = time.monotonic()
        for listener in _listeners:
            _tell(listener, Detailed(f"{_begun[-1]}: {words}"))


def _tell(listener: ActivityListener, text: str) -> None:
    # A listener raises where the stage is to stop. The stage gets the same at its next report between two units; here
    # it would end an installation in its middle.
    with suppress(Exception):
        listener(text)


@contextmanager
def repeating(call: Callable[[], None], every_s: float) -> Iterator[None]:
    """Call a function in a thread every so many seconds until the block ends."""
    over = threading.Event()

    def repeat() -> None:
        while not over.wait(every_s):
            call()

    thread = threading.Thread(target=repeat, daemon=True)
    thread.start()
    try:
        yield
    finally:
        # Joined, so that nothing is called once the block has ended.
        over.set()
        thread.join()
