"""Removing a direction from a gradient and from an optimiser's update, and measuring that it was removed.

Order in a step: accumulate, project the gradient, clip, optimise, project the update. An update is projected too
because a projected gradient does not give a projected update under Adam, whose steps are not along its gradient.

Removing relu(V g) V from the gradient is the method of wassname/grpo_proj2 @25ad306. Here the mean direction decides
and the whole span of the axes is removed: relu on single axes would depend on the arbitrary rotation of a singular
basis. With one axis, the mean's, both are the same.

One-sided removal is not neutral: on noise it leaves a drift away from any direction, a random one too, which is why
random and two-sided arms exist.

Shapes: N numbers of the flat gradient, n of one module.
"""

from dataclasses import dataclass
from pathlib import Path

import torch
from jaxtyping import Float
from torch import Tensor

from stages.probe.adapters.names import DescentConfig, ProjectionMode
from stages.probe.adapters.spectrum import read_tensors, write_tensors
from stages.probe.directions.extraction import FLOOR, Direction
from stages.runs.kinds import Row


@dataclass(frozen=True)
class Projection:
    """What was removed, from which modules (`fired`), and how exactly.

    Cosines are means over modules with a direction and a gradient; `num_skipped` counts the modules with a direction
    and no gradient. Energies are shares of the squared norm |g|^2. `conservation_error` is
    | |g|^2 - |g_out|^2 - what was taken | / |g|^2, `residual` the largest |V g_out| / |g| of a fired module, and
    `removed_dot` the inner product of what was removed with the unit directions.
    """

    cos_in: float | None
    cos_out: float | None
    frac_fired: float
    num_modules: int
    num_skipped: int
    norm_in: float
    norm_out: float
    energy_in: float
    energy_out: float
    energy_removed: float
    conservation_error: float
    residual: float
    removed_dot: float
    fired: tuple[str, ...]


def project(
    gradient: Float[Tensor, " N"], direction: Direction, mode: ProjectionMode = "one_sided", beta: float = 1.0
) -> tuple[Float[Tensor, " N"], Projection]:
    """Return a new gradient without `beta` times its part along the direction, and the account of the removal.

    one_sided acts where a module's gradient points toward the hack (<g, mean> > 0), two_sided wherever there is a
    gradient, reverse takes twice the part toward the hack. Modules that did not fire keep their bits, and the given
    tensor is not changed.
    """
    # A copy: the caller compares what came in with what went out, and `removed` checks that memory is not shared.
    out = gradient.clone()
    parts, outs = direction.layout.split(gradient), direction.layout.split(out)
    if mode == "none":
        fired: tuple[str, ...] = ()
    elif mode == "two_sided":
        fired = tuple(name for name in direction.modules if bool(parts[name].norm() > FLOOR))
    else:
        fired = tuple(name for name in direction.modules if bool(parts[name] @ direction.means[name] > 0))
    # Fire or not by the mean, remove the span of the axes: relu on each axis would depend on the rotation of the basis.
    strength = 2 * beta if mode == "reverse" else beta
    for name in fired:
        outs[name] -= strength * (direction.axes[name].T @ (direction.axes[name] @ parts[name]))
    return out, account(gradient, out, direction, fired, strength)


def account(
    before: Float[Tensor, " N"],
    after: Float[Tensor, " N"],
    direction: Direction,
    fired: tuple[str, ...],
    strength: float = 1.0,
) -> Projection:
    """Compare a gradient before and after projection; what was taken is summed over fired modules, of either sign.

    Taking `strength` times a part of square a^2 leaves the squared norm smaller by strength (2 - strength) a^2.
    """
    # In float64: conservation is checked to 1e-4 of the squared norm, a difference of two nearly equal numbers.
    square_before, square_after = (float(gradient.double().square().sum()) for gradient in (before, after))
    square = max(square_before, FLOOR)
    along_before, along_after = (
        {name: float((direction.axes[name].double() @ parts[name]).square().sum()) for name in direction.modules}
        for parts in (direction.layout.split(gradient.double()) for gradient in (before, after))
    )
    norms = dict(zip(direction.layout.names, direction.layout.norms(before).tolist(), strict=True))
    taken = strength * (2 - strength) * sum(along_before[name] for name in fired)
    return Projection(
        cos_in=mean_cosine(before, direction),
        cos_out=mean_cosine(after, direction),
        frac_fired=len(fired) / max(len(direction.modules), 1),
        num_modules=len(direction.modules),
        num_skipped=sum(norms[name] <= FLOOR for name in direction.modules),
        norm_in=float(before.norm()),
        norm_out=float(after.norm()),
        energy_in=sum(along_before.values()) / square,
        energy_out=sum(along_after.values()) / square,
        energy_removed=taken / square,
        conservation_error=abs(square_before - square_after - taken) / square,
        residual=max((along_after[name] ** 0.5 / max(norms[name], FLOOR) for name in fired), default=0.0),
        removed_dot=float((before - after) @ direction.unit),
        fired=fired,
    )


