"""Hack directions from pairs: by module, the mean difference of hack and clean gradients, or its top singular axes.

Directions among dS gradients from hack/clean pairs are those of wassname/grpo_proj2 @25ad306. That the mean decides
and the span of the axes is what is removed is this project's own choice: single axes depend on an arbitrary rotation.

Signs, in one place: a gradient c is that of a loss, and the optimiser moves by -c. v points along grad NLL(hack) - grad
NLL(clean). So <c, v> > 0 means: a descent step on this sample makes the hack relatively more likely. For an update D of
the parameters, the part toward the hack is -<D, v>.

Shapes: P pairs, N numbers in all, n of one module, k axes of a module, M modules with a direction.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import torch
from jaxtyping import Float, Int
from torch import Tensor

from stages.probe.adapters.layout import Layout

LossKind = Literal["nll_mean", "drgrpo_sum"]
"""How token-sum gradients are weighted: mean over own tokens, or Dr.GRPO's constant (arXiv 2503.20783)."""
Method = Literal["mean", "svd_k"]
FLOOR = 1e-12
"""Norms up to this count as zero."""


@dataclass(frozen=True)
class PairGradients:
    """Token-sum gradients [P, N] of each pair's two completions, and how many own tokens each has [P]."""

    layout: Layout
    hack: Float[Tensor, "P N"]
    clean: Float[Tensor, "P N"]
    hack_tokens: Int[Tensor, " P"]
    clean_tokens: Int[Tensor, " P"]

    @classmethod
    def alternating(
        cls, layout: Layout, rows: Float[Tensor, "2P N"], tokens: Sequence[Sequence[int]]
    ) -> "PairGradients":
        """Rows that alternate hack, clean; `tokens` [P, 2] are the own tokens of both."""
        counts = torch.tensor(tokens)
        return cls(layout, rows[0::2], rows[1::2], counts[:, 0], counts[:, 1])

    def __len__(self) -> int:
        return len(self.hack)

    def __getitem__(self, index: list[int] | Int[Tensor, " Q"]) -> "PairGradients":
        parts = (self.hack, self.clean, self.hack_tokens, self.clean_tokens)
        return PairGradients(self.layout, *(part[index] for part in parts))

    def weighted(self, loss: LossKind) -> tuple[Float[Tensor, "P N"], Float[Tensor, "P N"]]:
        """The (hack, clean) gradients under a loss: of the mean NLL a token, or of Dr.GRPO's loss as groups of two.

        The latter is the token sum / (2 Lmax), with advantages +1 and -1 and Lmax the longest of these completions.
        """
        if loss == "nll_mean":
            return self.hack / self.hack_tokens[:, None], self.clean / self.clean_tokens[:, None]
        scale = 2 * max(int(self.hack_tokens.max()), int(self.clean_tokens.max()))
        return self.hack / scale, self.clean / scale

    def differences(self, loss: LossKind) -> Float[Tensor, "P N"]:
        """Each pair's hack - clean under a loss."""
        hack, clean = self.weighted(loss)
        return hack - clean


@dataclass(frozen=True)
class Direction:
    """By module: orthonormal axes [k, n], their singular values [k], the mean difference [n]; a module may have none.

    Where a single direction is asked for it is the unit mean difference; what is removed is the span of the axes.
    """

    layout: Layout
    axes: Mapping[str, Float[Tensor, "k n"]]
    strengths: Mapping[str, Float[Tensor, " k"]]
    means: Mapping[str, Float[Tensor, " n"]]

    @property
    def modules(self) -> tuple[str, ...]:
        """Those that have a direction, in the order of the layout."""
        return tuple(name for name in self.layout.names if name in self.axes)

    @cached_property
    def indices(self) -> list[int]:
        """The places of those modules among all names of the layout."""
        return [self.layout.names.index(name) for name in self.modules]

    @cached_property
    def unit(self) -> Float[Tensor, " N"]:
        """The unit mean directions side by side: norm 1 in each module, 0 where a module has none."""
        return self.layout.join({name: self.means[name] / self.means[name].norm() for name in self.modules})

    @cached_property
    def mean(self) -> Float[Tensor, " N"]:
        """The mean differences side by side, modules weighted by how strongly they differ."""
        return self.layout.join({name: self.means[name] for name in self.modules})

    @cached_property
    def inside(self) -> Float[Tensor, " N"]:
        """1 where a module has a direction, else 0."""
        return self.layout.join({name: torch.ones_like(self.means[name]) for name in self.modules})

    def to(self, device: torch.device | str) -> "Direction":
        """On another device."""
        moved = (
            {name: part.to(device) for name, part in parts.items()} for parts in (self.axes, self.strengths, self.means)
        )
        return Direction(self.layout, *moved)


def from_flat(layout: Layout, flat: Float[Tensor, " N"], modules: tuple[str, ...]) -> Direction:
    """The direction that is this vector in these modules."""
    means = {name: part for name, part in layout.split(flat).items() if name in modules}
    axes = {name: (mean / mean.norm())[None] for name, mean in means.items()}
    return Direction(layout, axes, {name: mean.norm()[None] for name, mean in means.items()}, means)


def extract(
    layout: Layout, differences: Float[Tensor, "P N"], method: Method = "mean", k: int = 1, noise_floor: float = 0.0
) -> Direction:
    """The direction of these differences.

    `k` counts axes of a module under svd_k. `noise_floor` is a quantile: axes whose strength is below it among all
    modules' axes are dropped. Differences are never centred: that would remove the mean, which is the signal. A module
    without any gradient has no direction.
    """
    mean = layout.split(differences.mean(0))
    live = tuple(name for name, part in mean.items() if float(part.norm()) > FLOOR)
    if method == "mean":
        return from_flat(layout, differences.mean(0), live)
    parts = layout.split(differences)
    candidates = {name: _axes(parts[name], mean[name], k) for name in live}
    pooled = torch.cat([strengths for _, strengths in candidates.values()])
    floor = float(pooled.quantile(noise_floor)) if noise_floor else 0.0
    kept = {name: (a[s >= floor], s[s >= floor]) for name, (a, s) in candidates.items() if bool((s >= floor).any())}
    return Direction(
        layout, {n: a for n, (a, _) in kept.items()}, {n: s for n, (_, s) in kept.items()}, {n: mean[n] for n in kept}
    )


def _axes(
    differences: Float[Tensor, "P n"], mean: Float[Tensor, " n"], k: int
) -> tuple[Float[Tensor, "k n"], Float[Tensor, " k"]]:
    """Top right singular vectors, each pointing to where most pairs (or, at a tie, the mean) point."""
    _, strengths, axes = torch.linalg.svd(differences, full_matrices=False)
    axes, strengths = axes[:k], strengths[:k]
    votes = (differences @ axes.T).sign().sum(0)
    votes = torch.where(votes == 0, (axes @ mean).sign(), votes.sign())
    return axes * votes[:, None], strengths


def signal_to_noise(direction: Direction, differences: Float[Tensor, "P N"]) -> Float[Tensor, " M"]:
    """By module with a direction [M]: the mean difference's norm over that of its standard errors, about 1 in noise."""
    noise = direction.layout.sums(differences.var(0) / len(differences)).sqrt()[direction.indices]
    return direction.layout.norms(differences.mean(0))[direction.indices] / noise.clamp(min=FLOOR)
