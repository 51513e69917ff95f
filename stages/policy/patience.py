"""Says what is waited for, and since when, while a server is silent.

A listener counts what is finished; of a server that says nothing there is nothing to count. So while the oldest request
is older than `QUIET_S`, the listener hears of it as progress of 0 in 0 units: something that is waited for.
"""

import asyncio
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import datetime

from stages.runs.artifact import Interrupted, Listener

QUIET_S = 10.0


class Patience:
    """The requests of one policy that are in flight, by the time at which they were sent."""

    def __init__(self, whom: str, listener: Listener | None, quiet_s: float) -> None:
        self._whom, self._listener, self._quiet_s = whom, listener, quiet_s
        self._sent: dict[object, tuple[float, datetime]] = {}
        self._watching: asyncio.Task[None] | None = None

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Count a request as in flight until the block ends."""
        name = object()
        self._sent[name] = time.monotonic(), datetime.now().astimezone()
        if self._listener is not None and self._watching is None:
            self._watching = asyncio.create_task(self._watch())
        try:
            yield
        finally:
            del self._sent[name]

    async def _watch(self) -> None:
        while self._sent:
            await asyncio.sleep(self._quiet_s)
            sent, since = min(self._sent.values(), default=(time.monotonic(), None))
            if since is not None and time.monotonic() - sent >= self._quiet_s and self._listener is not None:
                count = f"{len(self._sent)} answer{'s' if len(self._sent) > 1 else ''}"
                with suppress(Interrupted):  # the stage itself hears of that when it next reports
                    self._listener(f"waiting for {count} of {self._whom}, the oldest since {since:%H:%M:%S}", 0, 0)
        self._watching = None
