"""Trainable additive changes of singular values: y = W x + U diag(dS) Vh x, dS = 0 at the start.

W is never rebuilt from its factors, so dS = 0 leaves the base model bit for bit. With all singular triples there is no
residual; with the top r of them the rest of W stays where it is, in W. A multiplicative knob S(1 + z) would have other
gradients: dS is additive.

The form is that of wassname/grpo_proj2 @25ad306, src/projected_grpo/antipasto.py (full rank), and of lora-lite
@19888fb, variants/antipasto.py (top r), after AntiPaSTO (arXiv 2601.07473).

Shapes: B rows, T tokens, I inputs and O outputs of a Linear, r singular directions, N numbers of all modules.
"""

from collections.abc import Mapping

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn import functional as F

from stages.probe.adapters.attach import Layout
from stages.probe.adapters.spectrum import Factors, Spectrum
from stages.runs import store


class Antipasto:
    """The dS of every adapted Linear, in one flat vector `theta` [N]."""

    def __init__(self, spectrum: Spectrum, rank: int | None = None) -> None:
        """All singular triples, or the top `rank` of each Linear."""
        self.kind = "antipasto_full" if rank is None else "antipasto_topr"
        self.rank = rank
        self.factors: dict[str, Factors] = {
            name: factors if rank is None else factors.top(rank) for name, factors in spectrum.factors.items()
        }
        self.layout = Layout({name: len(factors.S) for name, factors in self.factors.items()})
        self.theta = torch.zeros(self.layout.width)
        self.basis_sha256 = spectrum.sha256 if rank is None else store.digest([spectrum.sha256, rank])
        self.probed = self.layout.names

    def to(self, device: torch.device | str, dtype: torch.dtype) -> "Antipasto":
        """Move the factors to where the model computes; theta stays float32."""
        self.factors = {name: factors.to(device, dtype) for name, factors in self.factors.items()}
        self.theta = self.theta.to(device)
        return self

    def delta(self, module: str, theta: Float[Tensor, " N"] | None = None) -> Float[Tensor, "O I"]:
        """U diag(dS) Vh: what the adapter adds to a weight, in float32 at least."""
        factors, change = self.factors[module], (self.theta if theta is None else theta)[self.layout.slices[module]]
        wide = torch.promote_types(factors.U.dtype, change.dtype)
        return (factors.U * change).to(wide) @ factors.Vh.to(wide)

    def path(self, module: str, x: Float[Tensor, "B T I"], values: Mapping[str, Tensor]) -> Float[Tensor, "B T O"]:
        """U diag(dS) Vh x with dS from `values`: the adapter as a separate path, for autograd."""
        factors = self.factors[module]
        return F.linear(F.linear(x, factors.Vh.to(x)) * values[module].to(x.dtype), factors.U.to(x))

    def contributions(
        self, module: str, x: Float[Tensor, "B T I"], g: Float[Tensor, "B T O"]
    ) -> dict[str, Float[Tensor, "B r"]]:
        """Each row's gradient of dS, sum_t (U' g_t) * (Vh x_t), accumulated in float32 at least.

        By the chain rule from y = W x + U diag(dS) Vh x; tested against autograd. The sum runs over all positions, the
        prompt's too. For long rows diag(U' (sum_t g_t x_t') Vh') is the same with fewer products: O I (T + r) instead
        of r (O + I) T multiplications a row, a row at a time.
        """
        return self.backward(module, x, g)[0]

    def backward(
        self, module: str, x: Float[Tensor, "B T I"], g: Float[Tensor, "B T O"]
    ) -> tuple[dict[str, Float[Tensor, "B r"]], Float[Tensor, "B T I"] | None]:
        """The same, and the gradient of x where the factors give it for less: g W' = ((g U) diag(S + dS)) Vh.

        With all singular triples W' is U diag(S + dS) Vh, and g U is there already; so a Linear with more outputs than
        inputs needs r I instead of O I multiplications a token. In float32 alone, in which the factors were made.
        """
        factors = self.factors[module]
        (outputs, rank), inputs, tokens = factors.U.shape, factors.Vh.shape[1], x.shape[1]
        if outputs * inputs * (tokens + rank) < rank * (outputs + inputs) * tokens:
            return {module: torch.stack([_diagonal(factors, *row) for row in zip(x, g, strict=True)])}, None
        turned = g @ factors.U.to(g)
        along = F.linear(x, factors.Vh.to(x)).to(torch.promote_types(x.dtype, torch.float32))
        found = {module: along.mul_(turned).sum(1)}
        if self.rank is not None or outputs <= rank or not factors.U.dtype == g.dtype == torch.float32:
            return found, None
        strength = factors.S.to(g) + self.theta[self.layout.slices[module]].to(g)
        return found, turned.mul_(strength) @ factors.Vh.to(g)


def _diagonal(factors: Factors, x: Float[Tensor, "T I"], g: Float[Tensor, "T O"]) -> Float[Tensor, " r"]:
    """diag(U' (sum_t g_t x_t') Vh') of one row, in float32 at least."""
    wide = torch.promote_types(x.dtype, torch.float32)
    outer = (g.T @ x).to(wide)
    return (factors.U.to(wide) * (outer @ factors.Vh.to(wide).T)).sum(0)
