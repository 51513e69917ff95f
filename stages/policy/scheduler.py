"""One scheduler over all servers that are asked: conversations side by side, the steps of each in order.

In order, because a step's prompt begins with that of the step before, which the provider then has cached. A chain is
followed to its end before another begins, so that what was cached is used while it is there. There are no barriers: a
slow answer delays its own chain alone.
"""

from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar, runtime_checkable

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


@dataclass(frozen=True)
class Chain(Generic[Item]):
    """One conversation as one policy is asked about it: its steps, and the samples of each."""

    policy: Asks
    steps: Sequence[Sequence[Item]]


async def follow(
    chains: Sequence[Chain[Item]],
    turn: Callable[[Item], Turn],
    answered: Callable[[Item, Sample], Awaitable[None]],
    check: Callable[[], None],
) -> None:
    """Ask every item of every chain; `check` raises when nothing more is to be asked.

    Of several samples of a step the first is asked alone, and the others find its prompt cached. After an error
    nothing more is asked, and what is in flight is waited for, as it is paid.
    """
    queues: dict[int, deque[Chain[Item]]] = {}
    for chain in chains:
        queues.setdefault(id(chain.policy), deque()).append(chain)
    policies = {id(chain.policy): chain.policy for chain in chains}

    async def one(policy: Asks, item: Item) -> None:
        check()
        await answered(item, await policy.ask(turn(item)))

    async def work(queue: deque[Chain[Item]]) -> None:
        while queue:
            chain = queue.popleft()
            for first, *others in chain.steps:
                await one(chain.policy, first)
                await background.together(one(chain.policy, item) for item in others)

    workers = [
        work(queue) for name, queue in queues.items() for _ in range(min(len(queue), AHEAD * policies[name].batch_size))
    ]
    try:
        await background.together(workers)
    finally:
        for policy in policies.values():
            await policy.drain()
