"""What becomes of a request whose connection fails: what may have been billed is told from what was never sent.

With aiohttp installed calls go through it, else through httpx2; both are held to the same.
"""

import gzip
import os
import socket
import subprocess
import sys
import threading
import time
import zlib
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, nullcontext, suppress
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from composer_stages.policy import background, client
from composer_stages.policy.base import PolicyConfig
from composer_stages.policy.client import BODY_BYTES, CallError, Client, RefusedError, RetryableError, uses_aiohttp
from composer_stages.policy.reading import read
from composer_stages.policy.requests import CallBounds

REQUEST = {"model": "m", "messages": []}
OK = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\nX-Served: Yes\r\n\r\n{}"


@contextmanager
def served(serve: Callable[[socket.socket], None]) -> Iterator[str]:
    """The URL of a server that gives each connection to a thread."""
    held = list[socket.socket]()
    with closing(socket.create_server(("127.0.0.1", 0))) as listening:

        def accept() -> None:
            with suppress(OSError):
                while True:
                    held.append(listening.accept()[0])
                    threading.Thread(target=serve, args=held[-1:], daemon=True).start()

        threading.Thread(target=accept, daemon=True).start()
        yield f"http://127.0.0.1:{listening.getsockname()[1]}/v1"


def sends(data: bytes) -> Callable[[socket.socket], None]:
    """Answer with these bytes and hang up."""

    def serve(connection: socket.socket) -> None:
        with connection:
            connection.recv(65_536)
            connection.sendall(data)

    return serve


@pytest.fixture(autouse=True)
def _key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SERVER_KEY", "secret")


def client_of(url: str, timeout_s: float = 10.0) -> Client:
    return Client(PolicyConfig(model="m", base_url=url, api_key_env="SERVER_KEY", timeout_s=timeout_s), connect_s=0.5)


def post(url: str, timeout_s: float = 10.0, most_bytes: int = BODY_BYTES) -> bytes:
    asked = client_of(url, timeout_s).ask("/chat/completions", REQUEST, most_bytes=most_bytes)
    return background.run(asked).body


@contextmanager
def failing(kind: str, *, billed_usd: float | None) -> Iterator[pytest.ExceptionInfo[RetryableError]]:
    """The call inside is to fail so, without the key in its error; None: it may have been billed."""
    with pytest.raises(RetryableError) as caught:
        yield caught
    assert (caught.value.kind, caught.value.billed_usd) == (kind, billed_usd)
    assert str(caught.value) and "secret" not in repr(caught.value)


@pytest.mark.parametrize("sent", [b"", OK[:-1], b"nonsense\r\n\r\n"], ids=["hung up", "half an answer", "no HTTP"])
def test_a_connection_that_breaks_after_the_request_may_be_billed(sent: bytes) -> None:
    with served(sends(sent)) as url, failing("connection", billed_usd=None):
        post(url)


def test_a_silent_server_times_out() -> None:
    with served(lambda connection: None) as url, failing("timeout", billed_usd=None) as caught:
        post(url, 0.3)
    assert caught.value.pushes_back


DRIPPING_S = 60.0


def drip(first: bytes, again: bytes, pause_s: float = 0.0) -> Callable[[socket.socket], None]:
    """Answer with `first`, then with `again` until the other side hangs up, for a minute at most."""

    def serve(connection: socket.socket) -> None:
        with suppress(OSError), connection:
            connection.recv(65_536)
            connection.sendall(first)
            ends = time.monotonic() + DRIPPING_S
            while time.monotonic() < ends:
                connection.sendall(again)
                time.sleep(pause_s)

    return serve


