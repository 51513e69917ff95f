"""What a server means by a refusal: by its codes, by the two numbers of an overflow, then by its words.

Servers refuse in forms of their own, nested or inside a 200. `Fault` holds what they say, `meaning` what it means: a
name of `TABLE`, or None for what no table knows.
"""

import re
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from typing import Any

import orjson

from composer_stages.data_files import load_toml
from composer_stages.policy.request_fields import LIMITS
from composer_stages.policy.token_counts import least_tokens

TABLE = load_toml(__package__, "faults.toml")
CONTEXT, ACCOUNT, KEY, EMPTY_MESSAGE, FILTERED, THOUGHTS, SIGNATURES, *_OTHERS = TABLE
MALFORMED_CALL, LOGPROBS, PARAMETER, UNKNOWN_FIELD = _OTHERS
WORDS = {name: re.compile("|".join(table["words"]), re.IGNORECASE | re.DOTALL) for name, table in TABLE.items()}
CODES = ("code", "type", "status", "error_type", "error_code", "__type", "reason", "name", "status_code", "innererror")
TEXTS = ("message", "msg", "detail", "details", "error", "errors", "error_msg", "status_msg", "error_message", "raw")
"""Fields with codes and with texts, at any depth; a text may be JSON again, as gateways pass it on."""
MESSAGE = 2000
"""Characters of a server's message that are read: expressions with `.*` take the square of them."""
OF_ROOM = re.compile(r"room|left|leav|remain", re.IGNORECASE)
"""Words for what a prompt leaves of the context."""
DEPTH = 8
MOST_NUMBER = 10**8
"""Larger numbers of a message count no tokens: they name requests and times."""
BY_STATUS = {401: KEY, 402: ACCOUNT, 413: CONTEXT}
NOT_OF_LENGTH = (404, 429)
"""Statuses of refusals that are never about the length of a prompt, whatever words they use."""
REASONING = "reasoning_content"
"""The field of an answer's thoughts, as servers take them back."""
OPTIONAL = ("seed", "temperature", *LIMITS, "chat_template_kwargs")
"""Fields of our requests that a server may not take."""


@dataclass(frozen=True)
class Sent:
    """What was sent: the fewest and the most tokens that the prompt can have, the limit of the answer, the fields.

    has_empty: whether one of its messages has neither text nor calls. has_thoughts: whether answers have theirs beside.
    """

    least: int = 0
    most: int = 0
    limit: int = 0
    fields: frozenset[str] = frozenset()
    has_empty: bool = False
    has_thoughts: bool = False

    @classmethod
    def of(cls, request: Mapping[str, Any], size: int) -> "Sent":
        """Return what a request of this many bytes holds."""
        messages = request.get("messages", ())
        texts = [message.get("content") for message in messages]
        limits = [request.get(name) for name in ("max_tokens", "max_completion_tokens")]
        limit = max((n for n in limits if isinstance(n, int)), default=0)
        least = sum(least_tokens(text) for text in texts if isinstance(text, str))
        has_thoughts = any(REASONING in message for message in messages)
        return cls(least, size, limit, frozenset(request), any(map(is_empty, messages)), has_thoughts)


def is_empty(message: Mapping[str, Any]) -> bool:
    """Return whether a message of a request has neither text nor calls."""
    return not (message.get("tool_calls") or str(message.get("content") or "").strip())


@dataclass(frozen=True)
class Fault:
    """A refusal: its message, all of its texts, its codes without signs, the field that it names, what the model wrote.

    wait_s: the seconds that it asks to wait. headers: of limits, as OpenRouter passes them on in the body.
    """

    message: str
    said: str = ""
    codes: frozenset[str] = frozenset()
    parameter: str | None = None
    generation: str = ""
    wait_s: float | None = None
    headers: Mapping[str, str] = field(default_factory=dict)


