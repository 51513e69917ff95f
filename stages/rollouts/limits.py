"""Limits: what ends an episode early, with its work graded, and how much goes on at once."""

from collections.abc import Callable
from dataclasses import dataclass

from pydantic import Field

from stages.rollouts.history import FULL, NEAR, REQUEST
from stages.runs.config import Settings


class EpisodeLimits(Settings):
    """What one episode may use beside its steps. What it left behind is graded as it stands when a limit is reached."""

    wall_s: float | None = Field(None, gt=0)
    """Wall time of an episode; a request that is under way then is given up, a command is waited for."""
    context_tokens: int | None = Field(None, gt=0)
    """Longest prompt and answer together, as counted by the server or a tokenizer, else by UTF-8 bytes as a bound."""
    cost_usd: float | None = Field(None, gt=0)
    """What an episode may cost; the answer that reaches it is its last."""

    def reached(
        self, seconds: float, cost_usd: float, prompt_tokens: Callable[[], int | None], max_tokens: int
    ) -> str | None:
        """The limit that ends an episode before its next answer: "wall_time", "cost" or "context"; None: it goes on.

        Arguments: what the episode has taken and cost, how long the next prompt is (None: nobody knows), and how long
        the answer to it may be.
        """
        if self.wall_s is not None and seconds >= self.wall_s:
            return "wall_time"
        if self.cost_usd is not None and cost_usd >= self.cost_usd:
            return "cost"
        if self.context_tokens is not None:
            tokens = prompt_tokens()
            if tokens is not None and tokens + max_tokens > self.context_tokens:
                return "context"
        return None

    def nears(self, prompt_tokens: int | None, max_tokens: int) -> bool:
        """Whether the limit of the context nears: a summary is asked for while that still fits."""
        if self.context_tokens is None or prompt_tokens is None:
            return False
        return NEAR * self.context_tokens < prompt_tokens + len(REQUEST) + max_tokens <= self.context_tokens

    def notes(self, max_steps: int) -> tuple[str, ...]:
        """The limits in words, for a plan."""
        words = [f"{max_steps} steps"]
        words += [f"{self.wall_s:g} s"] if self.wall_s is not None else []
        words += [f"{self.context_tokens:,} tokens of context"] if self.context_tokens is not None else []
        words += [f"{self.cost_usd:g} USD"] if self.cost_usd is not None else []
        return (f"an episode at most {', '.join(words)}",)


class InFlight(Settings):
    """How much goes on at once where the policy is on a server. A local model plays batches of 32 instead."""

    episodes: int = Field(64, gt=0, json_schema_extra={"affects_results": False})
    """Episodes being played; as many again may wait to be graded."""
    commands: int = Field(8, gt=0, json_schema_extra={"affects_results": False})
    """Commands, and workspaces being set up."""
    gradings: int = Field(4, gt=0, json_schema_extra={"affects_results": False})
    """Gradings."""

    def notes(self) -> tuple[str, ...]:
        """The numbers in words, for a plan."""
        return (f"{self.episodes} episodes, {self.commands} commands and {self.gradings} gradings at once",)


NO_LIMITS = EpisodeLimits()


@dataclass(frozen=True)
class Rules:
    """How episodes are played: at most so many steps, within limits, showing so much of the past (history.py).

    `calls`: actions are tool calls.
    """

    max_steps: int
    limits: EpisodeLimits = NO_LIMITS
    history: str = FULL
    calls: bool = False
