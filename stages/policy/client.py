"""HTTP requests to a model server: each is sent at most once, and fails with a typed error that holds its bill.

`Client` sends a request to the address that it was given, and follows no redirect. A call has a limit of wall time and
of bytes, decompressed. After a `RetryableError` the request may be sent again (`retrying` does), a `RejectedError` is
about this request alone, and after a `FatalError` no request to this server can succeed. Each holds what the call cost,
None where that is unknown, because a request that arrived may have been billed. API keys are redacted from all text
that a server sends.

openai's library provides addresses, headers and connections. Its retries stay off, as they have no entry in the ledger;
so does its `post`, which takes twice the processor time of `Client.ask` (0.9 ms a call instead of 0.5). It is imported
once a server takes connections: that takes 0.9 s, which no mistake in an address has to wait for.
"""

import asyncio
import errno
import functools
import re
import socket
import ssl
import sys
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from importlib.util import find_spec
from ipaddress import ip_address, ip_network
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit
from urllib.request import getproxies, proxy_bypass

import anyio
import httpx2
import orjson
import tenacity

from composer_stages.errors import BadInput, ComposerError, Incomplete, InfrastructureError, UsageError
from composer_stages.policy import background, faults
from composer_stages.policy.base import PolicyConfig
from composer_stages.policy.faults import Fault, Sent, parse_fault, refused_field
from composer_stages.redaction import redacted, redacted_bytes
from composer_stages.words import Sentence

if TYPE_CHECKING:
    import openai

NOT_CONNECTED = {
    "httpx2": ("ConnectError", "ConnectTimeout", "PoolTimeout", "ProxyError", "UnsupportedProtocol", "InvalidURL"),
    "aiohttp": ("ClientConnectorError", "ConnectionTimeoutError", "InvalidUrlClientError", "NonHttpUrlClientError"),
}
"""Connection errors before which nothing was sent, by HTTP library."""
FAILED_CONNECTIONS = (httpx2.RequestError, ssl.SSLError, anyio.EndOfStream)
"""What httpx2 raises where a request fails; the last two are errors of TLS that it lets through."""
CLOSE_S = 1.0
KNOCK_S = 1.0
CONNECT_S = 10.0
"""Seconds to connect; a server that needs longer counts as unreachable, however slow its answers may be."""
BODY_BYTES = 64 * 2**20
"""Default limit of a decompressed response, in bytes."""
TOKEN_BYTES = 4096
"""Bytes of an answer for each of its tokens: 20 alternatives with their log-probs take half as many."""


@dataclass(frozen=True)
class Response:
    """Status, headers with names in lower case, and body of a response."""

    status: int
    headers: Mapping[str, str]
    body: bytes


class CallError(Exception):
    """A failed launch. billed_usd: its cost, None if the cost is unknown.

    claimed_usd: the cost by the server's own bill, where that is lower. permanent: the error of the run where all
    requests fail so.
    """

    billed_usd: float | None = 0.0
    claimed_usd: float | None = None
    permanent: Any = None

    def __init__(self, kind: str, message: str, *, billed_usd: float | None = 0.0, permanent: Any = None) -> None:
        super().__init__(message)
        self.kind, self.billed_usd, self.permanent = kind, billed_usd, permanent


NO_ANSWER = ("connection", "timeout")
"""Kinds of `RetryableError` after which the server has sent no complete answer."""


class RetryableError(CallError):
    """A failed launch that may be repeated. Kinds: "connection", "timeout", "rate_limit", "server", "garbage".

    wait_s: wait that the server asked for. pushes_back: whether the server is overloaded.
    """

    def __init__(
        self,
        kind: str,
        message: str,
        *,
        claimed_usd: float | None = None,
        wait_s: float | None = None,
        pushes_back: bool = False,
        **about: Any,
    ) -> None:
        super().__init__(kind, message, **about)
        self.claimed_usd, self.wait_s, self.pushes_back = claimed_usd, wait_s, pushes_back


