"""Responses of a server read: a 200 becomes a `Sample` with its bill, or a typed error of `policy.client`.

A bill is checked against the request and against the text of the answer. A possible bill is accepted, but never below
the configured prices. A bill that is too small for its text, negative, missing, or not made of numbers costs the upper
bound that was reserved for the call, so that a limit holds whatever a server claims; the claim is recorded with the
cost. `UNUSABLE` lists why a body is not an answer, and whether a retry can help.
"""

import json
import math
import re
from collections.abc import Iterator, Mapping
from contextlib import suppress
from typing import Any

import orjson

from composer_stages import endings
from composer_stages.messages import MessageParts, ToolCall, read as parts_of, thought_of, write
from composer_stages.policy.base import PolicyConfig, Sample
from composer_stages.policy.client import (
    CallError,
    RefusedError,
    RejectedError,
    RetryableError,
    WebPage,
    error_of_fault,
    web_page,
)
from composer_stages.policy.faults import Sent, excerpt, meaning, parse_fault
from composer_stages.policy.requests import CallBounds
from composer_stages.policy.token_counts import LONGEST_TOKEN, least_tokens, tokenizer
from composer_stages.policy.tool_calls import normalise_calls
from composer_stages.words import Sentence

MOST_USD = 1e6
"""USD of one call from which a bill is no bill but garbage. Two of 1e308 would add up to infinity."""
MOST_TOKENS = 10**12


class MalformedBill(ValueError):
    """A bill with something that is not a number where a number belongs."""


class OverlongAnswer(Exception):
    """An answer longer than `max_tokens`, which the server ignored; it is paid and kept."""

    def __init__(self, sample: Sample, tokens: int, limit: int) -> None:
        super().__init__(Sentence("policy.overlong-answer", tokens=tokens, limit=limit))
        self.sample = sample


UNUSABLE: dict[str, tuple[str, bool]] = {
    "not JSON": ("garbage", True),
    "not a completion": ("garbage", True),
    "broken off": ("garbage", True),
    "no choices": ("no_text", False),
    "malformed": ("malformed", False),
    "unknown ending": ("unknown_ending", False),
}
"""Why a body with status 200 is not an answer: the kind of the error, and whether the call is repeated.

A gateway in trouble sends no completion, and will recover. What a model has finished would be bought again as it is.
"""
THOUGHTS = ("reasoning_content", "reasoning", "reasoning_text", "thinking", "reasoning_details", "thinking_blocks")
"""Fields of a message in which servers put what is no part of its answer; the first that holds text counts."""
ENDINGS = ("finish_reason", "finishReason", "native_finish_reason", "stop_reason")
"""Fields of a choice that say why it ended; the last is no reason where the first is there (vLLM: the stop text)."""


STOPS = (KeyboardInterrupt, SystemExit)
"""What a reader does not raise. It may raise anything else: the panic of a library in Rust is no `Exception`."""


class UnreadableAnswer(CallError):
    """A body with status 200 at which a reader fails: a defect, or something that is missing on this machine.

    Its cause is what was raised. billed_usd: by the body's own bill, None where that cannot be read either.
    """

    def __init__(self, message: str, *, billed_usd: float | None) -> None:
        super().__init__(message)
        self.billed_usd = billed_usd


def make_record(raw: bytes, *, latency_s: float, attempts: int, at: float = 0.0) -> bytes:
    """Return a cache record: latency, number of launches and time as JSON, then the body of the response."""
    return orjson.dumps({"latency_s": latency_s, "attempts": attempts, "at": at}) + b"\n" + raw


def time_of(entry: bytes) -> float:
    """Return when the answer in a record came, in seconds since 1970; 0 where that was not recorded."""
    return float(orjson.loads(entry.partition(b"\n")[0]).get("at", 0.0))


def read_record(entry: bytes, config: PolicyConfig, bounds: CallBounds) -> Sample:
    """Return the answer in a record; raise as `read` does, and `UnreadableAnswer` for any other exception."""
    head, is_body, raw = entry.partition(b"\n")
    about = orjson.loads(head)
    about.pop("at", None)
    if not is_body:  # of an earlier commit: the fields of the sample that was read
        return Sample(**about)
    try:
        return read(raw, config, bounds, **about)
    except (CallError, OverlongAnswer, *STOPS):
        raise
    except BaseException as error:
        why = Sentence("policy.answer-not-readable", error_type=type(error).__name__, error=excerpt(error, 200))
        raise UnreadableAnswer(why, billed_usd=read_charge(raw, False, bounds=bounds, config=config)) from error


