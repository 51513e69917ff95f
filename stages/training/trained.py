"""The trained parameters of a Linear, and the change of its weight W: W itself, a LoRA, or its singular values.

`Trained` is the interface of all three. The direction that `projection` removes from a training, and to which
`rollout_gradients` compares the gradient of each rollout, is in the space of W; `slopes` maps it to the trained
parameters. Matrices of the size of W are made only where W itself is trained.

Singular values are those of AntiPaSTO (arXiv 2601.07473) in the form of wassname/grpo_proj2 @25ad306: a change d, 0 at
the start, and additive. The frozen W is never rebuilt from its factors, so that d = 0 leaves it as it is.

Shapes: O outputs and I inputs of a Linear, r rank of an adapter or number of singular values, B rows, T tokens of a
row, n trained numbers of a Linear.
"""

from abc import ABC, abstractmethod
from collections.abc import Container
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.nn import functional as F

from composer_stages.errors import UsageError
from composer_stages.gradients.basis import factorise, layer_linears


class Trained(ABC):
    """The trained parameters of one Linear. By default every process holds all of them."""

    _before: tuple[Tensor, ...] = ()
    """Copies of the trained parameters from before the optimiser's step."""

    def cut(self, direction: Float[Tensor, "O I"]) -> Tensor:
        """Return this process' share of a direction that all processes hold."""
        return direction

    @abstractmethod
    def tensors(self) -> tuple[Tensor, ...]:
        """Return the trained parameters."""

    def gradients(self) -> list[Tensor]:
        """Return the gradients of the trained parameters, to be modified in place, without missing ones."""
        return [_local(each.grad) for each in self.tensors() if each.grad is not None]

    @abstractmethod
    def slopes(self, unit: Tensor) -> list[Tensor]:
        """Return the derivatives of <W, unit> by each trained parameter."""

    @abstractmethod
    def row_gradients(self, x: Float[Tensor, "B T I"], g: Float[Tensor, "B T O"]) -> Float[Tensor, "B n"]:
        """Return each row's gradient in the order of `slopes`, from the Linear's inputs and its outputs' gradient."""

    def remember(self) -> None:
        """Copy the trained parameters before the optimiser's step; the copy takes as much memory as they do."""
        self._before = tuple(_local(each).detach().clone() for each in self.tensors())

    @abstractmethod
    def moved(self, unit: Tensor) -> tuple[Float[Tensor, ""], Float[Tensor, ""]]:
        """Return <W before - W, unit> and the squared norm of W before - W."""

    @abstractmethod
    def remove(self, unit: Tensor, along: Float[Tensor, ""]) -> Float[Tensor, ""]:
        """Remove the component `along` the direction from the update; return the squared norm of what is removable."""

    def forget(self) -> None:
        """Free the copies that `remember` made."""
        self._before = ()

    def squared_change(self) -> Float[Tensor, ""] | None:
        """Return the squared norm of the change of W since the start; None where the start is not stored."""
        return None


def _local(tensor: Tensor) -> Tensor:
    """Return this process' shard of an FSDP2 tensor, to be modified in place; return any other tensor unchanged."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


class TrainedWeight(Trained):
    """A Linear's weight that is trained itself: all of it, or this process' share of it under FSDP2."""

    def __init__(self, weight: Tensor) -> None:
        self._weight = weight

    def cut(self, direction: Float[Tensor, "O I"]) -> Tensor:
        """Return this process' share of a direction that all processes hold."""
        if not isinstance(self._weight, DTensor):
            return direction
        mesh, placements = self._weight.device_mesh, self._weight.placements
        return distribute_tensor(direction.to(mesh.device_type), mesh, placements, src_data_rank=None).to_local()

    def group(self) -> Any:
        """Return the processes that hold shares of the weight; None where this one holds all of it."""
        return self._weight.device_mesh.get_group() if isinstance(self._weight, DTensor) else None

    def tensors(self) -> tuple[Tensor, ...]:
        """Return the weight."""
        return (self._weight,)

    def slopes(self, unit: Tensor) -> list[Tensor]:
        """Return the derivative of <W, unit> by W."""
        return [unit]

    def row_gradients(self, x: Float[Tensor, "B T I"], g: Float[Tensor, "B T O"]) -> Float[Tensor, "B n"]:
        """Return each row's gradient of W."""
        return torch.bmm(g.float().transpose(1, 2), x.float()).flatten(1)

    def moved(self, unit: Tensor) -> tuple[Float[Tensor, ""], Float[Tensor, ""]]:
        """Return <W before - W, unit> and the squared norm of W before - W."""
        moved = (self._before[0] - _local(self._weight)).float()
        return (moved * unit).sum(), moved.square().sum()

    def remove(self, unit: Tensor, along: Float[Tensor, ""]) -> Float[Tensor, ""]:
        """Remove `along` times the direction from the update; return 1, the squared norm of the direction."""
        _local(self._weight).add_((along * unit.float()).to(self._weight.dtype))
        return torch.ones_like(along)


