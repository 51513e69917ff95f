"""HTTP requests to a server through openai's own client, and the reading of its responses.

`Client` sends a request at most once, without retries, and its errors tell whether the request may have arrived,
because what arrived may be billed. API keys are redacted from all text that a server sends. `read` turns a response
into a `Sample` or a typed error with its bill. `probe` finds out which request fields a server accepts.
"""

import asyncio
import re
import weakref
from collections.abc import Awaitable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from typing import Any, Protocol
from urllib.request import getproxies

import openai
import orjson

from stages.errors import UsageError
from stages.messages import Spoken, ToolCall, write
from stages.policy import background
from stages.policy.base import PolicyConfig, Sample
from stages.policy.dialect import EXTRAS, canonical
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


class Refused(Exception):
    """A status other than success, for a call that is not a chat completion."""

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
    """A client of one server that reuses its connections.

    All methods raise `Unreachable`, `Broken`, or `TimeoutError` without an answer within `timeout_s`.
    """

    def __init__(self, base_url: str, key: str, *, connect_s: float = CONNECT_S) -> None:
        self._connect_s = connect_s
        http = openai.DefaultAioHttpClient() if uses_aiohttp() else None
        self._client = openai.AsyncOpenAI(base_url=base_url, api_key=key, max_retries=0, http_client=http)
        if http is not None:
            weakref.finalize(self, _close, self._client)

    async def post(self, request: Mapping[str, Any], timeout_s: float) -> Response:
        """Return the response to a chat completion, whatever its status and content type."""
        timeout = openai.Timeout(timeout_s, connect=min(self._connect_s, timeout_s))
        options: Any = {"timeout": timeout, "headers": RAW}
        # `chat.completions.create` transforms every message again, which takes a third of the CPU time
        sent = self._client.post("/chat/completions", cast_to=object, content=orjson.dumps(request), options=options)
        return await _answered(_whole(sent))

    async def models(self, timeout_s: float = CONNECT_S) -> Response:
        """Return the server's list of models; this call is free."""
        return await _answered(_whole(self._client.models.with_raw_response.list(timeout=timeout_s)))

    async def ask(self, path: str, body: Mapping[str, Any] | None, timeout_s: float) -> Response:
        """Return the response of a path below the base URL to a POST of this body, or to a GET without one."""
        options: Any = {"timeout": timeout_s}

        async def send() -> Response:
            if body is None:
                got = await self._client.get(path, cast_to=bytes, options=options)
            else:
                got = await self._client.post(path, cast_to=bytes, body=dict(body), options=options)
            return Response(200, {}, redacted_bytes(got))

        return await _answered(send())

    async def find_batch(self, metadata: Mapping[str, str]) -> str | None:
        """Return the id of the batch with these metadata, or None; raise `Refused` or `Broken`."""
        with _errors():
            async for batch in self._client.batches.list(limit=100):
                if metadata.items() <= (batch.metadata or {}).items():
                    return batch.id
        return None

    async def create_batch(self, lines: bytes, metadata: Mapping[str, str]) -> str:
        """Upload requests, one per line, and return the id of a new batch of them."""
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
        """Return the server's record of a batch."""
        with _errors():
            return (await self._client.batches.retrieve(batch_id)).to_dict()

    async def file(self, file_id: str) -> bytes:
        """Return the content of a file."""
        with _errors():
            return redacted_bytes((await self._client.files.content(file_id)).content)


def uses_aiohttp() -> bool:
    """Return whether calls go through aiohttp, at half the CPU of httpx2: installed, and no proxy is set."""
    return find_spec("aiohttp") is not None and not getproxies()


def _close(client: openai.AsyncOpenAI) -> None:
    """Close the connections of a collected client; aiohttp warns about connections that are left open."""
    closing = background.start(client.close())
    try:
        asyncio.get_running_loop()
    except RuntimeError:  # this thread runs no event loop, so it can wait
        with suppress(Exception):
            closing.result(CLOSE_S)


