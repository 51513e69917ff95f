"""The bodies of requests to a server, and the most that their answers can cost.

An answer is reserved at the bound of its request before that is sent, so the sum of these bounds is what a plan says.
"""

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from composer_stages.policy import available, tool_calls
from composer_stages.policy.base import UNSTATED, PolicyConfig, Turn
from composer_stages.policy.faults import REASONING, is_empty
from composer_stages.policy.request_fields import LIMITS
from composer_stages.policy.tool_calls import PROBED_FIELDS
from composer_stages.runs import store

QUESTION = [{"role": "user", "content": "Answer with the word OK."}]
EMPTY = "(empty)"
LONGEST = 16
"""Tokens of the probe's answer at most."""
Request = dict[str, Any]


def max_tokens_field(config: PolicyConfig) -> int | bool:
    """Return the `max_tokens` of a model's requests, False to leave the field out; a server may have to be asked."""
    if not config.limits() and available.context_tokens(config) is None:
        return UNSTATED
    return config.max_tokens or False


def request_body(
    config: PolicyConfig, max_tokens: int | bool, turn: Turn, refused: Collection[str] = (), *, thoughts: bool = False
) -> Request:
    """Return the body of the request for a turn; refused: fields that are left out, as the server refuses them.

    thoughts: whether earlier answers are sent with theirs.
    """
    settings = config.request | dict.fromkeys(refused, False)
    tools = [] if settings.get("tools") is False else tool_calls.declare_tools(turn.tools)
    defaults = {
        "model": config.model,
        "messages": tool_calls.chat_messages(turn.messages, with_tools=bool(tools), thoughts=thoughts),
        **({"tools": tools} if tools else {}),
        "temperature": config.temperature,
        "max_tokens": max_tokens,
        "seed": turn.seed % 2**31,
        **({"chat_template_kwargs": config.chat_template_kwargs} if config.chat_template_kwargs else {}),
    }
    return {name: value for name, value in (defaults | settings).items() if value is not False} | config.extra_body


def with_text(request: Request) -> Request:
    """Return a request in which each message without text has `EMPTY`, for servers that take none without."""
    messages = [{**message, "content": EMPTY} if is_empty(message) else message for message in request["messages"]]
    return {**request, "messages": messages}


def lacks_thoughts(request: Request) -> bool:
    """Return whether a request has answers without their thoughts."""
    return any(message["role"] == "assistant" and REASONING not in message for message in request["messages"])


def probe_request(config: PolicyConfig, max_tokens: int | bool) -> tuple[Request, Request]:
    """Return the request that probes a server, without the fields that it may not accept, and these fields."""
    plain = request_body(config, max_tokens, Turn([], 0), PROBED_FIELDS)
    plain["messages"] = QUESTION
    for name in (set(LIMITS) & plain.keys()) or {"max_tokens"}:
        plain[name] = min(plain.get(name, LONGEST), LONGEST)
    return plain, {name: value for name, value in PROBED_FIELDS.items() if config.request.get(name) is not False}


@dataclass(frozen=True)
class CallBounds:
    """What bounds a call's cost: upper bounds of prompt and completion tokens, and what was sent."""

    prompt_tokens: int
    completion_tokens: int
    messages: tuple[Mapping[str, Any], ...] = ()
    has_tools: bool = True
    """Whether tools were declared."""

    @classmethod
    def of_request(cls, request: Mapping[str, Any], context: int) -> "CallBounds":
        """Return the bounds of a request to a server; context: the longest answer where the request has none."""
        limits = [request[name] for name in LIMITS if request.get(name) is not None]
        longest = max(limits, default=context)
        # No tokenizer makes more tokens than there are UTF-8 bytes. The margin, 10 % and 512, is for what a chat
        # template or a provider adds.
        prompt = len(store.encode(request)) * 11 // 10 + 512
        return cls(prompt, longest, tuple(request.get("messages", ())), bool(request.get("tools")))

    def max_usd(self, config: PolicyConfig) -> float:
        """Return the most that the call can cost in USD, however much of its prompt is read from a cache or written."""
        has_write = config.usd_per_mtok_cache_write or config.table
        prompt, written = self.prompt_tokens, self.prompt_tokens if has_write else 0
        ways = ((0, 0), (prompt, 0), (0, written))
        return max(config.cost(prompt, self.completion_tokens, *way) for way in ways)


def price_bound(config: PolicyConfig, turns: Iterable[Turn]) -> float:
    """Return the most in USD that a server asks for the answers to these turns, where no call is repeated."""
    longest, max_tokens = available.longest_answer(config), max_tokens_field(config)
    return sum(CallBounds.of_request(request_body(config, max_tokens, turn), longest).max_usd(config) for turn in turns)


def probe_price_bound(config: PolicyConfig) -> float:
    """Return the most in USD that a server asks for the probe, where it accepts all fields."""
    plain, fields = probe_request(config, max_tokens_field(config))
    return CallBounds.of_request(plain | fields, available.longest_answer(config)).max_usd(config)