class RefusedConnection(RetryableError):
    """A refused connection: the server restarts, or no server has this address."""

    def __init__(self, config: PolicyConfig) -> None:
        base_url, proxy = config.base_url, proxy_of(config.base_url)
        super().__init__("connection", Sentence("policy.connection-refused", base_url=base_url, proxy=proxy))
        self.permanent = UnavailableError(
            "policy.server-refuses-connections", base_url=base_url, proxy=proxy, model=config.model, billed_usd=0.0
        )


class WebPage(RetryableError):
    """A page for people in the place of an answer: a wrong address, or a gateway's for a server that is busy."""

    def __init__(self, config: PolicyConfig, hint: str) -> None:
        self.message = f"a web page; {hint}"
        super().__init__("garbage", Sentence("policy.web-page-not-json", hint=hint), billed_usd=None)
        self.permanent = RefusedError(
            "policy.web-page-for-answer", base_url=config.base_url, model=config.model, hint=hint
        )


class RejectedError(CallError):
    """A request that can never succeed. Kinds: "context" (too long), "no_text", "malformed", "rejected", and others.

    usage: the server's token counts and price, as fields of a `Sample`. text: what the model wrote, where the server
    could not read its call.
    """

    def __init__(
        self, kind: str, message: str, *, usage: dict[str, Any] | None = None, text: str = "", **about: Any
    ) -> None:
        super().__init__(kind, message, **about)
        self.usage, self.text = usage or {}, text
        self.billed_usd = self.usage.get("cost_usd", self.billed_usd)
        self.claimed_usd = self.usage.get("claimed_usd")


class FatalError(CallError, ComposerError):
    """A failure after which no request to this server can succeed, with these settings."""

    def __init__(self, code: str, *, billed_usd: float | None = None, **values: Any) -> None:
        ComposerError.__init__(self, code, **values)
        self.billed_usd = billed_usd


class RefusedError(FatalError, UsageError):
    """A server that does not take the address, the key or the request."""


class MissingModel(FatalError, BadInput):
    """A server without the requested model, or without such an address."""

    @property
    def message(self) -> str:
        """Return what the server said."""
        return str(self.values["message"])

    @property
    def permanent(self) -> FatalError:
        """Return the error itself, which another launch would not change."""
        return self


class UnavailableError(FatalError, InfrastructureError):
    """A server that answers nothing, or not without money."""


class Forbidden(RejectedError):
    """A 403: of this input alone, or of all requests (`permanent`), which the answer to another request tells."""


MESSAGES = "messages"


class RefusedField(CallError):
    """A field (`kind`) of the request that the server does not take, or (`permanent`) not with this value.

    `MESSAGES` where it takes no message without text, `faults.REASONING` where it takes none without its thoughts.
    """


