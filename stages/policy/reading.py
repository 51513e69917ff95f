"""Responses of a server read: a 200 becomes a `Sample` with its bill (`bills`), or a typed error of `policy.client`.

`UNUSABLE` lists why a body is not an answer, and whether a retry can help.
"""

import math
import re
from collections.abc import Mapping
from typing import Any

import orjson

from composer_stages import endings, json_text
from composer_stages.data_files import load_toml
from composer_stages.messages import (
    MessageParts,
    ToolCall,
    answer_text,
    read as parts_of,
    thought_of,
    thoughts_beside,
    without_calls,
    write,
)
from composer_stages.policy.base import PolicyConfig, Sample
from composer_stages.policy.bills import STOPS, completion_tokens, cost, parse, read_charge, short
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
from composer_stages.policy.token_counts import least_tokens
from composer_stages.policy.tool_calls import normalise_calls, without_end
from composer_stages.words import Sentence


class OverlongAnswer(Exception):
    """An answer longer than `max_tokens`, which the server ignored; it is paid and kept."""

    def __init__(self, sample: Sample, tokens: int, limit: int, *, asked: bool) -> None:
        super().__init__(Sentence("policy.overlong-answer", tokens=tokens, limit=limit, asked=asked))
        self.sample = sample


TABLE = load_toml(__package__, "reading.toml")
UNUSABLE: dict[str, tuple[str, bool]] = TABLE["unusable"]
"""Why a body with status 200 is not an answer: the kind of the error, and whether the call is repeated.

A gateway in trouble sends no completion, and will recover. What a model has finished would be bought again as it is.
"""


class UnreadableAnswer(CallError):
    """A body with status 200 at which a reader fails: a defect, or something that is missing on this machine.

    Its cause is what was raised. billed_usd: by the body's own bill, None where that cannot be read either.
    """


def make_record(raw: bytes, *, at: float = 0.0, told_usd: float | None = None, **about: float) -> bytes:
    """Return a cache record: latency, number of launches, time and told cost as JSON, then the body of the response."""
    costs = {} if told_usd is None else {"told_usd": told_usd}
    return orjson.dumps({**about, "at": at, **costs}) + b"\n" + raw


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
        billed = read_charge(raw, False, bounds=bounds, config=config, told_usd=about.get("told_usd"))
        raise UnreadableAnswer("unreadable", why, billed_usd=billed) from error


def read(
    raw: bytes,
    config: PolicyConfig,
    bounds: CallBounds,
    *,
    latency_s: float,
    attempts: int,
    told_usd: float | None = None,
) -> Sample:
    """Return the answer in a 200 response; raise for a body that holds an error, or is unusable by `UNUSABLE`.

    A body is read as JSON whatever its content type. A tool call is an answer, written as `messages.write` does.
    `OverlongAnswer` for a longer answer than was asked for. told_usd: what its headers say that it cost.
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
        raise _error_inside(fault if isinstance(fault, dict) else body, raw, bounds, config, told_usd)
    choices = body.get("choices")
    if not isinstance(choices, list) or not choices:
        if _status(body) or meaning(parse_fault(body), 200, _sent(bounds)):  # an error in the place of an answer
            raise _error_inside(body, raw, bounds, config, told_usd)
        reason = "not a completion" if not isinstance(choices, list) else "no choices"
        raise _unusable(
            reason,
            Sentence("policy.answer-without-choices", body=repr(excerpt(body, 80))),
            cost(body, [], bounds, config, told_usd),
        )
    try:
        choice = next((entry for entry in choices if entry.get("index") == 0), choices[0])
        word = _ending_word(choice)
        if "delta" in choice and not choice.get("message"):
            raise RefusedError("policy.answer-is-stream", base_url=config.base_url, billed_usd=None)
        # What was filtered or cut to nothing may have no message.
        has_none = word is not None and endings.ending_of(word) != endings.FINISHED
        message = (choice.get("message") or {}) if has_none else choice["message"]
        spoken, thoughts = _spoken(message), thoughts_beside(message) or thoughts_beside(choice)
        # GitHub Copilot puts the words and the calls of one answer into several choices (HKUDS/nanobot#1481).
        answers = (each_choice.get("message") or {} for each_choice in choices)
        calls = _calls(message) or tuple(call for answer in answers for call in _calls(answer))
        text = without_end("".join(spoken))
        text = write(MessageParts(without_calls(text), calls)) if calls else normalise_calls(config.tool_calls, text)
        # What the model has written itself, without the marks of our own format.
        written = [*spoken, *(piece for call in calls for piece in (call.name, call.arguments))]
        logprobs = _logprobs(choice)
    except (KeyError, TypeError, AttributeError, ValueError, OverflowError) as error:
        raise _unusable(
            "malformed",
            Sentence("policy.answer-malformed", error=repr(error), body=repr(excerpt(body, 80))),
            cost(body, [], bounds, config, told_usd),
        ) from None
    usage = cost(body, [*written, thoughts or ""], bounds, config, told_usd)
    # Without a word a server has ended its answer, unless it has sent nothing at all.
    ending = endings.ending_of(word) if word else endings.FINISHED if text or thoughts else endings.BROKEN
    if ending == endings.BROKEN:
        raise _unusable("broken off", Sentence("policy.answer-broken-off", finish=word), usage)
    if ending == endings.UNKNOWN:
        raise _unusable("unknown ending", Sentence("policy.answer-ended-unknown", finish=word), usage)
    unread = config.tool_calls == "native" and UNREAD.search(answer_text(text))
    # The server has not read the call in the text, or has lost the one that it tells of (vllm-project/vllm#53255).
    # Without tools there is none to lose, whatever it tells (InternLM/lmdeploy#3349).
    lost = unread or (bounds.has_tools and CALLED.search(word or ""))
    if ending == endings.FINISHED and lost and not parts_of(text).calls:
        ending = endings.MALFORMED
    # Servers that read calls say that one was made, whether it is whole or not, and some say nothing of what they cut.
    # `stop` is believed: an answer may end at the limit (vLLM asks for the end token first).
    is_at_limit = completion_tokens(body) >= bounds.completion_tokens
    if ending == endings.FINISHED and is_at_limit and (word is None or parts_of(text).calls):
        ending = endings.CUT
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
        latency_s=latency_s,
        attempts=attempts,
        **usage,
    )
    if tokens := find_overlong(body, written, bounds):
        raise OverlongAnswer(sample, tokens, bounds.completion_tokens, asked=bool(config.limits()))
    return sample


CALLED = re.compile("tool|function", re.IGNORECASE)
"""In words for an end by a call."""
UNREAD = re.compile(TABLE["unread"])
STREAM = re.compile(rb"\s*(:[^\n]*\s+)*(data|event|id|retry): ?\S")
"""The beginning of a stream of events, perhaps behind its comments."""


def _error_of_choice(body: Mapping[str, Any]) -> Any:
    choices = body.get("choices")
    first = choices[0] if isinstance(choices, list) and choices else None
    return first.get("error") if isinstance(first, dict) else None


def _sent(bounds: CallBounds) -> Sent:
    request = {"messages": bounds.messages, "max_tokens": bounds.completion_tokens, "seed": 0, "temperature": 0}
    return Sent.of(request, bounds.prompt_tokens)


def _status(fault: Any) -> int | None:
    """Return the status that a refusal in a body has as its code: of OpenRouter, of Zhipu's /api/v1; None for none."""
    code = fault.get("code") if isinstance(fault, dict) else None
    return int(str(code)) if re.fullmatch("[345]\\d\\d", short(code).strip("'")) else None