def read(raw: bytes, config: PolicyConfig, bounds: CallBounds, *, latency_s: float, attempts: int) -> Sample:
    """Return the answer in a 200 response; raise for a body that holds an error, or is unusable by `UNUSABLE`.

    A body is read as JSON whatever its content type. A tool call is an answer, written as `messages.write` does.
    `OverlongAnswer` for a longer answer than was asked for.
    """
    try:
        body = parse(raw)
    except ValueError as error:
        # Repeated as other garbage is: gateways send pages for a server that is busy, also with status 200.
        if hint := web_page(raw, config.base_url):
            raise WebPage(config, hint) from None
        if STREAM.match(raw):
            raise RefusedError("policy.answer-is-stream", base_url=config.base_url, billed_usd=None) from None
        raise _unusable("not JSON", Sentence("policy.answer-not-json", error=str(error)), None) from None
    if not isinstance(body, dict):
        raise _unusable("not a completion", Sentence("policy.answer-not-an-object", body=repr(excerpt(body, 80))), None)
    # OpenRouter sends status 200 as soon as a model begins to answer, and puts what fails afterwards into the body.
    if fault := body.get("error") or _error_of_choice(body):
        raise _error_inside(fault, raw, bounds, config)
    choices = body.get("choices")
    if not isinstance(choices, list) or not choices:
        if meaning(parse_fault(body), 200, _sent(bounds)) is not None:  # an error in the place of an answer
            raise _error_inside(body, raw, bounds, config)
        reason = "not a completion" if not isinstance(choices, list) else "no choices"
        raise _unusable(
            reason,
            Sentence("policy.answer-without-choices", body=repr(excerpt(body, 80))),
            cost(body, [], bounds, config),
        )
    try:
        choice = choices[0]
        word = _ending_word(choice)
        message = choice["message"] if word is None else choice.get("message") or {}
        text, thoughts, written = _text(message, config), _thoughts(message), _written(message)
        logprobs = _logprobs(choice)
    except (KeyError, TypeError, AttributeError, ValueError, OverflowError) as error:
        raise _unusable(
            "malformed",
            Sentence("policy.answer-malformed", error=repr(error), body=repr(excerpt(body, 80))),
            cost(body, [], bounds, config),
        ) from None
    usage = cost(body, [*written, thoughts or ""], bounds, config)
    # Without a word a server has ended its answer, unless it has sent nothing at all.
    ending = endings.ending_of(word) if word else endings.FINISHED if text or thoughts else endings.BROKEN
    if ending == endings.BROKEN:
        raise _unusable("broken off", Sentence("policy.answer-broken-off", finish=word), usage)
    if ending == endings.UNKNOWN:
        raise _unusable("unknown ending", Sentence("policy.answer-ended-unknown", finish=word), usage)
    if ending == endings.FINISHED and _completion_tokens(body) >= bounds.completion_tokens and parts_of(text).calls:
        ending = endings.CUT  # servers that read calls say that one was made, whether it is whole or not
    model, provider, fingerprint = (
        body.get(name) if isinstance(body.get(name), str) else None
        for name in ("model", "provider", "system_fingerprint")
    )
    sample = Sample(
        text=text,
        reasoning=thoughts,
        logprobs=logprobs,
        logprob_kind="unknown" if logprobs else None,
        finish_reason=(word or "stop") if ending == endings.FINISHED else ending,
        served_model=model,
        provider=provider,
        system_fingerprint=fingerprint,
        prompt_read=_prompt_read(body, bounds),
        latency_s=latency_s,
        attempts=attempts,
        **usage,
    )
    if tokens := find_overlong(body, written, bounds):
        raise OverlongAnswer(sample, tokens, bounds.completion_tokens)
    return sample


STREAM = re.compile(rb"\s*(data|event|id): ?\S")
"""The beginning of a stream of events."""