def parse_fault(body: Any) -> Fault:
    """Return what a refusal says; body: JSON as it was read, or a text."""
    values: dict[str, list[Any]] = defaultdict(list)
    for name, value in _scalars(body, "message", DEPTH):
        values[name].append(value)
    texts = [text for name in TEXTS for text in values[name] if isinstance(text, str) and text.strip()]
    message = texts[0] if texts else excerpt(body, MESSAGE)
    code = next((code for code in values["code"] if isinstance(code, str)), "")
    waits = [_duration_s(text) for text in (*map(str, values["retryDelay"]), *_WAIT.findall(" ".join(texts)[:MESSAGE]))]
    return Fault(
        f"{message[:MESSAGE]} ({code})" if code and code not in message else message[:MESSAGE],
        " ".join(texts)[:MESSAGE],
        frozenset(_plain(value) for name in CODES for value in values[name] if value is not None),
        next((str(name) for name in (*values["param"], *values["loc"][::-1]) if name), None),
        next((text for text in values["failed_generation"] if isinstance(text, str)), ""),
        next((wait for wait in waits if wait is not None), None),
        {name.lower().replace("_", "-"): str(told[0]) for name, told in values.items() if _OF_LIMITS.search(name)},
    )


def _scalars(value: Any, name: str, depth: int) -> Iterator[tuple[str, Any]]:
    """Yield the values of an object with the names of their fields; a text that is JSON again is walked, too."""
    if isinstance(value, str) and value.lstrip()[:1] in ("{", "[") and depth:
        with suppress(ValueError):
            value = orjson.loads(value)
    if isinstance(value, Mapping) and depth:
        for inner, entry in value.items():
            yield from _scalars(entry, str(inner), depth - 1)
    elif isinstance(value, list) and depth:
        for entry in value[:20]:
            yield from _scalars(entry, name, depth - 1)
    elif not isinstance(value, (Mapping, list)):
        yield name, value


def _plain(value: Any) -> str:
    return re.sub(r"[^a-z0-9]", "", excerpt(value, 80).lower())


KEY_WORDS = 80
"""Characters at the start of a refusal in which a refused key is named."""


def meaning(fault: Fault, status: int, sent: Sent) -> str | None:
    """Return what a refusal means; None where no table knows its codes and words, and its numbers are not ours."""
    for name, table in TABLE.items():
        if not fault.codes.isdisjoint(table["codes"]) and (name != PARAMETER or refused_field(fault, sent)):
            return name
    if status in BY_STATUS:
        return BY_STATUS[status]
    if status == 429 and fault.wait_s is not None:
        return None
    if status not in NOT_OF_LENGTH and WORDS[LOGPROBS].search(fault.said):  # its two numbers count no prompt's tokens
        return LOGPROBS
    if status not in NOT_OF_LENGTH and sent.has_empty and WORDS[EMPTY_MESSAGE].search(fault.said):
        return EMPTY_MESSAGE
    if status not in NOT_OF_LENGTH and _is_limit_beyond(fault, sent):
        return next((name for name in (ACCOUNT, FILTERED) if WORDS[name].search(fault.said)), PARAMETER)
    if status not in NOT_OF_LENGTH and _is_beyond(fault, sent):
        return CONTEXT
    if not sent.has_thoughts and WORDS[THOUGHTS].search(fault.said):
        return THOUGHTS
    for name in (SIGNATURES, MALFORMED_CALL, ACCOUNT, CONTEXT, KEY, PARAMETER, FILTERED):
        if name in (CONTEXT, PARAMETER, FILTERED) and status in NOT_OF_LENGTH:
            continue
        # A refused key is said at once; later in a message such words may be those of the prompt, which is quoted.
        said = fault.said[:KEY_WORDS] if name == KEY else fault.said
        if WORDS[name].search(said) and (name != PARAMETER or refused_field(fault, sent)):
            return name
    return None


def refused_field(fault: Fault, sent: Sent) -> str | None:
    """Return which field of the request a refusal names, of those that may be left out."""
    limits = LIMITS if _is_limit_beyond(fault, sent) else ()
    for name in (name for name in (*limits, *OPTIONAL) if name in sent.fields):
        if name in limits or fault.parameter == name or re.search(rf"(?<![\w]){name}(?![\w])", fault.said):
            return name
    return None


def _is_limit_beyond(fault: Fault, sent: Sent) -> bool:
    """Return whether it is the limit of the answer, alone, that is more than a message allows.

    It has that limit, or names its field, beside a number below it that the prompt is certainly below, and that is not
    what the prompt leaves.
    """
    numbers = _numbers(fault)
    told = sent.limit in numbers or any(name in fault.said or name == fault.parameter for name in LIMITS)
    return told and not OF_ROOM.search(fault.said) and any(sent.most < number < sent.limit for number in numbers)


