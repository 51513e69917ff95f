"""The settings of a plan: what `evaluate --plan` assumes of an evaluation that was not played."""

from pydantic import Field

from composer_stages.runs.settings import Settings


class Planning(Settings):
    """What `--plan` assumes. Rates that are not given come from the pilot behind --from, or are assumed."""

    gain: float = Field(default=0.02, gt=-1, lt=1)
    """The true difference in the pass rate, a fraction."""
    power: float = Field(default=0.8, gt=0.5, lt=1)
    seeds: int = Field(default=1, gt=0)
    """Training seeds; where nobody gives them, those of the trainings or of the evaluation that are read."""
    pass_rate: float | None = Field(default=None, gt=0, lt=1)
    """The baseline's pass rate, a fraction."""
    samples_differ: float | None = Field(default=None, gt=0, lt=1)
    """How often one of two rollouts of one model on one task passes and the other fails."""
    arms_differ: float | None = Field(default=None, gt=0, le=1)
    """How often a rollout of one arm passes and one of the other arm on the same task fails."""
    family_correlation: float | None = Field(default=None, ge=0, le=1)
    """The correlation of two tasks' difficulty within a family, or within what the environment declares instead."""
    seed_sd: float | None = Field(default=None, ge=0, lt=1)
    """The standard deviation of the gain from training seed to training seed, a fraction."""
    usd_per_rollout: float | None = Field(default=None, ge=0)
