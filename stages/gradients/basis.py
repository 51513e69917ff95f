"""Bases: the trained parameters in which gradients are measured, their change of a model's weights, and its folding.

A direction in singular coordinates means nothing in those of another decomposition: inside nearly degenerate subspaces
two decompositions may choose different axes. So a decomposition is made once, stored, and identified by its digest;
what was measured in it carries that digest. The decomposition is torch.linalg.svd's.

`FoldedModel` puts an adapter's change into the weights, `attached` runs it as a product of its own that autograd sees.
Either way an adapter at its start leaves the base model's logits bit for bit: W is never rebuilt from factors. A
change of theta is mostly smaller than the spacing of half-precision weights: at width 2,560 a bfloat16 weight loses
62 % of the change of an Adam step and all of a finite difference's. So weights that hold a change are float32, and the
adapted Linears multiply in it, whatever the type of the activations.

Shapes: B rows, T tokens, I inputs and O outputs of a Linear, r singular directions or rank, n trainable numbers of a
module, N of all modules.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, TypedDict

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional as F

from composer_stages.errors import BadInput, UsageError
from composer_stages.gradients.tensors import Layout, read_tensors, tensors_sha256, write_tensors
from composer_stages.runs import store

if TYPE_CHECKING:
    from transformers import PreTrainedModel


SUFFIXES = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
"""The seven projections of a layer of dense Qwen3, which are adapted, all of them and nothing else.

wassname/grpo_proj2 @25ad306 also adapts the projections of gated delta nets (in_proj_*, out_proj); here such a model is
refused.
"""
ASKED_AT_ONCE = 32
"""Linears whose change is looked at together: each look waits for the device, and unchanged ones are widened for it."""
Forward = Callable[[str, nn.Linear, Float[Tensor, "B T I"]], Float[Tensor, "B T O"]]
"""A Linear's forward from its name, the Linear and its inputs."""


SPECTRAL = ("antipasto_full", "antipasto_topr")
"""The adapters that work in singular coordinates, and so need a decomposition."""
A_HALF = ":A"
"""Suffix of the name under which a Linear's A is stored; its B has the Linear's own name."""


def layer_linears(model: nn.Module) -> Iterator[tuple[str, nn.Linear]]:
    """Yield the Linears of a model's layers, without its output head, by name."""
    for name, module in list(model.named_modules()):
        if isinstance(module, nn.Linear) and ".layers." in f".{name}":
            yield name, module


def target_linears(model: "PreTrainedModel") -> dict[str, nn.Linear]:
    """Return the adapted Linears by module name, in the model's order.

    `UsageError` when one is missing, or when a layer holds any other Linear: such a model would be probed in part only.
    """
    # Embedding and head are tied in small Qwen3 models and are never adapted.
    inside = list(layer_linears(model))
    extra = sorted({name.rpartition(".")[2] for name, _ in inside} - set(SUFFIXES))
    if extra:
        raise UsageError("gradients.unknown-linears", unknown=extra, known=str(SUFFIXES))
    layers = model.config.num_hidden_layers
    expected = layers * len(SUFFIXES)
    if len(inside) != expected:
        raise UsageError("gradients.missing-linears", linears=len(inside), expected=expected, layers=layers)
    return dict(inside)


class ProbeAdapter(Protocol):
    """The interface of an adapter: trained values `theta` [N], and the change that they make to each Linear.

    `kind` is the adapter's name (`probe.settings.AdapterName`), `probed` names the modules that can have a direction;
    `basis_sha256` identifies the frozen part that gives theta its meaning, on every processor.
    """

    kind: str
    layout: Layout
    theta: Tensor
    probed: tuple[str, ...]
    basis_sha256: str

    # Read-only, since some adapters have an int here and others None; mypy takes a mutable attribute as invariant.
    @property
    def rank(self) -> int | None:
        """Trained directions of each Linear; None for all of them."""
        ...

    def delta(self, module: str, theta: Tensor | None = None) -> Float[Tensor, "O I"]:
        """Return the change of a Linear's weight, at the adapter's present values or at others."""
        ...

    def row_gradients(
        self, module: str, x: Float[Tensor, "B T I"], g: Float[Tensor, "B T O"]
    ) -> tuple[dict[str, Float[Tensor, "B n"]], Float[Tensor, "B T I"] | None]:
        """Compute each row's gradient of a Linear's trained values from its inputs x and its outputs' gradient g.

        Also returns the gradient of x where it costs less than g W; the weights hold the adapter's change.
        """
        ...


