"""What rollouts came to, added up one after the other: how many, rewards, verdicts, tokens, the first failure."""

from dataclasses import dataclass, field

from stages.runs.records import Row


@dataclass
class Mean:
    """A mean of what is added to it; `value` is None of nothing."""

    total: float = 0.0
    number: int = 0

    def add(self, value: float) -> None:
        """One more value."""
        self.total, self.number = self.total + value, self.number + 1

    @property
    def value(self) -> float | None:
        """The mean."""
        return self.total / self.number if self.number else None


@dataclass
class Account:
    """Sums over rollouts. Tokens that a source does not tell count as none."""

    rollouts: int = 0
    steps: int = 0
    failed: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0
    first_failure: str | None = None
    rewards: Mean = field(default_factory=Mean)
    strict: Mean = field(default_factory=Mean)
    loose: Mean = field(default_factory=Mean)

    def add(self, rollout: Row, steps: int) -> None:
        """One rollout and the number of its steps."""
        self.rollouts += 1
        self.steps += steps
        self.prompt_tokens += rollout["prompt_tokens"] or 0
        self.completion_tokens += rollout["completion_tokens"] or 0
        if rollout["error_type"] is not None:
            self.failed += 1
            self.first_failure = self.first_failure or f"{rollout['error_type']}: {rollout['error']}"
        if rollout["reward"] is not None:
            self.rewards.add(rollout["reward"])
        if rollout["gt_pass"] is not None and rollout["visible_pass"] is not None:
            self.strict.add(rollout["gt_pass"])
            self.loose.add(rollout["visible_pass"])

    @property
    def mean_reward(self) -> float | None:
        """Over the rollouts that were scored."""
        return self.rewards.value

    @property
    def strict_rate(self) -> float | None:
        """The share of strict passes where there are both verdicts."""
        return self.strict.value

    @property
    def loose_rate(self) -> float | None:
        """The share of loose passes there."""
        return self.loose.value
