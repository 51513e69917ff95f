"""A call before the questions: what a server accepts beside a plain question, and how much it tells.

One call asks for everything at once. Where the server rejects it, each thing is tried alone, and what is rejected
alone is left out of all requests. These calls are paid from the run's budget, like every other; a rejection is free.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Protocol

from stages.policy.base import Sample
from stages.policy.config import PolicyConfig

QUESTION = [{"role": "user", "content": "Answer with the word OK."}]
TOOL = {"name": "say", "description": "Say a word.", "parameters": {"type": "object", "properties": {}}}
EXTRAS: dict[str, Any] = {"seed": 1, "tools": [{"type": "function", "function": TOOL}], "logprobs": True}
"""What is tried beside a plain question."""
LONGEST = 16
"""Tokens of the answer; no server asks for fewer to be allowed more."""


class Sends(Protocol):
    """A policy that sends requests as they are."""

    config: PolicyConfig

    async def send(self, request: dict[str, Any], seed: int) -> Sample:
        """The answer to one request."""
        ...


@dataclass(frozen=True)
class Accepted:
    """What a server takes; None where that could not be found out. `error` is what it said of a plain question."""

    seed: bool | None = None
    tools: bool | None = None
    logprobs: bool | None = None
    capture_level: str | None = None
    error: str | None = None

    def as_dict(self) -> dict[str, Any]:
        """JSON-able."""
        return asdict(self)

    @property
    def refused(self) -> list[str]:
        """The names of what is to be left out."""
        return [name for name in EXTRAS if getattr(self, name) is False]


async def probe(policy: Sends, plain: dict[str, Any]) -> Accepted:
    """Find out what a server takes beside a `plain` request, in one call or, after a rejection, one a thing."""
    plain = {**plain, "messages": QUESTION} | {
        name: min(plain[name], LONGEST) for name in ("max_tokens", "max_completion_tokens") if name in plain
    }
    wanted = {name: value for name, value in EXTRAS.items() if policy.config.request.get(name) is not False}
    everything = await policy.send(plain | wanted, 0)
    if everything.error_type != "rejected":
        known = True if everything.error_type in (None, "no_text") else None
        return _told(dict.fromkeys(wanted, known), everything)
    alone = {name: await policy.send(plain | {name: value}, 0) for name, value in wanted.items()}
    accepts = {name: sample.error_type in (None, "no_text") for name, sample in alone.items()}
    if not any(accepts.values()):
        found = await policy.send(plain, 0)
        if found.error_type is not None:
            return Accepted(error=found.error)
    return _told(accepts, alone.get("logprobs", everything))


def _told(accepts: Mapping[str, bool | None], sample: Sample) -> Accepted:
    if None in accepts.values():
        return Accepted(error=sample.error)
    level = "logprobs" if sample.logprobs else "text"
    return Accepted(accepts.get("seed"), accepts.get("tools"), accepts.get("logprobs"), level)
