"""Projection of a hack direction out of a training: out of every gradient, and out of every optimiser update.

The direction is that of a run of `composer probe extract-vhack`, computed again from its pairs in the space of the
weights: for each Linear of the layers the gradient of the mean over pairs of NLL(hack) - NLL(clean), each a mean over
own tokens, at the weights that training starts from. What points toward the hack is removed, as in
wassname/grpo_proj2 @25ad306: g - max(0, <g, v>) v with |v| = 1, by Linear. The update is projected too, because the
optimiser does not make a projected update of a projected gradient. Where an adapter is trained, its effect on the
weights is projected (`TrainedAdapter`); under FSDP2 each process projects its share of them. One-sided removal leaves a
drift away from any direction, so a random direction of the same shapes is the control (`probe.project = "random"`).

Shapes: T tokens of a row, O outputs and I inputs of a Linear.
"""

from collections.abc import Callable, Container, Mapping, Sequence
from typing import Any, Literal

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from stages.runs.kinds import Row
from stages.runs.run import RunWriter
from stages.training.packing import on_device
from stages.training.scoring import Tree, score, token_log_probs

PAIRS = "pairs.json"
"""In the folder of a direction: [hack, clean] pairs of rows of ids, as they were when it was extracted."""
Direction = dict[str, Float[Tensor, "O I"]]


def weight_direction(model: Any, pairs: Sequence[Sequence[Mapping[str, Any]]]) -> Direction:
    """Return the unit direction of each Linear from clean to hack, without those that have no gradient.

    In the type of the weights: at 8 billion of them, 16 GB rather than 32.
    """
    # Gradients of the Linears of layers alone, not of the output head: with all parameters on, the gradient of the
    # embeddings would be held for each pair and thrown away.
    linears = {n: m for n, m in model.named_modules() if isinstance(m, nn.Linear) and ".layers." in f".{n}"}
    needed = {name: parameter.requires_grad for name, parameter in model.named_parameters()}
    model.requires_grad_(False)
    total = {name: torch.zeros_like(linear.weight, dtype=torch.float32) for name, linear in linears.items()}

    def adding(name: str) -> Callable[[Tensor], None]:
        def add(weight: Tensor) -> None:
            if weight.grad is not None:
                total[name] += weight.grad
            weight.grad = None  # so that one gradient is held at a time

        return add

    hooks = []
    for name, linear in linears.items():
        linear.weight.requires_grad_(True)
        hooks.append(linear.weight.register_post_accumulate_grad_hook(adding(name)))
    for hack, clean in pairs:
        # One after the other: what the layers of both rows keep would be held together.
        _mean_nll(model, hack).backward()
        (-_mean_nll(model, clean)).backward()
    for hook in hooks:
        hook.remove()
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(needed[name])
    norms = dict(zip(total, torch.stack([part.norm() for part in total.values()]).tolist(), strict=True))
    dtype = next(iter(linears.values())).weight.dtype
    return {name: (total.pop(name) / norm).to(dtype) for name, norm in norms.items() if norm > 0}


def _mean_nll(model: Any, row: Mapping[str, Any]) -> Float[Tensor, ""]:
    """Return the mean of -log p over a row's own tokens, in nats a token."""
    scored = score(model, [Tree(row["prompt_ids"], (row["completion_ids"],))])
    [own] = on_device([torch.tensor(row["own"], dtype=torch.long)], scored.targets.device)
    return -(token_log_probs(model, scored) * own).sum() / own.sum()


def random_like(direction: Direction, seed: int) -> Direction:
    """Return unit directions of the same shapes, uniformly at random."""
    generator = torch.Generator().manual_seed(seed)
    drawn = {name: torch.randn(part.shape, generator=generator) for name, part in direction.items()}
    return {name: (part / part.norm()).to(direction[name]) for name, part in drawn.items()}


