"""Rounds over torchft's lighthouse: the lighthouse lists the members of a round, and bytes go from replica to replica.

A replica that has an offer asks the lighthouse for a quorum, with its round, the digest of its weights and the address
where it serves its objects. All members of a quorum get the same list. Those of the newest round count that hold the
weights which most of them hold; the first of them computes the mean, the others fetch it from any that has it. A
replica that is behind, or holds other weights, takes the state of one that counts. How long the lighthouse waits for
late replicas is its own setting (--join_timeout_ms), as is after how long a silent one counts as dead. The lighthouse
has no password, so replicas prove to each other that they know a secret (`Secret`).

Source of the calls: torchft 0.2.0, torchft/coordination.py (a low-level interface, which may change).
"""

import hmac
import secrets
import socket
import threading
import time
import uuid
from collections import Counter, defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from http.client import HTTPException
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.error import HTTPError
from urllib.parse import urlsplit
from urllib.request import Request, urlopen

from stages.diloco import arrays
from stages.diloco.arrays import Damaged, Fragments, seal, unseal
from stages.diloco.settings import SCHEME, Diloco
from stages.diloco.transport import GlobalState, Reduced, RoundDeleted
from stages.errors import InfrastructureError, UsageError
from stages.redaction import secret_in


@dataclass(frozen=True)
class Secret:
    """A word shared by all replicas of a training.

    The word itself is never sent. A request carries a nonce and an HMAC of the request; the answer carries an HMAC of
    the nonce and of the content. So a stranger on the network gets nothing, and cannot pass for a replica, which the
    lighthouse itself, having no password, would allow. Nothing is encrypted.
    """

    word: str = field(repr=False)

    @classmethod
    def read(cls, variable: str) -> "Secret":
        """Return the secret in an environment variable, redacted from now on; `UsageError` when it is not set."""
        word = secret_in(variable)
        if not word:
            raise UsageError(
                f"The environment variable {variable}, which holds the secret that replicas over a lighthouse share, "
                "is not set. Make one with `openssl rand -hex 16` and export it for each of them."
            )
        return cls(word)

    def proof(self, *words: str) -> str:
        """Return the HMAC-SHA-256, in hexadecimal, of these words, none of which has a line break."""
        return hmac.new(self.word.encode(), "\n".join(words).encode(), "sha256").hexdigest()

    def proves(self, proof: str, *words: str) -> bool:
        """Return whether a proof belongs to these words."""
        # compare_digest(): the time of `==` would tell a stranger how many characters of a guess are right. As bytes,
        # since it refuses text outside of ASCII, which a stranger may send.
        return hmac.compare_digest(self.proof(*words).encode(), proof.encode())


# A replica serves its offers, its means and the state of its round over HTTP, to callers that prove the secret.

FETCH_S = 600.0
"""Seconds for one object from another replica."""
KEPT = 3
"""Rounds whose objects are served."""
WHO, NONCE, PROOF = "X-Replica", "X-Nonce", "X-Proof"
"""Headers: the name of the replica that asks, a word that no other request has, and the proof of the sender."""


class Objects:
    """Objects by key, `WHAT/ROUND`, and a server of them on a free port of one address."""

    def __init__(self, towards: str, secret: Secret) -> None:
        """towards: a host; the server listens only at the address by which that host reaches this machine."""
        self.state: GlobalState | None = None
        self.sent = 0  # bytes
        self.over = threading.Event()
        self.kept: dict[str, bytes] = {}
        self.taken: dict[str, set[str]] = defaultdict(set)
        """The names of the replicas that fetched an object, by its key."""
        # Connecting a datagram socket sends nothing, but selects the network interface towards the host.
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect((towards, 9))
            host: str = probe.getsockname()[0]
        self._server = ThreadingHTTPServer((host, 0), _handler(self, secret))
        self._server.daemon_threads = True  # else a slow download would keep the process alive
        threading.Thread(target=self._server.serve_forever, daemon=True).start()
        self.address = f"http://{host}:{self._server.server_port}"

    def keep(self, key: str, data: bytes) -> None:
        """Serve an object from now on, and no longer those of `KEPT` rounds ago."""
        oldest = int(key.partition("/")[2]) - KEPT
        # A new dictionary, since the server's threads read the old one meanwhile.
        kept = {name: held for name, held in self.kept.items() if int(name.partition("/")[2]) > oldest}
        self.kept = {**kept, key: data}

    def serve(self, key: str, who: str) -> bytes | None:
        """Return an object for another replica; the state is encoded on request only, as few ask for it."""
        state, data = self.state, self.kept.get(key)
        if state is not None and key == f"state/{state.round}":
            data = state.sealed()
        if data is not None:
            self.taken[key].add(who)
            self.sent += len(data)
        return data

    def close(self) -> None:
        """Stop serving."""
        self.over.set()
        self._server.shutdown()
        self._server.server_close()


