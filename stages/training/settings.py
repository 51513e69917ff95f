"""The settings of training beside the channels' weights: pairs, hints, optimisation."""

from typing import Literal

from pydantic import Field

from stages.policy.base import PolicyConfig
from stages.runs.config import Settings

RowSource = Literal["pairs", "hinted", "episodes"]
"""What a channel learns from: extracted preference pairs, hinted turns, or whole sampled episodes."""


class Pairs(Settings):
    """How preference pairs are used."""

    per_step: int = Field(16, gt=0)
    """Pairs in every optimiser step."""
    loss_type: str = "sigmoid"
    """DPO's form: sigmoid, ipo, hinge, robust, or another that TRL has."""
    beta: float = Field(0.1, gt=0)
    """DPO's distance to the reference, which is the model that training starts from."""
    simpo_beta: float = Field(2.0, gt=0)
    simpo_gamma_ratio: float = Field(0.25, ge=0)
    max_tokens: int = Field(4096, gt=0)
    """Longest prompt plus completion; longer completions are cut, and pairs that become equal by that are dropped."""


class Hints(Settings):
    """Where the hints of the self-distillation channel come from, and how the divergence is taken."""

    source: Literal["template", "llm"] = "template"
    llm: PolicyConfig | None = None
    """The model that is shown the error, for source = "llm"."""
    per_step: int = Field(16, gt=0)
    """Hinted turns in every optimiser step, at most."""
    alpha: float = Field(0.5, ge=0, le=1)
    """0 forward KL, 1 reverse KL, between them the generalised Jensen-Shannon divergence."""
    top_k: int | None = 100
    """Support of the divergence: the student's k most likely tokens with a tail; None for the whole vocabulary."""


class Optimisation(Settings):
    """The optimiser and the size of a step."""

    steps: int = Field(20, gt=0)
    prompts_per_step: int = Field(8, gt=0)
    generations: int = Field(8, gt=1)
    """Rollouts of every prompt: the group whose mean reward is the baseline."""
    learning_rate: float = Field(2e-4, gt=0)
    max_grad_norm: float = Field(1.0, gt=0)
    beta: float = Field(0.0, ge=0)
    """GRPO's KL to the reference."""
    loss_type: str = "dapo"
    """TRL's form of the GRPO loss."""
    micro_batch: int | None = None
    """Rollouts in one forward and backward pass; None takes all of a step at once."""
    shared_prompts: bool = False
    """Compute a prompt once for all its samples when scoring them: faster, and equal up to rounding. Off, a step
    without channels is TRL's bit for bit; a step with channels always shares."""
    gradient_checkpointing: bool = False
    threads: int | None = Field(None, gt=0)
    """CPU threads; None for as many as there are. On a CPU, runs are equal byte for byte on equally many only."""
    save_every: int = Field(5, gt=0, json_schema_extra={"affects_results": False})
    """Steps between checkpoints that a resumed run can start from."""
    gradient_cosine_every: int = Field(0, ge=0, json_schema_extra={"affects_results": False})
    """Steps between reports of each channel's gradient norm and their cosines; 0 for none."""
