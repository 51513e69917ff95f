"""HTTP requests to a server with openai's own client, and the reading of its responses.

`Client` sends a request at most once, to the address that it was given: it neither retries nor follows redirects. A
call has a limit of wall time and of bytes, compressed or not, and its errors tell whether the request may have arrived,
because what arrived may be billed. API keys are redacted from all text that a server sends. `read` turns a response
into a `Sample` or a typed error with its bill (`stages.policy.billing`).
"""

import asyncio
import errno
import functools
import math
import re
import ssl
import weakref
from collections.abc import Awaitable, Iterator, Mapping
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any
from urllib.parse import urlsplit
from urllib.request import getproxies

import anyio
import httpx2
import openai
import orjson

from stages.errors import UsageError
from stages.messages import Spoken, ToolCall, write
from stages.policy import background, billing
from stages.policy.base import PolicyConfig, Sample
from stages.policy.billing import Asked, MalformedBill
from stages.policy.dialect import canonical
from stages.redaction import redacted, redacted_bytes

NOT_CONNECTED = {
    "httpx2": ("ConnectError", "ConnectTimeout", "PoolTimeout", "ProxyError", "UnsupportedProtocol", "InvalidURL"),
    "aiohttp": ("ClientConnectorError", "ConnectionTimeoutError", "InvalidUrlClientError", "NonHttpUrlClientError"),
}
"""Connection errors before which nothing was sent, by HTTP library below openai."""
FAILED_CONNECTIONS = (httpx2.RequestError, ssl.SSLError, anyio.EndOfStream)
"""What httpx2 raises where a request fails; the last two are errors of TLS that it lets through."""
CLOSE_S = 1.0
RAW = {"X-Stainless-Raw-Response": "true", "Content-Type": "application/json"}
"""Headers of openai's `with_raw_response`: return the response unparsed."""
CONNECT_S = 10.0
"""Seconds to connect; a server that needs longer counts as unreachable, however slow its answers may be."""
BODY_BYTES = 64 * 2**20
"""Bytes of a response, decompressed, unless the request is given a limit of its own."""
TOKEN_BYTES = 4096
"""Bytes of an answer for each of its tokens: 20 alternatives with their log-probs take half as many."""


class Unreachable(Exception):
    """No connection was made, so nothing was sent.

    refused: nothing listens at the address, or something on the way says so.
    """

    def __init__(self, reason: str, *, refused: bool = False) -> None:
        super().__init__(reason)
        self.refused = refused


class Broken(Exception):
    """The connection broke after the request was sent; the server may have done the work."""


@dataclass(frozen=True)
class Response:
    """Status, headers in lower case, and the whole body."""

    status: int
    headers: Mapping[str, str]
    body: bytes


@dataclass(eq=False)
class Refused(Exception):
    """A status other than success, raised by calls on batches; `Client.ask` returns it as a response."""

    response: Response