class Client:
    """A client of the server of one model, `config.base_url`, that reuses its connections.

    connect_s: seconds to connect; the whole call has `config.timeout_s`, unless a limit is passed.
    """

    def __init__(self, config: PolicyConfig, *, connect_s: float = CONNECT_S) -> None:
        self.config, self._key, self._connect_s = config, config.key(), connect_s
        self._requests: dict[tuple[str, str], httpx2.Request] = {}
        """By method and path a request without a body: the address and the headers of all its requests."""

    @functools.cached_property
    def _http(self) -> Any:
        return _http_client(proxy_of(self.config.base_url))

    @functools.cached_property
    def _client(self) -> "openai.AsyncOpenAI":
        import openai

        # openai 3.51 repeats 408, 409, 429, 5xx and lost connections on its own and sends no idempotency key, so that
        # a request which timed out would be executed and billed again without an entry in the ledger.
        base_url = str(self.config.base_url).partition("?")[0]
        client = openai.AsyncOpenAI(base_url=base_url, api_key=self._key, max_retries=0, http_client=self._http)
        weakref.finalize(self, _close, client)
        return client

    async def ask(
        self,
        path: str,
        body: Mapping[str, Any],
        *,
        most_bytes: int = BODY_BYTES,
        charged: Callable[[Response, bool], float | None] | None = None,
    ) -> Response:
        """Return the response with status 200, or another of 2xx, to a POST of this JSON below the base URL.

        Raises `RetryableError`, `RejectedError` or `FatalError`. most_bytes: limit of the response. charged: as in
        `error_of`.
        """
        content = orjson.dumps(dict(body))
        response = await self._exchange("POST", path, content, None, most_bytes)
        if not 200 <= response.status < 300:  # Polza.ai answers with 201
            raise error_of(response, self.config, charged, Sent.of(body, len(content)))
        return response

    async def explained(self, error: "WebPage | MissingModel") -> FatalError:
        """Return the error of an address that is none of the API's, with the one to use where that can be told."""
        base = str(self.config.base_url).rstrip("/")
        if self.config.model in str(error.message) or await self._lists_models(base):
            return error.permanent
        until_version = re.sub(r"(/v\d\w*)/.*$", r"\1", base)
        others = [until_version] if until_version != base else []
        others += [re.sub(r"/v\d+$", "", base) if re.search(r"/v\d\w*$", base) else f"{base}/v1"]
        serving = [address for address in others if await self._lists_models(address)]
        return RefusedError(
            "policy.other-address",
            base_url=self.config.base_url,
            address=[*serving, *others][0],
            message=error.message,
            known=bool(serving),
        )

    async def _lists_models(self, base_url: str) -> bool:
        try:
            client = Client(self.config.model_copy(update={"base_url": base_url}), connect_s=self._connect_s)
            return await client.models() is not None
        except (CallError, ComposerError):
            return False

    async def get(self, path: str, *, timeout_s: float | None = None) -> Response:
        """Return the response, of any status, to a GET below the base URL; such a request costs nothing."""
        return await self._exchange("GET", path, b"", timeout_s, BODY_BYTES)

    async def models(self) -> list[dict[str, Any]] | None:
        """Return the rows of the server's list of models, each with an `id`; None if the server has no such list.

        The list is free. Raises as `ask` does for a server that cannot be reached, a refused key and a web page.
        """
        response = await self.get("/models", timeout_s=CONNECT_S)
        url = self.config.base_url
        if response.status < 500 and (hint := web_page(response.body, url)):
            raise RefusedError("policy.web-page-for-models", url=url, hint=hint)
        if response.status == 403 and b"scope" in response.body.lower():
            return None  # a key of OpenAI's that may answer, and not list (api.model.read)
        if response.status in (401, 403):
            where = self.config.api_key_env or "api_key_env"
            raise RefusedError("policy.key-refused-for-models", url=url, status=response.status, where=where)
        if 300 <= response.status < 400 or response.status in RETRYABLE:
            raise error_of(response, self.config)
        try:
            body = orjson.loads(response.body) if response.status == 200 else {"data": None}
            rows = body if isinstance(body, list) else body["data"]  # Together's is the list itself
            return rows if rows is None or all(isinstance(row["id"], str) for row in rows) else None
        except (orjson.JSONDecodeError, KeyError, TypeError):
            return None

    async def _exchange(
        self, method: str, path: str, content: bytes, timeout_s: float | None, most_bytes: int
    ) -> Response:
        """Return the response, of any status, to a request that is sent once."""
        timeout_s = timeout_s or self.config.timeout_s
        # Shorter than the call's, so that a server which cannot be reached is not taken for one that is slow.
        timeout = httpx2.Timeout(timeout_s, connect=min(self._connect_s, 0.9 * timeout_s))
        if "openai" not in sys.modules:
            await self._knock()
        request = self._request(method, path, content, timeout)
        with _typed_errors(self.config, timeout_s):
            # The timeouts of HTTP libraries bound the silence between two bytes, not the call.
            async with asyncio.timeout(timeout_s):
                # Redirects: another address would get the prompt and the key, and each hop may bill a call that the
                # ledger counts once.
                answered = await self._http.send(request, stream=True, follow_redirects=False)
                try:
                    body = await _read_body(answered, most_bytes)
                finally:
                    await answered.aclose()
        # httpx2 tries several encodings at every look at its headers: a twentieth of a call's processor time.
        headers = {name.decode("latin-1").lower(): value.decode("latin-1") for name, value in answered.headers.raw}
        # A server may send the key back, in an error message for example: redacted here, where its text enters.
        return Response(answered.status_code, headers, redacted_bytes(body))

    async def _knock(self) -> None:
        """Raise `RefusedConnection` if every address refuses, `RetryableError` for an unknown host name."""
        parts = urlsplit(self.config.base_url or "")
        if proxy_of(self.config.base_url):
            return  # the server may only be reachable through the proxy
        try:
            where = parts.hostname or "", parts.port or {"https": 443}.get(parts.scheme, 80)
            async with asyncio.timeout(KNOCK_S):
                (await asyncio.to_thread(socket.create_connection, where, KNOCK_S, all_errors=True)).close()
        except ExceptionGroup as failed:
            if all(isinstance(error, ConnectionRefusedError) for error in failed.exceptions):
                raise RefusedConnection(self.config) from None
        except (TimeoutError, ValueError):
            pass  # the request has longer, and reports an address that is none
        except OSError as error:
            raise RetryableError(
                "connection",
                Sentence("policy.connection-failed", base_url=self.config.base_url, reason=error.strerror, proxy=None),
            ) from None

    def _request(self, method: str, path: str, content: bytes, timeout: httpx2.Timeout) -> httpx2.Request:
        """Return a request with openai's address and headers."""
        # Not through openai's own `post`, which makes address and headers anew for each request: half of the CPU time
        # of a call. `chat.completions.create` also transforms every message again, and pydantic takes 31 ms for an
        # answer with 200 tokens and 20 log-probs each.
        if (method, path) not in self._requests:
            base, query = self._client.base_url, str(self.config.base_url).partition("?")[2]
            headers = {name: value for name, value in self._client.default_headers.items() if isinstance(value, str)}
            template = self._http.build_request(
                method,
                base.copy_with(raw_path=f"{base.raw_path.decode()}{path.lstrip('/')}{query and '?'}{query}".encode()),
                headers={"Authorization": f"Bearer {self._key}", **headers},
            )
            template.headers.pop("Content-Length", None)  # of no body
            self._requests[method, path] = template
        same = self._requests[method, path]
        length = [(b"Content-Length", b"%d" % len(content))] if content else []
        request = httpx2.Request(
            method,
            same.url,
            headers=[*same.headers.raw, *length],
            stream=httpx2.ByteStream(content),
            extensions={"timeout": timeout.as_dict()},
        )
        request.read()  # else aiohttp would be given a stream, which takes longer than bytes
        # httpx2 would try encodings at every look at a header.
        request.headers.encoding = "utf-8"
        return request


