"""Requests to a server through openai's own client: one request a call, no retries, the body as it came.

A request is sent at most once, and the caller learns whether it may have arrived, because what arrived may be billed.
Whatever text a server sends enters here, and no key that it may hold goes further.
"""

import asyncio
import weakref
from collections.abc import Awaitable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any
from urllib.request import getproxies

import openai
import orjson

from stages.policy import background
from stages.redaction import redacted, redacted_bytes

NOT_CONNECTED = {
    "httpx2": ("ConnectError", "ConnectTimeout", "PoolTimeout", "ProxyError", "UnsupportedProtocol", "InvalidURL"),
    "aiohttp": ("ClientConnectorError", "ConnectionTimeoutError", "InvalidUrlClientError", "NonHttpUrlClientError"),
}
"""Causes of a connection error before which nothing was sent, by the names of the HTTP libraries below openai."""
CLOSE_S = 1.0
RAW = {"X-Stainless-Raw-Response": "true", "Content-Type": "application/json"}
"""What openai's `with_raw_response` asks for: the response as it came, nothing parsed."""


CONNECT_S = 10.0
"""A server that does not take up a connection within this time is not there, however long its answers may take."""


class Unreachable(Exception):
    """There was no connection, so nothing was sent."""


class Broken(Exception):
    """The connection broke after the request was sent; the server may have done the work."""


class Refused(Exception):
    """Another status than a success, to a call that is not a chat completion."""

    def __init__(self, response: "Response") -> None:
        super().__init__(str(response.status))
        self.response = response


@dataclass(frozen=True)
class Response:
    """Status, headers in lower case, and the whole body."""

    status: int
    headers: Mapping[str, str]
    body: bytes


class Client:
    """Asks one server; connections are kept for the next requests.

    All methods raise `Unreachable`, `Broken`, or `TimeoutError` when the answer is not there within `timeout_s`.
    """

    def __init__(self, base_url: str, key: str, *, connect_s: float = CONNECT_S) -> None:
        self._connect_s = connect_s
        http = openai.DefaultAioHttpClient() if uses_aiohttp() else None
        self._client = openai.AsyncOpenAI(base_url=base_url, api_key=key, max_retries=0, http_client=http)
        if http is not None:
            weakref.finalize(self, _close, self._client)

    async def post(self, request: Mapping[str, Any], timeout_s: float) -> Response:
        """The response to a chat completion, whatever its status and content type."""
        timeout = openai.Timeout(timeout_s, connect=min(self._connect_s, timeout_s))
        options: Any = {"timeout": timeout, "headers": RAW}
        # `chat.completions.create` walks through every message to make JSON of what is JSON already: a third of the CPU
        sent = self._client.post("/chat/completions", cast_to=object, content=orjson.dumps(request), options=options)
        return await _answered(_whole(sent))

    async def models(self, timeout_s: float = CONNECT_S) -> Response:
        """The server's list of models, which costs nothing."""
        return await _answered(_whole(self._client.models.with_raw_response.list(timeout=timeout_s)))

    async def ask(self, path: str, body: Mapping[str, Any] | None, timeout_s: float) -> Response:
        """The response of an address below the base URL, to a POST of this body, or to a GET where it is None."""
        options: Any = {"timeout": timeout_s}

        async def send() -> Response:
            if body is None:
                got = await self._client.get(path, cast_to=bytes, options=options)
            else:
                got = await self._client.post(path, cast_to=bytes, body=dict(body), options=options)
            return Response(200, {}, redacted_bytes(got))

        return await _answered(send())

    async def find_batch(self, metadata: Mapping[str, str]) -> str | None:
        """The id of the batch that has these metadata. Raises `Refused` and `Broken`, as the methods below do."""
        with _errors():
            async for batch in self._client.batches.list(limit=100):
                if metadata.items() <= (batch.metadata or {}).items():
                    return batch.id
        return None

    async def create_batch(self, lines: bytes, metadata: Mapping[str, str]) -> str:
        """Upload requests, a line each, and make a batch of them; its id."""
        with _errors():
            file = await self._client.files.create(file=("requests.jsonl", lines), purpose="batch")
            batch = await self._client.batches.create(
                input_file_id=file.id,
                endpoint="/v1/chat/completions",
                completion_window="24h",
                metadata=dict(metadata),
            )
        return batch.id

    async def batch(self, batch_id: str) -> dict[str, Any]:
        """A batch as the server tells it."""
        with _errors():
            return (await self._client.batches.retrieve(batch_id)).to_dict()

    async def file(self, file_id: str) -> bytes:
        """The content of a file."""
        with _errors():
            return redacted_bytes((await self._client.files.content(file_id)).content)


def uses_aiohttp() -> bool:
    """Whether calls go through aiohttp, at half the CPU of httpx2: where it is there, and no proxy is to be used."""
    return find_spec("aiohttp") is not None and not getproxies()


def _close(client: openai.AsyncOpenAI) -> None:
    """End the connections of a client that nobody uses any more; aiohttp complains of those that are left open."""
    closing = background.start(client.close())
    try:
        asyncio.get_running_loop()
    except RuntimeError:  # not on the loop itself, so that it can be waited for
        with suppress(Exception):
            closing.result(CLOSE_S)


async def _whole(sent: Awaitable[Any]) -> Response:
    return _response((await sent).http_response)


async def _answered(sending: Awaitable[Response]) -> Response:
    """A response of any status; whether a request that got none may have arrived is told by the error."""
    try:
        return await sending
    except openai.APIStatusError as error:
        return _response(error.response)
    except openai.APIConnectionError as error:
        cause, library = _cause(error)
        if any(kind.__name__ in NOT_CONNECTED[library] for kind in type(cause).__mro__):
            raise Unreachable(redacted(str(cause)) or type(cause).__name__) from None
        if isinstance(cause, TimeoutError) if library == "aiohttp" else isinstance(error, openai.APITimeoutError):
            raise TimeoutError from None
        raise Broken(redacted(str(cause)) or type(cause).__name__) from None
    except Exception as error:
        if not _of_aiohttp(error):
            raise
        raise Broken(redacted(str(error))) from None  # no HTTP at all; openai lets it through, with all its headers


def _of_aiohttp(error: BaseException | None) -> bool:
    return type(error).__module__.partition(".")[0] == "aiohttp"


def _cause(error: openai.APIConnectionError) -> tuple[BaseException, str]:
    """What the HTTP library said, and which one: openai takes aiohttp's lost connections for failed ones."""
    cause = error.__cause__ or error
    below = cause.__cause__
    return (below, "aiohttp") if below is not None and _of_aiohttp(below) else (cause, "httpx2")


@contextmanager
def _errors() -> Iterator[None]:
    try:
        yield
    except openai.APIStatusError as error:
        raise Refused(_response(error.response)) from None
    except openai.APIConnectionError as error:
        raise Broken(redacted(str(error.__cause__ or error))) from None
    except Exception as error:
        if not _of_aiohttp(error):
            raise
        raise Broken(redacted(str(error))) from None


def _response(answered: Any) -> Response:
    headers = {name.lower(): value for name, value in answered.headers.items()}
    return Response(answered.status_code, headers, redacted_bytes(answered.content))
