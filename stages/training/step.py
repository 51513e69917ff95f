"""What a step reports when it is over, whatever micro-batches it was cut into: channel losses and gradient cosines."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from itertools import combinations

import torch
from jaxtyping import Float
from torch import Tensor

from stages.backends.ranks import Ranks
from stages.training.channels import ChannelLoss

GRPO = "grpo"
"""The loss whose weight is 1, as gradient norms and cosines name it."""


@dataclass(frozen=True)
class GradientCosines:
    """Euclidean norm of each loss' (unweighted) gradient and the cosine of each pair of them.

    The cosine with a gradient of norm zero is NaN: it has no direction.
    """

    norms: Mapping[str, float]
    cosines: Mapping[str, float]

    def metrics(self) -> dict[str, float]:
        """Flat names: `gradient/norm/dpo`, `gradient/cosine/grpo~dpo`."""
        return {f"gradient/norm/{n}": v for n, v in self.norms.items()} | {
            f"gradient/cosine/{n}": v for n, v in self.cosines.items()
        }


class StepReport:
    """Sums over the parts of one step; `names` gives the order of the losses, GRPO first."""

    def __init__(self, names: Iterable[str]) -> None:
        self._names = [GRPO, *names]
        self.gradients: dict[str, Float[Tensor, " p"]] = {}
        """By loss, GRPO's among them; the sum over the parts so far."""
        self.losses: dict[str, ChannelLoss] = {}
        """By channel; those that had rows in some part."""

    def add(self, losses: Mapping[str, ChannelLoss]) -> None:
        """The channels' losses of one part."""
        for name, loss in losses.items():
            loss = loss.detached()
            self.losses[name] = self.losses[name] + loss if name in self.losses else loss

    def add_gradients(self, losses: Mapping[str, Float[Tensor, ""]], parameters: Iterable[Tensor]) -> None:
        """Gradients of one part's losses by name; the graph stays alive for the backward pass that follows."""
        for name, gradient in _gradients(losses, parameters).items():
            self.gradients[name] = self.gradients[name] + gradient if name in self.gradients else gradient

    def gathered(self, ranks: Ranks) -> "StepReport":
        """The sums over all processes, on each; the parts of each are those that it had."""
        if ranks.count == 1:
            return self
        whole = StepReport(self._names[1:])
        for losses in ranks.gather({name: _portable(loss) for name, loss in self.losses.items()}):
            whole.add(losses)
        somewhere = {name for names in ranks.gather(list(self.gradients)) for name in names}
        for name in self._names:
            if name in somewhere:
                own = self.gradients.get(name)
                whole.gradients[name] = ranks.total(torch.zeros_like(self.gradients[GRPO]) if own is None else own)
        return whole

    def metrics(self) -> dict[str, float]:
        """Of the whole step: `NAME/loss`, `NAME/denominator`, `NAME/KEY`, and cosines where gradients were added."""
        values: dict[str, float] = {}
        for name in self._names:
            if (channel := self.losses.get(name)) is not None:
                values |= {f"{name}/loss": float(channel.loss), f"{name}/denominator": float(channel.denominator)}
                values |= {f"{name}/{key}": float(value) for key, value in channel.metrics.items()}
        ordered = {name: self.gradients[name] for name in self._names if name in self.gradients}
        return values | (_cosines(ordered).metrics() if ordered else {})


def _portable(loss: ChannelLoss) -> ChannelLoss:
    """Without tensors on a device, which only their own process can read."""
    metrics = {
        name: replace(metric, **{field: float(value) for field, value in vars(metric).items()})
        for name, metric in loss.metrics.items()
    }
    return replace(loss, loss=loss.loss.cpu(), metrics=metrics)


def _cosines(flat: Mapping[str, Float[Tensor, " p"]]) -> GradientCosines:
    norms = {name: float(g.norm()) for name, g in flat.items()}
    return GradientCosines(norms, {f"{a}~{b}": _cosine(flat[a], flat[b]) for a, b in combinations(flat, 2)})


def _gradients(losses: Mapping[str, Float[Tensor, ""]], parameters: Iterable[Tensor]) -> dict[str, Float[Tensor, " p"]]:
    trained = [p for p in parameters if p.requires_grad]
    return {name: _gradient(loss, trained) for name, loss in losses.items()}


def _gradient(loss: Float[Tensor, ""], parameters: list[Tensor]) -> Float[Tensor, " p"]:
    gradients = torch.autograd.grad(loss, parameters, retain_graph=True, allow_unused=True)
    pairs = zip(gradients, parameters, strict=True)
    return torch.cat([(torch.zeros_like(p) if g is None else g).flatten().to(_wide(p)) for g, p in pairs])


def _wide(values: Tensor) -> torch.dtype:
    """float32 at least: norms of half-precision gradients overflow."""
    return torch.promote_types(values.dtype, torch.float32)


def _cosine(a: Float[Tensor, " p"], b: Float[Tensor, " p"]) -> float:
    scale = a.norm() * b.norm()
    return float(a @ b / scale) if scale > 0 else float("nan")