@dataclass(frozen=True)
class Factors:
    """W = U diag(S) Vh of one Linear: U [O, r], S [r] descending, Vh [r, I], r = min(O, I), float32."""

    U: Float[Tensor, "O r"]
    S: Float[Tensor, " r"]
    Vh: Float[Tensor, "r I"]

    def select(self, dims: Sequence[int]) -> "Factors":
        """Select these singular triples."""
        chosen = list(dims)
        return Factors(self.U[:, chosen].contiguous(), self.S[chosen].contiguous(), self.Vh[chosen].contiguous())

    def to(self, device: torch.device | str, dtype: torch.dtype) -> "Factors":
        """Copy the factors to a device and type."""
        return Factors(*(part.to(device, dtype) for part in (self.U, self.S, self.Vh)))

    @cached_property
    def sha256(self) -> str:
        """The digest of the three tensors, in hex."""
        return tensors_sha256([self.U, self.S, self.Vh])


@dataclass(frozen=True)
class Spectrum:
    """The factors of every adapted Linear, by module name."""

    factors: Mapping[str, Factors]

    @cached_property
    def sha256(self) -> str:
        """The digest of module names and their factors in order, in hex, which identifies this decomposition."""
        return store.digest([[name, factors.sha256] for name, factors in self.factors.items()])


def factorise(weight: Float[Tensor, "O I"], dtype: torch.dtype = torch.float32) -> Factors:
    """Decompose a weight in `dtype` (float32 or float64); the factors are float32 either way."""
    # Joint sign flips of (u, v) leave dS unchanged, rotations inside nearly degenerate subspaces do not. Gradients of a
    # float64 decomposition keep a cosine of .9999999 with those of a float32 one (widths 512 to 1,024); after a change
    # of W as large as bfloat16's rounding it is .994 to .998.
    U, S, Vh = torch.linalg.svd(weight.detach().to(dtype), full_matrices=False)
    return Factors(*(part.to(torch.float32).contiguous() for part in (U, S, Vh)))


def reconstruction_error(weight: Float[Tensor, "O I"], factors: Factors) -> float:
    """Compute ||W - U diag(S) Vh|| / ||W|| in Frobenius norms, in float32."""
    exact = weight.detach().float()
    rebuilt = (factors.U * factors.S) @ factors.Vh
    return float(torch.linalg.norm(exact - rebuilt) / torch.linalg.norm(exact))


def save_factors(path: Path, name: str, factors: Factors) -> None:
    """Write one module's factors as safetensors, with its name and digest in the metadata."""
    metadata = {"module": name, "sha256": factors.sha256}
    write_tensors(path, {"U": factors.U, "S": factors.S, "Vh": factors.Vh}, metadata)


def load_spectrum(folder: Path) -> Spectrum:
    """Load the decomposition in a folder of factor files, in the order of the model's modules.

    `BadInput` when a file's tensors do not match the digest in that file.
    """
    loaded = {}
    # Files are numbered in the model's order, so that sorted names restore the order of modules.
    for path in sorted(folder.glob("*.safetensors")):
        tensors, metadata = read_tensors(path)
        factors = Factors(tensors["U"], tensors["S"], tensors["Vh"])
        if factors.sha256 != metadata["sha256"]:
            raise BadInput("gradients.decomposition-damaged", path=path)
        loaded[metadata["module"]] = factors
    return Spectrum(loaded)


TOLERANCE = 1e-4
"""Of ||W - U diag(S) Vh|| / ||W||."""


def check_spectrum(model: "PreTrainedModel", spectrum: Spectrum) -> None:
    """`BadInput` when a decomposition does not reproduce this model's weights: it was made of another checkpoint."""
    # In float32 on the model's device, one Linear at a time: the product U diag(S) Vh is as large as the weight.
    for name, linear in target_linears(model).items():
        factors = spectrum.factors[name].to(linear.weight.device, torch.float32)
        error = reconstruction_error(linear.weight, factors)
        if error > TOLERANCE:
            raise BadInput("gradients.decomposition-of-other-weights", name=name, error=error)


