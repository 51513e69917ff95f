"""Many small durable writes as few large ones: what comes while one is under way goes together in the next.

An fsync takes milliseconds whatever its size, so that a thousand answers a second can be made durable only in groups.
"""

import asyncio
from collections.abc import Callable
from typing import Generic, TypeVar

Item = TypeVar("Item")


class Together(Generic[Item]):
    """Await an instance with an item, and the item is durable; `write` gets items in their order, in another thread.

    All callers share one event loop. An error of a write is raised to everyone whose item was in it; a caller that is
    cancelled leaves its item to be written.
    """

    def __init__(self, write: Callable[[list[Item]], None]) -> None:
        self._write = write
        self._waiting: list[tuple[Item, asyncio.Future[None]]] = []
        self._writer: asyncio.Task[None] | None = None

    async def __call__(self, item: Item) -> None:
        """Return once the item is durable."""
        durable = asyncio.get_running_loop().create_future()
        self._waiting.append((item, durable))
        if self._writer is None:
            self._writer = asyncio.create_task(self._write_all())
        await durable

    async def _write_all(self) -> None:
        while self._waiting:
            group, self._waiting = self._waiting, []
            error: Exception | None = None
            try:
                await asyncio.to_thread(self._write, [item for item, _ in group])
            except Exception as raised:
                error = raised
            for _, durable in group:
                if not durable.done():
                    durable.set_result(None) if error is None else durable.set_exception(error)
        self._writer = None
