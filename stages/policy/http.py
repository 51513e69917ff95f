"""HTTP/1.1 POST over kept-alive connections, and nothing else: no retries, no redirects, no hidden second request.

A request is sent at most once, and the caller learns whether it may have arrived, because what arrived may be billed.
One asyncio stream a connection, framed by h11; the SDKs spend 5 to 10 times as much CPU on a call and slow down with
hundreds in flight (benchmarks/replay.py).
"""

import asyncio
import contextlib
import ssl
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from urllib.parse import SplitResult, unquote, urlsplit
from urllib.request import getproxies, proxy_bypass

import h11

CHUNK = 1 << 16
PORTS = {"http": 80, "https": 443}


class Unreachable(Exception):
    """There was no connection, so nothing was sent."""


class Broken(Exception):
    """The connection broke after the request was sent; the server may have done the work."""


@dataclass(frozen=True)
class Response:
    """Status, headers in lower case, and the whole body."""

    status: int
    headers: Mapping[str, str]
    body: bytes


class Connection:
    """One open connection to a server."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer
        self._framing = h11.Connection(h11.CLIENT)

    @property
    def stale(self) -> bool:
        """Whether the server has closed it meanwhile."""
        return self._reader.at_eof() or self._writer.is_closing()

    async def post(self, target: str, headers: list[tuple[str, str]], body: bytes) -> Response:
        """Send one request and read its response."""
        frame = self._framing.send
        head = frame(h11.Request(method="POST", target=target, headers=headers)) or b""
        self._writer.write(head + (frame(h11.Data(data=body)) or b"") + (frame(h11.EndOfMessage()) or b""))
        await self._writer.drain()
        status, told, parts = 0, {}, []
        while True:
            event = self._framing.next_event()
            if event is h11.NEED_DATA:
                self._framing.receive_data(await self._reader.read(CHUNK))
            elif isinstance(event, h11.Response):
                status, told = event.status_code, {k.decode(): v.decode("latin-1") for k, v in event.headers}
            elif isinstance(event, h11.Data):
                parts.append(bytes(event.data))
            elif isinstance(event, h11.EndOfMessage):
                return Response(status, told, b"".join(parts))
            elif isinstance(event, h11.ConnectionClosed) or event is h11.PAUSED:
                raise h11.RemoteProtocolError("the server closed the connection without an answer")

    def reusable(self) -> bool:
        """Make it ready for another request, if both sides agree."""
        if self._framing.our_state is not h11.DONE or self._framing.their_state is not h11.DONE:
            return False
        self._framing.start_next_cycle()
        return True

    def close(self) -> None:
        """Give it up."""
        self._writer.close()


class Client:
    """Posts to one URL; as many connections as there are requests at once, kept for the next ones."""

    def __init__(self, url: str, headers: Mapping[str, str]) -> None:
        self._url = urlsplit(url)
        self._proxy = _proxy(self._url)
        self._idle: list[Connection] = []
        host = self._url.netloc.rpartition("@")[2]
        self._headers = [("Host", host), ("Content-Type", "application/json"), ("Accept", "application/json")]
        self._headers += list(headers.items())
        path = f"{self._url.path or '/'}{'?' + self._url.query if self._url.query else ''}"
        absolute = self._proxy is not None and self._url.scheme == "http"
        self._target = f"http://{host}{path}" if absolute else path

    async def post(self, body: bytes, timeout_s: float) -> Response:
        """The server's response, whatever its status.

        Raises `Unreachable`, `Broken`, or `TimeoutError` when the answer is not there within `timeout_s`.
        """
        sent = False
        try:
            async with asyncio.timeout(timeout_s):
                connection = self._kept() or await self._connect()
                try:
                    sent = True
                    length = ("Content-Length", str(len(body)))
                    response = await connection.post(self._target, [*self._headers, length], body)
                except BaseException:
                    connection.close()
                    raise
        except TimeoutError:
            if not sent:
                raise Unreachable(f"no connection within {timeout_s:g} s") from None
            raise
        except (OSError, h11.RemoteProtocolError) as error:
            raise (Broken if sent else Unreachable)(str(error) or type(error).__name__) from None
        if connection.reusable():
            self._idle.append(connection)
        else:
            connection.close()
        return response

    def _kept(self) -> Connection | None:
        while self._idle:
            connection = self._idle.pop()
            if not connection.stale:
                return connection
            connection.close()
        return None

    async def _connect(self) -> Connection:
        secure = _tls() if self._url.scheme == "https" else None
        host, port = self._url.hostname or "", self._url.port or PORTS.get(self._url.scheme, 80)
        if self._proxy is None:
            return Connection(*await asyncio.open_connection(host, port, ssl=secure))
        via = self._proxy
        reader, writer = await asyncio.open_connection(via.hostname or "", via.port or 80)
        if secure is not None:
            with contextlib.ExitStack() as undo:
                undo.callback(writer.close)
                writer.write(f"CONNECT {host}:{port} HTTP/1.1\r\nHost: {host}:{port}\r\n\r\n".encode())
                answer = await reader.readuntil(b"\r\n\r\n")
                if answer.split(b" ")[1:2] != [b"200"]:
                    raise OSError(f"the proxy answered {answer.splitlines()[0].decode('latin-1')!r}")
                await writer.start_tls(secure, server_hostname=host)
                undo.pop_all()
        return Connection(reader, writer)


def _proxy(url: SplitResult) -> SplitResult | None:
    """The proxy that the environment names for a URL (HTTPS_PROXY, HTTP_PROXY, NO_PROXY)."""
    found = getproxies().get(url.scheme)
    if not found or proxy_bypass(unquote(url.hostname or "")):
        return None
    return urlsplit(found if "//" in found else f"http://{found}")


@cache
def _tls() -> ssl.SSLContext:
    """Certificates are checked against the system's authorities, or those behind SSL_CERT_FILE."""
    return ssl.create_default_context()
