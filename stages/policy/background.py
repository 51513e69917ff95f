"""The event loop of all server requests, in its own thread so that callers stay synchronous; and its scheduler.

The scheduler asks all servers at once: conversations in parallel, the steps of each in order. In order, because a
step's prompt begins with that of the step before, which the provider then has cached. A conversation is finished before
another begins, so that its cached prefix is used while it exists. There are no barriers: a slow answer delays its own
conversation alone.
"""

import asyncio
import threading
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Iterator, Sequence
from concurrent.futures import Future, wait
from typing import Any, Protocol, TypeVar, runtime_checkable

from stages.policy.base import Sample, Turn

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
    """Start a coroutine on the event loop, which is started on first use, and return its future at once."""
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


Item = TypeVar("Item")
AHEAD = 2
"""Conversations in progress per allowed request: while one waits for the disk, another can ask."""


@runtime_checkable
class AsyncPolicy(Protocol):
    """A policy that answers asynchronously; at most `batch_size` requests are in flight."""

    batch_size: int

    async def ask(self, turn: Turn) -> Sample:
        """Return one answer."""
        ...

    async def drain(self) -> None:
        """Wait for the requests in flight."""
        ...


Chain = Sequence[Sequence[Item]]
"""One conversation as one policy is asked about it: the samples of each of its steps."""


async def ask_chains(
    queues: Sequence[tuple[AsyncPolicy, Iterator[Chain[Item]]]],
    turn: Callable[[Item], Turn],
    answered: Callable[[Item, Sample], Awaitable[None]],
    check: Callable[[], None],
) -> None:
    """Ask each policy every item of its chains; `check` raises to stop.

    A chain is taken from its iterator when a worker is free, so that the others need not be in memory. Of several
    samples of a step the first is asked alone, so that the others find its prompt cached. After an error nothing
    more is asked, and requests in flight are awaited because they are paid for.
    """

    async def one(policy: AsyncPolicy, item: Item) -> None:
        check()
        await answered(item, await policy.ask(turn(item)))

    async def work(policy: AsyncPolicy, chains: Iterator[Chain[Item]]) -> None:
        for chain in chains:
            for first, *others in chain:
                await one(policy, first)
                await gather(one(policy, item) for item in others)

    try:
        await gather(work(policy, chains) for policy, chains in queues for _ in range(AHEAD * policy.batch_size))
    finally:
        for policy, _ in queues:
            await policy.drain()
