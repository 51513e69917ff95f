"""Projection of a hack direction out of a training: out of every gradient, and out of every optimiser update.

The direction is that of a run of `composer probe extract-vhack`, computed again from its pairs in the space of the
weights: for each Linear of the layers the gradient of the mean over pairs of NLL(hack) - NLL(clean), each a mean over
own tokens, at the weights that training starts from. What points toward the hack is removed, as in
wassname/grpo_proj2 @25ad306: g - max(0, <g, v>) v with |v| = 1, by Linear. The update is projected too, because the
optimiser does not make a projected update of a projected gradient. Where an adapter or singular values are trained,
their effect on the weights is projected (`trained.Trained`); under FSDP2 each process projects its share of them.
One-sided removal leaves a drift away from any direction, so a random direction of the same shapes is the control
(`probe.project = "random"`), and `probe.two_sided` takes out what points away from the hack, too.

Shapes: T tokens of a row, O outputs and I inputs of a Linear.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor
from transformers import TrainerCallback, TrainerControl, TrainerState

from composer_stages.gradients.basis import layer_linears
from composer_stages.runs.kinds import Row
from composer_stages.runs.run import RunWriter
from composer_stages.training.config import Probe
from composer_stages.training.packing import on_device
from composer_stages.training.scoring import Tree, score, token_log_probs
from composer_stages.training.trained import Trained, TrainedWeight, trained_linears

PAIRS = "pairs.json"
"""In the folder of a direction: [hack, clean] pairs of rows of ids, as they were when it was extracted."""
Direction = dict[str, Float[Tensor, "O I"]]


def weight_direction(model: Any, pairs: Sequence[Sequence[Mapping[str, Any]]]) -> Direction:
    """Return the unit direction of each Linear from clean to hack, without those that have no gradient.

    In the type of the weights: at 8 billion of them, 16 GB rather than 32.
    """
    # Gradients of the Linears of layers alone, not of the output head: with all parameters on, the gradient of the
    # embeddings would be held for each pair and thrown away.
    linears = dict(layer_linears(model))
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
    [mask] = on_device([torch.tensor(row["own"], dtype=torch.long)], scored.targets.device)
    return -(token_log_probs(model, scored) * mask).sum() / mask.sum()


def random_like(direction: Direction, seed: int) -> Direction:
    """Return unit directions of the same shapes, uniformly at random."""
    generator = torch.Generator().manual_seed(seed)
    drawn = {name: torch.randn(part.shape, generator=generator) for name, part in direction.items()}
    return {name: (part / part.norm()).to(direction[name]) for name, part in drawn.items()}


class ProjectionCallback(TrainerCallback):
    """Projects the gradients before an optimiser step and the change of the weights after it, and records both."""

    def __init__(self, toward: Direction, settings: Probe, seed: int, out: RunWriter) -> None:
        """Project v, a random direction or nothing out of a training. toward: v, from `weight_direction`.

        The records give the cosine with v in each case, so that the control shows how much of v training took up.
        """
        self._settings = settings
        self._whole = (toward, random_like(toward, seed) if settings.project == "random" else toward)
        self._linears: dict[str, Trained] = {}
        self._toward: list[Tensor] = []
        self._removed: list[Tensor] = []
        self._account: Row = {}
        self._out = out

    def on_train_begin(
        self, args: Any, state: TrainerState, control: TrainerControl, model: Any = None, **kwargs: Any
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
    def on_pre_optimizer_step(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Project the gradients: called between clipping and the optimiser's step."""
        measured_linears = []
        for linear, toward, removed in zip(self._linears.values(), self._toward, self._removed, strict=True):
            if gradients := linear.gradients():
                slopes = linear.slopes(toward)
                measured_linears.append((gradients, slopes, slopes if removed is toward else linear.slopes(removed)))
        measured = [
            torch.stack([_dot(g, g), _dot(g, toward), _dot(toward, toward), _dot(g, removed), _dot(removed, removed)])
            for g, toward, removed in measured_linears
        ]
        sums = self._over_shares(measured)
        taken_out = self._taken_out(sums[:, 3])
        # Decided on the device: the host would wait for each tensor.
        amounts = torch.where(sums[:, 4] > 0, taken_out / sums[:, 4], 0.0)
        for (gradients, _, slopes), amount in zip(measured_linears, amounts, strict=True):
            for gradient, slope in zip(gradients, slopes, strict=True):
                gradient -= (amount * slope).to(gradient.dtype)
        energies = amounts * taken_out
        total, along, slope, gone = torch.stack([*sums[:, :3].T, energies]).sum(1).tolist()  # the only wait
        self._account = {
            "cos_in": along / (total * slope) ** 0.5 if total and slope else None,
            "energy_removed": gone / total if total else None,
        }
        for linear in self._linears.values():
            linear.remember()

    @torch.no_grad()
    def on_optimizer_step(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Project the update right after the optimiser's step: descents, -(W' - W), point as gradients do."""
        measured = []
        for linear, toward, removed in zip(self._linears.values(), self._toward, self._removed, strict=True):
            along, square = linear.moved(toward)
            measured.append(torch.stack([square, along, along if removed is toward else linear.moved(removed)[0]]))
        sums = self._over_shares(measured)
        energies = []
        taken_out = self._taken_out(sums[:, 2])
        for linear, removed, along in zip(self._linears.values(), self._removed, taken_out, strict=True):
            size = linear.remove(removed, along)
            energies.append(torch.where(size > 0, along.square() / size, 0.0))
            linear.forget()
        changes = [norm for linear in self._linears.values() if (norm := linear.squared_change()) is not None]
        since_start = [torch.stack(changes).sum().sqrt()] if len(changes) == len(self._linears) else []
        numbers = [sums[:, 0].sum(), sums[:, 1].sum(), torch.stack(energies).sum(), *since_start]
        total, along, gone, *change = torch.stack(numbers).tolist()  # the only wait
        account = {
            "cos_update": along / (total * len(sums)) ** 0.5 if total else None,
            "energy_removed_update": gone / total if total else None,
            "weight_change": change[0] if change else None,
        }
        step = state.global_step
        self._out.write(f"projection-{step:06d}", {"projected_step": step, **self._account, **account})

    def _taken_out(self, along: Float[Tensor, " linears"]) -> Float[Tensor, " linears"]:
        """Return what is taken out of parts along the direction: by default those that point toward it."""
        if self._settings.project == "none":
            return torch.zeros_like(along)
        return along if self._settings.two_sided else along.clamp_min(0)

    def _over_shares(self, measured: Sequence[Tensor]) -> Float[Tensor, "linears sums"]:
        """Return one row for each Linear, summed over the processes that hold shares of it."""
        sums = torch.stack(list(measured))
        share = next(iter(self._linears.values()))
        if isinstance(share, TrainedWeight) and (group := share.group()) is not None:
            torch.distributed.all_reduce(sums, group=group)
        return sums


def _dot(a: Sequence[Tensor], b: Sequence[Tensor]) -> Float[Tensor, ""]:
    return torch.stack([(x.float() * y.float()).sum() for x, y in zip(a, b, strict=True)]).sum()


def accounts(out: RunWriter) -> list[Row]:
    """Return the records of all steps, in order: cosines with v before removal, shares of the squared norm removed.

    weight_change is the Frobenius norm of the change since the start, null where all weights are trained.
    """
    names = ("projected_step", "cos_in", "energy_removed", "cos_update", "energy_removed_update", "weight_change")
    units = sorted((u for u in out.journal.records() if "projected_step" in u), key=lambda unit: unit["projected_step"])
    return [{name: unit[name] for name in names} for unit in units]
