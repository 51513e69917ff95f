"""What a call cost: the bill of a response, checked against the request and the text of the answer.

A possible bill is accepted, but never below the configured prices; below those of a public table (`prices`) the
server's own amount counts. A bill that is too small for its text, negative, missing, or not made of numbers costs the
upper bound that was reserved for the call, so that a limit holds whatever a server claims; the claim is recorded with
the cost.
"""

import json
import math
from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import orjson

from composer_stages import json_text
from composer_stages.data_files import load_toml
from composer_stages.policy.base import PolicyConfig
from composer_stages.policy.faults import excerpt
from composer_stages.policy.requests import CallBounds
from composer_stages.policy.token_counts import LONGEST_TOKEN, least_tokens, tokenizer

MOST_USD = 1e6
"""USD of one call from which a bill is no bill but garbage. Two of 1e308 would add up to infinity."""
MOST_TOKENS = 10**12
PROMPT, COMPLETION = ("prompt_tokens", "input_tokens"), ("completion_tokens", "output_tokens")
TABLE = load_toml(__package__, "bills.toml")
KINDS: dict[str, str] = {name: kind for kind, names in TABLE["kinds"].items() for name in names}
COSTS: dict[str, float] = TABLE["costs"]
DETAILS = ("prompt_tokens_details", "input_tokens_details", "completion_tokens_details", "output_tokens_details")
UPSTREAM = tuple(f"upstream_inference_{part}" for part in ("cost", "prompt_cost", "completions_cost"))
HEADER = "x-litellm-response-cost"
"""Where LiteLLM's proxy says what a call cost; of a model that it has no price of, nothing or 0."""
STOPS = (KeyboardInterrupt, SystemExit)
"""What a reader does not raise. It may raise anything else: the panic of a library in Rust is no `Exception`."""


class MalformedBill(ValueError):
    """A bill with something that is not a number where a number belongs."""


@dataclass(frozen=True)
class Bill:
    """Tokens by a server's count, reasoning and what it cached among them; None and 0 where it counts none.

    read: tokens of the prompt at most, in case those of the cache are not among the others.
    """

    prompt: int | None
    completion: int | None
    cached: int
    written: int
    read: int

    @classmethod
    def of(cls, usage: Mapping[str, Any]) -> "Bill":
        """Return the tokens of a bill; raise `MalformedBill` for what is no number."""
        numbers: dict[str, list[int]] = defaultdict(list)
        for part in (usage, *(_details(usage, name) for name in DETAILS if name in usage)):
            for name in KINDS.keys() & part.keys():
                if (number := _number(part, name)) is not None:
                    numbers[KINDS[name]].append(number)
        cached, written, reasoning = (_largest(numbers[kind]) for kind in ("cached", "written", "reasoning"))
        prompt, completion = _first_number(usage, PROMPT), _first_number(usage, COMPLETION)
        read = (prompt or 0) + cached + written
        if prompt is not None and "prompt_tokens" not in usage and "input_tokens_details" not in usage:
            prompt = read  # as Anthropic counts: neither is among the input tokens
        if prompt is not None and completion is not None:
            total = _number(usage, "total_tokens") or 0
            if total == read + completion:  # Portkey passes Anthropic's count on, in a total that is of all
                prompt = read
            # OpenAI counts reasoning among the completion tokens. Gemini's and xAI's compatible servers leave it out of
            # them and add it to the total.
            apart = completion + reasoning if reasoning > completion else 0
            completion = max(completion, total - prompt, apart)
        return cls(prompt, completion, cached, written, read)

    @property
    def possible(self) -> bool:
        """Whether no count is negative or of more than there is."""
        least = min(self.cached, self.written, self.completion or 0)
        return least >= 0 and self.cached + self.written <= (self.prompt or 0)


