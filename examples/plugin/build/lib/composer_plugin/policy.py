"""parrot: a policy that answers every turn with its own name."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from composer_post_training.policies import Budget, Listener, PolicyConfig, Sample, Turn


class Parrot:
    """A model `parrot:polly` says "polly"."""

    capture_level, batch_size = "text", 8

    def __init__(self, config: PolicyConfig) -> None:
        self.config = config

    @classmethod
    def open(cls, config: PolicyConfig, *, cache: Path, budget: Budget, listener: Listener | None) -> "Parrot":
        """Return the policy: nothing is loaded."""
        return cls(config)

    def sample(self, turns: Sequence[Turn]) -> list[Sample]:
        """Return one answer a turn."""
        return [Sample(text=self.config.model.partition(":")[2]) for _ in turns]

    def facts(self) -> dict[str, Any]:
        """Return what the run's manifest keeps of the policy."""
        return {"model": self.config.model}