def request_headers(secret: Secret, who: str, key: str) -> dict[str, str]:
    """Return the headers with which a replica asks another for an object."""
    nonce = secrets.token_hex(16)
    return {WHO: who, NONCE: nonce, PROOF: secret.proof("asks", who, nonce, key)}


def is_genuine(secret: Secret, headers: Mapping[str, str], key: str, proof: str, data: bytes) -> bool:
    """Return whether a replica sent `data`, empty for no object, in answer to a request with these headers."""
    # The first 32 bytes are the digest of the rest, which `unseal` checks: no second hash over all bytes is needed.
    return secret.proves(proof, "gives", headers[NONCE], key, data[:32].hex())


def fetch(address: str, key: str, secret: Secret, who: str) -> tuple[bytes | None, bool]:
    """Return an object of another replica, None when it has none or it is damaged; and whether the replica is alive."""
    headers = request_headers(secret, who, key)
    request = Request(f"{address}/{key}", headers=headers)  # noqa: S310 - http, at the address that a replica named
    try:
        with urlopen(request, timeout=FETCH_S) as answer:  # noqa: S310
            proof, data = answer.headers.get(PROOF, ""), answer.read()
        unseal(data)
    except HTTPError as error:  # a proof of nothing: the replica is alive, and has no such object
        return None, is_genuine(secret, headers, key, error.headers.get(PROOF, ""), b"")
    except (OSError, HTTPException, Damaged):
        return None, False
    return (data, True) if is_genuine(secret, headers, key, proof, data) else (None, False)


def _handler(objects: Objects, secret: Secret) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            key = self.path.strip("/")
            who, nonce, proof = (self.headers.get(name, "") for name in (WHO, NONCE, PROOF))
            if not secret.proves(proof, "asks", who, nonce, key):
                self.send_error(403)
                return
            data = objects.serve(key, who) or b""
            self.send_response(200 if data else 404)  # a sealed object is never empty
            self.send_header("Content-Length", str(len(data)))
            self.send_header(PROOF, secret.proof("gives", nonce, key, data[:32].hex()))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, format: str, *args: object) -> None:
            """Log nothing: the server would write each request to stderr."""

    return Handler


BEAT_S = 0.3
"""Seconds between two heartbeats to the lighthouse."""
ASK_S = 5.0
"""Seconds that one request for a quorum waits; it is repeated."""


@dataclass(frozen=True)
class Member:
    """A replica in a quorum. offer: digest of what it offers, empty where it only joins."""

    name: str
    address: str
    round: int
    base: str
    offer: str
    shared: str


