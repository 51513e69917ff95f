"""What one replica serves to the others over HTTP: its offers, the means that it has, and the state of its round."""

import socket
import threading
from collections import defaultdict
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from stages.diloco import codec
from stages.diloco.sealed import seal
from stages.diloco.transport import State

KEPT = 3
"""Rounds whose objects are served."""
WHO = "X-Replica"
"""The header that says who asks."""


class Objects:
    """Objects by key, `WHAT/ROUND`, and a server of them on a free port."""

    def __init__(self, towards: str) -> None:
        """towards: a host; the address is what this machine is reached by from there."""
        self.state: State | None = None
        self.sent = 0
        self.over = threading.Event()
        self._kept: dict[str, bytes] = {}
        self._taken: dict[str, set[str]] = defaultdict(set)
        self._server = ThreadingHTTPServer(("", 0), _handler(self))
        self._server.daemon_threads = True
        threading.Thread(target=self._server.serve_forever, daemon=True).start()
        self.address = f"http://{_own_address(towards)}:{self._server.server_port}"

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


def _handler(objects: Objects) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            data = objects.asked(self.path.strip("/"), self.headers.get(WHO, ""))
            self.send_response(404 if data is None else 200)
            self.send_header("Content-Length", str(len(data or b"")))
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
