"""A student between two models, W + alpha (W_teacher - W): on-policy, yet it sometimes hacks, so its rewards vary.

The generator `interp`; this project's own, not taken from a paper.
"""

from collections.abc import Callable, Mapping

import torch
from torch import nn

from stages.errors import BadInput

LOW, HIGH, ROUNDS = 0.3, 0.6, 8


@torch.no_grad()
def set_between(
    model: nn.Module, base: Mapping[str, torch.Tensor], teacher: Mapping[str, torch.Tensor], alpha: float
) -> None:
    """Give a model the weights at this place between two sets of parameters by name; 0 is the base, bit for bit."""
    for name, parameter in model.named_parameters():
        parameter.data = base[name].clone() if alpha == 0 else torch.lerp(base[name], teacher[name], alpha)


def find_alpha(hack_rate: Callable[[float], float]) -> tuple[float, float]:
    """An alpha at which the hack rate lies in .3 to .6, and that rate, by bisection; `BadInput` when none is found."""
    low, high = 0.0, 1.0
    for _ in range(ROUNDS):
        alpha = (low + high) / 2
        rate = hack_rate(alpha)
        if LOW <= rate <= HIGH:
            return alpha, rate
        low, high = (alpha, high) if rate < LOW else (low, alpha)
    raise BadInput(
        f"No mixture of student and teacher hacks in {LOW:.0%} to {HIGH:.0%} of its answers "
        f"(at alpha {alpha:.3f}: {rate:.0%}). Give alpha, or a teacher that hacks more often than that."
    )
