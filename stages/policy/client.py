"""HTTP requests to a server through openai's own client, and the reading of its responses.

`Client` sends a request at most once, without retries, and its errors tell whether the request may have arrived,
because what arrived may be billed. API keys are redacted from all text that a server sends. `read` turns a response
into a `Sample` or a typed error with its bill.
"""

import asyncio
import functools
import re
import ssl
import weakref
from collections.abc import Awaitable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any
from urllib.request import getproxies

import httpx2
import openai
import orjson

from stages.errors import UsageError
from stages.messages import Spoken, ToolCall, write
from stages.policy import background
from stages.policy.base import PolicyConfig, Sample
from stages.policy.dialect import canonical
from stages.redaction import redacted, redacted_bytes

NOT_CONNECTED = {
    "httpx2": ("ConnectError", "ConnectTimeout", "PoolTimeout", "ProxyError", "UnsupportedProtocol", "InvalidURL"),
    "aiohttp": ("ClientConnectorError", "ConnectionTimeoutError", "InvalidUrlClientError", "NonHttpUrlClientError"),
}
"""Connection errors before which nothing was sent, by HTTP library below openai."""
CLOSE_S = 1.0
RAW = {"X-Stainless-Raw-Response": "true", "Content-Type": "application/json"}
"""Headers of openai's `with_raw_response`: return the response unparsed."""
CONNECT_S = 10.0
"""Seconds to connect; a server that needs longer counts as unreachable, however slow its answers may be."""


class Unreachable(Exception):
    """No connection was made, so nothing was sent."""


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

    All methods raise `Unreachable`, `Broken`, or `TimeoutError` without an answer in time; those on batches also raise
    `Refused`.
    """

    def __init__(self, base_url: str, key: str, *, connect_s: float = CONNECT_S) -> None:
        self._connect_s = connect_s
        http = openai.DefaultAioHttpClient(verify=_ssl_context()) if uses_aiohttp() else None
        # openai 3.51 repeats 408, 409, 429, 5xx and lost connections on its own and sends no idempotency key, so that
        # a request which timed out would be executed and billed again without an entry in the ledger.
        self._client = openai.AsyncOpenAI(base_url=base_url, api_key=key, max_retries=0, http_client=http)
        if http is not None:
            weakref.finalize(self, _close, self._client)

    async def ask(self, path: str, body: Mapping[str, Any] | None, timeout_s: float) -> Response:
        """Return the response of a path below the base URL to a POST of this body, or to a GET without one.

        Any status and content type is a response. The body is sent as it is.
        """
        timeout = openai.Timeout(timeout_s, connect=min(self._connect_s, timeout_s))
        options: Any = {"timeout": timeout, "headers": RAW}
        # Not `chat.completions.create`, which transforms every message again: a third of the CPU time of a call. Nor
        # its typed result: an answer with 200 tokens and 20 log-probs each takes pydantic 31 ms.
        sending: Awaitable[Any]
        if body is None:
            sending = self._client.get(path, cast_to=object, options=options)
        else:
            sending = self._client.post(path, cast_to=object, content=orjson.dumps(dict(body)), options=options)
        try:
            with _typed_errors():
                return _response((await sending).http_response)
        except Refused as error:
            return error.response

    async def find_or_create_batch(self, lines: bytes, metadata: Mapping[str, str]) -> str:
        """Return the id of the batch with these metadata; without one, upload `lines` and make it.

        lines: requests, one per line.
        """
        with _typed_errors():
            async for known in self._client.batches.list(limit=100):
                if metadata.items() <= (known.metadata or {}).items():
                    return known.id
            file = await self._client.files.create(file=("requests.jsonl", lines), purpose="batch")
            batch = await self._client.batches.create(
                input_file_id=file.id,
                endpoint="/v1/chat/completions",
                completion_window="24h",
                metadata=dict(metadata),
            )
        return batch.id

    async def batch(self, batch_id: str) -> dict[str, Any]:
        """Return the server's record of a batch."""
        with _typed_errors():
            return (await self._client.batches.retrieve(batch_id)).to_dict()

    async def file(self, file_id: str) -> bytes:
        """Return the content of a file."""
        with _typed_errors():
            return redacted_bytes((await self._client.files.content(file_id)).content)


@functools.cache
def _ssl_context() -> ssl.SSLContext:
    """Return the settings of TLS, for all clients of a process: reading the machine's certificates takes 30 ms."""
    return httpx2.create_ssl_context()


