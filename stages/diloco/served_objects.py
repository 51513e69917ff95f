"""What one replica serves to the others over HTTP: its offers, the means that it has, and the state of its round.

Only who knows the replicas' secret is answered, and its answers prove that they are a replica's.
"""

import secrets
import socket
import threading
from collections import defaultdict
from collections.abc import Mapping
from http.client import HTTPException
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.error import HTTPError
from urllib.request import Request, urlopen

from stages.diloco import codec
from stages.diloco.sealed import Damaged, seal, unseal
from stages.diloco.secret import Secret
from stages.diloco.transport import State

FETCH_S = 600.0
"""For one object from another replica."""
KEPT = 3
"""Rounds whose objects are served."""
WHO, NONCE, PROOF = "X-Replica", "X-Nonce", "X-Proof"
"""The headers that say who asks, a word that no other request has, and that whoever speaks knows the secret."""


class Objects:
    """Objects by key, `WHAT/ROUND`, and a server of them on a free port of one address."""

    def __init__(self, towards: str, secret: Secret) -> None:
        """towards: a host; the address is what this machine is reached by from there, and no other one answers."""
        self.state: State | None = None
        self.sent = 0
        self.over = threading.Event()
        self._kept: dict[str, bytes] = {}
        self._taken: dict[str, set[str]] = defaultdict(set)
        host = _own_address(towards)
        self._server = ThreadingHTTPServer((host, 0), _handler(self, secret))
        self._server.daemon_threads = True
        threading.Thread(target=self._server.serve_forever, daemon=True).start()
        self.address = f"http://{host}:{self._server.server_port}"

    def keep(self, key: str, data: bytes) -> None:
        """Serve an object from now on, and no longer those of rounds long past."""
        self._kept[key] = data
        oldest = _round(key) - KEPT
        self._kept = {name: held for name, held in self._kept.items() if _round(name) > oldest}

    def get(self, key: str) -> bytes | None:
        """One's own object."""
        return self._kept.get(key)

    def taken(self, key: str) -> set[str]:
        """Who has fetched an object."""
        return set(self._taken[key])

    def asked(self, key: str, who: str) -> bytes | None:
        """The object for another replica; the state is encoded when it is wanted."""
        state, data = self.state, self._kept.get(key)
        if state is not None and key == f"state/{state.round}":
            payload = codec.encode(state.weights, "float32") + codec.encode(state.momentum, "float32")
            data = seal({"round": state.round, "weights": state.digest}, payload)
        if data is not None:
            self._taken[key].add(who)
            self.sent += len(data)
        return data

    def close(self) -> None:
        """Serve nothing more."""
        self.over.set()
        self._server.shutdown()
        self._server.server_close()


def request(secret: Secret, who: str, key: str) -> dict[str, str]:
    """The headers with which a replica asks another for an object."""
    nonce = secrets.token_hex(16)
    return {WHO: who, NONCE: nonce, PROOF: secret.proof("asks", who, nonce, key)}


def answered(secret: Secret, asked: Mapping[str, str], key: str, proof: str, data: bytes) -> bool:
    """Whether a replica gave `data`, empty for nothing, in answer to a request with the headers `asked`."""
    return secret.proves(proof, *_given(asked[NONCE], key, data))


def fetch(address: str, key: str, secret: Secret, who: str) -> tuple[bytes | None, bool]:
    """An object of another replica, None where it has none or it is damaged; and whether a replica lives there."""
    asked = request(secret, who, key)
    wanted = Request(f"{address}/{key}", headers=asked)  # noqa: S310 - http, as a replica said
    try:
        with urlopen(wanted, timeout=FETCH_S) as answer:  # noqa: S310
            proof, data = answer.headers.get(PROOF, ""), answer.read()
        unseal(data)
    except HTTPError as error:
        return None, answered(secret, asked, key, error.headers.get(PROOF, ""), b"")
    except (OSError, HTTPException, Damaged):
        return None, False
    return (data, True) if answered(secret, asked, key, proof, data) else (None, False)


def _given(nonce: str, key: str, data: bytes) -> tuple[str, ...]:
    return "gives", nonce, key, data[:32].hex()  # the digest of the rest, which `unseal` checks


def _handler(objects: Objects, secret: Secret) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            key = self.path.strip("/")
            who, nonce, proof = (self.headers.get(name, "") for name in (WHO, NONCE, PROOF))
            if not secret.proves(proof, "asks", who, nonce, key):
                self.send_error(403)
                return
            data = objects.asked(key, who)
            self.send_response(404 if data is None else 200)
            self.send_header("Content-Length", str(len(data or b"")))
            self.send_header(PROOF, secret.proof(*_given(nonce, key, data or b"")))
            self.end_headers()
            self.wfile.write(data or b"")

        def log_message(self, format: str, *args: object) -> None:
            """Nothing on stderr."""

    return Handler


def _round(key: str) -> int:
    return int(key.partition("/")[2])


def _own_address(towards: str) -> str:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((towards, 9))  # sends nothing
        address: str = probe.getsockname()[0]
        return address
