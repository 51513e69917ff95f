"""The event loop on which all servers are asked: one in a thread of its own, so that callers may be ordinary code."""

import asyncio
import threading
from collections.abc import Awaitable, Coroutine, Iterable
from concurrent.futures import Future, wait
from typing import Any, TypeVar

Result = TypeVar("Result")
WAKE_S = 0.2
_LOCK = threading.Lock()
_LOOPS: list[asyncio.AbstractEventLoop] = []


def loop() -> asyncio.AbstractEventLoop:
    """The loop, started on first use."""
    with _LOCK:
        if not _LOOPS:
            _LOOPS.append(asyncio.new_event_loop())
            threading.Thread(target=_LOOPS[0].run_forever, name="servers", daemon=True).start()
        return _LOOPS[0]


def run(work: Coroutine[Any, Any, Result]) -> Result:
    """What a coroutine returns or raises; it is cancelled when the waiting thread is interrupted.

    The thread wakes now and then: a signal that comes just before it waits would otherwise be handled only afterwards.
    """
    future = start(work)
    try:
        while not wait([future], WAKE_S).done:
            pass
        return future.result()
    except BaseException:
        future.cancel()
        raise


def start(work: Coroutine[Any, Any, Result]) -> Future[Result]:
    """Begin with a coroutine, beside whatever the caller does next."""
    return asyncio.run_coroutine_threadsafe(work, loop())


async def together(works: Iterable[Awaitable[Result]]) -> list[Result]:
    """All results in order; the first error cancels what has not ended, and is raised."""
    tasks = [asyncio.ensure_future(work) for work in works]
    try:
        return list(await asyncio.gather(*tasks))
    except BaseException:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        raise