class Client:
    """A client of one server that reuses its connections.

    All methods raise `Unreachable`, `Broken` (a body longer than its limit, too), or `TimeoutError` where the response
    is not complete in time; those on batches also raise `Refused`.
    """

    def __init__(self, base_url: str, key: str, *, connect_s: float = CONNECT_S) -> None:
        self._connect_s = connect_s
        # openai 3.51 repeats 408, 409, 429, 5xx and lost connections on its own and sends no idempotency key, so that
        # a request which timed out would be executed and billed again without an entry in the ledger.
        self._http = _http_client()
        self._client = openai.AsyncOpenAI(base_url=base_url, api_key=key, max_retries=0, http_client=self._http)
        self._key = key
        self._posts: dict[str, httpx2.Request] = {}
        """By path a request without a body: the address and the headers of all its requests."""
        weakref.finalize(self, _close, self._client)

    async def ask(
        self, path: str, body: Mapping[str, Any] | None, timeout_s: float, most_bytes: int = BODY_BYTES
    ) -> Response:
        """Return the response of a path below the base URL to a POST of this body, or to a GET without one.

        Any status and content type is a response. The body is sent as it is. timeout_s: wall time of the whole call.
        """
        # Shorter than the call's, so that a server which cannot be reached is not taken for one that is slow.
        timeout = openai.Timeout(timeout_s, connect=min(self._connect_s, 0.9 * timeout_s))
        sending: Awaitable[Any]
        if body is None:
            sending = self._client.get(path, cast_to=object, options={"timeout": timeout, "headers": RAW})
        else:
            sending = self._http.send(self._post(path, orjson.dumps(dict(body)), timeout))
        try:
            with _bounded(most_bytes), _typed_errors():
                # The timeouts of HTTP libraries bound the silence between two bytes, not the call.
                async with asyncio.timeout(timeout_s):
                    answered = await sending
                    return _response(answered if body is not None else answered.http_response)
        except Refused as error:
            return error.response

    def _post(self, path: str, content: bytes, timeout: openai.Timeout) -> httpx2.Request:
        """Return a POST with openai's address and headers."""
        # Not through openai's own `post`, which makes address and headers anew for each request: half of the CPU time
        # of a call. `chat.completions.create` also transforms every message again, and pydantic takes 31 ms for an
        # answer with 200 tokens and 20 log-probs each.
        if path not in self._posts:
            base = self._client.base_url
            headers = {name: value for name, value in self._client.default_headers.items() if isinstance(value, str)}
            self._posts[path] = self._http.build_request(
                "POST",
                base.copy_with(raw_path=base.raw_path + path.lstrip("/").encode()),
                headers={"Authorization": f"Bearer {self._key}", **headers},
            )
            del self._posts[path].headers["Content-Length"]  # of no body
        same = self._posts[path]
        request = httpx2.Request(
            "POST",
            same.url,
            headers=[*same.headers.raw, (b"Content-Length", b"%d" % len(content))],
            stream=httpx2.ByteStream(content),
            extensions={"timeout": timeout.as_dict()},
        )
        request.read()  # else aiohttp would be given a stream, which takes longer than bytes
        # httpx2 would try encodings at every look at a header.
        request.headers.encoding = "utf-8"
        return request


_MOST_BYTES: ContextVar[int] = ContextVar("most_bytes", default=BODY_BYTES)
"""The limit of the response that is being waited for. openai passes nothing on to the HTTP library below it."""


@contextmanager
def _bounded(most_bytes: int) -> Iterator[None]:
    token = _MOST_BYTES.set(most_bytes)
    try:
        yield
    finally:
        _MOST_BYTES.reset(token)


def _http_client() -> Any:
    """Return the HTTP client below openai's: through aiohttp or httpx2, without redirects, with bounded bodies."""
    base: Any = openai.DefaultAioHttpClient if uses_aiohttp() else openai.DefaultAsyncHttpxClient

    class Bounded(base):
        async def send(self, request: Any, **options: Any) -> Any:
            # Redirects: another address would get the prompt and the key, and each hop may bill a call that the ledger
            # counts once.
            response = await super().send(request, **{**options, "stream": True, "follow_redirects": False})
            try:
                body = await _whole(response)
            finally:
                await response.aclose()
            headers = [(name, value) for name, value in response.headers.raw if name.lower() not in OF_TRANSFER]
            return httpx2.Response(response.status_code, headers=headers, content=body, request=request)

    return Bounded(verify=_ssl_context())


OF_TRANSFER = (b"content-encoding", b"content-length", b"transfer-encoding")
"""Headers about the bytes that were sent, which are not those of the body as it is kept."""


async def _whole(response: Any) -> bytes:
    """Return the body of a response, decompressed in pieces of 1 MiB; `Broken` when it is longer than allowed."""
    # A gzip bomb of 2.4 MB has 2.4 GB, so bytes are counted after decompression. httpx2 decompresses piece by piece
    # from 2.16 on.
    most, body = _MOST_BYTES.get(), bytearray()
    async for piece in response.aiter_bytes():
        body += piece
        if len(body) > most:
            raise Broken(f"its answer is longer than {most:,} bytes")
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