def _error_of_choice(body: Mapping[str, Any]) -> Any:
    choices = body.get("choices")
    first = choices[0] if isinstance(choices, list) and choices else None
    return first.get("error") if isinstance(first, dict) else None


def _sent(bounds: CallBounds) -> Sent:
    fields = frozenset(("seed", "temperature", "max_tokens"))
    return Sent(sum(map(least_tokens, _contents(bounds))), bounds.prompt_tokens, bounds.completion_tokens, fields)


def _error_inside(fault: Any, raw: bytes, bounds: CallBounds, config: PolicyConfig) -> CallError:
    """Return the typed error of a refusal in a body with status 200."""
    code = fault.get("code") if isinstance(fault, dict) else None
    status = code if type(code) is int and 300 <= code < 600 else 500
    billed = read_charge(raw, False, bounds=bounds, config=config)
    return error_of_fault(parse_fault(fault), status, config, _sent(bounds), billed_usd=billed)


def parse(raw: bytes) -> Any:
    """Return the JSON of a response; `ValueError` where it is not JSON, `RecursionError` where it is nested too deeply.

    Read too is what a strict parser refuses in an answer that is paid: a byte order mark, bytes that are not UTF-8 and
    halves of surrogate pairs (both replaced), NaN, and numbers of any length (infinite from 4,300 digits on).
    Of a key that occurs twice in a bill, the higher number counts.
    """
    with suppress(ValueError):
        body = orjson.loads(raw)
        bill = raw[raw.find(b'"usage"') :]  # mostly the end: to count in all of 8 kB takes a tenth of a call's time
        if not any(bill.count(b'"%s"' % key.encode()) > 1 for key in BILL_KEYS):
            return body
    text = raw.decode(errors="replace").lstrip("\ufeff \t\r\n")
    return json.loads(text, object_pairs_hook=_merged, parse_int=_integer)


def _integer(digits: str) -> float:
    try:
        return int(digits)
    except ValueError:  # more than 4,300 digits
        return -math.inf if digits.startswith("-") else math.inf


BILL_KEYS = ("usage", "cost", "prompt_tokens", "completion_tokens", "total_tokens", "cached_tokens")


