"""Rounds in a bucket. One object, created if absent, settles who is in a round; the rest follows from it.

    run.json                   what all replicas share (joining.py)
    n/0002                     a replica's number, and who has it (joining.py)
    s/000024                   all weights and the momentum before round 24
    r/000024/a/0003            replica 3 means to take part
    r/000024/d/0003.BASE.SHA   what it offers, from weights of the digest BASE
    r/000024/commit.json       whose offers count
    r/000024/mean              their mean

A round is settled once all that were in the last one, or said that they come, have offered; or when there is a quorum
and this replica has waited for `grace_s` by its own clock. Who settled it computes the mean; after another `grace_s`
anybody does, from the same offers in the same order, and gets the same bytes. A replica that was killed at any line
below leaves a state that the others go on from.
"""

import time
from collections.abc import Callable, Mapping
from typing import Any

import orjson

from stages.diloco import arrays
from stages.diloco.arrays import Damaged, Fragments, seal, unseal
from stages.diloco.settings import Diloco
from stages.diloco.transport import GlobalState, Reduced, RoundDeleted
from stages.errors import InfrastructureError, UsageError
from stages.runs import store
from stages.runs.bucket import Bucket

SNAPSHOT_EVERY = 25
"""Rounds between two kept states, which are as large as the weights twice over."""
READS = 3
"""Tries at an object that comes out damaged."""


class ObjectStore:
    """One replica's way to the others."""

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
        """rounds: in the whole training. clock: seconds."""
        self._bucket, self._settings, self._replica, self._clock = bucket, settings, replica, clock
        self._fragments, self._rounds = fragments, rounds
        self._offered: dict[int, str] = {}
        self._since: dict[tuple[str, int], float] = {}
        self._commits: dict[int, list[str]] = {}
        self._own: set[int] = set()
        """Rounds that this replica settled."""

    @property
    def sent(self) -> int:
        """Bytes written."""
        return self._bucket.sent

    @property
    def received(self) -> int:
        """Bytes read."""
        return self._bucket.received

    def publish(self, start: GlobalState, delta: bytes) -> None:
        """Write the offer under a name made of its content, so that a second time changes nothing."""
        if start.round % SNAPSHOT_EVERY == 0 and start.round - 1 in self._own:
            self._keep(start)
        sealed = seal({"round": start.round, "replica": self._replica, "base": start.digest}, delta)
        self._offered[start.round] = f"r/{start.round:06d}/d/{self._replica:04d}.{start.digest[:16]}.{sealed[:8].hex()}"
        self._bucket.write(self._offered[start.round], sealed)
        self._since.setdefault(("published", start.round), self._clock())

    def commit(self, round_: int) -> bool | None:
        """Read who is in, or settle it when it is time to."""
        counted = self._counted(round_)
        if counted is None and round_ in self._offered:
            counted = self._settle(round_)
        return None if counted is None else self._offered.get(round_) in counted

    def reduce(self, round_: int) -> Reduced | None:
        """Read the mean, or compute it where this replica settled the round or has waited long enough."""
        reduced, there = self._mean(round_)
        counted = self._counted(round_)
        if reduced is None and counted and (there or round_ in self._own or self._waited("mean", round_)):
            reduced = self._reduced(round_, counted, again=there)
        if reduced is not None and self._replica not in reduced.replicas:
            self._announce(round_ + 1)
        return reduced

    def latest(self, mine: GlobalState) -> GlobalState:
        """The newest whole state in the bucket. Before the first round it is that of whoever kept theirs first."""
        if mine.round == self._rounds:
            self._keep(mine)
            return mine
        if not self._bucket.keys("s/"):
            self._keep(mine)
        newer = [key for key in self._bucket.keys("s/") if int(key[2:]) >= mine.round]
        whole = (state for key in reversed(newer) if (state := self._state(key)) is not None)
        found = next(whole, None)
        if found is None and mine.round == 0:
            raise InfrastructureError(
                f"{self._bucket.url}: no whole state is left in s/. Restore one, or start anew in another folder of "
                "the bucket."
            )
        self._announce((found or mine).round)
        return found or mine

    def _counted(self, round_: int) -> list[str] | None:
        """The keys of the offers that count; None while that is open."""
        if round_ not in self._commits:
            data = self._bucket.read(f"r/{round_:06d}/commit.json")
            if data is None:
                return None
            try:
                self._commits[round_] = list(orjson.loads(data)["keys"])
            except (orjson.JSONDecodeError, KeyError, TypeError):
                raise InfrastructureError(
                    f"{self._bucket.url}/r/{round_:06d}/commit.json is damaged, so nobody knows whose weights count. "
                    "Delete it while no replica runs, then --resume."
                ) from None
        return self._commits[round_]

    def _settle(self, round_: int) -> list[str] | None:
        """Create the commit when all are there who are expected, or a quorum after the grace period."""
        there = self._bucket.keys(f"r/{round_:06d}/")
        base = self._offered[round_].split(".")[1]
        offers = {number(key): key for key in there if "/d/" in key and key.split(".")[1] == base}
        earlier = self._counted(round_ - 1) or [] if round_ else []
        expected = {number(key) for key in [*earlier, *(key for key in there if "/a/" in key)]}
        wanted = self._settings.least if earlier else self._settings.replicas
        complete = offers.keys() >= expected and len(offers) >= wanted
        enough = len(offers) >= self._settings.least and self._waited("published", round_)
        if not complete and not enough:
            return None
        said = {"round": round_, "by": self._replica, "keys": [offers[replica] for replica in sorted(offers)]}
        if self._bucket.create(f"r/{round_:06d}/commit.json", store.encode(said)):
            self._own.add(round_)
        return self._counted(round_)

    def _waited(self, what: str, round_: int) -> bool:
        """Whether the grace period has passed since this was asked first."""
        since = self._since.setdefault((what, round_), self._clock())
        return self._clock() - since >= self._settings.grace_s

    def _mean(self, round_: int) -> tuple[Reduced | None, bool]:
        """The mean, and whether there is an object of it, be it damaged."""
        key = f"r/{round_:06d}/mean"
        found = self._unsealed(key)
        if found is None or isinstance(found, Damaged):
            return None, found is not None
        header, mean = found
        return Reduced(header["base"], mean, tuple(header["replicas"]), tuple(header["unreadable"])), True

    def _reduced(self, round_: int, keys: list[str], again: bool) -> Reduced:
        shapes, parts, unreadable, base = self._fragments.of(round_), {}, [], ""
        for key in keys:
            found = self._unsealed(key)
            if found is None or isinstance(found, Damaged):
                unreadable.append(number(key))
                continue
            parts[number(key)], base = arrays.decode(found[1], shapes, self._settings.codec), found[0]["base"]
        if not parts:
            if self._bucket.keys("s/")[-1:] > [f"s/{round_:06d}"]:
                raise RoundDeleted
            raise InfrastructureError(
                f"{self._bucket.url}: none of the {len(keys)} offers of round {round_} can be read. "
                "Restore them, or start anew in another folder of the bucket."
            )
        mean = arrays.encode(arrays.mean(list(parts.values())), arrays.OF_MEAN[self._settings.codec])
        header = {"round": round_, "base": base, "replicas": sorted(parts), "unreadable": unreadable}
        sealed = seal(header, mean)
        if again:
            self._bucket.write(f"r/{round_:06d}/mean", sealed)  # what is there is damaged
        elif not self._bucket.create(f"r/{round_:06d}/mean", sealed):
            theirs, _ = self._mean(round_)
            if theirs is not None:
                return theirs
        if round_ >= 2:  # the offers before last: nobody needs them to repair a mean any more
            gone = self._bucket.keys(f"r/{round_ - 2:06d}/")
            self._bucket.delete([key for key in gone if "/d/" in key or "/a/" in key])
        return Reduced(base, mean, tuple(sorted(parts)), tuple(unreadable))

    def _unsealed(self, key: str) -> tuple[dict[str, Any], bytes] | Damaged | None:
        """An object's header and payload; None where there is none, `Damaged` where it stays so in several reads."""
        found: Damaged | None = None
        for _ in range(READS):
            data = self._bucket.read(key)
            if data is None:
                return None
            try:
                return unseal(data)
            except Damaged as error:
                found = error
        return found

    def _announce(self, round_: int) -> None:
        earlier = self._counted(round_ - 1) or [] if round_ else []
        if self._replica not in map(number, earlier) and round_ < self._rounds:
            self._bucket.write(f"r/{round_:06d}/a/{self._replica:04d}", b"")

    def _keep(self, state: GlobalState) -> None:
        """Keep a state that is not there yet, and delete the means and states from before the last but one."""
        kept = self._bucket.keys("s/")
        key = f"s/{state.round:06d}"
        if key in kept:
            return
        payload = arrays.encode(state.weights, "float32") + arrays.encode(state.momentum, "float32")
        self._bucket.create(key, seal({"round": state.round, "weights": state.digest}, payload))
        if kept:
            oldest = int(kept[-1][2:])  # with its means, it leads to the new one should that be damaged
            means = [key for key in self._bucket.keys("r/") if key.endswith("/mean") and int(key[2:8]) < oldest]
            self._bucket.delete([*means, *(key for key in kept if int(key[2:]) < oldest)])

    def _state(self, key: str) -> GlobalState | None:
        found = self._unsealed(key)
        if found is None or isinstance(found, Damaged):
            return None
        header, payload = found
        half = len(payload) // 2
        weights = arrays.decode(payload[:half], self._fragments.all, "float32")
        return GlobalState(header["round"], weights, arrays.decode(payload[half:], self._fragments.all, "float32"))


