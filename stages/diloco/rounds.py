"""Rounds in an object store. One object, created if absent, settles which offers count; all else follows from it.

    run.json                   the settings that all replicas share (`agree`)
    n/0002                     a replica's number, and its owner (`claim`)
    s/000024                   all weights and the momentum before round 24
    r/000024/a/0003            replica 3 announces that it will take part
    r/000024/d/0003.BASE.SHA   its offer, from weights of the digest BASE
    r/000024/commit.json       the offers that count
    r/000024/mean              their mean

A round is settled once all replicas of the last round and all that announced themselves have offered; or when there is
a quorum and this replica has waited for `grace_s` by its own clock. The replica that settled the round computes the
mean; after another `grace_s` any other does, from the same offers in the same order, and gets the same bytes. A replica
that is killed at any line below leaves a state from which the others continue.
"""

import re
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import orjson

from composer_stages.diloco import arrays
from composer_stages.diloco.arrays import (
    OF_MEAN,
    Arrays,
    Damaged,
    Fragments,
    Shapes,
    decode,
    encode,
    mean,
    seal,
    unseal,
)
from composer_stages.diloco.settings import Diloco
from composer_stages.errors import InfrastructureError, UsageError
from composer_stages.runs import store
from composer_stages.runs.bucket import Bucket
from composer_stages.runs.settings import dotted

SNAPSHOT_EVERY = 25
"""Rounds between two stored states, each of which is as large as the weights twice over."""
OBJECT = re.compile(r"s/\d{6}|r/\d{6}/(a/\d{4}|d/\d{4}(\.[0-9a-f]{16}){2}|commit\.json|mean)")
READS = 3
"""Reads of an object that is damaged, before it counts as such: the damage may be in the transfer."""


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


