"""One optimiser step: gradient, projection, clip, optimiser, projection of the update, with an account of both.

An update is projected too because a projected gradient does not give a projected update under Adam, whose
steps are not along its gradient. One-sided removal from the gradient is that of wassname/grpo_proj2 @25ad306.
"""

from dataclasses import dataclass
from pathlib import Path

import torch
from jaxtyping import Float
from torch import Tensor

from stages.probe.adapters.tensor_file import read_tensors, write_tensors
from stages.probe.directions.extraction import Direction
from stages.probe.directions.modes import DescentConfig, ProjectionMode
from stages.probe.directions.projection import Projection, mean_cosine, project
from stages.runs.records import Row


@dataclass(frozen=True)
class StepAccount:
    """What one step did to the gradient and to the update, -(theta' - theta), which points as a gradient does.

    `change` is the norm that projection took from the gradient, `shares_memory` whether the projected gradient lies in
    the memory of the given one, `kept_bits` whether modules that did not fire are unchanged bit for bit.
    """

    gradient: Projection
    update: Projection
    change: float
    shares_memory: bool
    kept_bits: bool
    cos_upd_in: float | None
    cos_upd_out: float | None


class Descent:
    """An optimiser of the flat vector theta [N], on the CPU, whose state can be saved and loaded."""

    def __init__(
        self, theta: Float[Tensor, " N"], config: DescentConfig, mode: ProjectionMode, direction: Direction
    ) -> None:
        self.start = theta.detach().clone().cpu()
        self.theta = self.start.clone().requires_grad_()
        self.config, self.mode, self.direction = config, mode, direction
        make = torch.optim.Adam if config.optimiser == "adam" else torch.optim.SGD
        self._optimiser = make([self.theta], lr=config.learning_rate)

    def step(self, gradient: Float[Tensor, " N"]) -> StepAccount:
        """Move theta against this gradient; what of both is projected is `config.project_on`."""
        on_gradient: ProjectionMode = self.mode if self.config.project_on in ("grad", "both") else "none"
        on_update: ProjectionMode = self.mode if self.config.project_on in ("update", "both") else "none"
        out, account = project(gradient, self.direction, on_gradient, self.config.beta)
        before = self.theta.detach().clone()
        self.theta.grad = out * min(1.0, self.config.clip / max(float(out.norm()), 1e-12))
        self._optimiser.step()
        descent = before - self.theta.detach()
        kept, update = project(descent, self.direction, on_update, self.config.beta)
        with torch.no_grad():
            self.theta.copy_(before - kept)
        return StepAccount(
            gradient=account,
            update=update,
            change=float((gradient - out).norm()),
            shares_memory=out.data_ptr() == gradient.data_ptr(),
            kept_bits=_kept_bits(gradient, out, account, self.direction),
            cos_upd_in=mean_cosine(descent, self.direction),
            cos_upd_out=mean_cosine(kept, self.direction),
        )

    def save(self, path: Path) -> None:
        """Theta and the optimiser's state."""
        state = {name: value for name, value in self._optimiser.state[self.theta].items() if isinstance(value, Tensor)}
        write_tensors(path, {"theta": self.theta.detach(), **state}, {})

    def load(self, path: Path) -> None:
        """Go on from what was saved."""
        tensors, _ = read_tensors(path)
        with torch.no_grad():
            self.theta.copy_(tensors.pop("theta"))
        self._optimiser.state[self.theta].update(tensors)


def _kept_bits(before: Tensor, after: Tensor, account: Projection, direction: Direction) -> bool:
    """Whether modules that did not fire, and those without a direction, are the same bit for bit."""
    parts, outs = direction.layout.split(before), direction.layout.split(after)
    return all(torch.equal(parts[name], outs[name]) for name in parts if name not in account.fired)


def diagnostics(account: StepAccount, config: DescentConfig) -> Row:
    """The account as numbers by name, the columns of `step_NNN.diag.json`."""
    gradient = account.gradient
    return {
        "cos_in": gradient.cos_in,
        "cos_out": gradient.cos_out,
        "cos_upd_in": account.cos_upd_in,
        "cos_upd_out": account.cos_upd_out,
        "frac_fired": gradient.frac_fired,
        "n_modules": gradient.num_modules,
        "n_skipped": gradient.num_skipped,
        "energy_in": gradient.energy_in,
        "energy_out": gradient.energy_out,
        "energy_removed": gradient.energy_removed,
        "conservation_err": gradient.conservation_error,
        "residual": gradient.residual,
        "removed_dot": gradient.removed_dot,
        "grad_norm_in": gradient.norm_in,
        "grad_norm_out": gradient.norm_out,
        "change": account.change,
        "shares_memory": account.shares_memory,
        "kept_bits": account.kept_bits,
        "frac_fired_upd": account.update.frac_fired,
        "projects_update": config.project_on in ("update", "both"),
        "lr": config.learning_rate,
    }
