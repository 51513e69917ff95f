"""The protocol between replicas: publish, poll_round, reduce, latest; an implementation decides where bytes are stored.

`InProcess` implements the protocol for the replicas of one process: the reference that other transports are tested
against.
"""

from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Protocol

from stages.diloco import arrays
from stages.diloco.arrays import OF_MEAN, Arrays, Fragments, Shapes, decode, encode, mean, seal
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

    def sealed(self) -> bytes:
        """Return weights and momentum as sealed bytes, both in float32: all replicas continue from the same bytes."""
        payload = encode(self.weights, "float32") + encode(self.momentum, "float32")
        return seal({"round": self.round, "weights": self.digest}, payload)

    @classmethod
    def decoded(cls, header: dict[str, Any], payload: bytes, shapes: Shapes) -> "GlobalState":
        """Return the state from the header and payload of `sealed`; shapes: of all weights."""
        half = len(payload) // 2  # weights and momentum have the same shapes
        return cls(
            header["round"], decode(payload[:half], shapes, "float32"), decode(payload[half:], shapes, "float32")
        )


@dataclass(frozen=True)
class Reduced:
    """The result of a round. base: digest of its start weights; mean: encoded; unreadable: replicas left out."""

    base: str
    mean: bytes
    replicas: tuple[int, ...]
    unreadable: tuple[int, ...] = ()

    @classmethod
    def decoded(cls, header: dict[str, Any], mean: bytes) -> "Reduced":
        """Return the result from the header and payload of a sealed mean."""
        return cls(header["base"], mean, tuple(header["replicas"]), tuple(header["unreadable"]))


class RoundDeleted(Exception):
    """The requested round was deleted, because newer states exist."""


class Transport(Protocol):
    """The connection of one replica to the others. Implementations count the bytes `sent` and `received`."""

    def publish(self, start: GlobalState, delta: bytes) -> None:
        """Offer an encoded pseudo-gradient from the weights of `start` for its round. A second time changes nothing.

        `start` is kept for those who join later, where that is due.
        """

    def poll_round(self, round_: int) -> bool | None:
        """Return whether this replica's offer counts in the round; None while the round is open, as `Popen.poll` does.

        A settled round never changes. A replica that has published settles the round when it is due.
        """

    def reduce(self, round_: int) -> Reduced | None:
        """Return the mean of the offers that count: the same bytes for all; None while another replica computes it.

        Only for a settled round. Raises `RoundDeleted`.
        """

    def latest(self, mine: GlobalState) -> GlobalState:
        """Return the newest stored state, or `mine` where that is newer. The first and the last state are stored."""


@dataclass
class Meeting:
    """The shared state of the replicas of one process; `offers` hold (digest of the start weights, bytes)."""

    replicas: int
    codec: Codec
    fragments: Fragments
    offers: dict[int, dict[int, tuple[str, bytes]]] = field(default_factory=dict)
    reduced: dict[int, Reduced] = field(default_factory=dict)
    state: GlobalState | None = None


@dataclass
class InProcess:
    """Implements Transport: a round is settled once all replicas have published."""

    meeting: Meeting
    replica: int
    sent: int = 0
    received: int = 0

    def publish(self, start: GlobalState, delta: bytes) -> None:
        """Add the offer to those of the other replicas."""
        offers = self.meeting.offers.setdefault(start.round, {})
        if self.replica not in offers:
            offers[self.replica] = (start.digest, delta)
            self.sent += len(delta)

    def poll_round(self, round_: int) -> bool | None:
        """Return True once all replicas have published."""
        return True if len(self.meeting.offers.get(round_, ())) == self.meeting.replicas else None

    def reduce(self, round_: int) -> Reduced:
        """Return the mean, computed at the first call."""
        meeting = self.meeting
        offers = sorted(meeting.offers[round_].items())  # a fixed order: each replica computes the same mean
        if round_ not in meeting.reduced:
            shapes = meeting.fragments.of(round_)
            parts = [decode(delta, shapes, meeting.codec) for _, (_, delta) in offers]
            self.received += sum(len(delta) for replica, (_, delta) in offers if replica != self.replica)
            encoded = encode(mean(parts), OF_MEAN[meeting.codec])
            self.sent += len(encoded)
            meeting.reduced[round_] = Reduced(offers[0][1][0], encoded, tuple(replica for replica, _ in offers))
        else:
            self.received += len(meeting.reduced[round_].mean)
        return meeting.reduced[round_]

    def latest(self, mine: GlobalState) -> GlobalState:
        """Return the state of the first caller, and later the newest given state."""
        if self.meeting.state is None or self.meeting.state.round < mine.round:
            self.meeting.state = mine
        return self.meeting.state