RIDGE = 1e-6
"""Added to the r x r matrices A A' and B' B, relative to their mean eigenvalue: B is 0 at the start of a training."""


class TrainedAdapter(Trained):
    """The weight W0 + s B A of a Linear with a LoRA adapter of rank r, of which A and B are trained.

    Nothing of the size O x I is made of the adapter. What an update of A and B can do to W, to first order, are the
    matrices X A + B Y. The part of a direction v in them is T = v P + Q v (1 - P) with the projections P on the rows of
    A and Q on the columns of B. A multiple of T is taken out, the least change by which the update loses its part along
    v. Where A is invertible T is v, and the result that of a weight that is trained itself.
    """

    def __init__(self, a: Float[Tensor, "r I"], b: Float[Tensor, "O r"], scaling: float) -> None:
        self._a, self._b, self._scaling = a, b, scaling

    def tensors(self) -> tuple[Tensor, ...]:
        """Return A and B."""
        return self._a, self._b

    def slopes(self, unit: Float[Tensor, "O I"]) -> list[Tensor]:
        """Return the derivatives of <W, unit> by A and by B."""
        a, b, unit = self._a.float(), self._b.float(), unit.float()
        return [self._scaling * b.T @ unit, self._scaling * unit @ a.T]

    def row_gradients(self, x: Float[Tensor, "B T I"], g: Float[Tensor, "B T O"]) -> Float[Tensor, "B n"]:
        """Return each row's gradients of A and B."""
        x, g, a, b = x.float(), g.float(), self._a.detach().float(), self._b.detach().float()
        of_a, of_b = torch.bmm((g @ b).transpose(1, 2), x), torch.bmm(g.transpose(1, 2), x @ a.T)
        return self._scaling * torch.cat([of_a.flatten(1), of_b.flatten(1)], 1)

    def moved(self, unit: Float[Tensor, "O I"]) -> tuple[Float[Tensor, ""], Float[Tensor, ""]]:
        """Return <W before - W, unit> and the squared norm of W before - W."""
        # As (B0 - B) A0 + B (A0 - A): a difference of the two products would be one of almost equal numbers.
        (a0, b0), b = (each.float() for each in self._before), self._b.float()
        da, db = a0 - self._a.float(), b0 - b
        along = (db * (unit.float() @ a0.T)).sum() + (da * (b.T @ unit.float())).sum()
        square = (db.T @ db * (a0 @ a0.T)).sum() + (b.T @ b * (da @ da.T)).sum()
        crossed = 2 * (db.T @ b * (a0 @ da.T)).sum()
        return self._scaling * along, self._scaling**2 * (square + crossed)

    def remove(self, unit: Float[Tensor, "O I"], along: Float[Tensor, ""]) -> Float[Tensor, ""]:
        """Remove the component `along` the direction from the update; return the squared norm of T at present."""
        unit, left_over = unit.float(), along
        initial_size = torch.zeros_like(along)
        for number in range(3):  # the product of both changes is of second order: what it leaves is taken out again
            a, b = self._a.float(), self._b.float()
            right, rows = unit @ a.T, b.T @ unit
            of_a, of_b = _inverse(a @ a.T), _inverse(b.T @ b)
            for_b = right @ of_a
            for_a = of_b @ (rows - (rows @ a.T) @ of_a @ a)
            size = (for_b * right).sum() + (for_a * rows).sum()
            initial_size = size if number == 0 else initial_size
            share = torch.where(size > 0, left_over / (self._scaling * size), 0.0)
            self._b.add_((share * for_b).to(self._b.dtype))
            self._a.add_((share * for_a).to(self._a.dtype))
            left_over = torch.where(along != 0, self.moved(unit)[0], 0.0)
        return initial_size

    def squared_change(self) -> Float[Tensor, ""]:
        """Return the squared norm of s B A: B is 0 at the start."""
        a, b = self._a.float(), self._b.float()
        return self._scaling**2 * (b.T @ b * (a @ a.T)).sum()


def _inverse(gram: Float[Tensor, "r r"]) -> Float[Tensor, "r r"]:
    # inv_ex: `inv` asks the device whether the matrix is singular, and waits for it.
    ridge = RIDGE * gram.diagonal().mean() + torch.finfo(gram.dtype).tiny * 1e8
    return torch.linalg.inv_ex(gram + ridge * torch.eye(len(gram), device=gram.device)).inverse


