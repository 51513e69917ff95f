"""Adapters on the singular values of a weight, after AntiPaSTO (arXiv 2601.07473): added changes, and turned vectors.

`Antipasto`, y = W x + U diag(dS) Vh x with dS = 0 at the start, has the form of wassname/grpo_proj2 @25ad306,
src/projected_grpo/antipasto.py (full rank), and of lora-lite @19888fb, variants/antipasto.py (top r). W is never
rebuilt from its factors, so dS = 0 leaves the base model bit for bit. With all singular triples there is no residual;
with the top r of them the rest of W remains in W. A multiplicative knob S(1 + z) would have other gradients: dS is
additive.

`RotatedAntipasto`, y = W x + U (diag(S + dS) R' - diag(S)) Vh x, is the adapter of the paper (wassname/AntiPaSTO
@12233df, antipasto/peft_utils/antipasto_adapter.py): R is the Cayley transform of a skew matrix A whose entries are
bounded softly, so that R turns a single plane by less than pi / 3; the rest of W remains in W. It adapts what writes to
the residual stream, in r singular directions of each Linear, which `pick_dims` chooses by the Linear's inputs along
them (ibid., layer_selection.py, wanda_svd_l1_trip). Its start is not the model itself but close to it, dS about 4e-4
and A about .008, since at A = 0 its own loss, which compares R with R', has a saddle; here the gradients would be live
at 0 too. What differs: A's entries above the diagonal are the trained numbers, half as many as there; and directions
are picked by a Linear's own inputs, not by the residual stream.

Shapes: B rows, T tokens, I inputs and O outputs of a Linear, r singular directions, s = r (r - 1) / 2, n trained
numbers of a module, N of all modules.
"""

import math
from collections.abc import Mapping, Sequence

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn import functional as F

from stages.probe.adapters.attach import Layout
from stages.probe.adapters.spectrum import Factors, Spectrum, tensors_sha256
from stages.runs import store

WRITERS = ("o_proj", "down_proj")
"""The Linears that write to the residual stream, by the end of their names."""
TURN = ":R"
"""Suffix of the name under which a Linear's turn is stored; its dS has the Linear's own name."""
LIMIT = 2 * math.tan(math.pi / 6)
"""Bound of A's entries: the Cayley transform turns a plane with this entry by pi / 3."""
START_S, START_TURN = 4e-4, 3e-3
"""Spreads of dS and of the turn at the start of `RotatedAntipasto`, those of AntiPaSTO's file."""


class Antipasto:
    """The dS of every adapted Linear, in one flat vector `theta` [N]."""

    def __init__(self, spectrum: Spectrum, rank: int | None = None) -> None:
        """Take all singular triples, or the top `rank` of each Linear."""
        self.kind = "antipasto_full" if rank is None else "antipasto_topr"
        self.rank = rank
        self.factors: dict[str, Factors] = {
            name: factors if rank is None else factors.select(range(min(rank, len(factors.S))))
            for name, factors in spectrum.factors.items()
        }
        self.layout = Layout({name: len(factors.S) for name, factors in self.factors.items()})
        # float32 whatever the model's type: a change of theta is mostly smaller than the spacing of bfloat16 numbers.
        self.theta = torch.zeros(self.layout.width)
        self.basis_sha256 = spectrum.sha256 if rank is None else store.digest([spectrum.sha256, rank])
        self.probed = self.layout.names

    def to(self, device: torch.device | str, dtype: torch.dtype) -> "Antipasto":
        """Move the factors to the model's device and type; theta stays float32."""
        self.factors = {name: factors.to(device, dtype) for name, factors in self.factors.items()}
        self.theta = self.theta.to(device)
        return self

    def delta(self, module: str, theta: Float[Tensor, " N"] | None = None) -> Float[Tensor, "O I"]:
        """Return U diag(dS) Vh, the change of a weight, in float32 at least."""
        factors, change = self.factors[module], (self.theta if theta is None else theta)[self.layout.slices[module]]
        # The factors may be bfloat16; the change is computed in theta's float32, so that no small step is lost.
        wide = torch.promote_types(factors.U.dtype, change.dtype)
        return (factors.U * change).to(wide) @ factors.Vh.to(wide)

    def path(self, module: str, x: Float[Tensor, "B T I"], values: Mapping[str, Tensor]) -> Float[Tensor, "B T O"]:
        """Compute U diag(dS) Vh x with dS from `values`: the adapter as a separate path, for autograd."""
        factors = self.factors[module]
        return F.linear(F.linear(x, factors.Vh.to(x)) * values[module].to(x.dtype), factors.U.to(x))

    def row_gradients(
        self, module: str, x: Float[Tensor, "B T I"], g: Float[Tensor, "B T O"]
    ) -> tuple[dict[str, Float[Tensor, "B r"]], Float[Tensor, "B T I"] | None]:
        """Compute each row's gradient of dS, sum_t (U' g_t) * (Vh x_t), accumulated in float32 at least.

        By the chain rule from y = W x + U diag(dS) Vh x; tested against autograd. The sum runs over all positions, the
        prompt's too. The gradient of x is returned where the factors give it for less: g W' = ((g U) diag(S + dS)) Vh.
        """
        factors = self.factors[module]
        (outputs, rank), inputs, tokens = factors.U.shape, factors.Vh.shape[1], x.shape[1]
        wide = torch.promote_types(x.dtype, torch.float32)
        # For long rows diag(U' (sum_t g_t x_t') Vh') is the same with fewer products, a row at a time: O I (T + r)
        # instead of r (O + I) T multiplications a row.
        if outputs * inputs * (tokens + rank) < rank * (outputs + inputs) * tokens:
            outer = [(row_g.T @ row_x).to(wide) for row_x, row_g in zip(x, g, strict=True)]
            left, right = factors.U.to(wide), factors.Vh.to(wide).T
            return {module: torch.stack([(left * (row @ right)).sum(0) for row in outer])}, None
        turned = g @ factors.U.to(g)
        along = F.linear(x, factors.Vh.to(x)).to(wide)
        found = {module: along.mul_(turned).sum(1)}
        # With all singular triples W' is U diag(S + dS) Vh, and g U is there already; so a Linear with more outputs
        # than inputs needs r I instead of O I multiplications a token. Only in float32, in which the factors were made.
        if self.rank is not None or outputs <= rank or not factors.U.dtype == g.dtype == torch.float32:
            return found, None
        strength = factors.S.to(g) + self.theta[self.layout.slices[module]].to(g)
        return found, turned.mul_(strength) @ factors.Vh.to(g)