class SingularValues:
    """The dS of every adapted Linear, in one flat vector `theta` [N]: y = W x + U diag(dS) Vh x, dS = 0 at the start.

    After AntiPaSTO (arXiv 2601.07473) in the form of wassname/grpo_proj2 @25ad306, src/projected_grpo/antipasto.py
    (full rank), and of lora-lite @19888fb, variants/antipasto.py (top r). With all singular triples there is no
    residual; with the top r of them the rest of W remains in W. A multiplicative knob S(1 + z) would have other
    gradients: dS is additive.
    """

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

    def to(self, device: torch.device | str, dtype: torch.dtype) -> "SingularValues":
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
            u, vh = factors.U.to(wide), factors.Vh.to(wide).T
            return {module: torch.stack([(u * (row @ vh)).sum(0) for row in outer])}, None
        turned = g @ factors.U.to(g)
        along = F.linear(x, factors.Vh.to(x)).to(wide)
        gradients = {module: along.mul_(turned).sum(1)}
        # With all singular triples W' is U diag(S + dS) Vh, and g U is there already; so a Linear with more outputs
        # than inputs needs r I instead of O I multiplications a token. Only in float32, in which the factors were made.
        if self.rank is not None or outputs <= rank or not factors.U.dtype == g.dtype == torch.float32:
            return gradients, None
        strength = factors.S.to(g) + self.theta[self.layout.slices[module]].to(g)
        return gradients, turned.mul_(strength) @ factors.Vh.to(g)


def _orthonormal_rows(a: Float[Tensor, "r I"]) -> Float[Tensor, "r I"]:
    """Return what Gram-Schmidt makes of the rows: each has a positive product with its own."""
    q, r = torch.linalg.qr(a.T)
    return (q * r.diagonal().sign()).T.contiguous()  # a library of linear algebra may choose either sign


class Lora:
    """A [r, I] and B [O, r] of every adapted Linear, in one flat vector `theta` [N]: y = W x + B A x.

    B = 0 at the start, so that the base model is unchanged and A's gradient is 0; directions are on B. `lora` trains
    both halves, from PEFT's default start. `lora_frozenA` trains B alone with a frozen A of orthonormal rows: the
    change of W is then linear in what is trained and a direction keeps its meaning, as with singular values but in an
    arbitrary basis (wassname/grpo_proj2, spec 20260601). PEFT's scale alpha / r is 1 here: it would multiply gradients
    but leave cosines as they are.
    """

    def __init__(self, targets: Mapping[str, nn.Linear], rank: int, *, freeze_a: bool, seed: int) -> None:
        """Draw A with `seed`; B is zero."""
        self.kind = "lora_frozenA" if freeze_a else "lora"
        self.rank, self.freeze_a = rank, freeze_a
        generator, drawn = torch.Generator().manual_seed(seed), {}
        for name, linear in targets.items():
            # PEFT's start: uniform in +-1/sqrt(width), which is kaiming_uniform_ with a = sqrt(5).
            draw = torch.rand(rank, linear.in_features, generator=generator) * 2 - 1
            drawn[name] = draw / math.sqrt(linear.in_features)
        # Of the draws, which have the same bytes everywhere: each processor rounds orthonormal rows otherwise, and a
        # direction that was extracted on one of them keeps its meaning on the others.
        self.basis_sha256 = tensors_sha256(drawn.values())
        # Orthonormal rows: then ||B A|| = ||B||, so that theta's norm is the norm of the weights' change.
        self.initial: dict[str, Float[Tensor, "r I"]] = (
            {name: _orthonormal_rows(a) for name, a in drawn.items()} if freeze_a else drawn
        )
        start = {name: torch.zeros(linear.out_features * rank) for name, linear in targets.items()}
        if not freeze_a:
            start |= {name + A_HALF: a.flatten() for name, a in self.initial.items()}
        self.layout = Layout({name: part.numel() for name, part in start.items()})
        self.probed = tuple(targets)
        self.theta = self.layout.join(start)

    def to(self, device: torch.device | str, dtype: torch.dtype) -> "Lora":
        """Move the halves to the model's device; they are rounded to the model's type as they are used."""
        # Kept in float32 at least: `delta` needs the exact halves.
        wide = torch.promote_types(dtype, torch.float32)
        self.initial = {name: a.to(device, wide) for name, a in self.initial.items()}
        self.theta = self.theta.to(device)
        return self

    def halves(
        self, module: str, theta: Float[Tensor, " N"], dtype: torch.dtype
    ) -> tuple[Float[Tensor, "O r"], Float[Tensor, "r I"]]:
        """Return B and A of a Linear from flat values, in this type."""
        values, start = self.layout.only(theta, module, module + A_HALF), self.initial[module]
        a = start if self.freeze_a else values[module + A_HALF].view(start.shape)
        return values[module].view(-1, self.rank).to(dtype), a.to(dtype)

    def delta(self, module: str, theta: Float[Tensor, " N"] | None = None) -> Float[Tensor, "O I"]:
        """Return B A, the change of a weight, in float32 at least."""
        now = self.theta if theta is None else theta
        b, a = self.halves(module, now, torch.promote_types(self.initial[module].dtype, now.dtype))
        return b @ a

    def row_gradients(
        self, module: str, x: Float[Tensor, "B T I"], g: Float[Tensor, "B T O"]
    ) -> tuple[dict[str, Float[Tensor, "B n"]], None]:
        """Compute each row's dB = sum_t g_t (A x_t)' and, where A is trained, dA = sum_t (B' g_t) x_t', flattened.

        By the chain rule from y = W x + B A x; tested against autograd. Sums run over all positions, in float32 at
        least once they are taken. The gradient of x is cheapest by the weight.
        """
        b, a = self.halves(module, self.theta, x.dtype)
        wide = torch.promote_types(g.dtype, torch.float32)
        # Each is a sum of outer products over tokens, a product of matrices by row: [B, O, r] and [B, r, I].
        gradients = {module: torch.bmm(g.transpose(1, 2), F.linear(x, a)).to(wide).flatten(1)}
        if not self.freeze_a:
            gradients[module + A_HALF] = torch.bmm((g @ b).transpose(1, 2), x).to(wide).flatten(1)
        return gradients, None


