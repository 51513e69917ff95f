"""Replicas of one process: the same rounds without files, which other transports are held against."""

from stages.diloco import codec, outer
from stages.diloco.arrays import Fragments
from stages.diloco.settings import Codec
from stages.diloco.transport import Reduced, State


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
            parts = [codec.decode(delta, shapes, meeting.codec) for _, (_, delta) in offers]
            self.received += sum(len(delta) for replica, (_, delta) in offers if replica != self._replica)
            encoded = codec.encode(outer.mean(parts), codec.OF_MEAN[meeting.codec])
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
