"""Removing a direction from a gradient (or an update), and measuring that it was removed.

Removing relu(V g) V is the method of wassname/grpo_proj2 @25ad306. Here the mean direction decides and the whole span
of the axes is removed: relu on single axes would depend on the arbitrary rotation of a singular basis. With one axis,
the mean's, both are the same. Order in a step: accumulate, project, clip, optimise.

One-sided removal is not neutral: on noise it leaves a drift away from any direction, a random one too, which is why
random and two-sided arms exist.

Shapes: N numbers of the flat gradient, n of one module.
"""

from dataclasses import dataclass

from jaxtyping import Float
from torch import Tensor

from stages.probe.adapters.names import ProjectionMode
from stages.probe.directions.extraction import FLOOR, Direction


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
    """A new gradient without `beta` times its part along the direction, and the account of it.

    one_sided acts where a module's gradient points toward the hack (<g, mean> > 0), two_sided wherever there is a
    gradient, reverse takes twice the part toward the hack. Modules that did not fire keep their bits, and the given
    tensor is not changed.
    """
    out = gradient.clone()
    parts, outs = direction.layout.split(gradient), direction.layout.split(out)
    fired = tuple(name for name in direction.modules if _fires(parts[name], direction.means[name], mode))
    strength = 2 * beta if mode == "reverse" else beta
    for name in fired:
        outs[name] -= strength * (direction.axes[name].T @ (direction.axes[name] @ parts[name]))
    return out, account(gradient, out, direction, fired, strength)


def _fires(part: Float[Tensor, " n"], mean: Float[Tensor, " n"], mode: ProjectionMode) -> bool:
    if mode == "none":
        return False
    return bool(part.norm() > FLOOR) if mode == "two_sided" else bool(part @ mean > 0)


def account(
    before: Float[Tensor, " N"],
    after: Float[Tensor, " N"],
    direction: Direction,
    fired: tuple[str, ...],
    strength: float = 1.0,
) -> Projection:
    """Compare a gradient with what became of it; what was taken is summed over fired modules, whichever sign it had.

    Taking `strength` times a part of square a^2 leaves the squared norm smaller by strength (2 - strength) a^2.
    """
    square = max(_square(before), FLOOR)
    along_before, along_after = _squares_along(before, direction), _squares_along(after, direction)
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
        conservation_error=abs(_square(before) - _square(after) - taken) / square,
        residual=max((along_after[name] ** 0.5 / max(norms[name], FLOOR) for name in fired), default=0.0),
        removed_dot=float((before - after) @ direction.unit),
        fired=fired,
    )


def _square(gradient: Float[Tensor, " N"]) -> float:
    return float(gradient.double().square().sum())


def _squares_along(gradient: Float[Tensor, " N"], direction: Direction) -> dict[str, float]:
    parts = direction.layout.split(gradient.double())
    return {name: float((direction.axes[name].double() @ parts[name]).square().sum()) for name in direction.modules}


def mean_cosine(gradient: Float[Tensor, " N"], direction: Direction) -> float | None:
    """The mean over modules of <g_m, v_m> / ||g_m||, modules without gradient left out; None when none is left."""
    parts, units = direction.layout.split(gradient), direction.layout.split(direction.unit)
    cosines = [
        float(parts[n] @ units[n] / parts[n].norm()) for n in direction.modules if float(parts[n].norm()) > FLOOR
    ]
    return sum(cosines) / len(cosines) if cosines else None
