"""Placebo directions: the same shapes, modules and norms as v, without its meaning.

What a statistic says of these, it does not say of v. A Haar-random direction is the comparison that the authors' own
direction did not beat in their strongest offline checks (wassname/vGROUT_pub @c067218, docs/research_notes.md).

Trap: swapping hack and clean *within* pairs, upstream's `shuffled_V`, turns differences around and leaves their
singular axes where they were, so for singular bases that shuffle is no placebo; here labels are permuted *across*
pairs.

Which families are a null for "v separates hacked from honest gradients"? The rank of v's t among placebos is a p where
v, if it had nothing to do with hacking, would be one more draw; so the draws must have nothing to do with hacking
themselves, whether or not v has. `haar` and `randsign` take no gradient at all, `clean_clean` only those of honest
answers: they are nulls. `hack_hack` and `perm_pairs` are contrasts of hacks' own gradients. Let r be what separates the
pool's hacks from honest rows beside v. It is never 0, as the pool's hacks are others than the pairs', in other shares,
and it lies in the few dimensions that hacks' gradients span. Contrasts drawn in those dimensions hold much of r, with
either sign; draws from everywhere, or from honest answers, hold it by chance alone. So draws made of hacks separate
hacks just where there is hacking to be found, and to rank v among them asks whether it is the best direction of
hacking, not whether it is one. They are always shown and decide nothing. Both halves of this are simulated in
tests/stages/probe/directions/test_placebo_families.py.

Shapes: D draws, N numbers, S completions; every draw has norm 1 in each module.
"""

from collections.abc import Callable

import torch
from jaxtyping import Float
from torch import Tensor

from stages.probe.adapters.layout import Layout
from stages.probe.directions.extraction import FLOOR, Direction, LossKind, PairGradients

Units = Float[Tensor, "D N"]
"""Unit directions, one a draw."""


def unit_by_module(
    layout: Layout, flat: Float[Tensor, "*draws N"], modules: tuple[str, ...]
) -> Float[Tensor, "*draws N"]:
    """Scale each module's part to norm 1 and leave out modules that have no direction."""
    parts = layout.split(flat)
    return layout.join(
        {name: parts[name] / parts[name].norm(dim=-1, keepdim=True).clamp(min=FLOOR) for name in modules}
    )


def beside(direction: Direction, units: Units) -> Units:
    """The units less their part along v, in every module, at norm 1 again."""
    layout, parts, v = direction.layout, direction.layout.split(units), direction.layout.split(direction.unit.cpu())
    rest = {n: parts[n] - (parts[n] @ v[n])[:, None] * v[n] for n in direction.modules}
    return unit_by_module(layout, layout.join(rest), direction.modules)


def beside_contrasts(units: Units, rows: Float[Tensor, "S N"]) -> Units:
    """Directions less their part in the span of what rows differ in, at norm 1 over all modules together.

    With honest answers' gradients as rows, what is left of v is not right against wrong, nor short against long.
    """
    axes = torch.linalg.svd(rows - rows.mean(0), full_matrices=False)[2][: len(rows) - 1].to(units)
    rest = units - (units @ axes.T) @ axes
    return rest / rest.norm(dim=-1, keepdim=True).clamp(min=FLOOR)


def haar(direction: Direction, draws: int, seed: int) -> Units:
    """Uniformly random directions."""
    normal = torch.randn(draws, direction.layout.width, generator=_generator(seed))
    return unit_by_module(direction.layout, normal, direction.modules)


def randsign(direction: Direction, draws: int, seed: int) -> Units:
    """The unit v with a random sign for every number: the same profile over coordinates, no direction."""
    coins = torch.randint(0, 2, (draws, direction.layout.width), generator=_generator(seed)) * 2 - 1
    return direction.unit.cpu() * coins


def perm_pairs(direction: Direction, pairs: PairGradients, loss: LossKind, draws: int, seed: int) -> Units:
    """Mean differences after permuting the labels hack and clean among all completions of all pairs."""
    both = torch.cat(pairs.weighted(loss))
    return _random_splits(direction, both, len(pairs), draws, seed)


def clean_clean(direction: Direction, pairs: PairGradients, loss: LossKind, draws: int, seed: int) -> Units:
    """One random half of the clean completions against the other."""
    return _random_splits(direction, pairs.weighted(loss)[1], len(pairs) // 2, draws, seed)


def hack_hack(direction: Direction, pairs: PairGradients, loss: LossKind, draws: int, seed: int) -> Units:
    """One random half of the hacks against the other."""
    return _random_splits(direction, pairs.weighted(loss)[0], len(pairs) // 2, draws, seed)


FROM_PAIRS: dict[str, Callable[[Direction, PairGradients, LossKind, int, int], Units]] = {
    "perm_pairs": perm_pairs,
    "clean_clean": clean_clean,
    "hack_hack": hack_hack,
}


def _random_splits(direction: Direction, sides: Float[Tensor, "S N"], first: int, draws: int, seed: int) -> Units:
    """Mean of a random `first` of the rows minus the mean of the others, once a draw."""
    generator = _generator(seed)
    signs = torch.full((draws, len(sides)), -1.0 / (len(sides) - first))
    for line in signs:
        line[torch.randperm(len(sides), generator=generator)[:first]] = 1.0 / first
    return unit_by_module(direction.layout, signs @ sides, direction.modules)


def random_axes(direction: Direction, seed: int) -> Direction:
    """The direction of the arm projected_random: random orthonormal axes, as many in each module as v has.

    Removal is decided by a random mean in their span, with the norm of v's.
    """
    generator = _generator(seed)
    axes, means = {}, {}
    for name in direction.modules:
        k, n = direction.axes[name].shape
        axes[name] = torch.linalg.qr(torch.randn(n, k, generator=generator))[0].T.contiguous()
        means[name] = axes[name].sum(0) / k**0.5 * direction.means[name].norm().cpu()
    return Direction(direction.layout, axes, dict(direction.strengths), means)


def _generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)