def uses_aiohttp() -> bool:
    """Return whether calls go through aiohttp: where it is installed and no proxy is set."""
    # Below openai 3.51 a call takes 0.8 ms of CPU through aiohttp and 1.2 ms through httpx2, and the distance grows
    # with the number of requests in flight. But openai's aiohttp client reads no proxy from the environment.
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
    """Raise openai's errors as `Refused`, `Unreachable`, `TimeoutError` or `Broken`, their text redacted."""
    try:
        yield
    except openai.APIStatusError as error:
        raise Refused(_response(error.response)) from None
    except openai.APIConnectionError as error:
        cause = error.__cause__ or error
        library = "httpx2"
        # openai reports a lost connection of aiohttp as one that was not made; aiohttp's own error lies one deeper.
        if cause.__cause__ is not None and _of_aiohttp(cause.__cause__):
            cause, library = cause.__cause__, "aiohttp"
        if any(kind.__name__ in NOT_CONNECTED[library] for kind in type(cause).__mro__):
            raise Unreachable(redacted(str(cause)) or type(cause).__name__) from None
        if isinstance(cause, TimeoutError) if library == "aiohttp" else isinstance(error, openai.APITimeoutError):
            raise TimeoutError from None
        raise Broken(redacted(str(cause)) or type(cause).__name__) from None
    except Exception as error:
        if not _of_aiohttp(error):
            raise
        raise Broken(redacted(str(error))) from None  # what came is not HTTP; openai does not wrap this error


def _of_aiohttp(error: BaseException) -> bool:
    return type(error).__module__.partition(".")[0] == "aiohttp"


def _response(answered: Any) -> Response:
    headers = {name.lower(): value for name, value in answered.headers.items()}
    # A server may send the key back, in an error message for example: redacted here, where its text enters.
    return Response(answered.status_code, headers, redacted_bytes(answered.content))


RETRYABLE = {408, 409, 425, 429, 500, 502, 503, 504, 529}
PUSHES_BACK = {429, 503, 529}
"""Statuses of an overloaded server."""
PERHAPS_DONE = {408, 500, 502, 504}
"""Statuses that may follow a finished, billed answer."""
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


class Retryable(Exception):
    """A failed launch that may be repeated.

    wait_s: wait that the server asked for. billed_usd: cost of this launch; None where it is unknown.
    """

    def __init__(self, kind: str, message: str, wait_s: float | None = None, billed_usd: float | None = 0.0) -> None:
        super().__init__(message)
        self.kind, self.wait_s, self.billed_usd = kind, wait_s, billed_usd


class Rejected(Exception):
    """A request that can never succeed; others may. Kinds: "context" (too long), "no_text", "rejected".

    usage: the server's token counts and price, as fields of a `Sample`; without them nothing is billed.
    """

    def __init__(self, kind: str, message: str, *, usage: dict[str, Any] | None = None) -> None:
        super().__init__(message)
        self.kind, self.usage = kind, usage or {}
        self.billed_usd: float = self.usage.get("cost_usd", 0.0)


def classified(response: Response, config: PolicyConfig, wait_s: float | None) -> Exception:
    """Return the typed error of a response whose status is not 200."""
    try:
        body = orjson.loads(response.body)
        error = body.get("error", body)
        message = str(error.get("message", error) if isinstance(error, dict) else error)
        if isinstance(error, dict) and isinstance(error.get("code"), str) and error["code"] not in message:
            message = f"{message} ({error['code']})"
    except (ValueError, AttributeError):
        message = response.body[:200].decode(errors="replace")
    return _of_status(response.status, message, config, wait_s)


def _of_status(status: int, message: str, config: PolicyConfig, wait_s: float | None = None) -> Exception:
    """Return the typed error of a status, which a response or its body holds."""
    if status in FATAL:
        return UsageError(
            f"{config.base_url} answered {status} for {config.model!r}: {FATAL[status]} ({message[:200]})."
        )
    sentence = f"the server answered {status}: {message[:200]}"
    if status in RETRYABLE or status > 504:
        # Statuses above 504 are those of proxies, such as Cloudflare's 520 to 526; the server behind may have answered.
        kind = "rate_limit" if status == 429 else "server"
        perhaps_billed = status in PERHAPS_DONE or (status > 504 and status not in PUSHES_BACK)
        return Retryable(kind, sentence, wait_s, None if perhaps_billed else 0.0)
    return Rejected("context" if TOO_LONG.search(message) else "rejected", sentence)


