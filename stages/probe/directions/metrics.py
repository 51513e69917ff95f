"""How much of a gradient lies along a direction: exact definitions, with what chance alone would give.

norm_weighted_cos (cos_S_contrib) and hackfrac (there "cin") are quantities of wassname/grpo_proj2 @25ad306; cos_stack,
cos_global, energy and the chance levels are this project's own, from the definitions below.

Shapes: B rows, N numbers, P directions, K axes of all modules. M is the number of modules that have a direction, and
all sums run over those.
"""

import math

import torch
from jaxtyping import Float
from torch import Tensor

from stages.probe.directions.extraction import FLOOR, Direction

CHUNK_NUMBERS = 2**26
"""Gradients are read from disk in pieces of about so many numbers."""


def row_metrics(gradients: Float[Tensor, "B N"], direction: Direction) -> dict[str, Float[Tensor, " B"]]:
    """Each row's metrics by name, without unit but for the first and the last; NaN where a gradient is 0.

    grad_dot = sum_m <c_m, v_m>, v_m the unit mean direction. norm_weighted_cos = grad_dot / ||c||, at most sqrt(M).
    cos_stack = norm_weighted_cos / sqrt(M), the cosine of the concatenations. cos_global is the cosine with the mean
    differences, not scaled to 1 in each module. energy = sum ||V c||^2 / ||c||^2. hackfrac = ||relu(V c)|| / ||c||.
    grad_norm is the norm over all modules, also those without a direction.
    """
    sums = MetricSums(direction)
    for name, part in direction.layout.split(gradients).items():
        sums(name, part)
    return sums.metrics()


class MetricSums:
    """A sink of per-sample gradients that keeps what `row_metrics` is made of, six numbers a row.

    No more than one module's gradients exist at a time, so gradients of any size can be measured.
    """

    def __init__(self, direction: Direction) -> None:
        self._direction = direction
        self._sums = dict.fromkeys(("all", "inside", "dot", "dot_mean", "along", "toward"), torch.zeros(()))

    def __call__(self, name: str, contribution: Float[Tensor, "B n"]) -> None:
        """Add one module's gradients."""
        square = contribution.square().sum(-1)
        found = {"all": square}
        if name in self._direction.axes:
            mean, axes = (part[name].to(contribution) for part in (self._direction.means, self._direction.axes))
            along = contribution @ axes.T
            found |= {"inside": square, "dot": contribution @ (mean / mean.norm()), "dot_mean": contribution @ mean}
            found |= {"along": along.square().sum(-1), "toward": along.relu().square().sum(-1)}
        for key in self._sums:
            self._sums[key] = self._sums[key].to(square) + found.get(key, torch.zeros_like(square))

    def metrics(self) -> dict[str, Float[Tensor, " B"]]:
        """The rows' metrics, on the CPU."""
        sums = {key: value.cpu() for key, value in self._sums.items()}
        norm, strength = sums["inside"].sqrt(), sum(float(m.square().sum()) for m in self._direction.means.values())
        weighted = sums["dot"] / norm
        return {
            "grad_dot": sums["dot"],
            "norm_weighted_cos": weighted,
            "cos_stack": weighted / math.sqrt(max(len(self._direction.modules), 1)),
            "cos_global": sums["dot_mean"] / (norm * math.sqrt(strength)),
            "energy": sums["along"] / sums["inside"],
            "hackfrac": sums["toward"].sqrt() / norm,
            "grad_norm": sums["all"].sqrt(),
        }


def module_cosines(gradients: Float[Tensor, "B N"], direction: Direction) -> Float[Tensor, "B M"]:
    """The cosine within each module that has a direction; NaN where a module's gradient is 0."""
    dots = direction.layout.sums(gradients * direction.unit)[:, direction.indices]
    return dots / direction.layout.norms(gradients)[:, direction.indices]


def stacked_cosines(
    gradients: Float[Tensor, "B N"], units: Float[Tensor, "P N"], inside: Float[Tensor, " N"], num_modules: int
) -> Float[Tensor, "B P"]:
    """The cos_stack of many rows with many directions of the same modules; reads a memory-mapped store in pieces, once.

    `units` have norm 1 in each of the `num_modules` modules where `inside` is 1.
    """
    step = max(1, CHUNK_NUMBERS // max(gradients.shape[-1], 1))
    cosines = []
    for start in range(0, len(gradients), step):
        piece = gradients[start : start + step].to(units.dtype)
        norm = torch.linalg.vector_norm(piece * inside, dim=-1, keepdim=True)
        cosines.append(piece @ units.T / (norm * math.sqrt(num_modules)))
    return torch.cat(cosines)


def chance(gradients: Float[Tensor, "B N"], direction: Direction) -> dict[str, float]:
    """What isotropic random directions would give, averaged over rows; no units.

    Too small for real gradients, so shown beside placebos, never alone. With w_m = ||c_m|| / ||c||, n_m numbers and k_m
    axes in module m: sd(norm_weighted_cos) = sqrt(sum w^2 / n), E[energy] = sum w^2 k / n, and hackfrac about
    sqrt(E[energy] / 2), as half of the signs are positive.
    """
    layout = direction.layout
    squares = layout.norms(gradients)[:, direction.indices].square()
    weights = squares / squares.sum(-1, keepdim=True).clamp(min=FLOOR)
    sizes = torch.tensor([float(layout.sizes[name]) for name in direction.modules])
    axes = torch.tensor([float(len(direction.axes[name])) for name in direction.modules])
    spread = (weights / sizes).sum(-1).sqrt().mean()
    energy = float((weights * axes / sizes).sum(-1).mean())
    return {
        "sd_norm_weighted_cos": float(spread),
        "sd_cos_stack": float(spread) / math.sqrt(len(direction.modules)),
        "energy": energy,
        "hackfrac": math.sqrt(energy / 2),
    }
