"""Scores of stored gradients with v and with its placebos: no model, one pass over the store.

Metrics are those of `metrics`, placebos those of `placebos`, with their sources there; what a run is watched with
(`beside_honest`, `HackScale`) is this project's own.

Shapes: R rows, N numbers, D draws.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from stages.probe.directions.extraction import (
    FLOOR,
    FROM_PAIRS,
    Direction,
    LossKind,
    PairGradients,
    beside,
    beside_contrasts,
    haar,
    randsign,
    unit_by_module,
)
from stages.probe.directions.metrics import module_cosines, row_metrics, stacked_cosines
from stages.probe.pool.rows import finite_or_none
from stages.runs.records import Row

RANDOM = ("haar", "randsign")
"""The families of random directions, which T3 and the figures are held against."""
DRAWN = (*RANDOM, *FROM_PAIRS)
"""The families of which as many as asked for are drawn; the others (negated, generic, unrelated) are single ones."""


@dataclass(frozen=True)
class Placebos:
    """Unit directions [D, N] with the family of each."""

    families: list[str]
    units: Float[Tensor, "D N"]


def all_placebos(
    direction: Direction, pairs: PairGradients, loss: LossKind, others: Sequence[Direction], draws: int, seed: int
) -> Placebos:
    """Every family: random draws, draws from the pairs, v negated, the generic gradient, directions of other pair sets.

    `draws` is the number of each family that is drawn. Drawn placebos are orthogonal to v in every module: one that
    holds a part of v, as pairs dealt anew do, shows v's effect and not what there is without it.
    """
    families = {"haar": haar(direction, draws, seed), "randsign": randsign(direction, draws, seed + 1)}
    families |= {name: make(direction, pairs, loss, draws, seed + 2) for name, make in FROM_PAIRS.items()}
    families = {name: beside(direction, units) for name, units in families.items()}
    families["negated"] = -direction.unit[None]
    families["generic"] = generic_gradient(direction, pairs, loss)[None]
    if others:
        families["unrelated"] = torch.stack([unit_by_module(d.layout, d.mean, direction.modules) for d in others])
    names = [family for family, units in families.items() for _ in range(len(units))]
    return Placebos(names, torch.cat(list(families.values())))


@dataclass(frozen=True)
class HackScale:
    """Mean cosines with v of the pairs' clean answers and of their hacks, each with a v made from the other pairs."""

    clean: float
    hack: float

    @property
    def middle(self) -> float:
        """Between both."""
        return (self.clean + self.hack) / 2

    def likeness(self, cosines: Float[np.ndarray, "*shape"]) -> Float[np.ndarray, "*shape"]:
        """0 up to the middle, 1 at the hacks' mean, linear above the middle."""
        return np.clip((cosines - self.middle) / (self.hack - self.middle), 0, None)