def _merged(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return an object of these keys; of one that occurs twice the later value, of a bill that which costs more."""
    merged: dict[str, Any] = {}
    for name, value in pairs:
        earlier, now = merged.get(name), value
        if name in BILL_KEYS and isinstance(earlier, (dict, int, float)):
            if isinstance(earlier, dict):
                now = _merged([*earlier.items(), *(now.items() if isinstance(now, dict) else ())])
            else:
                costlier = min if name == "cached_tokens" else max
                now = costlier(earlier, now) if isinstance(now, (int, float)) else earlier
        merged[name] = now.encode(errors="replace").decode() if isinstance(now, str) else now
    return merged


def _unusable(reason: str, message: Sentence, usage: dict[str, Any] | None) -> CallError:
    """Return the error of a body that is not an answer. usage: its bill, as fields of a `Sample`."""
    kind, mends = UNUSABLE[reason]
    usage = usage or {}
    bill = usage if usage.get("usage_by") == "server" else {}
    billed_usd, claimed_usd = bill.get("cost_usd"), bill.get("claimed_usd")
    if mends:
        return RetryableError(kind, message, billed_usd=billed_usd, claimed_usd=claimed_usd)
    return RejectedError(kind, message, billed_usd=None, usage=bill)


def read_charge(raw: bytes, free: bool, *, bounds: CallBounds, config: PolicyConfig) -> float | None:
    """Return the cost of a call without an answer, by the bill in its body; None if it is unknown.

    free: whether the server's status says that nothing was done, which a bill in its body may contradict.
    """
    try:
        body = parse(raw)
    except (ValueError, RecursionError):
        body = None
    error = body.get("error") if isinstance(body, Mapping) else None
    places = [entry for entry in (body, error) if isinstance(entry, Mapping)]
    bills = [source["usage"] for source in places if isinstance(source.get("usage"), Mapping)]
    bills += [{"cost": source["cost"]} for source in places if "cost" in source]
    if not any(type(value) in (int, float) and value != 0 for bill in bills for value in bill.values()):
        return 0.0 if free else None
    try:
        costs = [cost({"usage": bill}, [], bounds, config) for bill in bills]
    except STOPS:
        raise
    except BaseException:  # what a call cost must be known to be unknown, whatever its body does to a reader
        return None
    return max((float(usage["cost_usd"]) for usage in costs if usage["usage_by"] == "server"), default=None)


def _ending_word(choice: dict[str, Any]) -> str | None:
    word = next((value for name in ENDINGS if (value := choice.get(name)) not in (None, "")), None)
    if word is not None and not isinstance(word, str):
        raise TypeError(f"a finish_reason that is not text: {_excerpt(word)}")
    return word


def _logprobs(choice: dict[str, Any]) -> list[float] | None:
    value = choice.get("logprobs")
    tokens = value.get("content") if isinstance(value, dict) else None
    # A text is not a number, although float() reads it as one.
    if tokens and not all(type(token["logprob"]) in (int, float) for token in tokens):
        raise TypeError("a logprob that is not a number")
    return [float(token["logprob"]) for token in tokens] if tokens else None


def _thoughts(message: dict[str, Any]) -> str | None:
    """Return the reasoning that a server separates from the answer, in a field of its own or in parts of content."""
    for value in (message.get(name) for name in THOUGHTS):
        parts = value if isinstance(value, list) else [value]
        texts = [part if isinstance(part, str) else part and thought_of({"type": "thinking"} | part) for part in parts]
        if thought := "\n".join(filter(None, texts)):
            return thought
    content = message.get("content")
    return "\n".join(filter(None, map(thought_of, content))) or None if isinstance(content, list) else None


def _text(message: dict[str, Any], config: PolicyConfig) -> str:
    """Return content and tool calls as one text, empty where a server writes nothing, in whatever way it does."""
    content = "".join(_spoken(message))
    calls = _calls(message)
    return normalise_calls(config.tool_calls, write(MessageParts(content, calls)) if calls else content)


def _spoken(message: dict[str, Any]) -> list[str]:
    """Return the pieces of the content that are no thoughts; a refusal in a field of its own is content."""
    content = message.get("content") or message.get("refusal") or ""
    if isinstance(content, str):
        return [content]
    if not isinstance(content, (list, dict)):
        raise TypeError("a content that is not text")
    parts = [part for part in ([content] if isinstance(content, dict) else content) if thought_of(part) is None]
    return [part.get("text") or part.get("refusal") or "" for part in parts]


def _calls(message: dict[str, Any]) -> tuple[ToolCall, ...]:
    calls = list(message.get("tool_calls") or [])
    if not calls and message.get("function_call"):  # as OpenAI had it before there were several calls
        calls = [{"function": message["function_call"]}]
    read = []
    for call in calls:
        function = call.get("function") or call
        value = function.get("arguments")
        # Some servers give the arguments as an object, where the protocol has the text of its JSON.
        arguments = value if isinstance(value, str) else orjson.dumps(value or {}).decode()
        read.append(ToolCall(str(function["name"] or ""), arguments or "{}"))
    return tuple(read)


def _written(message: dict[str, Any]) -> list[str]:
    """Return the pieces of an answer that the model has written itself, without the marks of our own format."""
    return [*_spoken(message), *(piece for call in _calls(message) for piece in (call.name, call.arguments))]


def _prompt_read(body: Mapping[str, Any], bounds: CallBounds) -> int | None:
    """Return how many tokens of the prompt a server counted, where it was sent more: it read only a part of it."""
    usage = body.get("usage")
    with suppress(MalformedBill):
        if isinstance(usage, Mapping) and (prompt := _tokens(usage, "prompt_tokens", "input_tokens")):
            read = prompt + _most(usage, CACHED) + _most(usage, WRITTEN)  # in case they are not among the others
            return read if _fewer(read, _contents(bounds), None) else None
    return None


def _completion_tokens(body: Mapping[str, Any]) -> int:
    usage = body.get("usage")
    billed = usage.get("completion_tokens", usage.get("output_tokens")) if isinstance(usage, Mapping) else 0
    return billed if isinstance(billed, int) and billed <= MOST_TOKENS else 0


CACHED = (
    "cached_tokens",
    "cache_read_input_tokens",
    "prompt_cache_hit_tokens",
    "cache_read_tokens",
    "num_cached_tokens",
)
WRITTEN = ("cache_creation_input_tokens", "cache_creation_tokens", "cache_write_tokens", "cache_write_input_tokens")
"""Fields of the tokens of a prompt that a server read from its cache, and that it wrote there, at any place."""
DETAILS = ("prompt_tokens_details", "input_tokens_details", "completion_tokens_details", "output_tokens_details")
COSTS = {"cost": 1.0, "total_cost": 1.0, "estimated_cost": 1.0, "cost_usd": 1.0, "cost_in_usd_ticks": 1e-10}
UPSTREAM = ("cost", "prompt_cost", "completions_cost")
"""Fields of what a call cost, and the USD of their units: OpenRouter's, Perplexity's, DeepInfra's, LiteLLM's, xAI's."""


def cost(body: Mapping[str, Any], texts: list[str], bounds: CallBounds, config: PolicyConfig) -> dict[str, Any]:
    """Return tokens and cost of a response as fields of a `Sample`.

    texts: what the model has visibly written.
    """
    usage: Any = body.get("usage")
    usage = usage if isinstance(usage, Mapping) else {}
    billed: float | None = None
    claimed: float | None = None
    with suppress(MalformedBill):
        # OpenRouter's own field, in every response since it ignores `usage: {include: true}`. Asking others for it is
        # an error: api.openai.com refuses unknown fields with 400.
        billed = claimed = _charged(usage)
        cached, written = (_most(usage, names) for names in (CACHED, WRITTEN))
        prompt, completion = (
            _tokens(usage, "prompt_tokens", "input_tokens"),
            _tokens(usage, "completion_tokens", "output_tokens"),
        )
        if prompt is not None and "prompt_tokens" not in usage and "input_tokens_details" not in usage:
            prompt += cached + written  # as Anthropic counts: neither is among the input tokens
        if prompt is not None and completion is not None:
            completion = _with_reasoning(usage, prompt, completion)
            if claimed is None:
                claimed = config.cost(prompt, completion, cached, written)
            possible = min(cached, written) >= 0 and cached + written <= prompt and completion >= 0
            count = tokenizer(config.model) if config.has_price else None
            # No tokenizer makes as few tokens of the answer or of the prompt as the bill has.
            too_small = config.has_price and (
                _fewer(completion, texts, count) or _fewer(prompt, _contents(bounds), count)
            )
            if possible and (billed is None or billed >= 0) and not too_small:
                listed = config.cost(prompt, completion, cached, written)
                return _fields(prompt, completion, cached, max(billed or 0.0, listed), claimed, config, billed)
        elif billed is not None and billed >= config.cost(*_least(texts, bounds, config)):
            return _fields(bounds.prompt_tokens, bounds.completion_tokens, 0, billed, claimed, config, billed)
    most = max(bounds.max_usd(config), billed or 0.0)
    bound = _fields(bounds.prompt_tokens, bounds.completion_tokens, 0, most, claimed, config, None)
    return {**bound, "usage_by": "bound"}


def _charged(usage: Mapping[str, Any]) -> float | None:
    """Return what a server says that a call cost, with what the owner of a key pays elsewhere (`is_byok`)."""
    places = [usage, usage["cost"]] if isinstance(usage.get("cost"), Mapping) else [usage]
    amounts = [
        amount * unit
        for place in places
        for name, unit in COSTS.items()
        if not isinstance(place.get(name), Mapping)
        and (amount := _number(place, name, MOST_USD / unit, integer=False)) is not None
    ]
    charged = min(amounts) if amounts and min(amounts) < 0 else max(amounts, default=None)
    if usage.get("is_byok") is not True:
        return charged
    details = _details(usage, "cost_details")
    upstream = [_number(details, f"upstream_inference_{part}", MOST_USD, integer=False) for part in UPSTREAM]
    whole, *parts = upstream
    if whole is None and None in parts:
        return None  # what the owner pays is not told
    return (charged or 0.0) + (sum(parts) if whole is None else whole)


def _tokens(usage: Mapping[str, Any], *names: str) -> Any:
    return next((number for name in names if (number := _number(usage, name)) is not None), None)


def _most(usage: Mapping[str, Any], names: tuple[str, ...]) -> int:
    """Return the largest number of these fields, wherever a server puts it; a negative one comes first."""
    places = [usage, *(_details(usage, name) for name in DETAILS)]
    numbers = [number for place in places for name in names if (number := _number(place, name)) is not None]
    return min(numbers) if numbers and min(numbers) < 0 else max(numbers, default=0)


def _fields(
    prompt: int, completion: int, cached: int, usd: float, claimed: float | None, config: PolicyConfig, billed: Any
) -> dict[str, Any]:
    # Ignore differences of rounding.
    short = claimed is not None and claimed < usd * (1 - 1e-6)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "cached_tokens": cached,
        "cost_usd": float(usd),
        "claimed_usd": claimed if short else None,
        "price_known": billed is not None or config.priced,
        "usage_by": "server",
    }