MAX_WAIT_S = 120.0
FIRST_WAIT_S, LONGEST_WAIT_S, JITTER_S = 0.5, 8.0, 0.5
BACKOFF = tenacity.wait_exponential(FIRST_WAIT_S, max=LONGEST_WAIT_S) + tenacity.wait_random(0.0, JITTER_S)
"""Waits as openai's own client has them: 0.5 s, doubled up to 8 s, with jitter."""


def retrying(config: PolicyConfig, **callbacks: Any) -> tenacity.AsyncRetrying:
    """Return tenacity's loop over the launches of one request, at most `config.max_attempts`.

    callbacks: further arguments of `tenacity.AsyncRetrying`, which override those set in this function.
    """
    usual: dict[str, Any] = {
        "stop": tenacity.stop_after_attempt(config.max_attempts),
        "retry": tenacity.retry_if_exception_type(RetryableError),
        "wait": _pause,
        "reraise": True,
    }
    return tenacity.AsyncRetrying(**(usual | callbacks))


def _pause(state: tenacity.RetryCallState) -> float:
    """Return the seconds before the next launch: the server's Retry-After up to two minutes, else 0.5 to 8 s.

    Where it refuses again after such a wait, at least as long as without: Azure asks to wait 0 ms for a spent minute.
    """
    error = state.outcome.exception() if state.outcome else None
    if not isinstance(error, RetryableError) or error.wait_s is None:
        return BACKOFF(state)
    if error.wait_s > MAX_WAIT_S:
        raise Incomplete("policy.wait-too-long", wait_s=error.wait_s, max_wait_s=MAX_WAIT_S)
    return error.wait_s if state.attempt_number == 1 else max(error.wait_s, BACKOFF(state))


