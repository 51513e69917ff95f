"""A web server on a free loopback port: what every stand-in and every small real server of the tests has in common."""

import json
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


class Handler(BaseHTTPRequestHandler):
    """Reads the body of a request, and sends JSON or bytes with their length; says nothing on stderr.

    What is asked arrives at `get`, `post` and `put`, of which a server has those that it needs.
    """

    protocol_version = "HTTP/1.1"

    def get(self) -> None:
        self.send_error(501)

    def post(self) -> None:
        self.send_error(501)

    def put(self) -> None:
        self.send_error(501)

    def do_GET(self) -> None:
        self.get()

    def do_POST(self) -> None:
        self.post()

    def do_PUT(self) -> None:
        self.put()

    def body(self) -> bytes:
        """What was sent with the request."""
        return self.rfile.read(int(self.headers["Content-Length"] or 0))

    def send(self, status: int, body: Any, headers: Mapping[str, str] | None = None) -> None:
        """Bytes as they are, anything else as JSON."""
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        self.send_response(status)
        for name, value in {"Content-Type": "application/json", **(headers or {})}.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(data)))
        with suppress(BrokenPipeError, ConnectionResetError):  # whoever asked was killed, as some tests do
            self.end_headers()
            self.wfile.write(data)

    def log_message(self, *arguments: Any) -> None:
        del arguments


@contextmanager
def listening(handler: type[Handler]) -> Iterator[str]:
    """The address of a server that answers in threads until the block ends."""
    http = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    http.daemon_threads = True
    threading.Thread(target=http.serve_forever, args=(0.02,), daemon=True).start()  # seconds until it notices its end
    try:
        yield f"http://127.0.0.1:{http.server_address[1]}"
    finally:
        http.shutdown()
        http.server_close()