class TrainedWeight:
    """A Linear's weight that is trained itself: all of it, or this process' share of it under FSDP2."""

    def __init__(self, weight: Tensor) -> None:
        self._weight, self._before = weight, weight.new_empty(0)

    def cut(self, whole: Float[Tensor, "O I"]) -> Tensor:
        """Return this process' share of a direction that all processes hold."""
        if not isinstance(self._weight, DTensor):
            return whole
        mesh, placements = self._weight.device_mesh, self._weight.placements
        return distribute_tensor(whole.to(mesh.device_type), mesh, placements, src_data_rank=None).to_local()

    def group(self) -> Any:
        """Return the processes that hold shares of the weight; None where this one holds all of it."""
        return self._weight.device_mesh.get_group() if isinstance(self._weight, DTensor) else None

    def gradients(self) -> list[Tensor]:
        """Return the gradients of what is trained, which may be written to; none where it has no gradient."""
        return [] if self._weight.grad is None else [_local(self._weight.grad)]

    def slopes(self, unit: Tensor) -> list[Tensor]:
        """Return the derivative of <W, unit> by each tensor that has a gradient."""
        return [unit]

    def remember(self) -> None:
        """Keep the weight as it is before the optimiser's step: its size once more in memory."""
        self._before = _local(self._weight).detach().clone()

    def descent(self, unit: Tensor) -> tuple[Float[Tensor, ""], Float[Tensor, ""]]:
        """Return <W before - W, unit> and the squared norm of W before - W."""
        descent = (self._before - _local(self._weight)).float()
        return (descent * unit).sum(), descent.square().sum()

    def remove(self, unit: Tensor, along: Float[Tensor, ""]) -> Float[Tensor, ""]:
        """Take `along` times the direction out of the update; return 1, the squared norm of what can be taken out."""
        _local(self._weight).add_((along * unit.float()).to(self._weight.dtype))
        return torch.ones_like(along)

    def forget(self) -> None:
        """Free what `remember` keeps."""
        self._before = self._before.new_empty(0)


RIDGE = 1e-6
"""Added to the r x r matrices A A' and B' B, relative to their mean eigenvalue: B is 0 at the start of a training."""


class TrainedAdapter:
    """The weight W0 + s B A of a Linear with a LoRA adapter of rank r, of which A and B are trained.

    Nothing of the size O x I is made of the adapter. What an update of A and B can do to W, to first order, are the
    matrices X A + B Y. The part of a direction v in them is T = v P + Q v (1 - P) with the projections P on the rows of
    A and Q on the columns of B. A multiple of T is taken out, the least change by which the update loses its part along
    v. Where A is invertible T is v, and the result that of a weight that is trained itself.
    """

    def __init__(self, a: Float[Tensor, "r I"], b: Float[Tensor, "O r"], scaling: float) -> None:
        self._a, self._b, self._scaling = a, b, scaling
        self._before: tuple[Tensor, ...] = ()

    def cut(self, whole: Float[Tensor, "O I"]) -> Tensor:
        """Return the direction: adapters are whole on every process."""
        return whole

    def gradients(self) -> list[Tensor]:
        """Return the gradients of A and B, which may be written to; none where there are none."""
        return [each.grad for each in (self._a, self._b) if each.grad is not None]

    def slopes(self, unit: Float[Tensor, "O I"]) -> list[Tensor]:
        """Return the derivatives of <W, unit> by A and by B."""
        a, b, unit = self._a.float(), self._b.float(), unit.float()
        return [self._scaling * b.T @ unit, self._scaling * unit @ a.T]

    def remember(self) -> None:
        """Keep A and B as they are before the optimiser's step."""
        self._before = (self._a.detach().float().clone(), self._b.detach().float().clone())

    def descent(self, unit: Float[Tensor, "O I"]) -> tuple[Float[Tensor, ""], Float[Tensor, ""]]:
        """Return <W before - W, unit> and the squared norm of W before - W."""
        # As (B0 - B) A0 + B (A0 - A): a difference of the two products would be one of almost equal numbers.
        (a0, b0), b = self._before, self._b.float()
        da, db = a0 - self._a.float(), b0 - b
        along = (db * (unit.float() @ a0.T)).sum() + (da * (b.T @ unit.float())).sum()
        square = (db.T @ db * (a0 @ a0.T)).sum() + (b.T @ b * (da @ da.T)).sum()
        crossed = 2 * (db.T @ b * (a0 @ da.T)).sum()
        return self._scaling * along, self._scaling**2 * (square + crossed)

    def remove(self, unit: Float[Tensor, "O I"], along: Float[Tensor, ""]) -> Float[Tensor, ""]:
        """Take the part `along` the direction out of the update; return the squared norm of T at the weights given."""
        unit, left_over = unit.float(), along
        found = torch.zeros_like(along)
        for number in range(3):  # the product of both changes is of second order: what it leaves is taken out again
            a, b = self._a.float(), self._b.float()
            right, left = unit @ a.T, b.T @ unit
            of_a, of_b = _inverse(a @ a.T), _inverse(b.T @ b)
            for_b = right @ of_a
            for_a = of_b @ (left - (left @ a.T) @ of_a @ a)
            size = (for_b * right).sum() + (for_a * left).sum()
            found = size if number == 0 else found
            share = torch.where(size > 0, left_over / (self._scaling * size), 0.0)
            self._b.add_((share * for_b).to(self._b.dtype))
            self._a.add_((share * for_a).to(self._a.dtype))
            left_over = torch.where(along > 0, self.descent(unit)[0], 0.0)
        return found

    def forget(self) -> None:
        """Free what `remember` keeps."""
        self._before = ()