class TooLong(Exception):
    """A response with more bytes than its limit."""


def _http_client(proxy: str | None) -> Any:
    """Return the HTTP client below openai's: through aiohttp or httpx2."""
    import openai

    client: Any = openai.DefaultAioHttpClient if uses_aiohttp() else openai.DefaultAsyncHttpxClient
    try:
        return client(verify=_ssl_context(), trust_env=False, **({"proxy": proxy} if proxy else {}))
    except (ImportError, ValueError) as error:
        raise UsageError("policy.proxy-unusable", proxy=proxy, error=str(error)) from None


def proxy_of(base_url: str | None) -> str | None:
    """Return the proxy that the environment names for an address; None for an address of NO_PROXY."""
    parts, proxies = urlsplit(base_url or ""), getproxies()
    proxy = proxies.get(parts.scheme) or proxies.get("all")
    exempt = False
    for entry in proxies.get("no", "").split(","):
        with suppress(ValueError):  # a name; urllib does not know networks and addresses of IPv6
            exempt |= ip_address(parts.hostname or "") in ip_network(entry.strip(" []"), strict=False)
    if not proxy or exempt or proxy_bypass(parts.netloc.rpartition("@")[2]):
        return None
    return proxy if "://" in proxy else f"http://{proxy}"


async def _read_body(response: Any, most: int) -> bytes:
    """Return the body of a response, decompressed in pieces of 1 MiB; raise `TooLong` where it has more bytes."""
    # A gzip bomb of 2.4 MB has 2.4 GB, so bytes are counted after decompression. httpx2 decompresses piece by piece
    # from 2.16 on.
    body = bytearray()
    async for piece in response.aiter_bytes():
        body += piece
        if len(body) > most:
            raise TooLong(Sentence("policy.response-too-long", most=most))
    return bytes(body)


@functools.cache
def _ssl_context() -> ssl.SSLContext:
    """Return the settings of TLS, for all clients of a process: reading the machine's certificates takes 30 ms."""
    return httpx2.create_ssl_context()


def uses_aiohttp() -> bool:
    """Return whether calls go through aiohttp: where it is installed and no proxy is set."""
    # Under openai's client (3.51) a call takes 0.8 ms of CPU through aiohttp and 1.2 ms through httpx2, and the
    # difference grows with the number of requests in flight. But openai's aiohttp client reads no proxy from the
    # environment.
    return find_spec("aiohttp") is not None and not getproxies()


def _close(client: "openai.AsyncOpenAI") -> None:
    """Close the connections of a collected client; aiohttp warns about connections that are left open."""
    closing = background.start(client.close())
    try:
        asyncio.get_running_loop()
    except RuntimeError:  # this thread runs no event loop, so it can wait
        with suppress(Exception):
            closing.result(CLOSE_S)


@contextmanager
def _typed_errors(config: PolicyConfig, timeout_s: float) -> Iterator[None]:
    """Raise errors of connections as `RetryableError`, free where nothing was sent, their text redacted."""
    try:
        yield
    except TimeoutError:
        raise _timed_out(config, timeout_s) from None
    except FAILED_CONNECTIONS as error:
        cause: BaseException = error
        library = "httpx2"
        # openai's transport reports a lost connection of aiohttp as one that was not made; aiohttp's own error lies one
        # deeper.
        if cause.__cause__ is not None and _is_of_aiohttp(cause.__cause__):
            cause, library = cause.__cause__, "aiohttp"
        why = redacted(str(cause)) or type(cause).__name__
        if fatal := _fault_of_tls(config, error):
            raise fatal from None
        if any(kind.__name__ in NOT_CONNECTED[library] for kind in type(cause).__mro__):
            if any(getattr(each, "errno", None) == errno.ECONNREFUSED for each in _causes(cause)):
                raise RefusedConnection(config) from None
            about = {"base_url": config.base_url, "proxy": proxy_of(config.base_url), "reason": why}
            message = Sentence("policy.connection-failed", **about)
            raise RetryableError("connection", message) from None
        if isinstance(cause, TimeoutError if library == "aiohttp" else httpx2.TimeoutException):
            raise _timed_out(config, timeout_s) from None
        raise _lost(config, why) from None
    except Exception as error:
        if not isinstance(error, TooLong) and not _is_of_aiohttp(error):
            raise
        raise _lost(config, redacted(str(error))) from None  # aiohttp's: what was sent is not HTTP


