"""Keeps a scoring to itself on a server that samples for others meanwhile.

On a CPU, vLLM 0.32 that may load adapters dies of log-probs of given tokens in a batch with any other request:
`punica_cpu.add_lora_logits` counts one row a request, where there is one a token.
"""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from urllib.parse import urlsplit

LOOPBACK = ("127.0.0.1", "localhost", "::1")


class Door:
    """Samplings overlap; a scoring waits until none is under way, and those that come meanwhile wait for it."""

    def __init__(self) -> None:
        self._turn, self._idle, self._under_way = asyncio.Lock(), asyncio.Event(), 0
        self._idle.set()

    @asynccontextmanager
    async def sampling(self) -> AsyncIterator[None]:
        """Beside other samplings."""
        async with self._turn:
            self._under_way += 1
            self._idle.clear()
        try:
            yield
        finally:
            self._under_way -= 1
            if not self._under_way:
                self._idle.set()

    @asynccontextmanager
    async def scoring(self) -> AsyncIterator[None]:
        """Alone."""
        async with self._turn:
            await self._idle.wait()
            yield


class Open:
    """A door for servers that take everything at once."""

    @asynccontextmanager
    async def sampling(self) -> AsyncIterator[None]:
        """At once."""
        yield

    scoring = sampling


DOORS: dict[str, Door] = {}


def door(base_url: str, device: str) -> Door | Open:
    """The door of a server, one for all of the process; `device` is where models run on this machine."""
    parts = urlsplit(base_url)
    if device != "cpu" or parts.hostname not in LOOPBACK:
        return Open()
    return DOORS.setdefault(parts.netloc, Door())