class Coordinates(TypedDict):
    """The facts that two adapters must share for a direction of one to mean the same in the other."""

    adapter: str
    rank: int | None
    basis_sha256: str
    modules_sha256: str


def open_adapter(name: str, model: "PreTrainedModel", spectrum: Spectrum | None, rank: int, seed: int) -> ProbeAdapter:
    """Open the named adapter (`probe.settings.AdapterName`) at its start, for this model, with theta in float32.

    `rank` applies to all but antipasto_full, `seed` to random starts. `UsageError` when the adapter needs a
    decomposition and there is none; `BadInput` when the decomposition's shapes are not the model's.
    """
    parameter = next(model.parameters())
    where = (parameter.device, parameter.dtype)
    if name not in SPECTRAL:
        return Lora(target_linears(model), rank, seed=seed, freeze_a=name == "lora_frozenA").to(*where)
    if spectrum is None:
        raise UsageError("gradients.no-decomposition", name=name)
    # Shapes alone are compared here, which needs no product; `check_spectrum` compares the weights.
    expected = {name: tuple(linear.weight.shape) for name, linear in target_linears(model).items()}
    decomposed = {name: (f.U.shape[0], f.Vh.shape[1]) for name, f in spectrum.factors.items()}
    differ = sorted(n for n in expected.keys() | decomposed.keys() if expected.get(n) != decomposed.get(n))
    if differ:
        raise BadInput("gradients.decomposition-of-other-model", linears=len(differ), first=differ[0])
    return SingularValues(spectrum, None if name == "antipasto_full" else rank).to(*where)


def coordinates(adapter: ProbeAdapter) -> Coordinates:
    """Return the coordinates of an adapter's trained values."""
    return {
        "adapter": adapter.kind,
        "rank": adapter.rank,
        "basis_sha256": adapter.basis_sha256,
        "modules_sha256": adapter.layout.sha256,
    }


# The adapter in a model.