def _is_beyond(fault: Fault, sent: Sent) -> bool:
    """Return whether a message has the tokens of this prompt beside a smaller number, or a number below all of them."""
    numbers = [number for number in _numbers(fault) if number != sent.limit]
    about = re.search(r"token|context|length|prompt|input|long|长|字", fault.said, re.IGNORECASE)
    plausible = [n for n in numbers if sent.least <= n <= sent.most + sent.limit]
    return bool(about) and any(limit < n for n in plausible for limit in numbers)


def _numbers(fault: Fault) -> list[int]:
    """Return the numbers of a message that may count tokens."""
    texts = re.findall(r"(?<![\w.,-])\d[\d,]{1,11}(?![\w.-]*\w)", fault.said)
    return [number for number in (int(text.replace(",", "")) for text in texts) if 64 <= number < MOST_NUMBER]


# Waits: a number of seconds, a date, a duration such as 6m0s, or a time since 1970 in seconds or milliseconds.

_WAIT = re.compile(
    r"(?:again|retry|wait)(?: after| in| for)?:? "
    r"((?:[\d.]+ ?(?:ms|milliseconds?|s|secs?|seconds?|m|mins?|minutes?|h|hrs?|hours?|d|days?)(?![a-z])"
    r"(?:,? and |, | )?)+)",
    re.IGNORECASE,
)
_OF_LIMITS = re.compile("retry[-_]after|ratelimit", re.IGNORECASE)
_UNITS = {"ms": 0.001, "millisecond": 0.001, "s": 1, "sec": 1, "second": 1, "m": 60, "min": 60, "minute": 60}
_UNITS |= {"h": 3600, "hr": 3600, "hour": 3600, "d": 86400, "day": 86400}


def told_wait_s(headers: Mapping[str, str], fault: Fault) -> float | None:
    """Return how many seconds a server asks to wait, in any of the fields that servers have for it; None for none."""
    headers = {**fault.headers, **headers}
    texts = [f"{headers[name]}ms" for name in ("retry-after-ms", "x-ms-retry-after-ms") if name in headers]
    texts += [headers.get("retry-after", "")]
    if (first := next((wait for text in texts if (wait := _duration_s(text)) is not None), fault.wait_s)) is not None:
        return first
    resets = [name for name in headers if re.search(r"ratelimit.*reset", name)]
    spent = [name for name in resets if headers.get(name.replace("reset", "remaining"), "").strip() == "0"]
    waits = [wait for name in spent or resets if (wait := _duration_s(headers[name])) is not None]
    return max(waits) if spent else min(waits, default=None)


def _duration_s(text: str) -> float | None:
    text = re.sub(r",? and |, (?=\d)", " ", text.strip(" ,"))
    parts = re.findall(r"([\d.]+) ?([a-z]+)", text.lower())
    with suppress(ValueError, TypeError, OverflowError, KeyError):
        if parts and re.fullmatch(r"(?:[\d.]+ ?[a-z]+ ?)+", text.lower()):
            return sum(float(n) * (_UNITS.get(unit) or _UNITS[unit.rstrip("s")]) for n, unit in parts)
        if re.fullmatch(r"[-+]?[\d.]+", text):
            wait = float(text) / (1000 if float(text) > 1e11 else 1)
            return max(wait - (datetime.now(UTC).timestamp() if wait > 1e9 else 0.0), 0.0)
        at = datetime.fromisoformat(text) if text[:4].isdigit() else parsedate_to_datetime(text)
        return max((at.replace(tzinfo=at.tzinfo or UTC) - datetime.now(UTC)).total_seconds(), 0.0)
    return None


def excerpt(value: Any, most: int, form: Callable[[Any], str] = str) -> str:
    """Return the beginning of a value from a server as text, whatever it is."""
    try:
        return form(value)[:most]
    except RecursionError:  # a reader of JSON takes a thousand levels, and Python's writer fewer
        return f"{type(value).__name__} that is nested too deeply"