def _inverse(gram: Float[Tensor, "r r"]) -> Float[Tensor, "r r"]:
    # inv_ex: `inv` asks the device whether the matrix is singular, and waits for it.
    ridge = RIDGE * gram.diagonal().mean() + torch.finfo(gram.dtype).tiny * 1e8
    return torch.linalg.inv_ex(gram + ridge * torch.eye(len(gram), device=gram.device)).inverse


def _local(tensor: Tensor) -> Tensor:
    """Return this process' share of a tensor that FSDP2 has cut, which may be written to; any other as it is."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def trained_linears(model: nn.Module, names: Container[str]) -> dict[str, TrainedWeight | TrainedAdapter]:
    """Return what is trained of the named Linears: their adapters, or their weights in a model without adapters."""
    adapters: dict[str, TrainedWeight | TrainedAdapter] = {}
    for path, module in model.named_modules():
        name = path.removeprefix("base_model.model.")
        if name in names and hasattr(module, "lora_A"):
            layer: Any = module
            (adapter,) = layer.active_adapters
            a, b = layer.lora_A[adapter].weight, layer.lora_B[adapter].weight
            adapters[name] = TrainedAdapter(a, b, layer.scaling[adapter])
    if adapters or hasattr(model, "peft_config"):
        return adapters
    return {
        name: TrainedWeight(module.weight)
        for name, module in model.named_modules()
        if name in names and isinstance(module, nn.Linear)
    }


class ProjectionCallback(TrainerCallback):
    """Projects the gradients before an optimiser step and the change of the weights after it, and records both."""

    def __init__(self, toward: Direction, kind: Literal["v", "random"], seed: int, out: RunWriter) -> None:
        """Project v itself, or a random direction, out of a training. toward: v, from `weight_direction`.

        The records give the cosine with v in both cases, so that the control shows how much of v training took up.
        """
        self._whole = (toward, toward if kind == "v" else random_like(toward, seed))
        self._linears: dict[str, TrainedWeight | TrainedAdapter] = {}
        self._toward: list[Tensor] = []
        self._removed: list[Tensor] = []
        self._account: Row = {}
        self._out = out

    def on_train_begin(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        model: Any = None,
        **kwargs: Any,
    ) -> None:
        """Find the weights or adapters, which exist by now, and keep this process' share of the directions."""
        toward, removed = self._whole
        self._linears = linears = trained_linears(model, toward)
        self._toward = [linear.cut(toward[name]) for name, linear in linears.items()]
        self._removed = self._toward
        if removed is not toward:
            self._removed = [linear.cut(removed[name]) for name, linear in linears.items()]
        self._whole = ({}, {})

    @torch.no_grad()
    def on_pre_optimizer_step(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Project the gradients: called between clipping and the optimiser's step."""
        found = []
        for linear, toward, removed in zip(self._linears.values(), self._toward, self._removed, strict=True):
            if gradients := linear.gradients():
                slopes = linear.slopes(toward)
                found.append((gradients, slopes, slopes if removed is toward else linear.slopes(removed)))
        measured = [
            torch.stack([_dot(g, g), _dot(g, toward), _dot(toward, toward), _dot(g, removed), _dot(removed, removed)])
            for g, toward, removed in found
        ]
        sums = self._over_shares(measured)
        # One-sided, and decided on the device: the host would wait for each tensor.
        amounts = torch.where(sums[:, 4] > 0, sums[:, 3].clamp_min(0) / sums[:, 4], 0.0)
        for (gradients, _, slopes), amount in zip(found, amounts, strict=True):
            for gradient, slope in zip(gradients, slopes, strict=True):
                gradient -= (amount * slope).to(gradient.dtype)
        taken = amounts * sums[:, 3].clamp_min(0)
        total, along, slope, gone = torch.stack([*sums[:, :3].T, taken]).sum(1).tolist()  # the only wait
        self._account = {
            "cos_in": along / (total * slope) ** 0.5 if total and slope else None,
            "energy_removed": gone / total if total else None,
        }
        for linear in self._linears.values():
            linear.remember()

    @torch.no_grad()
    def on_optimizer_step(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Project the update right after the optimiser's step: descents, -(W' - W), point as gradients do."""
        measured = []
        for linear, toward, removed in zip(self._linears.values(), self._toward, self._removed, strict=True):
            along, square = linear.descent(toward)
            measured.append(torch.stack([square, along, along if removed is toward else linear.descent(removed)[0]]))
        sums = self._over_shares(measured)
        taken = []
        for linear, removed, along in zip(self._linears.values(), self._removed, sums[:, 2].clamp_min(0), strict=True):
            size = linear.remove(removed, along)
            taken.append(torch.where(size > 0, along.square() / size, 0.0))
            linear.forget()
        total, along, gone = torch.stack([sums[:, 0].sum(), sums[:, 1].sum(), torch.stack(taken).sum()]).tolist()
        account = {
            "cos_update": along / (total * len(sums)) ** 0.5 if total else None,
            "energy_removed_update": gone / total if total else None,
        }
        step = state.global_step
        self._out.write(f"projection-{step:06d}", {"projected_step": step, **self._account, **account})

    def _over_shares(self, measured: Sequence[Tensor]) -> Float[Tensor, "linears sums"]:
        """Return one row for each Linear, summed over the processes that hold shares of it."""
        sums = torch.stack(list(measured))
        share = next(iter(self._linears.values()))
        if isinstance(share, TrainedWeight) and (group := share.group()) is not None:
            torch.distributed.all_reduce(sums, group=group)
        return sums


def _dot(one: Sequence[Tensor], other: Sequence[Tensor]) -> Float[Tensor, ""]:
    return torch.stack([(x.float() * y.float()).sum() for x, y in zip(one, other, strict=True)]).sum()


def accounts(out: RunWriter) -> list[Row]:
    """Return the records of all steps, in order: cosines with v before removal, shares of the squared norm removed."""
    names = ("projected_step", "cos_in", "energy_removed", "cos_update", "energy_removed_update")
    units = sorted((u for u in out.journal.records() if "projected_step" in u), key=lambda unit: unit["projected_step"])
    return [{name: unit[name] for name in names} for unit in units]
