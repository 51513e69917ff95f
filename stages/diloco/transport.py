"""What replicas say to each other, in four words; whoever implements them decides where the bytes lie."""

from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

from stages.diloco import arrays
from stages.diloco.arrays import Arrays


@dataclass(frozen=True)
class State:
    """What all replicas share before a round: global weights and the outer momentum."""

    round: int
    weights: Arrays
    momentum: Arrays

    @cached_property
    def digest(self) -> str:
        """Of the weights."""
        return arrays.digest(self.weights)


@dataclass(frozen=True)
class Reduced:
    """What came of a round. base: digest of the weights it started from; mean: encoded; unreadable: left out."""

    base: str
    mean: bytes
    replicas: tuple[int, ...]
    unreadable: tuple[int, ...] = ()


class Gone(Exception):
    """What is asked for was deleted, because newer states are there."""


class Transport(Protocol):
    """One replica's way to the others."""

    @property
    def sent(self) -> int:
        """Bytes so far."""

    @property
    def received(self) -> int:
        """Bytes so far."""

    def publish(self, start: State, delta: bytes) -> None:
        """Offer an encoded pseudo-gradient from the weights of `start` for its round. A second time changes nothing.

        `start` is kept for those who join later, where that is due.
        """

    def commit(self, round_: int) -> bool | None:
        """Whether this replica's offer is among those that count; None while that is open.

        Once it is settled it never changes. A replica that has published settles it when it is time to.
        """

    def reduce(self, round_: int) -> Reduced | None:
        """The mean of the offers that count: the same bytes for everyone; None while another replica computes it.

        Only for a round that is settled. Raises `Gone`.
        """

    def latest(self, mine: State) -> State:
        """The newest state that is kept, or `mine` where that is newer. The first and the last state are kept."""