def _timed_out(config: PolicyConfig, timeout_s: float) -> RetryableError:
    why = Sentence("policy.no-answer-in-time", base_url=config.base_url, timeout_s=timeout_s)
    return RetryableError("timeout", why, billed_usd=None, pushes_back=True)


def _lost(config: PolicyConfig, why: str) -> RetryableError:
    message = Sentence("policy.connection-closed", base_url=config.base_url, reason=why)
    return RetryableError("connection", message, billed_usd=None)


def _causes(failed: BaseException) -> Iterator[BaseException]:
    """Yield an error and what caused it; HTTP libraries wrap errors."""
    cause: BaseException | None = failed
    while cause is not None:
        yield cause
        cause = cause.__cause__ or cause.__context__


NO_TLS = ("WRONG_VERSION_NUMBER", "RECORD_LAYER_FAILURE", "HTTP_REQUEST")
"""What OpenSSL says of a server that answers without TLS."""


def _fault_of_tls(config: PolicyConfig, failed: BaseException) -> FatalError | None:
    """Return the error of a certificate that is not trusted, or of a server without TLS; None for any other."""
    for cause in reversed([*_causes(failed)]):  # aiohttp's own have the same types, and say less
        if isinstance(cause, ssl.SSLCertVerificationError):
            why = getattr(cause, "verify_message", None) or str(cause)
            return RefusedError("policy.certificate-not-trusted", base_url=config.base_url, reason=why, billed_usd=0.0)
        if getattr(cause, "reason", None) in NO_TLS:
            address = f"http://{str(config.base_url).removeprefix('https://')}"
            return RefusedError("policy.no-tls", base_url=config.base_url, address=address, billed_usd=0.0)
    return None


def _is_of_aiohttp(error: BaseException) -> bool:
    return type(error).__module__.partition(".")[0] == "aiohttp"


def max_response_bytes(tokens: int) -> int:
    """Return the limit in bytes of a decompressed response with this number of tokens."""
    return 2**20 + TOKEN_BYTES * tokens


RETRYABLE = {408, 409, 425, 429, 500, 502, 503, 504, 529}
NO_SUCH_METHOD = {405, 501}
"""Answers of servers of files and pages to a POST."""
PUSHES_BACK = {429, 503, 529}
"""Statuses of an overloaded server."""
MESSAGE_BYTES = 2000
NOTHING_SENT = Sent()
FREE = {401, 402, 403, 404, 405, 413, 415, 429}
"""Statuses that refuse a request before any work, which is free unless a bill comes with it; others may be billed.

401 to 404 give no access, 405, 413 and 415 read no body, and 429 comes before the work.

Azure's "Plan to manage costs" bills by work done: it names 400 (content filter, input limit) and 408 as statuses that
may be charged, 401 and 429 as free. Perplexity bills no 429. Of 422 fal.ai charges some, and Groq answers with it after
a model's malformed tool call; novita.ai charges 499. OpenRouter sends errors inside a 200 once a model has begun.
"""
# Possessive: 22 comments that no page follows took 10 s, each further one twice as long.
WEB_PAGE = re.compile(rb"\s*+(<!--.*?-->\s*+)*+<(!doctype\s++html|html)\b", re.IGNORECASE | re.DOTALL)


def web_page(body: bytes, base_url: str | None) -> str | None:
    """Return a hint about the base URL if a response is an HTML page; None for any other response."""
    if not WEB_PAGE.match(body[:2000]):
        return None
    ends_in_v1 = (base_url or "").rstrip("/").endswith("/v1")
    return "is the URL that of an API?" if ends_in_v1 else "is /v1 missing from the URL?"