def cost(
    body: Mapping[str, Any], texts: list[str], bounds: CallBounds, config: PolicyConfig, told_usd: float | None = None
) -> dict[str, Any]:
    """Return tokens and cost of a response as fields of a `Sample`.

    texts: what the model has visibly written. told_usd: what the headers say that the call cost.
    """
    usage: Any = body.get("usage")
    usage = usage if isinstance(usage, Mapping) else {}
    billed: float | None = None
    claimed: float | None = None
    read: int | None = None
    with suppress(MalformedBill):
        # OpenRouter's own field, in every response since it ignores `usage: {include: true}`. Asking others for it is
        # an error: api.openai.com refuses unknown fields with 400.
        billed = claimed = _charged(usage, body, told_usd)
        bill = Bill.of(usage)
        texts_sent, count = list(contents(bounds)), tokenizer(config.model) if config.has_price else None
        is_cut = bill.prompt is not None and _fewer(bill.read, texts_sent, None)
        read = (bill.read or None) if is_cut else None
        if bill.prompt is not None and bill.completion is not None:
            # Of more cached tokens than there are the difference would count as negative.
            listed = max(config.cost(bill.prompt, bill.completion, bill.cached, bill.written), 0.0)
            claimed = listed if claimed is None else claimed
            # No tokenizer makes as few tokens of the answer or of the prompt as the bill has.
            too_small = config.has_price and (
                is_cut
                or _fewer(bill.completion, texts, count)
                or ((count is not None or bill.read > bill.prompt) and _fewer(bill.prompt, texts_sent, count))
            )
            if bill.possible and (billed is None or billed >= 0) and not too_small:
                least = listed if billed is None or config.table is None else 0.0
                usd = max(billed or 0.0, least)
                fields = _fields(bill.prompt, bill.completion, bill.cached, usd, claimed, config, billed)
                return {**fields, "prompt_read": read}
        elif billed is not None and billed >= config.cost(*_least(texts, bounds, config)):
            fields = _fields(bounds.prompt_tokens, bounds.completion_tokens, 0, billed, claimed, config, billed)
            return {**fields, "prompt_read": read}
    most = max(bounds.max_usd(config), billed or 0.0)
    bound = _fields(bounds.prompt_tokens, bounds.completion_tokens, 0, most, claimed, config, None)
    return {**bound, "prompt_read": read, "usage_by": "bound"}


def completion_tokens(body: Mapping[str, Any]) -> int:
    """Return the tokens of an answer by the server's own count; 0 where it has none."""
    usage = body.get("usage")
    billed = next(map(usage.get, filter(usage.__contains__, COMPLETION)), 0) if isinstance(usage, Mapping) else 0
    return billed if isinstance(billed, int) and billed <= MOST_TOKENS else 0


def told_cost(headers: Mapping[str, str]) -> float | None:
    """Return the USD that the headers of a response say that the call cost; None where they say nothing, or 0."""
    with suppress(KeyError, ValueError):
        usd = float(headers[HEADER])
        return usd if 0 < usd < MOST_USD else None
    return None


def _charged(usage: Mapping[str, Any], body: Mapping[str, Any], told_usd: float | None) -> float | None:
    """Return what a server says that a call cost, with what the owner of a key pays elsewhere (`is_byok`)."""
    parts = usage.get("cost")
    choices = body.get("choices")
    listed = choices if isinstance(choices, list) else []
    messages = [choice.get("message") for choice in listed if isinstance(choice, Mapping)]
    holders = [holder.get("provider_metadata") for holder in (body, *messages) if isinstance(holder, Mapping)]
    gateways = [holder.get("gateway") for holder in holders if isinstance(holder, Mapping)]  # of Vercel
    places = [usage, body, *(part for part in (parts, *gateways) if isinstance(part, Mapping))]
    amounts = [
        amount * unit
        for part in places
        for name in COSTS.keys() & part.keys()
        if not isinstance(part[name], Mapping)
        and (amount := _number(part, name, MOST_USD / (unit := COSTS[name]), integer=False)) is not None
    ] + ([] if told_usd is None else [told_usd])
    charged, details = _largest(amounts, None), _details(usage, "cost_details")
    total, *parts = (_number(details, name, MOST_USD, integer=False) for name in UPSTREAM)
    upstream = sum(parts) if total is None and None not in parts else total
    if usage.get("is_byok") is True:  # None: what the owner pays is not told
        return None if upstream is None else (charged or 0.0) + upstream
    # It is a part of the charge; gateways that charge nothing of their own tell it alone (Kilo-Org/kilocode#13841).
    return _largest([usd for usd in (charged, upstream) if usd is not None], None)


def read_charge(
    raw: bytes, free: bool, *, bounds: CallBounds, config: PolicyConfig, told_usd: float | None = None
) -> float | None:
    """Return the cost of a call without an answer, by the bill in its body; None if it is unknown.

    free: whether the server's status says that nothing was done, which a bill in its body may contradict. told_usd: as
    in `cost`.
    """
    try:
        body = parse(raw)
    except (ValueError, RecursionError):
        body = None
    error = body.get("error") if isinstance(body, Mapping) else None
    places = [entry for entry in (body, error) if isinstance(entry, Mapping)] or [{}]
    usages = [usage for part in places if isinstance(usage := part.get("usage"), Mapping)]
    sums = [told_usd, *map(places[0].get, COSTS), *map(places[-1].get, COSTS), *(n for u in usages for n in u.values())]
    if not any(type(value) in (int, float) and value != 0 for value in sums):
        return 0.0 if free else None
    try:
        costs = [cost(part, [], bounds, config, told_usd) for part in places]
    except STOPS:
        raise
    except BaseException:  # what a call cost must be known to be unknown, whatever its body does to a reader
        return None
    return max((float(usage["cost_usd"]) for usage in costs if usage["usage_by"] == "server"), default=None)


