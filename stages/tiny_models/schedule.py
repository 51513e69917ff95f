"""How long and how fast a small model is trained."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Schedule:
    """How long and how fast to train; the learning rate rises for `warm_up` of the steps and then falls to zero."""

    steps: int
    learning_rate: float
    batch: int = 8
    weight_decay: float = 0.01
    warm_up: float = 0.2
    max_norm: float = 1.0