def _close(client: openai.AsyncOpenAI) -> None:
    """Close the connections of a collected client; aiohttp warns about connections that are left open."""
    closing = background.start(client.close())
    try:
        asyncio.get_running_loop()
    except RuntimeError:  # this thread runs no event loop, so it can wait
        with suppress(Exception):
            closing.result(CLOSE_S)


@contextmanager
def _typed_errors() -> Iterator[None]:
    """Raise errors of the libraries as `Refused`, `Unreachable`, `TimeoutError` or `Broken`, their text redacted."""
    try:
        yield
    except openai.APIStatusError as error:
        raise Refused(_response(error.response)) from None
    except (openai.APIConnectionError, *FAILED_CONNECTIONS) as error:
        cause: BaseException = error
        if isinstance(error, openai.APIConnectionError):
            cause = error.__cause__ or error
        timed_out = isinstance(error, (openai.APITimeoutError, httpx2.TimeoutException))
        library = "httpx2"
        # openai's transport reports a lost connection of aiohttp as one that was not made; aiohttp's own error lies one
        # deeper.
        if cause.__cause__ is not None and _of_aiohttp(cause.__cause__):
            cause, library = cause.__cause__, "aiohttp"
        if any(kind.__name__ in NOT_CONNECTED[library] for kind in type(cause).__mro__):
            refused = _is_refused(cause)
            reason = "connection refused" if refused else redacted(str(cause)) or type(cause).__name__
            raise Unreachable(reason, refused=refused) from None
        if isinstance(cause, TimeoutError) if library == "aiohttp" else timed_out:
            raise TimeoutError from None
        raise Broken(redacted(str(cause)) or type(cause).__name__) from None
    except Exception as error:
        if not _of_aiohttp(error):
            raise
        raise Broken(redacted(str(error))) from None  # what came is not HTTP; openai does not wrap this error


def _is_refused(failed: BaseException) -> bool:
    """Return whether a connection was refused, which the libraries wrap in words of their own."""
    cause: BaseException | None = failed
    while cause is not None:
        if isinstance(cause, ConnectionRefusedError) or getattr(cause, "errno", None) == errno.ECONNREFUSED:
            return True
        cause = cause.__cause__ or cause.__context__
    return False


def _of_aiohttp(error: BaseException) -> bool:
    return type(error).__module__.partition(".")[0] == "aiohttp"


def _response(answered: Any) -> Response:
    # httpx2 tries several encodings at every look at its headers, which takes a twentieth of a call's processor time.
    headers = {name.decode("latin-1").lower(): value.decode("latin-1") for name, value in answered.headers.raw}
    # A server may send the key back, in an error message for example: redacted here, where its text enters.
    return Response(answered.status_code, headers, redacted_bytes(answered.content))


RETRYABLE = {408, 409, 425, 429, 500, 502, 503, 504, 529}
NO_SUCH_METHOD = {405, 501}
"""Answers of servers of files and pages to a POST."""
PUSHES_BACK = {429, 503, 529}
"""Statuses of an overloaded server."""
TOO_LONG = re.compile(
    r"context[_ ](length|window|size)|exceed_context|maximum context|longer than the (model|context)"
    r"|(prompt|input|request) (is|was) too long|(prompt|input) (contains|has) \d+ tokens.*(limit|max)"
    r"|too many (input |prompt )?tokens|exceeds? the (available|maximum) (context|number of tokens)",
    re.IGNORECASE,
)
"""Messages about a prompt that does not fit (OpenAI's code, vLLM, SGLang, llama.cpp, Anthropic, OpenRouter)."""
FATAL = {
    401: "the key was refused",
    402: "the account has no credit",
    403: "access is forbidden",
    404: "there is no such model or address",
}


class Failed(Exception):
    """A launch that failed. billed_usd: what it cost, None where that is not known.

    claimed_usd: the cost by the server's own bill, where that is lower.
    """

    billed_usd: float | None = 0.0
    claimed_usd: float | None = None