def number(key: str) -> int:
    """The replica that a key names."""
    return int(key.rpartition("/")[2].partition(".")[0])


MOST = 10_000


def agree(bucket: Bucket, shared: Mapping[str, Any]) -> None:
    """Write what all replicas share, or hold it against what the first one wrote; `UsageError` names what differs."""
    if bucket.create("run.json", store.encode(shared)):
        return
    theirs, mine = _flat(orjson.loads(bucket.read("run.json") or b"{}")), _flat(orjson.loads(store.encode(shared)))
    differing = [key for key in sorted(theirs.keys() | mine.keys()) if theirs.get(key) != mine.get(key)]
    if differing:
        key = differing[0]
        raise UsageError(
            f"{bucket.url} holds a run with other settings: {key} is {theirs.get(key)!r} there and {mine.get(key)!r} "
            "here. Give the same settings to all replicas, or another folder of the bucket."
        )


def claim(bucket: Bucket, owner: str) -> int:
    """The number of `owner`: the one it has, else the first that is free."""
    for replica in range(MOST):
        key = f"n/{replica:04d}"
        if bucket.create(key, owner.encode()) or bucket.read(key) == owner.encode():
            return replica
    raise UsageError(f"{bucket.url} has had {MOST} replicas. Set diloco.replica, or take another folder of the bucket.")


def _flat(tree: Any, prefix: str = "") -> dict[str, Any]:
    """{"a.b": value} for {"a": {"b": value}}."""
    if not isinstance(tree, dict):
        return {prefix: tree}
    return {key: value for name, below in tree.items() for key, value in _flat(below, _joined(prefix, name)).items()}


def _joined(prefix: str, name: str) -> str:
    return f"{prefix}.{name}" if prefix else name
