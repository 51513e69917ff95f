"""What a policy is asked (`Turn`), what it answers (`Sample`), and what it is."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from stages.messages import Message
from stages.policy.config import PolicyConfig
from stages.runs.artifact import Listener
from stages.runs.ledger import Budget

__all__ = ["CountsTokens", "Policy", "PolicyConfig", "PolicyKind", "Sample", "Turn"]


@dataclass(frozen=True)
class Turn:
    """One question: the whole conversation, and, where the policy sampled it itself, the token ids held so far.

    held_ids: prompt and completions up to the last assistant message, as sampled, or None to render from the messages.
    seed: of this one answer. tools: what the model may call, as the source or the environment declared it (see
    `stages.envs.base.TakesCalls`); servers get them.
    """

    messages: list[Message]
    seed: int
    held_ids: list[int] | None = None
    tools: Sequence[Any] = ()


@dataclass(frozen=True)
class Sample:
    """One answer. Token fields are None where the source cannot tell.

    prompt_ids, completion_ids: token ids in the model's vocabulary, the end token included. logprobs: natural log, one
    a completion token, under `logprob_kind` ("processed": after temperature; "raw": before). A failed call has
    `error_type` and no text. reasoning: what the model thought aside, where its server tells it apart. usage_by: who
    counted the tokens, "server" or "bound" (at most so many). price_known: whether `cost_usd` is the price, and not 0
    for want of one. served_model, provider: as the server says.
    """

    text: str = ""
    reasoning: str | None = None
    finish_reason: str = "stop"
    prompt_ids: list[int] | None = None
    completion_ids: list[int] | None = None
    logprobs: list[float] | None = None
    logprob_kind: str | None = None
    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0
    cost_usd: float = 0.0
    price_known: bool = True
    usage_by: str = "server"
    served_model: str | None = None
    provider: str | None = None
    latency_s: float = 0.0
    attempts: int = 1
    error_type: str | None = None
    error: str | None = None
    policy_version: int | None = None
    """Optimiser steps that the weights had seen, where they are being trained and a server holds a copy."""

    def as_dict(self) -> dict[str, Any]:
        """All fields, for the cache of answers."""
        return {name: getattr(self, name) for name in self.__dataclass_fields__}


class Policy(Protocol):
    """Answers turns.

    capture_level: "tokens" where samples carry token ids and log-probs, "text" where they cannot. batch_size: how many
    turns one call should hold, a batch for a local model, as many as run at once for a server.
    """

    config: PolicyConfig
    capture_level: str
    batch_size: int

    def sample(self, turns: list[Turn]) -> list[Sample]:
        """One answer a turn, in order; an error of one answer is in its `Sample`, an error of them all is raised."""
        ...

    def facts(self) -> dict[str, Any]:
        """What the manifest keeps: model, digests of weights, tokenizer and chat template."""
        ...


@runtime_checkable
class CountsTokens(Protocol):
    """A policy that has its model's tokenizer at hand."""

    def count_tokens(self, turn: Turn) -> int:
        """How many tokens the prompt of a turn has."""
        ...


class PolicyKind(Protocol):
    """A class of policies, as `stages.policy.KINDS` lists them."""

    def open(self, config: PolicyConfig, *, cache: Path, budget: Budget, listener: Listener) -> Policy:
        """The policy that is configured, ready to sample: a classmethod. `config.model` is as the user wrote it."""
        ...