class Lighthouse:
    """Implements Transport over a lighthouse. `shared`: a digest of the settings that all replicas have in common."""

    def __init__(
        self, url: str, settings: Diloco, replica: int, *, fragments: Fragments, rounds: int, shared: str = ""
    ) -> None:
        """url: lighthouse://HOST:PORT. rounds: of the whole training."""
        self._client = _client(url)
        self._secret = Secret.read(settings.api_key_env)
        self._url, self._settings, self._replica = url, settings, replica
        self._shared = self._secret.proof("shares", shared)
        self._fragments, self._rounds = fragments, rounds
        self._name = f"{replica:04d}-{uuid.uuid4().hex[:8]}"
        self._counted: dict[int, list[Member]] = {}
        """The members whose offers count, by round."""
        self._gone: set[int] = set()
        """Rounds that the others settled without this replica."""
        self._ahead: list[Member] | None = None
        """Members whose state is to be loaded: they are further, or this replica holds other weights than they."""
        self._objects = Objects(urlsplit(url).hostname or "", self._secret)
        self._computed = ""
        """The key of the mean that this replica computed last."""
        self.received = 0
        threading.Thread(target=self._beat, args=(_client(url),), daemon=True).start()

    @property
    def sent(self) -> int:
        """Return the bytes sent so far."""
        return self._objects.sent

    def _beat(self, client: Any) -> None:
        """Send heartbeats, in a thread with a client of its own: the other one blocks while it waits for a quorum."""
        while not self._objects.over.wait(BEAT_S):
            try:
                client.heartbeat(self._name)
            except (RuntimeError, TimeoutError, OSError):
                continue  # the next request for a quorum reports it

    def publish(self, start: GlobalState, delta: bytes) -> None:
        """Serve the offer, and the state that it starts from to those who join."""
        sealed = seal({"round": start.round, "replica": self._replica, "base": start.digest}, delta)
        self._objects.keep(f"offer/{start.round}", sealed)
        self._objects.state = start

    def poll_round(self, round_: int) -> bool | None:
        """Ask the lighthouse for the members of the round; False when the others are further, or hold other weights."""
        if round_ not in self._counted and round_ not in self._gone:
            offer, state = self._objects.kept.get(f"offer/{round_}"), self._objects.state
            if offer is None or state is None or not self._settle(state, offer[:32].hex()):
                return None
        return round_ not in self._gone and self._name in {member.name for member in self._counted[round_]}

    def reduce(self, round_: int) -> Reduced | None:
        """Fetch the mean from any member that has it; the first one alive of those that count computes it."""
        if round_ in self._gone:
            raise RoundDeleted
        key, alive = f"mean/{round_}", list[Member]()
        if (mine := self._objects.kept.get(key)) is not None:
            return Reduced.decoded(*unseal(mine))
        for member in self._counted[round_]:
            if member.name == self._name:
                alive.append(member)
                continue
            found, lives = self._fetch(member, key)
            alive += [member] if lives else []
            if found is not None:
                self._objects.keep(key, found)  # and serve it: the member that computed it may be gone soon
                return Reduced.decoded(*unseal(found))
        if not alive:
            raise RoundDeleted
        if alive[0].name != self._name:
            return None
        self._computed = key
        self._objects.keep(key, self._reduced(round_))
        return self.reduce(round_)

    def latest(self, mine: GlobalState) -> GlobalState:
        """Return the state of the members that count in the next quorum, or that were ahead in the last one."""
        self._objects.state = mine
        if mine.round == self._rounds:
            self._linger()
            return mine
        deadline = time.monotonic() + self._settings.timeout_s
        while self._ahead is None and not self._settle(mine, ""):
            if time.monotonic() > deadline:
                raise InfrastructureError(
                    f"{self._url} brought too few replicas together within {self._settings.timeout_s:g} s. "
                    "Start more, or lower the lighthouse's --min_replicas."
                )
        ahead, self._ahead, self._gone = self._ahead or [], None, set()
        if not ahead:
            return mine
        for member in ahead:
            found, _ = self._fetch(member, f"state/{member.round}")
            if found is not None:
                return GlobalState.decoded(*unseal(found), self._fragments.all)
        raise InfrastructureError(f"No replica that {self._url} names gave its state. --resume tries again.")

    def _settle(self, state: GlobalState, offer: str) -> bool:
        """Ask for a quorum and settle the newest round with it; return whether the quorum was large enough.

        offer: digest of this replica's offer, empty where it only joins.
        """
        members = self._quorum({"base": state.digest, "offer": offer, "shared": self._shared}, state.round)
        if any(member.shared != self._shared for member in members):
            raise UsageError(
                f"Replicas at {self._url} have other settings, another model, or another secret in "
                f"{self._settings.api_key_env}. Give all of them the same."
            )
        # All members get the same list and apply the same rules below, so that they agree without another message.
        newest = max((member.round for member in members), default=0)
        there = [member for member in members if member.round == newest]
        offering = [member for member in there if member.offer] or there
        # Of equally many, the largest digest: any rule will do, as long as all members apply the same one.
        bases = Counter(member.base for member in offering)
        counted = [m for m in offering if m.base == max(bases, key=lambda base: (bases[base], base))]
        if len(counted) < (self._settings.least if newest else self._settings.replicas):
            return False
        if counted[0].offer:
            self._counted[newest] = counted
        if newest > state.round or counted[0].base != state.digest:
            self._ahead = counted
            self._gone.add(state.round)
        return True

    def _quorum(self, data: dict[str, str], round_: int) -> list[Member]:
        """Return the members of a quorum in the order of names; none when there was no quorum within `ASK_S`."""
        try:
            quorum = self._client.quorum(
                self._name,
                timedelta(seconds=ASK_S),
                address=self._objects.address,
                store_address="",
                step=round_,
                world_size=1,
                shrink_only=False,
                data=data,
            )
        except (TimeoutError, RuntimeError, OSError):
            return []
        members = [
            Member(one.replica_id, one.address, one.step, **{name: one.data[name] for name in data})
            for one in quorum.participants
        ]
        return sorted(members, key=lambda member: member.name)

    def _reduced(self, round_: int) -> bytes:
        """Return the sealed mean of the offers that count; an offer that cannot be fetched is left out."""
        parts, unreadable, shapes = {}, [], self._fragments.of(round_)
        for member in self._counted[round_]:
            own = self._objects.kept.get(f"offer/{round_}") if member.name == self._name else None
            sealed = own or self._fetch(member, f"offer/{round_}")[0]
            number = int(member.name[:4])
            # The quorum has the digest of each offer, so that no member can give different offers to different others.
            if sealed is None or sealed[:32].hex() != member.offer:
                unreadable.append(number)
            else:
                parts[number] = arrays.decode(unseal(sealed)[1], shapes, self._settings.codec)
        mean = arrays.encode(arrays.mean(list(parts.values())), arrays.OF_MEAN[self._settings.codec])
        base = self._counted[round_][0].base
        return seal({"round": round_, "base": base, "replicas": sorted(parts), "unreadable": unreadable}, mean)

    def _fetch(self, member: Member, key: str) -> tuple[bytes | None, bool]:
        data, lives = fetch(member.address, key, self._secret, self._name)
        self.received += len(data or b"")
        return data, lives

    def _linger(self) -> None:
        """Serve the last mean, if this replica computed it, until the others have it or for the grace period."""
        others = {m.name for m in self._counted.get(self._rounds - 1, []) if m.name != self._name}
        deadline = time.monotonic() + self._settings.grace_s
        key = f"mean/{self._rounds - 1}"
        while self._counted and self._computed == key and time.monotonic() < deadline:
            if others <= self._objects.taken[key]:
                break
            time.sleep(BEAT_S)
        self._objects.close()


def _client(url: str) -> Any:
    """Return torchft's client; `UsageError` when it is not installed, or no lighthouse answers."""
    try:
        from torchft.coordination import LighthouseClient
    except ImportError:
        raise UsageError("torchft is not installed. `pip install torchft` brings it, and the lighthouse.") from None
    address = url.replace(SCHEME, "http://", 1).rstrip("/")
    try:
        return LighthouseClient(address, timedelta(seconds=ASK_S))
    except (TimeoutError, RuntimeError, OSError, ValueError):
        raise UsageError(
            f"No lighthouse answers at {url}. Start one: torchft_lighthouse --bind [::]:29510 --min_replicas 2."
        ) from None
