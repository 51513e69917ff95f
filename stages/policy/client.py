"""A server's chat completions through openai's own client: one request a call, no retries, the body as it came.

A request is sent at most once, and the caller learns whether it may have arrived, because what arrived may be billed.
Whatever text a server sends enters here, and no key that it may hold goes further.
"""

from collections.abc import Awaitable, Mapping
from dataclasses import dataclass
from typing import Any

import openai

from stages.redaction import redacted, redacted_bytes

NOT_CONNECTED = ("ConnectError", "ConnectTimeout", "PoolTimeout", "ProxyError", "UnsupportedProtocol", "InvalidURL")
"""Causes of a connection error before which nothing was sent, by the names of the HTTP library below openai."""


CONNECT_S = 10.0
"""A server that does not take up a connection within this time is not there, however long its answers may take."""


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


class Client:
    """Posts to the chat completions of one server; connections are kept for the next requests."""

    def __init__(self, base_url: str, key: str, *, connect_s: float = CONNECT_S) -> None:
        self._connect_s = connect_s
        self._client = openai.AsyncOpenAI(base_url=base_url, api_key=key, max_retries=0)

    async def post(self, request: Mapping[str, Any], timeout_s: float) -> Response:
        """The server's response, whatever its status and content type.

        Raises `Unreachable`, `Broken`, or `TimeoutError` when the answer is not there within `timeout_s`.
        """
        create = self._client.chat.completions.with_raw_response.create
        return await self._responding(
            create(
                model=request["model"],
                messages=request["messages"],
                extra_body=dict(request),
                timeout=openai.Timeout(timeout_s, connect=min(self._connect_s, timeout_s)),
            )
        )

    async def models(self, timeout_s: float = CONNECT_S) -> Response:
        """The server's list of models, which costs nothing; raises as `post` does."""
        return await self._responding(self._client.models.with_raw_response.list(timeout=timeout_s))

    async def _responding(self, call: Awaitable[Any]) -> Response:
        try:
            raw = await call
        except openai.APIStatusError as error:
            return _response(error.response)
        except openai.APIConnectionError as error:
            cause = error.__cause__ or error
            if any(kind.__name__ in NOT_CONNECTED for kind in type(cause).__mro__):
                raise Unreachable(redacted(str(cause)) or type(cause).__name__) from None
            if isinstance(error, openai.APITimeoutError):
                raise TimeoutError from None
            raise Broken(redacted(str(cause)) or type(cause).__name__) from None
        return _response(raw.http_response)


def _response(answered: Any) -> Response:
    headers = {name.lower(): value for name, value in answered.headers.items()}
    return Response(answered.status_code, headers, redacted_bytes(answered.content))
