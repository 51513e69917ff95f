"""A real HTTP server on loopback that speaks /v1/chat/completions and misbehaves on request."""

import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


@dataclass
class Reply:
    """What to send: a status, a body (a dict becomes JSON), headers, and how long to wait before."""

    status: int = 200
    body: Any = None
    headers: dict[str, str] = field(default_factory=dict)
    delay_s: float = 0.0


def answer(text: str, prompt_tokens: int = 10, completion_tokens: int = 5, **more: Any) -> dict[str, Any]:
    """A well-formed completion."""
    return {
        "id": "c",
        "object": "chat.completion",
        "choices": [{"index": 0, "finish_reason": "stop", "message": {"role": "assistant", "content": text}}],
        "usage": {"prompt_tokens": prompt_tokens, "completion_tokens": completion_tokens, **more},
    }


@dataclass
class Server:
    """Base URL, the body of every request that came in, and the key that each was sent with."""

    url: str
    requests: list[dict[str, Any]] = field(default_factory=list)
    keys: list[str | None] = field(default_factory=list)


@contextmanager
def serving(reply: Callable[[dict[str, Any], int], Reply], listing: Reply | None = None) -> Iterator[Server]:
    """Serve until the block ends; `reply` gets the request's body and how many requests came before it.

    listing: what a GET, which asks for the list of models, is answered with; 404 without.
    """
    lock = threading.Lock()
    server = Server("")

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            with lock:
                number = len(server.requests)
                server.requests.append(body)
                server.keys.append(self.headers.get("Authorization"))
            self._send(reply(body, number))

        def do_GET(self) -> None:
            self._send(listing or Reply(404, {"error": {"message": "no such page"}}))

        def _send(self, sent: Reply) -> None:
            time.sleep(sent.delay_s)
            data = sent.body if isinstance(sent.body, bytes) else json.dumps(sent.body).encode()
            self.send_response(sent.status)
            for name, value in {"Content-Type": "application/json", **sent.headers}.items():
                self.send_header(name, value)
            self.send_header("Content-Length", str(len(data)))
            with suppress(BrokenPipeError, ConnectionResetError):  # whoever asked was killed, as some tests do
                self.end_headers()
                self.wfile.write(data)

        def log_message(self, *arguments: Any) -> None:
            del arguments

    http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    http.daemon_threads = True
    thread = threading.Thread(target=http.serve_forever, daemon=True)
    thread.start()
    server.url = f"http://127.0.0.1:{http.server_address[1]}/v1"
    try:
        yield server
    finally:
        http.shutdown()
        http.server_close()
