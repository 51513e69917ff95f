"""The event loop of all server requests, in its own thread so that callers stay synchronous."""

import asyncio
import threading
from collections.abc import Awaitable, Coroutine, Iterable
from concurrent.futures import Future, wait
from typing import Any, TypeVar

Result = TypeVar("Result")
WAKE_S = 0.2
_LOCK = threading.Lock()
_LOOPS: list[asyncio.AbstractEventLoop] = []


def run(work: Coroutine[Any, Any, Result]) -> Result:
    """Run a coroutine and return its result; cancel it when the waiting thread is interrupted.

    The thread wakes every WAKE_S: a signal that arrives just before the wait would otherwise be handled after it.
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
    """Start a coroutine on the event loop and return its future; the first call starts the loop."""
    with _LOCK:
        if not _LOOPS:
            _LOOPS.append(asyncio.new_event_loop())
            # One loop for the process, because a client's connections belong to the loop that opened them. A daemon,
            # because a thread that is waited for at the exit would keep the process alive.
            threading.Thread(target=_LOOPS[0].run_forever, name="servers", daemon=True).start()
    return asyncio.run_coroutine_threadsafe(work, _LOOPS[0])


async def gather(works: Iterable[Awaitable[Result]]) -> list[Result]:
    """Return all results in order; the first error cancels the rest and is raised once all have ended."""
    tasks = [asyncio.ensure_future(work) for work in works]
    try:
        return list(await asyncio.gather(*tasks))
    except BaseException:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        raise
