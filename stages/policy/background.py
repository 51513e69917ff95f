"""The event loop on which all servers are asked: one in a thread of its own, so that callers may be ordinary code."""

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


# ---- scheduler
# One scheduler over all servers that are asked: conversations side by side, the steps of each in order.
#
# In order, because a step's prompt begins with that of the step before, which the provider then has cached. A chain is
# followed to its end before another begins, so that what was cached is used while it is there. There are no
# barriers: a
# slow answer delays its own chain alone.

Item = TypeVar("Item")
AHEAD = 2
"""Chains under way for every request that may be in flight: while one is waiting for the disk, another is asking."""


@runtime_checkable
class Asks(Protocol):
    """A policy that can be asked many things at once; `batch_size` requests are in flight at most."""

    batch_size: int

    async def ask(self, turn: Turn) -> Sample:
        """One answer."""
        ...

    async def drain(self) -> None:
        """Wait for what is in flight."""
        ...


Chain = Sequence[Sequence[Item]]
"""One conversation as one policy is asked about it: its steps, and the samples of each."""


async def follow(
    queues: Sequence[tuple[Asks, Iterator[Chain[Item]]]],
    turn: Callable[[Item], Turn],
    answered: Callable[[Item, Sample], Awaitable[None]],
    check: Callable[[], None],
) -> None:
    """Ask each policy every item of its chains; `check` raises when nothing more is to be asked.

    A chain is taken from its iterator when somebody is free to follow it, so that no others need be in memory. Of
    several samples of a step the first is asked alone, and the others find its prompt cached. After an error nothing
    more is asked, and what is in flight is waited for, as it is paid.
    """

    async def one(policy: Asks, item: Item) -> None:
        check()
        await answered(item, await policy.ask(turn(item)))

    async def work(policy: Asks, chains: Iterator[Chain[Item]]) -> None:
        for chain in chains:
            for first, *others in chain:
                await one(policy, first)
                await together(one(policy, item) for item in others)

    try:
        await together(work(policy, chains) for policy, chains in queues for _ in range(AHEAD * policy.batch_size))
    finally:
        for policy, _ in queues:
            await policy.drain()
