"""Projection of a hack direction out of a training: out of every gradient, and out of every optimiser update.

The direction is that of a run of `composer probe extract-vhack`, computed again from its pairs in the space of the
weights, where it needs no adapter: for each Linear of the layers the gradient of the mean over pairs of NLL(hack) -
NLL(clean), each a mean over own tokens, at the weights that training starts from. What points toward the hack is
removed, as in wassname/grpo_proj2 @25ad306: g - max(0, <g, v>) v with |v| = 1, by Linear. The update is projected too,
because the optimiser does not make a projected update of a projected gradient. One-sided removal leaves a drift away
from any direction, so a random direction of the same shapes is the control (`probe.project = "random"`).

Shapes: T tokens of a row, O outputs and I inputs of a Linear.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Literal

import torch
from jaxtyping import Float
from torch import Tensor, nn
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from stages.losses.reduction import token_log_probs
from stages.runs import store
from stages.runs.artifact import Run, RunWriter
from stages.runs.records import Row

PAIRS = "pairs.json"
"""In the folder of a direction: [hack, clean] pairs of rows of ids, as they were when it was extracted."""
Direction = dict[str, Float[Tensor, "O I"]]


def weight_direction(model: Any, pairs: Sequence[Sequence[Mapping[str, Any]]]) -> Direction:
    """Return the unit direction of each Linear from clean to hack, without those that have no gradient."""
    # Gradients of the Linears of layers alone, not of the output head: with all parameters on, the gradient of the
    # embeddings would be held for each pair and thrown away.
    linears = {n: m for n, m in model.named_modules() if isinstance(m, nn.Linear) and ".layers." in f".{n}"}
    needed = {name: parameter.requires_grad for name, parameter in model.named_parameters()}
    model.requires_grad_(False)
    for linear in linears.values():
        linear.weight.requires_grad_(True)
    total = {name: torch.zeros_like(linear.weight, dtype=torch.float32) for name, linear in linears.items()}
    for hack, clean in pairs:
        loss = _mean_nll(model, hack) - _mean_nll(model, clean)
        gradients = torch.autograd.grad(loss, [linear.weight for linear in linears.values()])
        for name, gradient in zip(linears, gradients, strict=True):
            total[name] += gradient.float()
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(needed[name])
    norms = dict(zip(total, _numbers([part.norm() for part in total.values()]), strict=True))
    return {name: part / part.norm() for name, part in total.items() if norms[name] > 0}


def _mean_nll(model: Any, row: Mapping[str, Any]) -> Float[Tensor, ""]:
    """Return the mean of -log p over a row's own tokens, in nats a token."""
    device = next(model.parameters()).device
    ids = torch.tensor([[*row["prompt_ids"], *row["completion_ids"]]], device=device)
    own = torch.tensor([[False] * len(row["prompt_ids"]) + list(row["own"])], device=device)
    logits = model(input_ids=ids, use_cache=False).logits.float()
    return -token_log_probs(logits[:, :-1], ids[:, 1:])[own[:, 1:]].mean()


def random_like(direction: Direction, seed: int) -> Direction:
    """Return unit directions of the same shapes, uniformly at random."""
    generator = torch.Generator().manual_seed(seed)
    drawn = {name: torch.randn(part.shape, generator=generator) for name, part in direction.items()}
    return {name: (part / part.norm()).to(direction[name].device) for name, part in drawn.items()}


class ProjectionCallback(TrainerCallback):
    """Projects the gradients before an optimiser step and the change of the weights after it, and records both."""

    def __init__(self, run: Run, kind: Literal["v", "random"], model: nn.Module, seed: int, out: RunWriter) -> None:
        """Project the direction v of a run of `composer probe extract-vhack`, or a random one, out of a training.

        The records give the cosine with v in both cases, so that the control shows how much of v training took up.
        """
        self._toward = weight_direction(model, store.read_json(run.folder() / PAIRS))
        self._removed = self._toward if kind == "v" else random_like(self._toward, seed)
        self._weights, self._out = {name: model.get_parameter(f"{name}.weight") for name in self._removed}, out
        self._before: dict[str, Tensor] = {}
        self._account: Row = {}

    @torch.no_grad()
    def on_pre_optimizer_step(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Project the gradients: called between clipping and the optimiser's step."""
        gradients = {n: w.grad for n, w in self._weights.items() if w.grad is not None}
        cosine = _cosine(gradients, self._toward)  # before `_project`, which writes into the gradients
        self._account = {"cos_in": cosine, "energy_removed": self._project(gradients)}
        # A copy of the layers' weights for the length of one optimiser step: their size once more in memory.
        self._before = {name: weight.detach().clone() for name, weight in self._weights.items()}

    @torch.no_grad()
    def on_optimizer_step(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Project the update right after the optimiser's step: descents, -(W' - W), point as gradients do."""
        descents = {name: before - self._weights[name] for name, before in self._before.items()}
        cosine = _cosine(descents, self._toward)
        taken = self._project(descents)
        for name, descent in descents.items():
            self._weights[name].copy_(self._before[name] - descent)
        self._before = {}
        account = {"cos_update": cosine, "energy_removed_update": taken}
        step = state.global_step
        self._out.write(f"projection-{step:06d}", {"projected_step": step, **self._account, **account})

    def _project(self, parts: Mapping[str, Tensor]) -> float | None:
        """Remove the part along the direction from tensors, in place; return its share of the squared norm."""
        measured = []
        for name, part in parts.items():
            unit = self._removed[name]
            along = (part.float() * unit).sum()
            measured += [along, part.float().square().sum()]
            # One-sided, and decided on the device: the host would wait for each tensor.
            part -= (torch.where(along > 0, along, 0.0) * unit).to(part.dtype)
        numbers = _numbers(measured)
        total, taken = sum(numbers[1::2]), sum(along**2 for along in numbers[::2] if along > 0)
        return taken / total if total else None


def _cosine(parts: Mapping[str, Tensor], direction: Direction) -> float | None:
    """Return the cosine of the concatenated tensors with the concatenated unit directions; None where all are 0."""
    shared = [name for name in parts if name in direction]
    squares = [parts[name].float().square().sum() for name in shared]
    numbers = _numbers([*squares, *((parts[name].float() * direction[name]).sum() for name in shared)])
    square, dot = sum(numbers[: len(shared)]), sum(numbers[len(shared) :])
    return dot / (square * len(shared)) ** 0.5 if square else None


def _numbers(scalars: Sequence[Float[Tensor, ""]]) -> list[float]:
    """Return scalars of one type as numbers, and wait for the device once."""
    found: list[float] = torch.stack(list(scalars)).tolist() if scalars else []
    return found


def accounts(out: RunWriter) -> list[Row]:
    """Return the records of all steps, in order: cosines with v before removal, shares of the squared norm removed."""
    names = ("projected_step", "cos_in", "energy_removed", "cos_update", "energy_removed_update")
    units = sorted((u for u in out.journal.records() if "projected_step" in u), key=lambda unit: unit["projected_step"])
    return [{name: unit[name] for name in names} for unit in units]