@pytest.fixture(params=["aiohttp", "httpx2"])
def library(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Calls go through aiohttp, or through httpx2 as where there is a proxy."""
    if request.param == "httpx2":
        monkeypatch.setenv("FTP_PROXY", "http://127.0.0.1:9")
    assert uses_aiohttp() == (request.param == "aiohttp")
    return str(request.param)


def test_a_request_has_openais_url_and_headers_and_is_sent_in_one_part(library: str) -> None:
    seen = list[bytes]()

    def serve(connection: socket.socket) -> None:
        with connection:
            data = b""
            while not data.endswith(b"}"):
                data += connection.recv(65_536)
            seen.append(data)
            connection.sendall(OK.replace(b"X-Served: Yes", b"Connection: close"))

    with served(serve) as url:
        asked = client_of(f"{url}/")
        for text in ("a", "longer"):
            background.run(asked.ask("/chat/completions", {"model": text}))
    for data, text in zip(seen, ("a", "longer"), strict=True):
        head, _, body = data.partition(b"\r\n\r\n")
        first, *lines = head.decode().split("\r\n")
        headers = {name.lower(): value for name, _, value in (line.partition(": ") for line in lines)}
        assert first == "POST /v1/chat/completions HTTP/1.1" and body == b'{"model":"%s"}' % text.encode()
        assert len(headers) == len(lines) and url.startswith(f"http://{headers['host']}/")
        assert headers["content-length"] == str(len(body)) and "transfer-encoding" not in headers
        assert headers["authorization"] == "Bearer secret" and headers["content-type"] == "application/json"
        assert headers["user-agent"].startswith("AsyncOpenAI/Python") and "gzip" in headers["accept-encoding"]


CHUNKED = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
DRIPS = {
    "a body": (b"HTTP/1.1 200 OK\r\nContent-Length: 1000000\r\n\r\n", b"x"),
    "chunks": (CHUNKED, b"1\r\nx\r\n"),
    "a header": (b"HTTP/1.1 200 OK\r\nX-Long: ", b"x"),
    "headers": (b"HTTP/1.1 200 OK\r\n", b"X: x\r\n"),
    "provisional answers": (b"", b"HTTP/1.1 102 Processing\r\n\r\n"),
    "an error": (b"HTTP/1.1 500 No\r\nContent-Length: 1000000\r\n\r\n", b"x"),
    "a redirect": (b"HTTP/1.1 307 No\r\nLocation: /\r\nContent-Length: 1000000\r\n\r\n", b"x"),
}


@pytest.mark.parametrize("what", DRIPS)
def test_a_call_ends_in_time_however_slowly_it_is_answered(library: str, what: str) -> None:
    """One byte every 0.3 s held a limit of 1 s for 12.9 s at commit 46e634e."""
    first, again = DRIPS[what]
    with served(drip(first, again, 0.1)) as url:
        started = time.monotonic()
        with pytest.raises(CallError) as caught:
            post(url, 0.5)
        assert caught.value.billed_usd is None
        assert time.monotonic() - started < DRIPPING_S / 2, "it ended before its server did"


def peak_mib() -> int:
    """The most memory that this process has held since `memory_below` began."""
    status = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) // 1024 for line in status if line.startswith("VmHWM"))


@contextmanager
def memory_below(more_mib: int) -> Iterator[None]:
    """What happens inside takes less memory than this."""
    with suppress(OSError):  # where it cannot be reset, the peak of what ran before hides a lower one
        Path("/proc/self/clear_refs").write_text("5")
    before = peak_mib()
    yield
    assert peak_mib() - before < more_mib


@pytest.mark.parametrize("what", ["chunks", "a header", "headers", "provisional answers"])
def test_an_endless_response_is_cut_off(library: str, what: str) -> None:
    first, again = DRIPS[what]
    with served(drip(first, again * 5_000)) as url, memory_below(200), pytest.raises(CallError):
        post(url, 0.5, 2**17)


CODINGS = ("gzip", "deflate", "gzip, gzip", "identity")


@cache
def bomb(coding: str) -> bytes:
    """100 MiB of zeros, but for those that nothing packs; each packed MiB begins anew, so that all are alike."""
    zeros = b"0" * 2**20
    if coding == "gzip, gzip":
        return gzip.compress(bomb("gzip"))
    if coding == "identity":
        return zeros * 3
    packer = zlib.compressobj(1, wbits=31 if coding == "gzip" else 15)
    first, second = (packer.compress(zeros) + packer.flush(zlib.Z_FULL_FLUSH) for _ in range(2))
    return first + second * 99


@pytest.mark.parametrize(("coding", "status"), [*((name, b"200 OK") for name in CODINGS), ("gzip", b"500 No")])
def test_a_decompression_bomb_is_refused(library: str, coding: str, status: bytes) -> None:
    """One of 2.4 MB used 2.4 GB at commit 46e634e."""
    data = bomb(coding)
    head = b"HTTP/1.1 %b\r\nContent-Encoding: %b\r\nContent-Length: %d\r\n\r\n" % (status, coding.encode(), len(data))

    def serve(connection: socket.socket) -> None:
        with suppress(OSError), connection:
            connection.recv(65_536)
            connection.sendall(head + data)
            while connection.recv(65_536):  # until the other side hangs up: closing first could cut off the answer
                pass

    with served(serve) as url, memory_below(60), failing("connection", billed_usd=None) as caught:
        post(url, 20.0, 2**20)
    assert "1,048,576 bytes" in str(caught.value)


def test_a_compressed_response_is_read(library: str) -> None:
    data = gzip.compress(b'{"a": 1}')
    head = b"HTTP/1.1 200 OK\r\nContent-Encoding: gzip\r\nContent-Length: %d\r\n\r\n" % len(data)
    with served(sends(head + data)) as url:
        assert post(url) == b'{"a": 1}'


@pytest.mark.parametrize("coding", [b"gzip", b"br", b"zstd", b"gzip, br"])
def test_a_corrupt_compressed_body_is_a_typed_error(library: str, coding: bytes) -> None:
    said = b"HTTP/1.1 200 OK\r\nContent-Encoding: %b\r\nContent-Length: 5\r\n\r\nabcde" % coding
    # A coding that is not known is left as it is; all others cannot be unpacked.
    outcome = nullcontext() if coding in (b"br", b"zstd") else failing("connection", billed_usd=None)
    with served(sends(said)) as url, outcome:
        assert post(url, 5.0) == b"abcde"


@pytest.mark.parametrize("url", ["http://127.0.0.1:9/v1", "http://no-such-host.invalid/v1"])
def test_a_failed_connection_costs_nothing(url: str) -> None:
    with failing("connection", billed_usd=0.0):
        post(url)


def test_a_server_that_accepts_no_connection_is_given_up_soon() -> None:
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen(0)
        full = [socket.socket() for _ in range(4)]  # the next connection is left waiting by the system
        for one in full:
            one.setblocking(False)
            one.connect_ex(silent.getsockname())
        started = time.monotonic()
        with failing("connection", billed_usd=0.0):
            post(f"http://127.0.0.1:{silent.getsockname()[1]}/v1", 60.0)
        assert time.monotonic() - started < 30.0, "after its own half second, not after the call's minute"
        for one in full:
            one.close()


@pytest.mark.parametrize(
    ("sent", "outcome"),
    [
        (b'200 OK\r\nContent-Length: 24\r\n\r\n{"data": [{"id": "m1"}]}', [{"id": "m1"}]),
        (b"404 No\r\nContent-Length: 0\r\n\r\n", None),
        (b'200 OK\r\nContent-Length: 21\r\n\r\n{"data": {"id": "m"}}', None),
        (b"200 OK\r\nContent-Length: 12\r\n\r\n{'data': []}", None),
        (b"401 No\r\nContent-Length: 0\r\n\r\n", RefusedError),
        (b"307 No\r\nLocation: /\r\nContent-Length: 0\r\n\r\n", RefusedError),
        (b"200 OK\r\nContent-Length: 15\r\n\r\n<!doctype html>", RefusedError),
        (b"503 No\r\nContent-Length: 0\r\n\r\n", RetryableError),
    ],
)
def test_the_list_of_models_is_read_or_a_typed_error(sent: bytes, outcome: Any) -> None:
    ends = pytest.raises(outcome) if isinstance(outcome, type) else nullcontext()
    with served(sends(b"HTTP/1.1 " + sent)) as url, ends:
        assert background.run(client_of(url).models()) == outcome


def test_no_warning_about_open_connections_at_exit() -> None:
    code = (
        "import sys\nfrom composer_stages.policy import PolicyConfig, background\n"
        "from composer_stages.policy.client import Client\n"
        "client = Client(PolicyConfig(model='m', base_url=sys.argv[1]))\n"
        f"print(background.run(client.ask('/chat/completions', {REQUEST!r})).body)"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    with served(sends(OK)) as url:
        words = [sys.executable, "-c", code, url]
        done = subprocess.run(words, capture_output=True, text=True, env=environment, timeout=60)
    assert (done.stdout, done.stderr) == ("b'{}'\n", "")


PAGE = b"<!DOCTYPE html><html><body>Welcome to the console</body></html>"


@pytest.mark.parametrize(
    ("path", "asks"), [("", "is /v1 missing from the URL?"), ("/v1", "is the URL that of an API?")]
)
def test_a_web_page_is_reported_as_such(path: str, asks: str) -> None:
    """An address without /v1 often leads to a page for people, with status 200, 404 or 405."""
    url = f"http://127.0.0.1:1{path}"
    config = PolicyConfig(model="m", base_url=url)
    assert client.web_page(PAGE, url) == asks
    assert client.web_page(b'{"error": "<html>"}', url) is None and client.web_page(b"<xml/>", url) is None
    with pytest.raises(client.RetryableError, match="web page"):
        read(PAGE, config, CallBounds(1, 1), latency_s=0.0, attempts=1)
    for status, named in ((404, True), (405, True), (502, False)):
        error = client.error_of(client.Response(status, {}, PAGE), config)
        assert ("web page" in str(error)) is named, status
