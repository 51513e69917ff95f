"""The activity of a stage between two finished units: installing, contacting a server, loading a model.

Code far below a stage (an environment that installs packages, a loader of models) has no listener. It names what takes
long by `doing`, and whatever shows the progress of this process gets the name: `RunWriter.progress` is for units.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

Told = Callable[[str], None]
"""Called with an activity when it begins, and with the one before it (empty for none) when it ends."""


class Notice(str):
    """What people should read at once, and not with the next line of progress; a listener gets it as a remark."""


_told: list[Told] = []
_begun: list[str] = []
"""The activities that have not ended, the newest last."""


@contextmanager
def telling(told: Told) -> Iterator[None]:
    """Pass every activity of this process to `told` until the block ends, from any thread."""
    _told.append(told)
    try:
        yield
    finally:
        _told.remove(told)


@contextmanager
def doing(what: str) -> Iterator[None]:
    """Name what this process does, such as "installing pytest", until the block ends."""
    listeners = list(_told)
    _begun.append(what)
    for told in listeners:
        _tell(told, what)
    try:
        yield
    finally:
        _begun.remove(what)
        for told in listeners:
            _tell(told, _begun[-1] if _begun else "")


def _tell(told: Told, what: str) -> None:
    # A listener raises where the stage is to stop. The stage gets the same at its next report between two units; here
    # it would end an installation in its middle.
    with suppress(Exception):
        told(what)
