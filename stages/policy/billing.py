"""What a call costs: a server's bill, checked against the request that it answers and against the text of its answer.

A bill is taken as true where it is possible, and never lowers what a call costs below our own price list. One that is
too small for its text, negative, or missing costs the upper bound that was reserved for the call, so that a limit holds
whatever a server claims; the claim is kept beside the cost. A bill that is no number makes its answer unusable.

`FREE` is the one place that says after which answers nothing can have been billed.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from stages.policy.base import PolicyConfig, prompt_bound
from stages.runs import store

FREE = {
    401: "the key is not accepted, so nothing was done for it",
    402: "the account has no credit",
    403: "the key may not ask this",
    404: "there is no such model or address",
    405: "the address takes no POST",
    413: "the body is too large to be read",
    415: "the body's type is not read",
    429: "the rate limit comes before the work",
}
"""Statuses that refuse a request before any work, so that they cannot have been billed; all others may have been.

Azure's "Plan to manage costs" bills by work done: it names 400 (content filter, input limit) and 408 as statuses that
may be charged, 401 and 429 as free. Perplexity bills no 429. Of 422 fal.ai charges some, and Groq answers with it after
a model's malformed tool call; novita.ai charges 499. OpenRouter sends errors inside a 200 once a model has begun.
"""
MOST_USD = 1e6
"""USD of one call from which a bill is no bill but garbage. Two of 1e308 would add up to infinity."""
MOST_TOKENS = 10**12


class MalformedBill(ValueError):
    """A bill with something that is no number where a number belongs."""


def perhaps_billed(status: int) -> bool:
    """Return whether work may have been billed that ended with this status."""
    return status not in FREE


@dataclass(frozen=True)
class Asked:
    """What bounds a call's cost: upper bounds of prompt and completion tokens, and the conversation that was sent."""

    prompt_tokens: int
    completion_tokens: int
    messages: tuple[Mapping[str, Any], ...] = ()

    @classmethod
    def of(cls, request: Mapping[str, Any], context: int) -> "Asked":
        """Return the bounds of a request to a server; context: the longest answer where the request has none."""
        limits = [request[name] for name in ("max_tokens", "max_completion_tokens") if request.get(name) is not None]
        longest = max(limits, default=context)
        return cls(prompt_bound(len(store.encode(request))), longest, tuple(request.get("messages", ())))

    def usd(self, config: PolicyConfig) -> float:
        """Return the most that the call can cost, at the larger of the two prices of input."""
        return config.most(self.prompt_tokens, self.completion_tokens)


def cost(body: Mapping[str, Any], texts: list[str], asked: Asked, config: PolicyConfig) -> dict[str, Any]:
    """Return tokens and cost of a response as fields of a `Sample`.

    texts: what the model has visibly written. Raises `MalformedBill`.
    """
    usage = body.get("usage")
    if usage is not None and not isinstance(usage, Mapping):
        raise MalformedBill(f"usage is {_shown(usage)}, and no object")
    usage = usage or {}
    prompt, completion = _number(usage, "prompt_tokens"), _number(usage, "completion_tokens")
    cached = _number(_details(usage, "prompt_tokens_details"), "cached_tokens") or 0
    # OpenRouter's own field, in every response since it ignores `usage: {include: true}`. Asking others for it is an
    # error: api.openai.com refuses unknown fields with 400.
    billed = _number(usage, "cost", MOST_USD, whole=False)
    claimed: float | None = billed
    if prompt is not None and completion is not None:
        completion = _with_reasoning(usage, prompt, completion)
        if claimed is None:
            claimed = config.cost(prompt, completion, cached)
        possible = 0 <= cached <= prompt and completion >= 0 and (billed is None or billed >= 0)
        if possible and not (config.has_price and _too_small(prompt, completion, texts, asked, config)):
            own = config.cost(prompt, completion, cached)
            return _fields(prompt, completion, cached, max(billed or 0.0, own), claimed, config, billed)
    elif billed is not None and billed >= config.cost(*_least(texts, asked, config)):
        return _fields(asked.prompt_tokens, asked.completion_tokens, 0, billed, claimed, config, billed)
    most = max(asked.usd(config), billed or 0.0)
    bound = _fields(asked.prompt_tokens, asked.completion_tokens, 0, most, claimed, config, None)
    return {**bound, "usage_by": "bound"}


def _fields(
    prompt: int, completion: int, cached: int, usd: float, claimed: float | None, config: PolicyConfig, billed: Any
) -> dict[str, Any]:
    # A difference of rounding is no lie.
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


def _number(held: Mapping[str, Any], name: str, most: float = MOST_TOKENS, *, whole: bool = True) -> Any:
    """Return a number of a bill, perhaps negative; None where it is missing."""
    value = held.get(name)
    if value is None:
        return None
    # A bool is an int in Python: `true` would be a token, and `false` a bill of nothing.
    if isinstance(value, bool) or not isinstance(value, int if whole else (int, float)):
        raise MalformedBill(f"{name} is {_shown(value)}, and no number")
    if not abs(value) <= most:  # NaN too
        raise MalformedBill(f"{name} is {_shown(value)}, which no call can reach")
    return value


