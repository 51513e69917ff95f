"""How many requests a server gets at once: found out, and shared by all policies that ask the same server.

The number starts low and grows with every answer until the server pushes back (429, 503, a time-out); from then on it
falls by 30 % at most once a second and grows by one a round: additive increase, multiplicative decrease. A wait that
the server asks for holds for everyone who asks it.
"""

import asyncio
import time
from collections import deque
from urllib.parse import urlsplit

START = 16
"""Requests in flight before anything is known of a server."""
FALL = 0.7
PATIENCE_S = 1.0
"""Push-backs within this time count as one: they answer requests that were sent before the first of them."""


class Host:
    """One server's door. `enter` waits for the server's own pace; every `enter` ends in one `leave`."""

    def __init__(self) -> None:
        self.limit, self.in_flight = float(START), 0
        self._growing = True
        self._closed_until = 0.0
        self._fell_at = -PATIENCE_S
        self._waiting: deque[asyncio.Future[None]] = deque()

    async def enter(self) -> None:
        """Return when a request may be sent."""
        while True:
            wait_s = self._closed_until - time.monotonic()
            if wait_s > 0:
                await asyncio.sleep(wait_s)
            elif self.in_flight < int(self.limit):
                self.in_flight += 1
                return
            else:
                turn = asyncio.get_running_loop().create_future()
                self._waiting.append(turn)
                try:
                    await turn
                except asyncio.CancelledError:
                    self._wake()  # it may have been this one's turn
                    raise

    def leave(self, *, pushed_back: bool = False, wait_s: float | None = None) -> None:
        """A request has ended; `wait_s` is what the server asked for."""
        now = time.monotonic()
        if pushed_back:
            self._growing = False
            if now - self._fell_at >= PATIENCE_S:
                self.limit, self._fell_at = max(self.limit * FALL, 1.0), now
            self._closed_until = max(self._closed_until, now + (wait_s or 0.0))
        elif self.in_flight >= int(self.limit):  # an idle door tells nothing about what the server can take
            self.limit += 1.0 if self._growing else 1.0 / self.limit
        self.in_flight -= 1
        self._wake()

    def _wake(self) -> None:
        room = int(self.limit) - self.in_flight
        while self._waiting and room > 0:
            turn = self._waiting.popleft()
            if not turn.done():
                turn.set_result(None)
                room -= 1


HOSTS: dict[tuple[str, str], Host] = {}


def host_of(base_url: str) -> Host:
    """The door of the server behind a URL; one for all of the process."""
    parts = urlsplit(base_url)
    return HOSTS.setdefault((parts.scheme, parts.netloc), Host())