def error_of(
    response: Response,
    config: PolicyConfig,
    charged: Callable[[Response, bool], float | None] | None = None,
    sent: Sent = NOTHING_SENT,
) -> CallError:
    """Return the typed error of a response whose status is not 200.

    charged: returns what the call cost, None where that is not known, given whether the status is `FREE`, which decides
    without it.
    """
    try:
        body = orjson.loads(response.body)
    except ValueError:
        body = response.body[:MESSAGE_BYTES].decode(errors="replace")
        # Above 500, gateways send their own pages for a server that is down.
        if response.status < 500 or response.status in NO_SUCH_METHOD:
            hint = web_page(response.body, config.base_url)
            body = f"this is a web page; {hint}" if hint else body
            if hint and response.status in NO_SUCH_METHOD:
                return WebPage(config, hint)
    fault = parse_fault(body)
    if 300 <= response.status < 400:
        fault = Fault(f"to {_origin(response.headers.get('location'))}")
    wait_s = faults.told_wait_s(response.headers, fault)
    is_free = response.status in FREE
    billed = charged(response, is_free) if charged else 0.0 if is_free else None
    return error_of_fault(fault, response.status, config, sent, billed_usd=billed, wait_s=wait_s)


def _origin(location: str | None) -> str:
    """Return the server of an address, for a message."""
    try:
        parts = urlsplit(location or "")
    except ValueError:  # a bracket without its end
        return "an address that is none"
    where = f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}" if parts.netloc else "another path"
    return redacted(where)[:200]


def error_of_fault(
    fault: Fault,
    status: int,
    config: PolicyConfig,
    sent: Sent,
    *,
    billed_usd: float | None,
    wait_s: float | None = None,
    code: int | None = None,
) -> CallError:
    """Return the typed error of a refusal, by what it means and then by its status; a 200 may hold one, too.

    code: the status to tell, where `status` is what the refusal is taken for.
    """
    message, means = fault.message[:200], faults.meaning(fault, status, sent)
    about: dict[str, Any] = {"base_url": config.base_url, "status": code or status, "message": message}
    sentence = Sentence("policy.status-of-error", status=code or status, message=message)
    if means == faults.ACCOUNT:  # which is asked before any work
        return UnavailableError("policy.account-empty", model=config.model, billed_usd=billed_usd or 0.0, **about)
    if means == faults.KEY:
        return RefusedError("policy.key-refused", model=config.model, billed_usd=billed_usd or 0.0, **about)
    if status == 404:
        return MissingModel("policy.request-refused", model=config.model, billed_usd=billed_usd, **about)
    if 300 <= status < 400:
        return RefusedError("policy.redirect", billed_usd=billed_usd, **about)
    if means == faults.MALFORMED_CALL:
        return RejectedError(means, message, billed_usd=billed_usd, text=fault.generation)
    if means == faults.SIGNATURES:
        sentence = Sentence("policy.signatures-wanted", status=code or status, message=message)
        return RejectedError("rejected", sentence, billed_usd=billed_usd)
    if means == faults.CONTEXT:
        return RejectedError(means, sentence, billed_usd=billed_usd)
    is_parameter = means == faults.PARAMETER and status in (400, 415, 422)
    learnt = {faults.EMPTY_MESSAGE: MESSAGES, faults.THOUGHTS: faults.REASONING}.get(means or "")
    if field := learnt or (refused_field(fault, sent) if is_parameter else None):
        refused = {"base_url": config.base_url, "field": field, "message": message}
        permanent = RefusedError("policy.field-refused", billed_usd=billed_usd, **refused)
        return RefusedField(field, message, billed_usd=billed_usd, permanent=permanent)
    if status == 403:
        permanent = RefusedError("policy.request-refused", model=config.model, billed_usd=billed_usd, **about)
        return Forbidden("rejected", sentence, billed_usd=billed_usd, permanent=permanent)
    if means != faults.FILTERED and (status in RETRYABLE or status > 504):  # above: Cloudflare's 520 to 526 and others
        return RetryableError(
            "rate_limit" if status == 429 else "server",
            sentence,
            billed_usd=billed_usd,
            wait_s=wait_s,
            pushes_back=status in PUSHES_BACK,
        )
    if means is None:
        sentence = Sentence("policy.refusal-not-understood", status=code or status, message=message, least=sent.least)
    return RejectedError("rejected", sentence, billed_usd=billed_usd)