class RotatedAntipasto:
    """The dS [r] and the turn [s] of every Linear that writes to the residual stream, one flat vector `theta` [N]."""

    kind = "antipasto_paper"

    def __init__(
        self, spectrum: Spectrum, rank: int, *, seed: int, dims: Mapping[str, Sequence[int]] | None = None
    ) -> None:
        """Draw a start near no change with `seed`; `dims` are each Linear's singular directions, None for the largest.

        dS is truncated normal around 4e-4, A = 2 (x - x') with x truncated normal, as in AntiPaSTO's file.
        """
        self.rank = rank
        every = {name: f for name, f in spectrum.factors.items() if name.endswith(WRITERS)}
        self.dims = {n: list(dims[n]) if dims else list(range(min(rank, len(f.S)))) for n, f in every.items()}
        self.factors = {name: factors.select(self.dims[name]) for name, factors in every.items()}
        self.shapes = {name: (f.U.shape[0], f.Vh.shape[1]) for name, f in spectrum.factors.items()}
        generator, start = torch.Generator().manual_seed(seed), dict[str, Tensor]()
        draw = torch.nn.init.trunc_normal_
        for name, factors in self.factors.items():
            count = len(factors.S)
            start[name] = draw(torch.empty(count), mean=START_S, std=START_S, generator=generator)
            x = draw(torch.empty(count, count), mean=0.0, std=START_TURN, generator=generator)
            # A is skew, so the entries above the diagonal are all of its numbers.
            start[name + TURN] = (2 * (x - x.T))[tuple(torch.triu_indices(count, count, 1))]
        self.layout = Layout({name: part.numel() for name, part in start.items()})
        self.probed = self.layout.names
        self._basis = [spectrum.sha256, self.dims]
        self.begin_at(self.layout.join(start))

    def begin_at(self, theta: Float[Tensor, " N"]) -> None:
        """Start from these values, which then belong to what identifies the coordinates."""
        self.theta = theta.clone()
        self.basis_sha256 = store.digest([*self._basis, tensors_sha256([self.theta])])

    def to(self, device: torch.device | str, dtype: torch.dtype) -> "RotatedAntipasto":
        """Move the factors to the model's device and type; theta stays float32."""
        self.factors = {name: factors.to(device, dtype) for name, factors in self.factors.items()}
        self.theta = self.theta.to(device)
        return self

    def _core(self, module: str, values: Mapping[str, Tensor]) -> Float[Tensor, "r r"]:
        """Compute diag(S + dS) R' - diag(S)."""
        s = self.factors[module].S.to(values[module])
        r = rotation(skew(values[module + TURN], len(s)))
        return (s + values[module])[:, None] * r.T - torch.diag(s)

    def delta(self, module: str, theta: Float[Tensor, " N"] | None = None) -> Float[Tensor, "O I"]:
        """Return the change of a weight, in float32 at least; zeros for a Linear that the adapter leaves as it is."""
        now = self.theta if theta is None else theta
        if module not in self.factors:
            return now.new_zeros(self.shapes[module])
        factors, core = self.factors[module], self._core(module, self.layout.only(now, module, module + TURN))
        wide = torch.promote_types(factors.U.dtype, core.dtype)
        return factors.U.to(wide) @ core.to(wide) @ factors.Vh.to(wide)

    def path(self, module: str, x: Float[Tensor, "B T I"], values: Mapping[str, Tensor]) -> Float[Tensor, "B T O"]:
        """Compute the adapter as a separate path with its numbers from `values`, for autograd."""
        if module not in self.factors:
            return x.new_zeros(*x.shape[:-1], self.shapes[module][0])
        factors = self.factors[module]
        return F.linear(F.linear(F.linear(x, factors.Vh.to(x)), self._core(module, values).to(x)), factors.U.to(x))

    def row_gradients(
        self, module: str, x: Float[Tensor, "B T I"], g: Float[Tensor, "B T O"]
    ) -> tuple[dict[str, Float[Tensor, "B n"]], None]:
        """Compute each row's gradients of dS and of the turn, by the chain rule, in float32 at least.

        With C = diag(S + dS) R' - diag(S) and X = A / 2: dC = sum_t (U' g_t) (Vh x_t)', and from (I - X) R = I + X,
        dR = (I - X)^-1 dX (I + R); tested against autograd. The gradient of x is cheapest by the weight.
        """
        if module not in self.factors:
            return {}, None
        factors, values = self.factors[module], self.layout.only(self.theta, module, module + TURN)
        wide = torch.promote_types(x.dtype, torch.float32)
        of_core = torch.bmm((g @ factors.U.to(g)).transpose(1, 2), F.linear(x, factors.Vh.to(x))).to(wide)  # B r r
        turn, s = skew(values[module + TURN].to(wide), len(factors.S)), factors.S.to(wide) + values[module].to(wide)
        r, unit = rotation(turn), torch.eye(len(s), dtype=wide, device=x.device)
        # Backward through C, then through R (the transpose of dR's formula), then through the bound on A's entries,
        # whose derivative is 1 - tanh^2.
        of_r = (s[:, None] * of_core).transpose(1, 2)
        half = LIMIT * (turn / LIMIT).tanh() / 2
        of_half = torch.linalg.solve((unit - half).T, of_r @ (unit + r).T)
        of_turn = of_half / 2 * (1 - (turn / LIMIT).tanh().square())
        rows, columns = torch.triu_indices(len(s), len(s), 1)
        return {
            module: (of_core * r.T).sum(-1),
            # Each entry above the diagonal also occurs below it, with the opposite sign.
            module + TURN: (of_turn - of_turn.transpose(1, 2))[:, rows, columns],
        }, None


