"""Does what v means stay the same while the student moves? In the adapter's basis and in the space of weights.

Only weight space is common to all adapters. Formulas and choice of quantities are this project's own.

Shapes: B rows, T tokens, O outputs and I inputs of a Linear, r rank, N trained numbers.
"""

from collections.abc import Sequence

import torch
from jaxtyping import Float
from torch import Tensor

from stages.probe.adapters.lora import A_HALF, Lora
from stages.probe.gradients.per_sample import own_log_probs, tapped
from stages.probe.gradients.student import Student
from stages.probe.pool.tokens import TokenRow, by_length, collate

WeightDirection = dict[str, Float[Tensor, "O I"]]
"""A direction for every adapted weight, by module."""


def weight_direction(student: Student, pairs: Sequence[tuple[TokenRow, TokenRow]]) -> WeightDirection:
    """The gradient of the sum over pairs of mean NLL(hack) - mean NLL(clean) with respect to every adapted weight.

    By module it is the sum over rows and tokens of the outer products g x', batch by batch.
    """
    rows = [side for pair in pairs for side in pair]
    signs = torch.tensor([sign / row.num_own for pair in pairs for sign, row in zip((1.0, -1.0), pair, strict=True)])
    direction: WeightDirection = {}

    def tap(module: str, x: Float[Tensor, "B T I"], g: Float[Tensor, "B T O"]) -> None:
        part = torch.einsum("bto,bti->oi", g.float(), x.float())
        direction[module] = direction[module] + part if module in direction else part

    with torch.enable_grad(), tapped(student.model, tap):
        for indices in by_length([len(row) for row in rows], student.max_tokens):
            batch = collate([rows[i] for i in indices]).to(student.device)
            (-own_log_probs(student.model, batch).sum(-1) @ signs[indices].to(student.device)).backward()
    return direction


def toward_hack(student: Student, direction: WeightDirection) -> float | None:
    """The cosine of -(the weights' change so far) with the weight direction, above 0 toward the hack.

    None before any change. The sign convention is that of `extraction`: the optimiser moves by minus a gradient.
    """
    changes = {name: -student.adapter.delta(name).float() for name in direction}
    dot = sum(float((changes[name] * part).sum()) for name, part in direction.items())
    norms = [sum(float(part.square().sum()) for part in parts.values()) ** 0.5 for parts in (changes, direction)]
    return dot / (norms[0] * norms[1]) if norms[0] else None


def basis_overlap(theta: Float[Tensor, " N"], start: Float[Tensor, " N"], student: Student) -> float:
    """The overlap ||Q_t' Q_0||^2 / r of the row spaces of the A halves, the mean over modules, at most 1.

    Q are orthonormal bases of the rows of A in `theta` and in `start`. It is 1 where A, or the singular basis, is
    frozen.
    """
    adapter = student.adapter
    if not isinstance(adapter, Lora) or adapter.freeze_a:
        return 1.0
    overlaps = []
    for name, place in adapter.layout.slices.items():
        if name.endswith(A_HALF):
            now, then = (torch.linalg.qr(flat[place].view(adapter.rank, -1).T)[0] for flat in (theta, start))
            overlaps.append(float((now.T @ then).square().sum()) / adapter.rank)
    return sum(overlaps) / len(overlaps)