def _error_inside(
    fault: Any, raw: bytes, bounds: CallBounds, config: PolicyConfig, told_usd: float | None
) -> CallError:
    """Return the typed error of a refusal in a body with status 200."""
    told_status = _status(fault) or 200
    billed = read_charge(raw, False, bounds=bounds, config=config, told_usd=told_usd)
    status = 500 if told_status == 200 else told_status
    return error_of_fault(parse_fault(fault), status, config, _sent(bounds), billed_usd=billed, code=told_status)


def _unusable(reason: str, message: Sentence, usage: dict[str, Any] | None) -> CallError:
    """Return the error of a body that is not an answer. usage: its bill, as fields of a `Sample`."""
    kind, mends = UNUSABLE[reason]
    usage = usage or {}
    bill = usage if usage.get("usage_by") == "server" else {}
    billed_usd, claimed_usd = bill.get("cost_usd"), bill.get("claimed_usd")
    if mends:
        return RetryableError(kind, message, billed_usd=billed_usd, claimed_usd=claimed_usd)
    return RejectedError(kind, message, billed_usd=None, usage=bill)


def _ending_word(choice: dict[str, Any]) -> str | None:
    word = next((value for name in TABLE["endings"] if (value := choice.get(name)) not in (None, "")), None)
    word = word.get("type") if isinstance(word, dict) else word
    if word is not None and not isinstance(word, str):
        raise TypeError(f"a finish_reason that is not text: {short(word)}")
    # A gateway says "error" or "stop" where the model's maker says that its call is malformed, or its answer filtered.
    places = (choice, choice.get("provider_specific_fields"))
    natives = [str(place.get("native_finish_reason")) for place in places if isinstance(place, dict)]
    return next((text for text in natives if endings.ending_of(text) in endings.NOT_WHOLE), word)


def _logprobs(choice: dict[str, Any]) -> list[float] | None:
    value = choice.get("logprobs")
    tokens = value.get("content") if isinstance(value, dict) else None
    logprobs = [token.get("logprob") for token in tokens or ()]
    # A text is not a number, although float() reads it as one.
    if not all(type(logprob) in (int, float, type(None)) for logprob in logprobs):
        raise TypeError("a logprob that is not a number")
    # JSON has no infinity: a token without probability has null in its place, and then the answer none at all.
    complete = None not in logprobs and all(map(math.isfinite, logprobs))
    return [float(logprob) for logprob in logprobs] if complete and logprobs else None


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
    calls, content = message.get("tool_calls") or [], message.get("content")
    calls = [calls] if isinstance(calls, dict) else list(calls)
    if not calls and message.get("function_call"):  # as OpenAI had it before there were several calls
        calls = [{"function": message["function_call"]}]
    parts = [part for part in content if part.get("type") in TABLE["calls"]] if isinstance(content, list) else []
    read = []
    for call in calls or parts:  # as Anthropic has them; where both are there, they are the same
        function = call.get("function") or call
        value = next((function[name] for name in TABLE["arguments"] if function.get(name) is not None), None)
        # Some servers give the arguments as an object, where the protocol has the text of its JSON.
        arguments = value.strip() if isinstance(value, str) else json_text.dumps(value or {})
        read.append(ToolCall(str(function["name"] or "").strip(), arguments or "{}"))
    return tuple(read)


SLACK = 2
"""Tokens by which an honest answer may exceed `max_tokens`: some servers count what ends it."""


def find_overlong(body: Mapping[str, Any], texts: list[str], bounds: CallBounds) -> int:
    """Return the tokens of an answer that is longer than it may be, by the bill or by its own text; else 0."""
    tokens = max(completion_tokens(body), sum(map(least_tokens, texts)))
    return tokens if tokens > bounds.completion_tokens + SLACK else 0
