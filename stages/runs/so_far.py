"""What a run has come to so far, for whoever watches: the mean reward of its units, tokens a second, and the money."""

import time
from collections.abc import Callable, Mapping
from typing import Any


class SoFar:
    """Sums over units as they are written. A step of training has a mean of its own, since its policy is another.

    Means are kept for each arm of an evaluation. Tokens are those that were sampled; their pace is that of this
    attempt, from its first progress on, so that a server's start does not count.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._sums: dict[str, tuple[float, int]] = {}
        self._name = "mean reward"
        self._clock, self._began = clock, -1.0
        self.units, self.tokens, self._before = 0, 0, 0

    def begin(self) -> None:
        """From here on the clock runs, and tokens count toward the pace; called again, it changes nothing."""
        if self._began < 0:
            self._began, self._before = self._clock(), self.tokens

    def add(self, payload: Mapping[str, Any]) -> None:
        """One unit's payload: a rollout, an item of an evaluation, an answer, or the rollouts of a training step."""
        self.units += 1
        if "played" in payload:
            self._sums, self._name = {}, "reward of the last step"
            for played in payload["played"]:
                self._unit(played["rollout"], "reward", "reward", "completion_tokens")
        elif isinstance(rollout := payload.get("rollout"), Mapping):
            self._unit(rollout, "reward", "reward", "completion_tokens")
        elif isinstance(item := payload.get("item"), Mapping):
            self._name = "passed"
            self._unit(item, f"passed/{item.get('arm', '')}", "passed", "sampled_tokens")
        elif isinstance(answer := payload.get("answer"), Mapping):
            self.tokens += answer.get("completion_tokens") or 0

    def _unit(self, row: Mapping[str, Any], name: str, value: str, tokens: str) -> None:
        self.tokens += row.get(tokens) or 0
        if row.get(value) is not None:
            total, count = self._sums.get(name, (0.0, 0))
            self._sums[name] = total + float(row[value]), count + 1

    def pace(self) -> float:
        """Sampled tokens a second in this attempt; 0.0 before any."""
        seconds = self._clock() - self._began
        return (self.tokens - self._before) / seconds if self._began >= 0 and seconds > 0 else 0.0

    def figures(self, usd: float) -> dict[str, float]:
        """The means by name, sampled tokens, their pace and the money, as a backend logs them."""
        means = {name: total / count for name, (total, count) in self._sums.items()}
        return {**means, "sampled_tokens": self.tokens, "tokens_per_second": self.pace(), "cost_usd": usd}

    def text(self, usd: float) -> str:
        """`mean reward 0.412, 35 tokens a second, 0.03 USD`; empty where there is none of them."""
        sums = list(self._sums.values())
        count = sum(number for _, number in sums)
        reward = [f"{self._name} {sum(total for total, _ in sums) / count:.3f}"] if count else []
        pace = [f"{self.pace():,.0f} tokens a second"] if self.pace() >= 0.5 else []
        return ", ".join([*reward, *pace, *([f"{usd:.4f} USD"] if usd else [])])