class Retryable(Failed):
    """A failed launch that may be repeated.

    wait_s: wait that the server asked for.
    """

    def __init__(
        self,
        kind: str,
        message: str,
        wait_s: float | None = None,
        billed_usd: float | None = 0.0,
        claimed_usd: float | None = None,
    ) -> None:
        super().__init__(message)
        self.kind, self.wait_s, self.billed_usd, self.claimed_usd = kind, wait_s, billed_usd, claimed_usd


class NotListening(Retryable):
    """A refused connection: a server that is being restarted, or an address at which there is none."""

    def __init__(self, config: PolicyConfig) -> None:
        super().__init__("connection", f"{config.base_url} cannot be reached (connection refused)")
        self.permanent = Fatal(
            f"{config.base_url} refuses every connection, and no server has answered there. Start the server of "
            f"{config.model!r}, or correct base_url; what is finished is saved.",
            billed_usd=0.0,
        )


class WebPage(Retryable):
    """A page for people in the place of an answer: a wrong address, or a gateway's for a server that is busy."""

    def __init__(self, config: PolicyConfig, hint: str) -> None:
        super().__init__("garbage", f"the server's answer is not JSON (this is a web page; {hint})", billed_usd=None)
        self.permanent = Fatal(
            f"{config.base_url} was asked for an answer of {config.model!r}, but this is a web page; {hint}"
        )


class Rejected(Failed):
    """A request that can never succeed; others may. Kinds: "context" (too long), "no_text", "rejected".

    usage: the server's token counts and price, as fields of a `Sample`.
    """

    def __init__(
        self, kind: str, message: str, *, billed_usd: float | None = 0.0, usage: dict[str, Any] | None = None
    ) -> None:
        super().__init__(message)
        self.kind, self.usage = kind, usage or {}
        self.billed_usd = self.usage.get("cost_usd", billed_usd)
        self.claimed_usd = self.usage.get("claimed_usd")


class Fatal(Failed, UsageError):
    """An answer after which no request to this server can succeed, with these settings."""

    def __init__(self, message: str, *, billed_usd: float | None = None) -> None:
        super().__init__(message)
        self.billed_usd = billed_usd


class Overlong(Exception):
    """An answer longer than was asked for, which is paid and kept: the server does not keep to `max_tokens`."""

    def __init__(self, sample: Sample, tokens: int, limit: int) -> None:
        super().__init__(f"answered with {tokens} tokens, but at most {limit} were asked for")
        self.sample = sample


# Possessive: 22 comments that no page follows took 10 s, each further one twice as long.
WEB_PAGE = re.compile(rb"\s*+(<!--.*?-->\s*+)*+<(!doctype\s++html|html)\b", re.IGNORECASE | re.DOTALL)


def web_page(body: bytes, base_url: str | None) -> str | None:
    """Return what may be wrong with an address whose response is a page for people; None for any other response."""
    if not WEB_PAGE.match(body[:2000]):
        return None
    ends_in_v1 = (base_url or "").rstrip("/").endswith("/v1")
    return "is the URL that of an API?" if ends_in_v1 else "is /v1 missing from the URL?"


def classified(response: Response, config: PolicyConfig, wait_s: float | None) -> Failed:
    """Return the typed error of a response whose status is not 200."""
    try:
        body = orjson.loads(response.body)
        error = body.get("error", body)
        message = str(error.get("message", error) if isinstance(error, dict) else error)
        if isinstance(error, dict) and isinstance(error.get("code"), str) and error["code"] not in message:
            message = f"{message} ({error['code']})"
    except (ValueError, AttributeError):
        message = response.body[:200].decode(errors="replace")
        if (
            response.status < 500 or response.status in NO_SUCH_METHOD
        ):  # above, gateways send pages of their own for a server that is down
            hint = web_page(response.body, config.base_url)
            message = f"this is a web page; {hint}" if hint else message
            if hint and response.status in NO_SUCH_METHOD:
                return WebPage(config, hint)
    billed = None if billing.perhaps_billed(response.status) else 0.0
    if 300 <= response.status < 400:
        message = f"to {_origin(response.headers.get('location'))}"
    # 2,000 characters: TOO_LONG takes the cube of a length for a message that repeats the first words of a pattern.
    return _of_status(response.status, message[:2000], config, wait_s, billed)