def mean_cosine(gradient: Float[Tensor, " N"], direction: Direction) -> float | None:
    """Return the mean over modules of <g_m, v_m> / ||g_m||, without modules of no gradient; None when none is left."""
    parts, units = direction.layout.split(gradient), direction.layout.split(direction.unit)
    cosines = [
        float(parts[n] @ units[n] / parts[n].norm()) for n in direction.modules if float(parts[n].norm()) > FLOOR
    ]
    return sum(cosines) / len(cosines) if cosines else None


class Descent:
    """An optimiser of the flat vector theta [N], on the CPU, whose state can be saved and loaded."""

    def __init__(
        self, theta: Float[Tensor, " N"], config: DescentConfig, mode: ProjectionMode, direction: Direction
    ) -> None:
        # On the CPU, as v and stored gradients are.
        self.start = theta.detach().clone().cpu()
        self.theta = self.start.clone().requires_grad_()
        self.config, self.mode, self.direction = config, mode, direction
        make = torch.optim.Adam if config.optimiser == "adam" else torch.optim.SGD
        self._optimiser = make([self.theta], lr=config.learning_rate)

    def step(self, gradient: Float[Tensor, " N"]) -> Row:
        """Move theta against this gradient, and return the account: the columns of `step_NNN.diag.json`.

        `config.project_on` decides which of gradient and update is projected. The update is -(theta' - theta), which
        points as a gradient does. `change` is the norm that projection took from the gradient, `shares_memory` whether
        the projected gradient is in the memory of the given one, `kept_bits` whether modules that did not fire, and
        those without a direction, are unchanged bit for bit.
        """
        config, direction = self.config, self.direction
        projects_gradient, projects_update = (config.project_on in (where, "both") for where in ("grad", "update"))
        out, removal = project(gradient, direction, self.mode if projects_gradient else "none", config.beta)
        # Clipping after projection: the limit then counts for what the optimiser sees.
        before = self.theta.detach().clone()
        self.theta.grad = out * min(1.0, config.clip / max(float(out.norm()), 1e-12))
        self._optimiser.step()
        update = before - self.theta.detach()
        # Adam divides each number by its own scale, so its update has a part along v even if its gradient has none: in
        # a toy model |cos| .05 on average and up to .20, under SGD 0.
        kept, update_removal = project(update, direction, self.mode if projects_update else "none", config.beta)
        with torch.no_grad():
            self.theta.copy_(before - kept)
        parts, outs = direction.layout.split(gradient), direction.layout.split(out)
        return {
            "cos_in": removal.cos_in,
            "cos_out": removal.cos_out,
            "cos_upd_in": mean_cosine(update, direction),
            "cos_upd_out": mean_cosine(kept, direction),
            "frac_fired": removal.frac_fired,
            "n_modules": removal.num_modules,
            "n_skipped": removal.num_skipped,
            "energy_in": removal.energy_in,
            "energy_out": removal.energy_out,
            "energy_removed": removal.energy_removed,
            "conservation_err": removal.conservation_error,
            "residual": removal.residual,
            "removed_dot": removal.removed_dot,
            "grad_norm_in": removal.norm_in,
            "grad_norm_out": removal.norm_out,
            "change": float((gradient - out).norm()),
            "shares_memory": out.data_ptr() == gradient.data_ptr(),
            "kept_bits": all(torch.equal(parts[name], outs[name]) for name in parts if name not in removal.fired),
            "frac_fired_upd": update_removal.frac_fired,
            "projects_update": projects_update,
            "lr": config.learning_rate,
        }

    def save(self, path: Path) -> None:
        """Write theta and the optimiser's state."""
        # Adam's moments and its count of steps are tensors; a safetensors file can hold nothing else.
        state = {name: value for name, value in self._optimiser.state[self.theta].items() if isinstance(value, Tensor)}
        write_tensors(path, {"theta": self.theta.detach(), **state}, {})

    def load(self, path: Path) -> None:
        """Restore theta and the optimiser's state."""
        tensors, _ = read_tensors(path)
        with torch.no_grad():
            self.theta.copy_(tensors.pop("theta"))
        self._optimiser.state[self.theta].update(tensors)
