"""Small random tensors in float64, the same for the same seed."""

import torch
from torch import Tensor


def logits(seed: int, *shape: int, wants_gradient: bool = False) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64).requires_grad_(wants_gradient)


def log_probs(seed: int, *shape: int, wants_gradient: bool = False) -> Tensor:
    """Of single tokens: between -2.5 and 0."""
    generator = torch.Generator().manual_seed(seed)
    return (-2.5 * torch.rand(*shape, generator=generator, dtype=torch.float64)).requires_grad_(wants_gradient)


def gradient(loss: Tensor, *inputs: Tensor) -> tuple[Tensor, ...]:
    return torch.autograd.grad(loss.sum(), inputs)