def _details(usage: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    found = usage.get(name)
    if found is not None and not isinstance(found, Mapping):
        raise MalformedBill(f"{name} is {_shown(found)}, and no object")
    return found or {}


def _shown(value: Any) -> str:
    return repr(value)[:40]


SLACK = 2
"""Tokens by which an honest answer may exceed `max_tokens`: some servers count what ends it."""


def overlong(body: Mapping[str, Any], texts: list[str], asked: Asked) -> int:
    """Return the tokens of an answer that is longer than it may be, by the bill or by its own text; else 0."""
    usage = body.get("usage")
    billed = usage.get("completion_tokens") if isinstance(usage, Mapping) else 0
    tokens = max(billed if isinstance(billed, int) else 0, sum(map(least_tokens, texts)))
    return tokens if tokens > asked.completion_tokens + SLACK else 0


def _with_reasoning(usage: Mapping[str, Any], prompt: int, completion: int) -> int:
    """Return the completion tokens with those of reasoning, which some servers bill but count apart."""
    # OpenAI counts reasoning among the completion tokens. Gemini's and xAI's compatible servers leave it out of them
    # and add it to the total.
    reasoning = _number(_details(usage, "completion_tokens_details"), "reasoning_tokens") or 0
    total = _number(usage, "total_tokens") or 0
    return max(completion, total - prompt, completion + reasoning if reasoning > completion else 0)


def _too_small(prompt: int, completion: int, texts: list[str], asked: Asked, config: PolicyConfig) -> bool:
    """Return whether no tokenizer makes as few tokens of the prompt and the answer as the bill has."""
    count = tokenizer(config.model)
    return _fewer(completion, texts, count) or _fewer(prompt, _contents(asked), count)


def _fewer(tokens: int, texts: Iterator[str] | list[str], count: Any) -> bool:
    """Return whether a number of tokens is too small for these texts."""
    held = list(texts)
    # The count of all words, quickly made, is at least that of `least_tokens`: most bills need no more.
    words, size = (sum(map(measure, held)) for measure in (most_words, len))
    if (words > tokens or size * 4 > tokens * LONGEST_TOKEN) and sum(map(least_tokens, held)) > tokens:
        return True
    return count is not None and sum(map(count, held)) > tokens


ASCII_SPACES = " \t\n\r\v\f\x1c\x1d\x1e\x1f"
"""The ASCII characters at which `str.split` splits."""


def most_words(text: str) -> int:
    """Return a number that is at least that of the words between spaces."""
    # To split 8 kB takes 60 us, a twentieth of a call's processor time; to count the spaces takes 5.
    return 1 + sum(map(text.count, ASCII_SPACES)) if text.isascii() else len(text.split())


def _least(texts: list[str], asked: Asked, config: PolicyConfig) -> tuple[int, int]:
    """Return lower bounds of prompt and completion tokens."""
    count = tokenizer(config.model) or least_tokens
    return sum(map(count, _contents(asked))), sum(map(count, texts))


def _contents(asked: Asked) -> Iterator[str]:
    return (content for message in asked.messages if isinstance(content := message.get("content"), str))


LONGEST_TOKEN = 1024
"""Bytes of the longest token in any vocabulary we found: Claude 2's, 1,024 NUL characters. Others end at 128."""
LETTER = re.compile(r"[^\W\d_]")


def least_tokens(text: str) -> int:
    """Return a number of tokens that no tokenizer of a server goes below.

    No token holds letters from both sides of a space, because tokenizers split text at spaces first. Held true by all
    909,000 tokens of OpenAI's r50k, p50k, cl100k and o200k, Mistral's v1 to v7 and Tekken, and Claude 2. English has
    1.3 tokens a word, code 2 to 3; text without spaces, such as Chinese, is bounded by its bytes alone.
    """
    return max(
        sum(map(bool, map(LETTER.search, text.split()))),
        -(-len(text.encode("utf-8", "surrogatepass")) // LONGEST_TOKEN),
    )


@lru_cache(16)
def tokenizer(model: str) -> Any:
    """Return a function that counts the tokens of a text with a model's own tokenizer; None where it is not known.

    It is known where the model's name is a folder, or a hub id whose tokenizer this machine has downloaded before.
    Nothing is downloaded for it.
    """
    from huggingface_hub import try_to_load_from_cache

    path: Any = Path(model) / "tokenizer.json"
    try:
        if not path.is_file():
            path = try_to_load_from_cache(model, "tokenizer.json")
    except ValueError:  # a name that no file or no repository can have
        return None
    if not isinstance(path, str | Path):
        return None
    from tokenizers import Tokenizer

    try:
        encode = Tokenizer.from_file(str(path)).encode
    except Exception:  # tokenizers raises a bare Exception for a file that it cannot read
        return None

    @lru_cache(4096)  # a conversation's messages come again with each of its steps
    def count(text: str) -> int:
        # Less two and a twentieth: where text meets the template, a token may take in the end of a message; and a
        # sampled text may have fewer tokens than the tokenizer makes of it.
        found = len(encode(text.strip(), add_special_tokens=False).ids)
        return max(found - 2 - found // 20, least_tokens(text.strip()), 0)

    return count