def parse(raw: bytes) -> Any:
    """Return the JSON of a response; `ValueError` where it is not JSON, `RecursionError` where it is nested too deeply.

    Read too is what a strict parser refuses in an answer that is paid: a byte order mark, bytes that are not UTF-8 and
    halves of surrogate pairs (both replaced), NaN, and numbers of any length (infinite from 4,300 digits on).
    Of a key that occurs twice in a bill, the higher number counts. What is wrapped around a completion is left out.
    """
    with suppress(ValueError):
        body = orjson.loads(raw)
        bill = raw[raw.find(b'"usage"') :]  # mostly the end: to count in all of 8 kB takes a tenth of a call's time
        if max(map(bill.count, QUOTED_KEYS)) <= 1 and not json_text.LONG_INTEGER.search(raw):
            return _unwrapped(body)
    text = raw.decode(errors="replace").lstrip("\ufeff \t\r\n")
    return _unwrapped(json.loads(text, object_pairs_hook=_merged, parse_int=_integer))


def _unwrapped(body: Any) -> Any:
    """Return the completion that api.cline.bot puts below `data` (cline/cline#12647); any other body as it is."""
    inner = body.get("data") if isinstance(body, dict) and not body.get("choices") else None
    return {**body, **inner} if isinstance(inner, dict) and isinstance(inner.get("choices"), list) else body


def _integer(digits: str) -> float:
    try:
        return int(digits)
    except ValueError:  # more than 4,300 digits
        return -math.inf if digits.startswith("-") else math.inf


BILL_KEYS = ("usage", "cost", "prompt_tokens", "completion_tokens", "total_tokens", "cached_tokens")
QUOTED_KEYS = [f'"{key}"'.encode() for key in BILL_KEYS]


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
    """Return a number of a bill, perhaps negative; None where it is missing. An amount may be a decimal as text."""
    value = fields.get(name)
    if value is None:
        return None
    if isinstance(value, str) and not integer:
        with suppress(ValueError):
            value = float(value)
    value = int(value) if integer and isinstance(value, float) and value.is_integer() else value
    # A bool is an int in Python: `true` would be a token, and `false` a bill of nothing.
    if isinstance(value, bool) or not isinstance(value, int if integer else (int, float)):
        raise MalformedBill(f"{name} is {short(value)}, not a number")
    if not abs(value) <= most:  # NaN too
        raise MalformedBill(f"{name} is {short(value)}, which no call can reach")
    return value


def _first_number(fields: Mapping[str, Any], names: tuple[str, ...]) -> int | None:
    for name in names:
        if (number := _number(fields, name)) is not None:
            return int(number)
    return None


def _largest(numbers: list[Any], default: Any = 0) -> Any:
    """Return the number of several that counts: the largest, or the least where a negative one makes none possible."""
    if not numbers:
        return default
    return least if (least := min(numbers)) < 0 else max(numbers)


def _details(usage: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    details = usage.get(name)
    if details is not None and not isinstance(details, Mapping):
        raise MalformedBill(f"{name} is {short(details)}, not an object")
    return details or {}


def short(value: Any) -> str:
    """Return the beginning of a value as Python writes it."""
    return excerpt(value, 40, repr)


def _fewer(tokens: int, texts: Iterator[str] | list[str], count: Any) -> bool:
    """Return whether a number of tokens is too small for these texts."""
    pieces = list(texts)
    # The count of all words, quickly made, is at least that of `least_tokens`: most bills need no more.
    words, size = (sum(map(measure, pieces)) for measure in (most_words, len))
    if (words > tokens or size * 4 > tokens * LONGEST_TOKEN) and sum(map(least_tokens, pieces)) > tokens:
        return True
    return count is not None and sum(map(count, pieces)) > tokens


ASCII_SPACES = b" \t\n\r\v\f\x1c\x1d\x1e\x1f"
"""The ASCII characters at which `str.split` splits."""


def most_words(text: str) -> int:
    """Return an upper bound of the number of words of a text, counted by its spaces."""
    # To split 8 kB takes 40 us, and to count each of the spaces 30; to leave all of them out takes 5.
    return 1 + len(text) - len(text.encode().translate(None, ASCII_SPACES)) if text.isascii() else len(text.split())


def _least(texts: list[str], bounds: CallBounds, config: PolicyConfig) -> tuple[int, int]:
    """Return lower bounds of prompt and completion tokens."""
    count = (tokenizer(config.model) if config.has_price else None) or least_tokens
    return sum(map(count, contents(bounds))), sum(map(count, texts))


def contents(bounds: CallBounds) -> Iterator[str]:
    """Yield the texts of a conversation that was sent."""
    return (content for message in bounds.messages if isinstance(content := message.get("content"), str))