def _origin(location: str | None) -> str:
    """Return the server of an address, for a message."""
    try:
        parts = urlsplit(location or "")
    except ValueError:  # a bracket without its end
        return "an address that is none"
    where = f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}" if parts.netloc else "another path"
    return redacted(where)[:200]


def _of_status(
    status: int, message: str, config: PolicyConfig, wait_s: float | None = None, billed_usd: float | None = None
) -> Failed:
    """Return the typed error of a status, which a response or its body holds."""
    if status in FATAL:
        return Fatal(
            f"{config.base_url} answered {status} for {config.model!r}: {FATAL[status]} ({message[:200]}).",
            billed_usd=billed_usd,
        )
    if 300 <= status < 400:
        return Fatal(
            f"{config.base_url} answered {status}, a redirect {message[:200]}. It was not followed, because the prompt "
            "and the key would be sent there, and each address may bill the call. Give the final address as base_url.",
            billed_usd=billed_usd,
        )
    sentence = f"the server answered {status}: {message[:200]}"
    if status in RETRYABLE or status > 504:  # above 504: those of proxies, such as Cloudflare's 520 to 526
        return Retryable("rate_limit" if status == 429 else "server", sentence, wait_s, billed_usd)
    return Rejected("context" if TOO_LONG.search(message) else "rejected", sentence, billed_usd=billed_usd)


def read(raw: bytes, config: PolicyConfig, asked: Asked, *, latency_s: float, attempts: int) -> Sample:
    """Return the answer in a 200 response; raise for a body that holds an error or no choice.

    A body is read as JSON whatever its content type. A tool call is an answer, written as `stages.messages` writes it.
    `Retryable` for a field of another type than the protocol has, `Overlong` for a longer answer than was asked for.
    """
    try:
        body = orjson.loads(raw)
    except ValueError as error:
        # Repeated as other garbage is: gateways send pages for a server that is busy, also with status 200.
        if hint := web_page(raw, config.base_url):
            raise WebPage(config, hint) from None
        raise Retryable("garbage", f"the server's answer is not JSON ({error})", billed_usd=None) from None
    if not isinstance(body, dict):
        raise Retryable(
            "garbage", f"the server answered something that is no JSON object: {str(body)[:80]!r}", billed_usd=None
        )
    # OpenRouter sends status 200 as soon as a model begins to answer, and puts what fails afterwards into the body.
    if fault := body.get("error"):
        code = fault.get("code") if isinstance(fault, dict) else None
        raise _of_status(
            code if type(code) is int else 500, str(fault)[:200], config, None, _billed(body, asked, config)
        )
    try:
        choice = body["choices"][0]
        message, finish = choice["message"], choice.get("finish_reason")
        text, thoughts, written = _text(message), _thoughts(message), _written(message)
        logprobs = _logprobs(choice)
    except (KeyError, IndexError, TypeError, AttributeError, ValueError) as error:
        raise Retryable(
            "garbage",
            f"the server's answer has no choices[0].message.content, or a field of another type ({error!r}): "
            f"{str(body)[:80]!r}",
            billed_usd=_billed(body, asked, config),
        ) from None
    if finish is not None and not isinstance(finish, str):
        raise Retryable(
            "garbage",
            f"the server's answer has a finish_reason that is no text: {finish!r:.40}",
            billed_usd=_billed(body, asked, config),
        )
    try:
        usage = billing.cost(body, [*written, thoughts or ""], asked, config)
    except MalformedBill as error:
        raise Retryable("garbage", f"the server's bill is malformed: {error}", billed_usd=None) from None
    if finish == "error":
        raise Retryable(
            "garbage",
            "the server broke off its answer (finish_reason 'error')",
            billed_usd=usage["cost_usd"] if usage["usage_by"] == "server" else None,
            claimed_usd=usage["claimed_usd"],
        )
    # A reasoning model that used up max_tokens on its thoughts has no text either: that is a truncated answer.
    if text is None and finish != "length":
        usage["finish_reason"] = finish or "stop"
        raise Rejected("no_text", f"the server's answer has no text (finish_reason {finish!r})", usage=usage)
    model, provider = (body.get(name) if isinstance(body.get(name), str) else None for name in ("model", "provider"))
    sample = Sample(
        text=canonical(config.tool_calls, text or ""),
        reasoning=thoughts,
        logprobs=logprobs,
        logprob_kind="unknown" if logprobs else None,
        finish_reason=finish or "stop",
        served_model=model,
        provider=provider,
        latency_s=latency_s,
        attempts=attempts,
        **usage,
    )
    if tokens := billing.overlong(body, written, asked):
        raise Overlong(sample, tokens, asked.completion_tokens)
    return sample