@contextmanager
def attached(model: "PreTrainedModel", adapter: ProbeAdapter) -> Iterator[Float[Tensor, " N"]]:
    """Run the adapter's change as a product of its own while open; yields theta as a leaf that requires grad."""
    theta = adapter.theta.detach().clone().requires_grad_()
    with replaced_forwards(
        model,
        lambda name, linear, x: wide_linear(x, linear.weight, linear.bias) + wide_linear(x, adapter.delta(name, theta)),
    ):
        yield theta


def wide_linear(
    x: Float[Tensor, "*rows I"], weight: Float[Tensor, "O I"], bias: Float[Tensor, " O"] | None = None
) -> Float[Tensor, "*rows O"]:
    """Compute F.linear in the wider of both types and return the type of `x`; equal types are plain F.linear."""
    wide = torch.promote_types(x.dtype, weight.dtype)
    return F.linear(x.to(wide), weight.to(wide), None if bias is None else bias.to(wide)).to(x.dtype)


@contextmanager
def replaced_forwards(model: "PreTrainedModel", forward: Forward) -> Iterator[None]:
    """Replace the forward of every adapted Linear by `forward(name, linear, x)`, while open."""
    targets = target_linears(model)
    # A Linear may have a forward already: `FoldedModel` and `apply_lora` set one, and this one can be nested.
    before = {name: vars(linear).get("forward") for name, linear in targets.items()}
    for name, linear in targets.items():
        # By `vars`, since mypy refuses an assignment to a method; `del linear.forward` restores the class's forward.
        vars(linear)["forward"] = partial(forward, name, linear)
    try:
        yield
    finally:
        for name, linear in targets.items():
            del linear.forward
            if (earlier := before[name]) is not None:
                vars(linear)["forward"] = earlier


@contextmanager
def in_float32(model: "PreTrainedModel") -> Iterator[None]:
    """Make a folded model of half-precision weights compute in float32 while open, for differences of small steps.

    Its adapted Linears compute in the type of their inputs; all else (embedding, norms, head) is float32 while open, at
    four bytes a number. A wider model is not changed.
    """
    # By id, since == of tensors compares their elements.
    adapted = {id(linear.weight) for linear in target_linears(model).values()}
    narrow = {p: p.data for p in model.parameters() if p.dtype.itemsize < 4 and id(p) not in adapted}
    for parameter in narrow:
        parameter.data = parameter.data.float()
    try:
        yield
    finally:
        for parameter, data in narrow.items():
            parameter.data = data


class FoldedModel:
    """A model whose weights hold the adapter's present change, W' = W + delta.

    Always computed from the clean W, never by subtracting the previous change, so that rounding does not add up. W' is
    float32 where W is of half precision and there is a change; at no change it is W itself. Memory: 14.6 GB for the
    adapted weights of Qwen3-4B, in addition to the clean ones.
    """

    def __init__(self, model: "PreTrainedModel", adapter: ProbeAdapter) -> None:
        self.model, self.adapter = model, adapter
        self._linears = target_linears(model)
        self._clean = {name: linear.weight.data for name, linear in self._linears.items()}
        for name, linear in self._linears.items():
            # A LoRA that runs as a path has set a forward already, which must stay.
            if self._clean[name].dtype.itemsize < 4 and "forward" not in vars(linear):
                # The Parameter stays the same object while `refold` exchanges its data.
                vars(linear)["forward"] = partial(wide_linear, weight=linear.weight, bias=linear.bias)
        self.refold()

    @torch.no_grad()
    def refold(self) -> None:
        """Set the weights to the adapter's present values."""
        names = list(self._linears)
        for start in range(0, len(names), ASKED_AT_ONCE):
            some, flags = names[start : start + ASKED_AT_ONCE], []
            for name in some:
                clean, change = self._clean[name], self.adapter.delta(name)
                flags.append(change.any())
                self._linears[name].weight.data = clean + change.to(clean.device)
            # At no change the clean tensor itself: the model stays equal bit for bit, and half-precision weights small.
            for name, changed in zip(some, torch.stack(flags).tolist(), strict=True):
                if not changed:
                    self._linears[name].weight.data = self._clean[name]

    def restore(self) -> None:
        """Restore the model's clean weights, the same tensors."""
        for name, linear in self._linears.items():
            linear.weight.data = self._clean[name]
