"""What a server's response means: an answer with tokens and price, or a typed error that says if it was billed.

A body is read as JSON whatever its content type says. A tool call is an answer, written as `stages.messages` writes it.
A server that leaves out `usage` is not free: its tokens then count as their upper bounds, and the answer says so.
"""

import re
from typing import Any

import orjson

from stages.errors import UsageError
from stages.messages import Spoken, ToolCall, write
from stages.policy.base import Sample
from stages.policy.client import Response
from stages.policy.config import PolicyConfig
from stages.policy.tool_formats import canonical

RETRYABLE = {408, 409, 425, 429, 500, 502, 503, 504, 529}
PUSHES_BACK = {429, 503, 529}
"""A server that has too much to do."""
PERHAPS_DONE = {408, 500, 502, 504}
"""Something broke on the way, perhaps after a model had answered."""
TOO_LONG = re.compile(
    r"context[_ ](length|window|size)|exceed_context|maximum context|longer than the (model|context)"
    r"|(prompt|input|request) (is|was) too long|(prompt|input) (contains|has) \d+ tokens.*(limit|max)"
    r"|too many (input |prompt )?tokens|exceeds? the (available|maximum) (context|number of tokens)",
    re.IGNORECASE,
)
"""How servers say that a prompt does not fit (OpenAI's code, vLLM, SGLang, llama.cpp, Anthropic, OpenRouter)."""
FATAL = {
    401: "the key was refused",
    402: "the account has no credit",
    403: "access is forbidden",
    404: "there is no such model or address",
}


class Retryable(Exception):
    """Worth another launch.

    wait_s: what the server asked for, if it did. billed_usd: the bill for this one; None where nobody knows.
    """

    def __init__(self, kind: str, message: str, wait_s: float | None = None, billed_usd: float | None = 0.0) -> None:
        super().__init__(message)
        self.kind, self.wait_s, self.billed_usd = kind, wait_s, billed_usd


class Rejected(Exception):
    """This one request can never succeed; others may. Kinds: "context" (too long), "no_text", "rejected".

    told: what the server said about tokens and price, as fields of a `Sample`; nothing is billed without it.
    """

    def __init__(self, kind: str, message: str, *, told: dict[str, Any] | None = None) -> None:
        super().__init__(message)
        self.kind, self.told = kind, told or {}
        self.billed_usd: float = self.told.get("cost_usd", 0.0)


def classified(response: Response, config: PolicyConfig, wait_s: float | None) -> Exception:
    """The error that a response with another status than 200 is."""
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
    """The error behind a status, of a response or inside a body."""
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
    """The answer in a 200 response; a body that holds an error or no choice is not an answer.

    bound: at most so many prompt and completion tokens, for a server that does not count.
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
    """Content and tool calls as one text; None where there is neither."""
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