def _billed(body: dict[str, Any], asked: Asked, config: PolicyConfig) -> float | None:
    """Return the bill of an answer that cannot be used; None where it has none, or one that is not believed."""
    try:
        usage = billing.cost(body, [], asked, config)
    except MalformedBill:
        return None
    return float(usage["cost_usd"]) if usage["usage_by"] == "server" else None


def _logprobs(choice: dict[str, Any]) -> list[float] | None:
    given = choice.get("logprobs")
    tokens = given.get("content") if isinstance(given, dict) else None
    # A text is no number, although float() reads it as one.
    if tokens and not all(type(token["logprob"]) in (int, float) for token in tokens):
        raise TypeError("a logprob that is no number")
    return [float(token["logprob"]) for token in tokens] if tokens else None


def _thoughts(message: dict[str, Any]) -> str | None:
    """Return the reasoning that a server separates from the answer, under either of its names."""
    found = (message.get(name) for name in ("reasoning_content", "reasoning"))
    return next((thought for thought in found if isinstance(thought, str) and thought), None)


def _text(message: dict[str, Any]) -> str | None:
    """Return content and tool calls as one text; None where content is null; `KeyError` where there is neither."""
    content = message.get("content")
    if isinstance(content, list):
        content = "".join(part.get("text") or "" for part in content)
    if content is not None and not isinstance(content, str):
        raise TypeError("a content that is no text")
    if calls := _calls(message):
        return write(Spoken(content or "", calls))
    if "content" not in message:
        raise KeyError("content")
    return content


def _calls(message: dict[str, Any]) -> tuple[ToolCall, ...]:
    calls = []
    for function in (call["function"] for call in message.get("tool_calls") or []):
        given = function.get("arguments") or "{}"
        # Some servers give the arguments as an object, where the protocol has the text of its JSON.
        arguments = given if isinstance(given, str) else orjson.dumps(given).decode()
        calls.append(ToolCall(str(function["name"] or ""), arguments))
    return tuple(calls)


def _written(message: dict[str, Any]) -> list[str]:
    """Return the pieces of an answer that the model has written itself, without the marks of our own format."""
    content = message.get("content")
    parts = [part.get("text") or "" for part in content] if isinstance(content, list) else [content or ""]
    return [*parts, *(piece for call in _calls(message) for piece in (call.name, call.arguments))]


def most_bytes(tokens: int) -> int:
    """Return the bytes that a response with so many tokens may have, decompressed."""
    return 2**20 + TOKEN_BYTES * tokens


def retry_after_s(text: str | None) -> float | None:
    """Return the seconds of a Retry-After header; None for a date, for no number of seconds and for no header."""
    try:
        wait_s = float(text) if text is not None else math.nan
    except ValueError:
        return None
    return max(wait_s, 0.0) if math.isfinite(wait_s) else None