class SingularValueLinear(nn.Linear):
    """A frozen Linear with a trained change d of its singular values: y = W x + U diag(d) Vh x.

    The product is made beside W, in float32 whatever the weights' type: a step of d is mostly smaller than the spacing
    of half-precision weights. U and Vh are saved with checkpoints: another machine may factorise W into others.
    """

    def __init__(self, linear: nn.Linear) -> None:
        nn.Module.__init__(self)
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.weight = linear.weight
        self.register_parameter("bias", linear.bias)
        factors = factorise(linear.weight)
        self.u: Float[Tensor, "O r"]
        self.vh: Float[Tensor, "r I"]
        self.register_buffer("u", factors.U)
        self.register_buffer("vh", factors.Vh)
        self.change = nn.Parameter(torch.zeros_like(factors.S))

    def forward(self, input: Float[Tensor, "*rows I"]) -> Float[Tensor, "*rows O"]:
        """Return the outputs, in the type of W's own product."""
        plain = super().forward(input)
        # In float32 under autocast, too, which would round the factors.
        with torch.autocast(input.device.type, enabled=False):
            changed = F.linear(F.linear(input.float(), self.vh) * self.change, self.u)
        return (plain + changed).to(plain.dtype)

    @torch.no_grad()
    def folded(self) -> Float[Tensor, "O I"]:
        """Return the changed weight, in float32 at least."""
        return self.weight.to(torch.promote_types(self.weight.dtype, torch.float32)) + (self.u * self.change) @ self.vh


class TrainedSingularValues(Trained):
    """The weight W0 + U diag(d) Vh of which d is trained: W is linear in d, and the norm of its change is that of d."""

    def __init__(self, linear: SingularValueLinear) -> None:
        self._linear = linear

    def tensors(self) -> tuple[Tensor, ...]:
        """Return d."""
        return (self._linear.change,)

    def slopes(self, unit: Float[Tensor, "O I"]) -> list[Tensor]:
        """Return the derivative of <W, unit> by d, diag(U' unit V)."""
        return [((self._linear.u.T @ unit.float()) * self._linear.vh).sum(-1)]

    def row_gradients(self, x: Float[Tensor, "B T I"], g: Float[Tensor, "B T O"]) -> Float[Tensor, "B n"]:
        """Return each row's gradient of d, sum_t (U' g_t) * (Vh x_t)."""
        return ((g.float() @ self._linear.u) * F.linear(x.float(), self._linear.vh)).sum(1)

    def moved(self, unit: Float[Tensor, "O I"]) -> tuple[Float[Tensor, ""], Float[Tensor, ""]]:
        """Return <W before - W, unit> and the squared norm of W before - W."""
        moved = self._before[0] - self._linear.change
        return (moved * self.slopes(unit)[0]).sum(), moved.square().sum()

    def remove(self, unit: Float[Tensor, "O I"], along: Float[Tensor, ""]) -> Float[Tensor, ""]:
        """Remove the component `along` the direction from the update; return the squared norm of its slope."""
        [slope] = self.slopes(unit)
        size = slope.square().sum()
        self._linear.change.add_(torch.where(size > 0, along / size, 0.0) * slope)
        return size

    def squared_change(self) -> Float[Tensor, ""]:
        """Return the squared norm of d: U and Vh are orthonormal."""
        return self._linear.change.square().sum()


def train_singular_values(model: nn.Module) -> None:
    """Freeze a model but for a change of its layers' Linears' singular values; `UsageError` where it has none."""
    model.requires_grad_(False)
    linears = dict(layer_linears(model))
    if not linears:
        raise UsageError("training.no-singular-values", kind=type(model).__name__)
    for name, linear in linears.items():
        model.set_submodule(name, SingularValueLinear(linear))


def save_folded(model: Any, folder: Path) -> bool:
    """Write a model whose singular values are trained as an ordinary one; False, and nothing, for other models.

    The changed weights are float32, and so is the type that the folder states: half precision would lose the change.
    """
    changed = {name: m for name, m in model.named_modules() if isinstance(m, SingularValueLinear)}
    if not changed:
        return False
    left_out = {f"{name}.{part}" for name in changed for part in ("u", "vh", "change")}
    state = {name: value for name, value in model.state_dict().items() if name not in left_out}
    state |= {f"{name}.weight": linear.folded() for name, linear in changed.items()}
    model.save_pretrained(folder, state_dict=state)
    model.config.dtype = "float32"
    model.config.save_pretrained(folder)
    model.config.dtype = model.dtype
    return True


def linear_modules(model: nn.Module, names: Container[str]) -> dict[str, nn.Module]:
    """Return the modules that compute the named Linears; for a Linear with a LoRA, the wrapping module."""
    named = ((path.removeprefix("base_model.model."), module) for path, module in model.named_modules())
    return {name: module for name, module in named if name in names}


def trained_linears(model: nn.Module, names: Container[str]) -> dict[str, Trained]:
    """Return the trained parameters of the named Linears; frozen Linears are left out."""
    linears: dict[str, Trained] = {}
    for name, module in linear_modules(model, names).items():
        layer: Any = module
        if isinstance(module, SingularValueLinear):
            linears[name] = TrainedSingularValues(module)
        elif hasattr(module, "lora_A"):
            (adapter,) = layer.active_adapters
            a, b = layer.lora_A[adapter].weight, layer.lora_B[adapter].weight
            linears[name] = TrainedAdapter(a, b, layer.scaling[adapter])
        elif layer.weight.requires_grad:
            linears[name] = TrainedWeight(layer.weight)
    return linears
