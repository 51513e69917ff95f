"""One scheduler over all servers that are asked: conversations side by side, the steps of each in order.

In order, because a step's prompt begins with that of the step before, which the provider then has cached. A chain is
followed to its end before another begins, so that what was cached is used while it is there. There are no barriers: a
slow answer delays its own chain alone.
"""

from collections.abc import Awaitable, Callable, Iterator, Sequence
from typing import Protocol, TypeVar, runtime_checkable

from stages.policy import background
from stages.policy.base import Sample, Turn

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
                await background.together(one(policy, item) for item in others)

    try:
        await background.together(
            work(policy, chains) for policy, chains in queues for _ in range(AHEAD * policy.batch_size)
        )
    finally:
        for policy, _ in queues:
            await policy.drain()
