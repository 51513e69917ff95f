"""The protocol between replicas: publish, commit, reduce, latest; an implementation decides where the bytes are stored.

`InProcess` implements the protocol for the replicas of one process: the reference that other transports are tested
against.
"""

from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

from stages.diloco import arrays
from stages.diloco.arrays import OF_MEAN, Arrays, Fragments, decode, encode, mean
from stages.diloco.settings import Codec


@dataclass(frozen=True)
class GlobalState:
    """The state that all replicas share before a round: global weights and the outer momentum."""

    round: int
    weights: Arrays
    momentum: Arrays

    @cached_property
    def digest(self) -> str:
        """Return the digest of the weights."""
        return arrays.digest(self.weights)


@dataclass(frozen=True)
class Reduced:
    """The result of a round. base: digest of its start weights; mean: encoded; unreadable: replicas left out."""

    base: str
    mean: bytes
    replicas: tuple[int, ...]
    unreadable: tuple[int, ...] = ()


class RoundDeleted(Exception):
    """The requested round was deleted, because newer states exist."""


class Transport(Protocol):
    """The connection of one replica to the others."""

    @property
    def sent(self) -> int:
        """Bytes so far."""

    @property
    def received(self) -> int:
        """Bytes so far."""

    def publish(self, start: GlobalState, delta: bytes) -> None:
        """Offer an encoded pseudo-gradient from the weights of `start` for its round. A second time changes nothing.

        `start` is kept for those who join later, where that is due.
        """

    def commit(self, round_: int) -> bool | None:
        """Return whether this replica's offer counts in the round; None while the round is open.

        A settled round never changes. A replica that has published settles the round when it is due.
        """

    def reduce(self, round_: int) -> Reduced | None:
        """Return the mean of the offers that count: the same bytes for all; None while another replica computes it.

        Only for a settled round. Raises `RoundDeleted`.
        """

    def latest(self, mine: GlobalState) -> GlobalState:
        """Return the newest stored state, or `mine` where that is newer. The first and the last state are stored."""


class Meeting:
    """The shared state of the replicas of one process."""

    def __init__(self, replicas: int, codec_: Codec, fragments: Fragments) -> None:
        self.replicas, self.codec, self.fragments = replicas, codec_, fragments
        self.offers: dict[int, dict[int, tuple[str, bytes]]] = {}
        self.reduced: dict[int, Reduced] = {}
        self.state: GlobalState | None = None

    def place(self, replica: int) -> "InProcess":
        """Return the transport of a replica."""
        return InProcess(self, replica)


class InProcess:
    """Implements Transport: a round is settled once all replicas have published."""

    def __init__(self, meeting: Meeting, replica: int) -> None:
        self._meeting, self._replica = meeting, replica
        self.sent = self.received = 0

    def publish(self, start: GlobalState, delta: bytes) -> None:
        """Add the offer to those of the other replicas."""
        offers = self._meeting.offers.setdefault(start.round, {})
        if self._replica not in offers:
            offers[self._replica] = (start.digest, delta)
            self.sent += len(delta)

    def commit(self, round_: int) -> bool | None:
        """Return True once all replicas have published."""
        return True if len(self._meeting.offers.get(round_, ())) == self._meeting.replicas else None

    def reduce(self, round_: int) -> Reduced:
        """Return the mean, computed at the first call."""
        meeting = self._meeting
        offers = sorted(meeting.offers[round_].items())
        if round_ not in meeting.reduced:
            shapes = meeting.fragments.of(round_)
            parts = [decode(delta, shapes, meeting.codec) for _, (_, delta) in offers]
            self.received += sum(len(delta) for replica, (_, delta) in offers if replica != self._replica)
            encoded = encode(mean(parts), OF_MEAN[meeting.codec])
            self.sent += len(encoded)
            meeting.reduced[round_] = Reduced(offers[0][1][0], encoded, tuple(replica for replica, _ in offers))
        else:
            self.received += len(meeting.reduced[round_].mean)
        return meeting.reduced[round_]

    def latest(self, mine: GlobalState) -> GlobalState:
        """Return the state of the first caller, and later the newest given state."""
        if self._meeting.state is None or self._meeting.state.round < mine.round:
            self._meeting.state = mine
        return self._meeting.state
