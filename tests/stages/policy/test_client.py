"""What becomes of a request whose connection fails: what may have been billed is told from what was never sent.

With aiohttp installed calls go through it, else through httpx2; both are held to the same.
"""

import os
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import closing

import pytest

from stages.policy import background
from stages.policy.client import Broken, Client, Response, Unreachable, uses_aiohttp

REQUEST = {"model": "m", "messages": []}
OK = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\nX-Served: Yes\r\n\r\n{}"


@pytest.fixture
def answering() -> Iterator[Callable[[bytes | None], str]]:
    """The URL of a server that answers every request with these bytes and hangs up; with None it only listens."""
    with closing(socket.create_server(("127.0.0.1", 0))) as listening:

        def start(said: bytes | None) -> str:
            held = []

            def serve() -> None:
                while True:
                    try:
                        connection, _ = listening.accept()
                    except OSError:
                        return
                    held.append(connection)
                    connection.recv(65_536)
                    if said is not None:
                        connection.sendall(said)
                        connection.close()

            threading.Thread(target=serve, daemon=True).start()
            return f"http://127.0.0.1:{listening.getsockname()[1]}/v1"

        yield start


def post(url: str, timeout_s: float = 10.0) -> Response:
    return background.run(Client(url, "secret", connect_s=0.5).ask("/chat/completions", REQUEST, timeout_s))


def test_an_answer_comes_whole(answering: Callable[[bytes | None], str]) -> None:
    found = post(answering(OK))
    assert (found.status, found.headers["x-served"], found.body) == (200, "Yes", b"{}")


@pytest.mark.parametrize("said", [b"", OK[:-1], b"nonsense\r\n\r\n"], ids=["hung up", "half an answer", "no HTTP"])
def test_a_connection_that_breaks_after_the_request_may_be_billed(
    said: bytes, answering: Callable[[bytes | None], str]
) -> None:
    with pytest.raises(Broken) as caught:
        post(answering(said))
    assert str(caught.value) and "secret" not in repr(caught.value)


def test_silence_is_a_time_out(answering: Callable[[bytes | None], str]) -> None:
    with pytest.raises(TimeoutError):
        post(answering(None), 0.3)


@pytest.mark.parametrize("url", ["http://127.0.0.1:9/v1", "http://no-such-host.invalid/v1", "htp://127.0.0.1:9/v1"])
def test_where_nobody_is_nothing_was_sent(url: str) -> None:
    with pytest.raises(Unreachable):
        post(url)


def test_a_proxy_is_respected(monkeypatch: pytest.MonkeyPatch) -> None:
    """openai's aiohttp client reads no proxy from the environment, so it is not taken where there is one."""
    monkeypatch.setenv("HTTPS_PROXY", "http://127.0.0.1:9")
    assert not uses_aiohttp()


def test_nothing_is_said_of_open_connections_at_the_end(answering: Callable[[bytes | None], str]) -> None:
    code = (
        "from stages.policy import background\nfrom stages.policy.client import Client\n"
        f"client = Client({answering(OK)!r}, 'k')\n"
        f"print(background.run(client.ask('/chat/completions', {REQUEST!r}, 5.0)).status)"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, timeout=60)
    assert (done.stdout, done.stderr) == ("200\n", "")