def rotation(skewed: Float[Tensor, "r r"], alpha: float = 1.0) -> Float[Tensor, "r r"]:
    """Compute the Cayley transform (I - X)^-1 (I + X) with X = alpha / 2 times the bounded A.

    The result is orthogonal, and inverted by -alpha. `alpha` is AntiPaSTO's steering strength: 0 is no turn. The
    entries of A are bounded to +-LIMIT by a hyperbolic tangent.
    """
    unit = torch.eye(len(skewed), dtype=skewed.dtype, device=skewed.device)
    # Bounded entries turn a single plane by less than pi / 3.
    half = alpha * (LIMIT * (skewed / LIMIT).tanh()) / 2
    # I - X is invertible for every skew X, whose eigenvalues are imaginary.
    return torch.linalg.solve(unit - half, unit + half)


def skew(turn: Float[Tensor, " s"], rank: int) -> Float[Tensor, "r r"]:
    """Build the skew matrix with these entries above the diagonal, row by row."""
    # index_put instead of an assignment in place, so that autograd can follow it.
    upper = turn.new_zeros(rank, rank).index_put(tuple(torch.triu_indices(rank, rank, 1)), turn)
    return upper - upper.T


def pick_dims(scores: Sequence[Float[Tensor, " r"]], rank: int) -> list[int]:
    """Pick the singular directions to adapt: a third by each of three scores, then the largest of any; in order.

    The scores are singular value times mean absolute input along the direction, over clean and over hacking answers
    (as Wanda, arXiv 2306.11695, weighs a weight by its input), and times the difference of both mean inputs.
    """
    rank, third = min(rank, len(scores[0])), min(rank, len(scores[0])) // 3
    counts = (third, third, rank - 2 * third)
    # One direction may be picked by several scores; the loop below fills up what is then missing, by any score.
    chosen = {
        i
        for score, n in zip(scores, counts, strict=True)
        for i in score.argsort(descending=True, stable=True)[:n].tolist()
    }
    for index in torch.stack(list(scores)).amax(0).argsort(descending=True, stable=True).tolist():
        if len(chosen) == rank:
            break
        chosen.add(index)
    return sorted(chosen)
