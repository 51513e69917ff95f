"""What replicas say to each other, in four words; whoever implements them decides where the bytes lie."""

from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

from stages.diloco import arrays
from stages.diloco.arrays import OF_MEAN, Arrays, Fragments, decode, encode, mean
from stages.diloco.settings import Codec


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


# ---- in_process
# Replicas of one process: the same rounds without files, which other transports are held against.


class Meeting:
    """What the replicas of one process share."""

    def __init__(self, replicas: int, codec_: Codec, fragments: Fragments) -> None:
        self.replicas, self.codec, self.fragments = replicas, codec_, fragments
        self.offers: dict[int, dict[int, tuple[str, bytes]]] = {}
        self.reduced: dict[int, Reduced] = {}
        self.state: State | None = None

    def place(self, replica: int) -> "InProcess":
        """The transport of a replica."""
        return InProcess(self, replica)


class InProcess:
    """One replica's way to the others: a round is settled once all have published."""

    def __init__(self, meeting: Meeting, replica: int) -> None:
        self._meeting, self._replica = meeting, replica
        self.sent = self.received = 0

    def publish(self, start: State, delta: bytes) -> None:
        """Put the offer beside the others'."""
        offers = self._meeting.offers.setdefault(start.round, {})
        if self._replica not in offers:
            offers[self._replica] = (start.digest, delta)
            self.sent += len(delta)

    def commit(self, round_: int) -> bool | None:
        """Whether all are there."""
        return True if len(self._meeting.offers.get(round_, ())) == self._meeting.replicas else None

    def reduce(self, round_: int) -> Reduced:
        """Computed by the first that asks."""
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

    def latest(self, mine: State) -> State:
        """That of the replica that came first, and later the newest that was brought."""
        if self._meeting.state is None or self._meeting.state.round < mine.round:
            self._meeting.state = mine
        return self._meeting.state