def _number(fields: Mapping[str, Any], name: str, most: float = MOST_TOKENS, *, integer: bool = True) -> Any:
    """Return a number of a bill, perhaps negative; None where it is missing."""
    value = fields.get(name)
    if value is None:
        return None
    # A bool is an int in Python: `true` would be a token, and `false` a bill of nothing.
    if isinstance(value, bool) or not isinstance(value, int if integer else (int, float)):
        raise MalformedBill(f"{name} is {_excerpt(value)}, not a number")
    if not abs(value) <= most:  # NaN too
        raise MalformedBill(f"{name} is {_excerpt(value)}, which no call can reach")
    return value


def _details(usage: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    details = usage.get(name)
    if details is not None and not isinstance(details, Mapping):
        raise MalformedBill(f"{name} is {_excerpt(details)}, not an object")
    return details or {}


def _excerpt(value: Any) -> str:
    return excerpt(value, 40, repr)


SLACK = 2
"""Tokens by which an honest answer may exceed `max_tokens`: some servers count what ends it."""


def find_overlong(body: Mapping[str, Any], texts: list[str], bounds: CallBounds) -> int:
    """Return the tokens of an answer that is longer than it may be, by the bill or by its own text; else 0."""
    tokens = max(_completion_tokens(body), sum(map(least_tokens, texts)))
    return tokens if tokens > bounds.completion_tokens + SLACK else 0


def _with_reasoning(usage: Mapping[str, Any], prompt: int, completion: int) -> int:
    """Return the completion tokens with reasoning tokens that the server counts separately."""
    # OpenAI counts reasoning among the completion tokens. Gemini's and xAI's compatible servers leave it out of them
    # and add it to the total.
    reasoning = max(_most(usage, ("reasoning_tokens",)), 0)
    total = _number(usage, "total_tokens") or 0
    return max(completion, total - prompt, completion + reasoning if reasoning > completion else 0)


def _fewer(tokens: int, texts: Iterator[str] | list[str], count: Any) -> bool:
    """Return whether a number of tokens is too small for these texts."""
    pieces = list(texts)
    # The count of all words, quickly made, is at least that of `least_tokens`: most bills need no more.
    words, size = (sum(map(measure, pieces)) for measure in (most_words, len))
    if (words > tokens or size * 4 > tokens * LONGEST_TOKEN) and sum(map(least_tokens, pieces)) > tokens:
        return True
    return count is not None and sum(map(count, pieces)) > tokens


ASCII_SPACES = " \t\n\r\v\f\x1c\x1d\x1e\x1f"
"""The ASCII characters at which `str.split` splits."""


def most_words(text: str) -> int:
    """Return a number that is at least that of the words between spaces."""
    # To split 8 kB takes 60 us, a twentieth of a call's processor time; to count the spaces takes 5.
    return 1 + sum(map(text.count, ASCII_SPACES)) if text.isascii() else len(text.split())


def _least(texts: list[str], bounds: CallBounds, config: PolicyConfig) -> tuple[int, int]:
    """Return lower bounds of prompt and completion tokens."""
    count = (tokenizer(config.model) if config.has_price else None) or least_tokens
    return sum(map(count, _contents(bounds))), sum(map(count, texts))


def _contents(bounds: CallBounds) -> Iterator[str]:
    return (content for message in bounds.messages if isinstance(content := message.get("content"), str))
