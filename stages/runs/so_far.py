"""What a run has come to so far, for whoever watches: the mean reward of its units, and the money."""

from collections.abc import Mapping
from typing import Any


class SoFar:
    """Sums over units as they are written. A step of training has a mean of its own, since its policy is another."""

    def __init__(self) -> None:
        self._sum, self._count, self._name = 0.0, 0, "mean reward"

    def add(self, payload: Mapping[str, Any]) -> None:
        """One unit's payload: a rollout, an item of an evaluation, or the rollouts of a training step."""
        if "played" in payload:
            self._sum, self._count, self._name = 0.0, 0, "reward of the last step"
            for played in payload["played"]:
                self._value(played["rollout"]["reward"])
        elif isinstance(rollout := payload.get("rollout"), Mapping):
            self._value(rollout.get("reward"))
        elif isinstance(item := payload.get("item"), Mapping):
            self._name = "passed"
            self._value(item.get("passed"))

    def _value(self, value: float | bool | None) -> None:
        if value is not None:
            self._sum, self._count = self._sum + float(value), self._count + 1

    def text(self, usd: float) -> str:
        """`mean reward 0.412, 0.03 USD`; empty where there is neither."""
        reward = [f"{self._name} {self._sum / self._count:.3f}"] if self._count else []
        return ", ".join([*reward, *([f"{usd:.4f} USD"] if usd else [])])