async def _whole(sent: Awaitable[Any]) -> Response:
    return _response((await sent).http_response)


async def _answered(sending: Awaitable[Response]) -> Response:
    """Return a response of any status; the error of a request without one tells whether it may have arrived."""
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
        raise Broken(redacted(str(error))) from None  # not HTTP; openai does not wrap it


def _of_aiohttp(error: BaseException | None) -> bool:
    return type(error).__module__.partition(".")[0] == "aiohttp"


def _cause(error: openai.APIConnectionError) -> tuple[BaseException, str]:
    """Return the HTTP library's own error and its name: openai reports aiohttp's lost connections as failed ones."""
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

    told: the server's token counts and price, as fields of a `Sample`; without them nothing is billed.
    """

    def __init__(self, kind: str, message: str, *, told: dict[str, Any] | None = None) -> None:
        super().__init__(message)
        self.kind, self.told = kind, told or {}
        self.billed_usd: float = self.told.get("cost_usd", 0.0)


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
    return of_status(response.status, message, config, wait_s)


def of_status(status: int, message: str, config: PolicyConfig, wait_s: float | None = None) -> Exception:
    """Return the typed error of a status, which a response or its body holds."""
    if status in FATAL:
        return UsageError(
            f"{config.base_url} answered {status} for {config.model!r}: {FATAL[status]} ({message[:200]})."
        )
    said = f"the server answered {status}: {message[:200]}"
    if status in RETRYABLE or status > 504:
        kind = "rate_limit" if status == 429 else "server"
        perhaps_billed = status in PERHAPS_DONE or (status > 504 and status not in PUSHES_BACK)
        return Retryable(kind, said, wait_s, None if perhaps_billed else 0.0)
    return Rejected("context" if TOO_LONG.search(message) else "rejected", said)


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
    told = _usage(body, config, bound)
    billed = told["cost_usd"] if told["usage_by"] == "server" else None
    if body.get("error"):
        failed = of_status(_code(body["error"]), str(body["error"])[:200], config)
        raise Retryable(failed.kind, str(failed), billed_usd=billed) if isinstance(failed, Retryable) else failed
    try:
        choice = body["choices"][0]
        finish, text, logprobs = choice.get("finish_reason"), _text(choice["message"]), _logprobs(choice)
    except (KeyError, IndexError, TypeError, AttributeError):
        raise Retryable(
            "garbage",
            f"the server's answer has no choices[0].message.content: {str(body)[:80]!r}",
            billed_usd=billed,
        ) from None
    if finish == "error":
        raise Retryable("garbage", "the server broke off its answer (finish_reason 'error')", billed_usd=billed)
    if text is None and finish != "length":
        told["finish_reason"] = finish or "stop"
        raise Rejected("no_text", f"the server's answer has no text (finish_reason {finish!r})", told=told)
    model, provider = (body.get(name) if isinstance(body.get(name), str) else None for name in ("model", "provider"))
    return Sample(
        text=canonical(config.tool_calls, text or ""),
        reasoning=_reasoning(choice["message"]),
        logprobs=logprobs,
        logprob_kind="unknown" if logprobs else None,
        finish_reason=finish or "stop",
        served_model=model,
        provider=provider,
        latency_s=latency_s,
        attempts=attempts,
        **told,
    )


def _text(message: dict[str, Any]) -> str | None:
    """Return content and tool calls as one text; None where there is neither."""
    content = message.get("content")
    if isinstance(content, list):
        content = "".join(part.get("text") or "" for part in content)
    calls = tuple(_call(call["function"]) for call in message.get("tool_calls") or [])
    if calls:
        return write(Spoken(content or "", calls))
    if "content" not in message:
        raise KeyError("content")
    return content if isinstance(content, str) else None


def _reasoning(message: dict[str, Any]) -> str | None:
    """What was thought aside, under either of the names that servers give it."""
    thoughts = (message.get(name) for name in ("reasoning_content", "reasoning"))
    return next((thought for thought in thoughts if isinstance(thought, str) and thought), None)


def _logprobs(choice: dict[str, Any]) -> list[float] | None:
    """Log-probs of the answer's tokens, where they were asked for and given."""
    given = choice.get("logprobs")
    tokens = given.get("content") if isinstance(given, dict) else None
    return [float(token["logprob"]) for token in tokens] if tokens else None


