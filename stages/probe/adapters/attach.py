"""An adapter in a model: the layout of its numbers, and the adapter as a separate path or folded into the weights.

`attached` runs an adapter as a path that autograd sees, `Folded` puts its change into the weights. Either way an
adapter at its start leaves the base model's logits bit for bit, as in wassname/grpo_proj2 @25ad306,
src/projected_grpo/antipasto.py: W is never rebuilt from factors.

A change of theta is mostly smaller than the spacing of half-precision weights: at width 2,560 a bfloat16 weight loses
62 % of the change of an Adam step and all of a finite difference's. So weights that hold a change are float32, and the
adapted Linears multiply in it, whatever the type of the activations.

Shapes: B rows, T tokens, I inputs and O outputs of a Linear, n trainable numbers of a module, N of all, J modules.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Protocol

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional as F

from stages.errors import UsageError
from stages.runs import store

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


class Layout:
    """The slices of modules in one flat vector of trainable numbers: names in order, each with its count of numbers.

    With one layout a gradient is one row of a matrix. `slices` has the slice of each name, `width` is N, the count of
    all numbers, `sha256` the digest of names and sizes in their order.
    """

    def __init__(self, sizes: Mapping[str, int]) -> None:
        self.sizes, self.names = sizes, tuple(sizes)
        self.slices: dict[str, slice] = {}
        self.width = 0
        for name, size in sizes.items():
            self.slices[name] = slice(self.width, self.width + size)
            self.width += size
        # A list of pairs, not an object: two layouts with the same sizes in another order are different coordinates.
        self.sha256 = store.digest(list(sizes.items()))

    def split(self, flat: Float[Tensor, "*rows N"]) -> dict[str, Float[Tensor, "*rows n"]]:
        """Return views of a flat tensor by name."""
        return {name: flat[..., place] for name, place in self.slices.items()}

    def only(self, flat: Float[Tensor, "*rows N"], *names: str) -> dict[str, Float[Tensor, "*rows n"]]:
        """Return views of a flat tensor for these names alone, those of them that the layout has."""
        return {name: flat[..., self.slices[name]] for name in names if name in self.slices}

    def join(self, parts: Mapping[str, Float[Tensor, "*rows n"]]) -> Float[Tensor, "*rows N"]:
        """Build one flat tensor from parts by name (at least one of them), zeros where a name is missing."""
        first = next(iter(parts.values()))
        flat = first.new_zeros(*first.shape[:-1], self.width)
        for name, part in parts.items():
            flat[..., self.slices[name]] = part
        return flat

    def sums(self, flat: Float[Tensor, "*rows N"]) -> Float[Tensor, "*rows J"]:
        """Return the sum over each name's numbers, in float32 at least."""
        wide = torch.promote_types(flat.dtype, torch.float32)
        return torch.stack([part.sum(-1, dtype=wide) for part in self.split(flat).values()], dim=-1)

    def norms(self, flat: Float[Tensor, "*rows N"]) -> Float[Tensor, "*rows J"]:
        """Return the Euclidean norm of each name's numbers, in float32 at least."""
        wide, parts = torch.promote_types(flat.dtype, torch.float32), self.split(flat).values()
        return torch.stack([torch.linalg.vector_norm(part, dim=-1, dtype=wide) for part in parts], dim=-1)


def target_linears(model: "PreTrainedModel") -> dict[str, nn.Linear]:
    """Return the adapted Linears by module name, in the model's order.

    `UsageError` when one is missing, or when a layer holds any other Linear: such a model would be probed in part only.
    """
    # Only Linears of the layers: embedding and head are tied in small Qwen3 models and are never adapted.
    inside = [(name, m) for name, m in model.named_modules() if isinstance(m, nn.Linear) and ".layers." in f".{name}"]
    extra = sorted({name.rpartition(".")[2] for name, _ in inside} - set(SUFFIXES))
    if extra:
        raise UsageError(
            f"The model's layers hold Linears that the probe does not know: {', '.join(extra)}. It knows {SUFFIXES}."
        )
    layers = model.config.num_hidden_layers
    expected = layers * len(SUFFIXES)
    if len(inside) != expected:
        raise UsageError(f"The model has {len(inside)} of the {expected} Linears that {layers} layers should have.")
    return dict(inside)


class ProbeAdapter(Protocol):
    """The interface of an adapter: trained values `theta` [N], and the change that they make to each Linear.

    `kind` is the adapter's name (`adapters.names.AdapterName`), `probed` names the modules that can have a direction;
    `basis_sha256` identifies the frozen part that gives theta its meaning.
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

    def path(self, module: str, x: Float[Tensor, "B T I"], values: Mapping[str, Tensor]) -> Float[Tensor, "B T O"]:
        """Compute the change of a Linear's output, with the adapter's trained values taken from `values`."""
        ...

    def row_gradients(
        self, module: str, x: Float[Tensor, "B T I"], g: Float[Tensor, "B T O"]
    ) -> tuple[dict[str, Float[Tensor, "B n"]], Float[Tensor, "B T I"] | None]:
        """Compute each row's gradient of a Linear's trained values from its inputs x and its outputs' gradient g.

        Also returns the gradient of x where it costs less than g W; the weights hold the adapter's change.
        """
        ...


@contextmanager
def attached(model: "PreTrainedModel", adapter: ProbeAdapter) -> Iterator[dict[str, Tensor]]:
    """Run the adapter as a separate path while open; yields its values as leaves that require grad, by name."""
    leaves = {
        name: part.detach().clone().requires_grad_() for name, part in adapter.layout.split(adapter.theta).items()
    }
    with replaced_forwards(
        model,
        lambda name, linear, x: wide_linear(x, linear.weight, linear.bias) + adapter.path(name, x, leaves),
    ):
        yield leaves


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
    # A Linear may have a forward of its own already: `Folded` and `apply_lora` set one, and this one can be nested.
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


class Folded:
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
