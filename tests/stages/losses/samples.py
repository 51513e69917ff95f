"""Small random tensors in float64, the same for the same seed."""

import torch
from torch import Tensor

from composer_stages.losses.tokens import Head, Predictors


def logits(seed: int, *shape: int, wants_gradient: bool = False) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64).requires_grad_(wants_gradient)


def log_probs(seed: int, *shape: int, wants_gradient: bool = False) -> Tensor:
    """Of single tokens: between -2.5 and 0."""
    generator = torch.Generator().manual_seed(seed)
    return (-2.5 * torch.rand(*shape, generator=generator, dtype=torch.float64)).requires_grad_(wants_gradient)


def predictors(seed: int, vocabulary: int = 23, biased: bool = False) -> Predictors:
    """Hidden states of nine tokens, with a head that scales and caps."""
    bias = logits(seed + 2, vocabulary, wants_gradient=True) if biased else None
    weight = logits(seed + 1, vocabulary, 6, wants_gradient=True)
    return Predictors(logits(seed, 9, 6, wants_gradient=True), Head(weight, bias, 1.5, 2.0))


def trained(model: Predictors) -> list[Tensor]:
    """What of the predictors has a gradient."""
    return [x for x in (model.rows, model.head and model.head.weight, model.head and model.head.bias) if x is not None]


def gradient(loss: Tensor, *inputs: Tensor) -> tuple[Tensor, ...]:
    return torch.autograd.grad(loss.sum(), inputs)