def _call(function: dict[str, Any]) -> ToolCall:
    """A call as it came; some servers give the arguments as an object."""
    given = function.get("arguments") or "{}"
    return ToolCall(str(function["name"] or ""), given if isinstance(given, str) else orjson.dumps(given).decode())


def _usage(body: dict[str, Any], config: PolicyConfig, bound: tuple[int, int]) -> dict[str, Any]:
    """Tokens and price: as the server says, else at most."""
    usage = body.get("usage")
    usage = usage if isinstance(usage, dict) else {}
    counted = isinstance(usage.get("prompt_tokens"), int) and isinstance(usage.get("completion_tokens"), int)
    prompt, completion = (usage["prompt_tokens"], usage["completion_tokens"]) if counted else bound
    details = usage.get("prompt_tokens_details")
    cached = int((details.get("cached_tokens") if isinstance(details, dict) else None) or 0)
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


def seconds(text: str | None) -> float | None:
    """A Retry-After header in seconds; a date or nothing is None."""
    try:
        return max(float(text), 0.0) if text is not None else None
    except ValueError:
        return None


def _code(error: Any) -> int:
    code = error.get("code") if isinstance(error, dict) else None
    return code if isinstance(code, int) else 500


QUESTION = [{"role": "user", "content": "Answer with the word OK."}]
LONGEST = 16
"""Tokens of the probe's answer at most."""


class RequestSender(Protocol):
    """A policy that sends requests unchanged."""

    config: PolicyConfig

    async def send(self, request: dict[str, Any], seed: int) -> Sample:
        """Return the answer to one request."""
        ...


@dataclass(frozen=True)
class Accepted:
    """Which request fields a server accepts; None where that is unknown. `error`: its answer to a plain question."""

    seed: bool | None = None
    tools: bool | None = None
    logprobs: bool | None = None
    capture_level: str | None = None
    error: str | None = None

    def as_dict(self) -> dict[str, Any]:
        """Return the fields for the manifest."""
        return asdict(self)

    @property
    def refused(self) -> list[str]:
        """Return the names of the fields that requests must leave out."""
        return [name for name in EXTRAS if getattr(self, name) is False]


async def probe(policy: RequestSender, plain: dict[str, Any]) -> Accepted:
    """Find out which of EXTRAS a server accepts: one call with all of them, or after a rejection one call per field.

    The calls are paid from the run's budget like every other; a rejection is free.
    """
    plain = {**plain, "messages": QUESTION} | {
        name: min(plain[name], LONGEST) for name in ("max_tokens", "max_completion_tokens") if name in plain
    }
    wanted = {name: value for name, value in EXTRAS.items() if policy.config.request.get(name) is not False}
    everything = await policy.send(plain | wanted, 0)
    if everything.error_type != "rejected":
        known = True if everything.error_type in (None, "no_text") else None
        return _accepted(dict.fromkeys(wanted, known), everything)
    alone = {name: await policy.send(plain | {name: value}, 0) for name, value in wanted.items()}
    accepts = {name: sample.error_type in (None, "no_text") for name, sample in alone.items()}
    if not any(accepts.values()):
        found = await policy.send(plain, 0)
        if found.error_type is not None:
            return Accepted(error=found.error)
    return _accepted(accepts, alone.get("logprobs", everything))


def _accepted(accepts: Mapping[str, bool | None], sample: Sample) -> Accepted:
    if None in accepts.values():
        return Accepted(error=sample.error)
    level = "logprobs" if sample.logprobs else "text"
    return Accepted(accepts.get("seed"), accepts.get("tools"), accepts.get("logprobs"), level)