class ObjectStore:
    """The connection of one replica to the others, through a bucket."""

    def __init__(
        self,
        bucket: Bucket,
        settings: Diloco,
        replica: int,
        *,
        fragments: Fragments,
        rounds: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """rounds: of the whole training. clock: seconds."""
        self.bucket, self._settings, self._replica, self._clock = bucket, settings, replica, clock
        self._fragments, self._rounds = fragments, rounds
        self._offered: dict[int, str] = {}
        """The key of this replica's offer, by round."""
        self._since: dict[tuple[str, int], float] = {}
        """The time at which a wait began, by its name and round."""
        self._commits: dict[int, list[str]] = {}
        self._own: set[int] = set()
        """Rounds that this replica settled."""

    def publish(self, start: GlobalState, delta: bytes) -> None:
        """Offer an encoded pseudo-gradient from the weights of `start` for its round.

        The key is made of the content, so that a second call changes nothing. A state that is due is stored first.
        """
        if start.round % SNAPSHOT_EVERY == 0 and start.round - 1 in self._own:
            self._keep(start)
        sealed = seal({"round": start.round, "replica": self._replica, "base": start.digest}, delta)
        self._offered[start.round] = f"r/{start.round:06d}/d/{self._replica:04d}.{start.digest[:16]}.{sealed[:8].hex()}"
        self.bucket.write(self._offered[start.round], sealed)
        self._since.setdefault(("published", start.round), self._clock())

    def poll_round(self, round_: int) -> bool | None:
        """Return whether this replica's offer counts in the round; None while the round is open, as `Popen.poll` does.

        A settled round never changes. A replica that has published settles the round when it is due.
        """
        counted = self._counted(round_)
        if counted is None and round_ in self._offered:
            counted = self._settle(round_)
        return None if counted is None else self._offered.get(round_) in counted

    def reduce(self, round_: int) -> Reduced | None:
        """Return the mean of the offers that count: the same bytes for all; None while another replica computes it.

        Only for a settled round. Computed here if this replica settled it or has waited long enough. Raises
        `RoundDeleted`.
        """
        reduced, exists = self._mean(round_)
        counted = self._counted(round_)
        if reduced is None and counted and (exists or round_ in self._own or self._waited("mean", round_)):
            reduced = self._reduced(round_, counted, again=exists)
        if reduced is not None and self._replica not in reduced.replicas:
            self._announce(round_ + 1)
        return reduced

    def latest(self, mine: GlobalState) -> GlobalState:
        """Return the newest readable state in the bucket, or `mine` where that is newer.

        Before the first round it is the first one that was stored. The first and the last state are stored.
        """
        if mine.round == self._rounds:
            self._keep(mine)
            return mine
        if not self._keys("s/"):
            self._keep(mine)
        newer = [key for key in self._keys("s/") if int(key[2:]) >= mine.round]
        state: GlobalState | None = None
        for key in reversed(newer):
            if sealed := self._unsealed(key):  # else the one before, with its rounds' means
                state = GlobalState.decoded(*sealed, self._fragments.all)
                break
        if state is None and mine.round == 0:
            raise InfrastructureError("diloco.no-state-left", url=self.bucket.url)
        self._announce((state or mine).round)
        return state or mine

    def _counted(self, round_: int) -> list[str] | None:
        """Return the keys of the offers that count; None while the round is open."""
        if round_ not in self._commits:
            data = self.bucket.read(f"r/{round_:06d}/commit.json")
            if data is None:
                return None
            try:
                self._commits[round_] = list(orjson.loads(data)["keys"])
            except (orjson.JSONDecodeError, KeyError, TypeError):
                key = f"r/{round_:06d}/commit.json"
                raise InfrastructureError("diloco.object-damaged", url=self.bucket.url, key=key) from None
        return self._commits[round_]

    def _settle(self, round_: int) -> list[str] | None:
        """Create the commit when all expected offers are there, or a quorum after the grace period."""
        keys = self._keys(f"r/{round_:06d}/")
        base = self._offered[round_].split(".")[1]
        # Offers from other start weights (a machine that computes otherwise) do not count.
        offers = {number(key): key for key in keys if "/d/" in key and key.split(".")[1] == base}
        earlier = self._counted(round_ - 1) or [] if round_ else []
        expected = {number(key) for key in [*earlier, *(key for key in keys if "/a/" in key)]}
        required = self._settings.least if earlier else self._settings.replicas
        complete = offers.keys() >= expected and len(offers) >= required
        enough = len(offers) >= self._settings.least and self._waited("published", round_)
        if not complete and not enough:
            return None
        commit = {"round": round_, "by": self._replica, "keys": [offers[replica] for replica in sorted(offers)]}
        # The race of several replicas: the first to create the object settles the round, the others read it.
        if self.bucket.create(f"r/{round_:06d}/commit.json", store.encode(commit)):
            self._own.add(round_)
        return self._counted(round_)

    def _waited(self, name: str, round_: int) -> bool:
        """Return whether the grace period has passed since the first call with these arguments."""
        since = self._since.setdefault((name, round_), self._clock())
        return self._clock() - since >= self._settings.grace_s

    def _mean(self, round_: int) -> tuple[Reduced | None, bool]:
        """Return the mean if it can be read, and whether its object exists."""
        unsealed = self._unsealed(f"r/{round_:06d}/mean")
        return Reduced.decoded(*unsealed) if unsealed else None, unsealed is not None

    def _reduced(self, round_: int, keys: list[str], again: bool) -> Reduced:
        """Compute and store the mean; again: replace an object that is damaged."""
        shapes, parts, unreadable, base = self._fragments.round_shapes(round_), {}, [], ""
        for key in keys:
            if unsealed := self._unsealed(key):
                parts[number(key)], base = decode(unsealed[1], shapes, self._settings.codec), unsealed[0]["base"]
            else:
                unreadable.append(number(key))
        if not parts:
            if self._keys("s/")[-1:] > [f"s/{round_:06d}"]:  # keys are sorted: a newer state exists
                raise RoundDeleted
            raise InfrastructureError("diloco.no-offers-left", url=self.bucket.url, offers=len(keys), round=round_)
        encoded = encode(mean(list(parts.values())), OF_MEAN[self._settings.codec])
        header = {"round": round_, "base": base, "replicas": sorted(parts), "unreadable": unreadable}
        sealed = seal(header, encoded)
        if again:
            self.bucket.write(f"r/{round_:06d}/mean", sealed)
        elif not self.bucket.create(f"r/{round_:06d}/mean", sealed):
            stored, _ = self._mean(round_)
            if stored is not None:
                return stored
        if round_ >= 2:  # the offers before last: no replica needs them to repair a mean any more
            gone = self._keys(f"r/{round_ - 2:06d}/")
            self.bucket.delete([key for key in gone if "/d/" in key or "/a/" in key])
        return Reduced.decoded(header, encoded)

    def _keys(self, prefix: str) -> list[str]:
        """Return the keys below a prefix that replicas wrote, sorted, without files of other programs (.DS_Store)."""
        return [key for key in self.bucket.keys(prefix) if OBJECT.fullmatch(key)]

    def _unsealed(self, key: str) -> tuple[dict[str, Any], bytes] | tuple[()] | None:
        """Return an object's header and payload; None when there is no object, () when several reads are damaged."""
        for _ in range(READS):
            if (data := self.bucket.read(key)) is None:
                return None
            with suppress(Damaged):
                return unseal(data)
        return ()

    def _announce(self, round_: int) -> None:
        """Announce this replica for a round, so that other replicas wait for it."""
        earlier = self._counted(round_ - 1) or [] if round_ else []
        if self._replica not in map(number, earlier) and round_ < self._rounds:
            self.bucket.write(f"r/{round_:06d}/a/{self._replica:04d}", b"")

    def _keep(self, state: GlobalState) -> None:
        """Store a state that is not there yet, and delete the means and states from before the last but one."""
        states = self._keys("s/")
        key = f"s/{state.round:06d}"
        if key in states:
            return
        self.bucket.create(key, state.sealed())
        if states:
            oldest = int(states[-1][2:])  # with the means since, it leads to the new state should that be damaged
            means = [key for key in self._keys("r/") if key.endswith("/mean") and int(key[2:8]) < oldest]
            self.bucket.delete([*means, *(key for key in states if int(key[2:]) < oldest)])


def number(key: str) -> int:
    """Return the number of the replica that a key names."""
    return int(key.rpartition("/")[2].partition(".")[0])


MOST = 10_000


def agree(bucket: Bucket, shared: Mapping[str, Any]) -> None:
    """Write the settings that all replicas share, or compare them with the stored ones; `UsageError` if they differ."""
    if bucket.create("run.json", store.encode(shared)):
        return
    try:
        stored = dotted(orjson.loads(bucket.read("run.json") or b""))
    except orjson.JSONDecodeError:
        raise InfrastructureError("diloco.object-damaged", url=bucket.url, key="run.json") from None
    local = dotted(orjson.loads(store.encode(shared)))
    differing = [key for key in sorted(stored.keys() | local.keys()) if stored.get(key) != local.get(key)]
    if differing:
        key = differing[0]
        raise UsageError(
            "diloco.settings-differ", url=bucket.url, key=key, stored=stored.get(key), local=local.get(key)
        )


def claim(bucket: Bucket, owner: str, chosen: int | None = None) -> int:
    """Return the replica number of `owner`: the chosen one, or that which it claimed before, else the first free one.

    `UsageError` where another owner has the chosen number: of two replicas with one number one would train in vain.
    """
    for replica in range(MOST) if chosen is None else [chosen]:
        key = f"n/{replica:04d}"
        # create() lets one of several replicas that start together have the number.
        if bucket.create(key, owner.encode()) or bucket.read(key) == owner.encode():
            return replica
    if chosen is not None:
        raise UsageError("diloco.number-taken", url=bucket.url, key=key, chosen=chosen)
    raise UsageError("diloco.no-number-left", url=bucket.url, most=MOST)