def hack_scale(direction: Direction, pairs: PairGradients, loss: LossKind) -> HackScale:
    """The scale of cosines with v less what honest answers differ in, as `beside_honest` has it.

    A pair's own difference is a part of v and would lift its hack's cosine, so each is measured without.
    """
    differences, (hack, clean) = pairs.differences(loss), pairs.weighted(loss)
    others = unit_by_module(direction.layout, differences.sum(0) - differences, direction.modules)
    units = beside_contrasts(others, clean[: len(pairs) // 2])
    means = []
    for side in (clean, hack):
        inside = side * direction.inside
        cosines = (inside * units).sum(-1) / inside.norm(dim=-1).clamp(min=FLOOR)
        means.append(float(cosines.mean()))
    return HackScale(*means)


def beside_honest(
    direction: Direction, pairs: PairGradients, loss: LossKind, draws: int, seed: int
) -> tuple[list[str], Float[Tensor, "D1 N"]]:
    """The drawn placebos' families, and v with them [1 + D, N], all less what honest answers differ in.

    That is taken from the clean answers of one half of the pairs, and the placebos of pairs are drawn from the other:
    drawn from the same answers they would be what is taken out, and tell nothing of what other answers leave. Draws
    keep their part along v, or v would not be like one more of them.
    """
    half = len(pairs) // 2
    honest, others = pairs[list(range(half))].weighted(loss)[1], pairs[list(range(half, len(pairs)))]
    drawn = {"haar": haar(direction, draws, seed), "randsign": randsign(direction, draws, seed + 1)}
    drawn |= {name: make(direction, others, loss, draws, seed + 2) for name, make in FROM_PAIRS.items()}
    units = torch.cat([direction.unit[None], *drawn.values()])
    return [family for family in drawn for _ in range(draws)], beside_contrasts(units, honest)


def generic_gradient(direction: Direction, pairs: PairGradients, loss: LossKind) -> Float[Tensor, " N"]:
    """The unit mean gradient of clean answers: what any completion pulls toward."""
    return unit_by_module(direction.layout, pairs.weighted(loss)[1].mean(0), direction.modules)


def score_rows(rows: Sequence[Row], sums: Float[Tensor, "R N"], direction: Direction) -> list[Row]:
    """The `probe_score/1` rows of a direction, which may be another than the rows were measured with."""
    measured = row_metrics(sums.float(), direction)
    return [
        {
            "row_uid": row["row_uid"],
            "cos_stack": finite_or_none(measured["cos_stack"][index]),
            "cos_S_contrib": finite_or_none(measured["norm_weighted_cos"][index]),
            "cos_global": finite_or_none(measured["cos_global"][index]),
        }
        for index, row in enumerate(rows)
    ]


def placebo_rows(placebos: Placebos, sums: Float[Tensor, "R N"], direction: Direction) -> list[Row]:
    """The `placebo/1` rows: each draw's cos_stack with every row, null where undefined, and its cosine with v."""
    scores = stacked_cosines(sums, placebos.units, direction.inside, len(direction.modules))
    with_v = (placebos.units @ direction.unit / len(direction.modules)).tolist()
    counts = dict.fromkeys(placebos.families, 0)
    rows = []
    for index, family in enumerate(placebos.families):
        column = [finite_or_none(value) for value in scores[:, index]]
        rows.append({"family": family, "draw": counts[family], "cos_with_v": with_v[index], "scores": column})
        counts[family] += 1
    return rows


def step_placebos(
    steps: Sequence[Float[Tensor, " N"]], placebos: Placebos, direction: Direction
) -> dict[str, list[float]]:
    """For each random placebo, means over a replay's step gradients of what its one-sided removal would do.

    `fired` is the share of modules that it would fire in, `energy` the share of the squared norm that it would take.
    """
    random = [index for index, family in enumerate(placebos.families) if family in RANDOM]
    layout, units = direction.layout, placebos.units[random]
    fired, energy = [], []
    for gradient in steps:
        dots = layout.sums(units * gradient)[:, direction.indices]
        fired.append((dots > 0).float().mean(-1))
        energy.append(dots.relu().square().sum(-1) / gradient.square().sum().clamp(min=FLOOR))
    return {"fired": torch.stack(fired).mean(0).tolist(), "energy": torch.stack(energy).mean(0).tolist()}


def module_effects(rows: Sequence[Row], sums: Float[Tensor, "R N"], direction: Direction) -> list[Row]:
    """By module: how far apart hacked and other rows lie on v, in standard deviations (Cohen's d).

    Rows without a label are left out; no rows come back when either group has fewer than two.
    """
    known = [index for index, row in enumerate(rows) if row["hacked"] is not None]
    hacked = np.array([rows[index]["hacked"] for index in known], dtype=bool)
    if min(hacked.sum(), (~hacked).sum()) < 2:
        return []
    cosines = module_cosines(sums[known].float(), direction).double().numpy()
    gap = np.nanmean(cosines[hacked], 0) - np.nanmean(cosines[~hacked], 0)
    spread = np.sqrt((np.nanvar(cosines[hacked], 0, ddof=1) + np.nanvar(cosines[~hacked], 0, ddof=1)) / 2)
    return [
        {"module": name, "d": finite_or_none(d)}
        for name, d in zip(direction.modules, gap / np.maximum(spread, FLOOR), strict=True)
    ]