def read(raw: bytes, config: PolicyConfig, bound: tuple[int, int], *, latency_s: float, attempts: int) -> Sample:
    """Return the answer in a 200 response; raise for a body that holds an error or no choice.

    A body is read as JSON whatever its content type. A tool call is an answer, written as `stages.messages` writes it.
    bound: upper bounds of prompt and completion tokens, which count where the server leaves out `usage`.
    """
    try:
        body = orjson.loads(raw)
    except ValueError as error:
        raise Retryable("garbage", f"the server's answer is not JSON ({error})", billed_usd=None) from None
    if not isinstance(body, dict):
        raise Retryable(
            "garbage", f"the server answered something that is no JSON object: {str(body)[:80]!r}", billed_usd=None
        )
    usage = _usage(body, config, bound)
    billed = usage["cost_usd"] if usage["usage_by"] == "server" else None
    # OpenRouter sends status 200 as soon as a model begins to answer, and puts what fails afterwards into the body.
    if fault := body.get("error"):
        code = fault.get("code") if isinstance(fault, dict) else None
        failed = _of_status(code if isinstance(code, int) else 500, str(fault)[:200], config)
        raise Retryable(failed.kind, str(failed), billed_usd=billed) if isinstance(failed, Retryable) else failed
    try:
        choice = body["choices"][0]
        message, finish = choice["message"], choice.get("finish_reason")
        text = _text(message)
        given = choice.get("logprobs")
        tokens = given.get("content") if isinstance(given, dict) else None
        logprobs = [float(token["logprob"]) for token in tokens] if tokens else None
    except (KeyError, IndexError, TypeError, AttributeError):
        raise Retryable(
            "garbage",
            f"the server's answer has no choices[0].message.content: {str(body)[:80]!r}",
            billed_usd=billed,
        ) from None
    if finish == "error":
        raise Retryable("garbage", "the server broke off its answer (finish_reason 'error')", billed_usd=billed)
    # A reasoning model that used up max_tokens on its thoughts has no text either: that is a truncated answer.
    if text is None and finish != "length":
        usage["finish_reason"] = finish or "stop"
        raise Rejected("no_text", f"the server's answer has no text (finish_reason {finish!r})", usage=usage)
    # Servers use either name for reasoning that they separate from the answer.
    thoughts = (message.get(name) for name in ("reasoning_content", "reasoning"))
    model, provider = (body.get(name) if isinstance(body.get(name), str) else None for name in ("model", "provider"))
    return Sample(
        text=canonical(config.tool_calls, text or ""),
        reasoning=next((thought for thought in thoughts if isinstance(thought, str) and thought), None),
        logprobs=logprobs,
        logprob_kind="unknown" if logprobs else None,
        finish_reason=finish or "stop",
        served_model=model,
        provider=provider,
        latency_s=latency_s,
        attempts=attempts,
        **usage,
    )


def _text(message: dict[str, Any]) -> str | None:
    """Return content and tool calls as one text; None where content is null; `KeyError` where there is neither."""
    content = message.get("content")
    if isinstance(content, list):
        content = "".join(part.get("text") or "" for part in content)
    calls = []
    for function in (call["function"] for call in message.get("tool_calls") or []):
        given = function.get("arguments") or "{}"
        # Some servers give the arguments as an object, where the protocol has the text of its JSON.
        arguments = given if isinstance(given, str) else orjson.dumps(given).decode()
        calls.append(ToolCall(str(function["name"] or ""), arguments))
    if calls:
        return write(Spoken(content or "", tuple(calls)))
    if "content" not in message:
        raise KeyError("content")
    return content if isinstance(content, str) else None


def _usage(body: dict[str, Any], config: PolicyConfig, bound: tuple[int, int]) -> dict[str, Any]:
    """Return tokens and price as fields of a `Sample`: the server's numbers, else upper bounds."""
    usage = body.get("usage")
    usage = usage if isinstance(usage, dict) else {}
    counted = isinstance(usage.get("prompt_tokens"), int) and isinstance(usage.get("completion_tokens"), int)
    prompt, completion = (usage["prompt_tokens"], usage["completion_tokens"]) if counted else bound
    details = usage.get("prompt_tokens_details")
    cached = int((details.get("cached_tokens") if isinstance(details, dict) else None) or 0)
    # OpenRouter's own field, in every response since it ignores `usage: {include: true}`. Asking others for it is an
    # error: api.openai.com refuses unknown fields with 400.
    billed = usage.get("cost")
    is_billed = isinstance(billed, int | float)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "cached_tokens": cached,
        "cost_usd": float(billed) if isinstance(billed, int | float) else config.cost(prompt, completion, cached),
        "price_known": is_billed or config.priced,
        "usage_by": "server" if counted or is_billed else "bound",
    }


def retry_after_s(text: str | None) -> float | None:
    """Return the seconds of a Retry-After header; None for a date and for no header."""
    try:
        return max(float(text), 0.0) if text is not None else None
    except ValueError:
        return None
