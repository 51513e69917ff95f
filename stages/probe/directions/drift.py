"""Drift: how far the student and the meaning of v move, in the adapter's basis and in the space of weights.

Only weight space is common to all adapters. Formulas and choice of quantities are this project's own.

Shapes: B rows, T tokens, O outputs and I inputs of a Linear, r rank, N trained numbers.
"""

from collections.abc import Sequence
from pathlib import Path

import torch
from jaxtyping import Float
from torch import Tensor

from stages.probe.adapters.antipasto import Antipasto
from stages.probe.adapters.attach import Layout, ProbeAdapter, target_linears
from stages.probe.adapters.lora import A_HALF, Lora
from stages.probe.adapters.spectrum import RowFile
from stages.probe.gradients.per_sample import own_log_probs, tapped
from stages.probe.gradients.student import Student
from stages.probe.pool.tokens import TokenRow, by_length, collate

WeightDirection = dict[str, Float[Tensor, "O I"]]
"""A direction for every adapted weight, by module."""


def weight_direction(student: Student, pairs: Sequence[tuple[TokenRow, TokenRow]], path: Path) -> WeightDirection:
    """Compute the gradient of the sum over pairs of mean NLL(hack) - mean NLL(clean) for every adapted weight.

    By module it is the sum over rows and tokens of the outer products g x', batch by batch. It is written anew to the
    file `path` and mapped into memory: no more than one module of it needs to be in memory at a time.
    """
    path.unlink(missing_ok=True)
    linears = target_linears(student.model)
    layout = Layout({name: linear.weight.numel() for name, linear in linears.items()})
    parts = layout.split(RowFile(path, 1, layout.width).rows[0])
    direction = {name: part.view(linears[name].weight.shape) for name, part in parts.items()}
    rows = [side for pair in pairs for side in pair]
    signs = torch.tensor([sign / row.num_own for pair in pairs for sign, row in zip((1.0, -1.0), pair, strict=True)])

    def tap(module: str, x: Float[Tensor, "B T I"], g: Float[Tensor, "B T O"]) -> None:
        direction[module] += torch.einsum("bto,bti->oi", g.float(), x.float()).to(direction[module].device)

    with torch.enable_grad(), tapped(student.model, tap):
        for indices in by_length([len(row) for row in rows], student.max_tokens):
            batch = collate([rows[i] for i in indices]).to(student.device)
            (-own_log_probs(student.model, batch).sum(-1) @ signs[indices].to(student.device)).backward()
    return direction


def toward_hack(student: Student, direction: WeightDirection, start: Float[Tensor, " N"]) -> float | None:
    """Compute the cosine of -(the weights' change since theta was `start`) with the weight direction.

    Above 0 is toward the hack; None before any change. The sign convention is that of `extraction`: the optimiser moves
    by minus a gradient. One module's change exists at a time.
    """
    dot, moved, square = 0.0, 0.0, 0.0
    for name, part in direction.items():
        change = _change(student.adapter, name, start).float().to(part.device)
        dot -= float((change * part).sum())
        moved += float(change.square().sum())
        square += float(part.square().sum())
    return dot / (moved * square) ** 0.5 if moved else None


@torch.no_grad()
def change_norm(student: Student, start: Float[Tensor, " N"]) -> float:
    """Compute the Frobenius norm of the change of all adapted weights since theta was `start`.

    Only this norm can be compared between adapters. Where bases are orthonormal and what is trained enters linearly it
    is the norm of theta's change.
    """
    adapter = student.adapter
    if isinstance(adapter, Antipasto) or (isinstance(adapter, Lora) and adapter.freeze_a):
        return float((adapter.theta - start.to(adapter.theta)).norm())
    names = [name for name in target_linears(student.model) if name in adapter.layout.names]
    return sum(float(_change(adapter, name, start).square().sum()) for name in names) ** 0.5


def _change(adapter: ProbeAdapter, name: str, start: Float[Tensor, " N"]) -> Float[Tensor, "O I"]:
    return adapter.delta(name) - adapter.delta(name, start.to(adapter.theta))


def basis_overlap(theta: Float[Tensor, " N"], start: Float[Tensor, " N"], student: Student) -> float:
    """Compute the overlap ||Q_t' Q_0||^2 / r of the row spaces of the A halves, the mean over modules, at most 1.

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
