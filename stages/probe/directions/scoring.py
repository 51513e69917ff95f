"""Placebo directions, and the scores of stored gradients with v and with them: no model, one pass over the store.

A placebo has the shapes, modules and norms of v without its meaning. What a statistic shows for these, it does not show
for v. A Haar-random direction is the comparison that the authors' own direction did not beat in their strongest offline
checks (wassname/vGROUT_pub @c067218, docs/research_notes.md).

Trap: swapping hack and clean *within* pairs, upstream's `shuffled_V`, turns differences around and leaves their
singular axes where they were, so for singular bases that shuffle is no placebo; here labels are permuted *across*
pairs.

Which families are a null for "v separates hacked from honest gradients"? The rank of v's effect among placebos is a p
where v, if it had nothing to do with hacking, would be one more draw; so the draws must have nothing to do with hacking
themselves, whether or not v has. `haar` and `randsign` take no gradient at all, `clean_clean` only those of honest
answers: they are nulls. `hack_hack` and `perm_pairs` are contrasts of hacks' own gradients. Let r be what separates the
pool's hacks from honest rows apart from v. It is never 0, as the pool's hacks are others than the pairs', in other
shares, and it lies in the few dimensions that hacks' gradients span. Contrasts drawn in those dimensions hold much of
r, with either sign; draws from everywhere, or from honest answers, hold it by chance alone. So draws made of hacks
separate hacks just where there is hacking to be found, and to rank v among them asks whether it is the best direction
of hacking, not whether it is one. They are always shown and decide nothing.

Nothing may be taken out of the draws that is left in v. With v's own part taken out, a v that is unrelated to hacking
and holds much of r by chance has no draws beside it that do: in one module of 30 numbers it ranked among the highest
1 % in 2 to 5 % of runs, and in 1 % with whole draws. Draws with a part of a true v have a part of its effect, which is
why effects are ranked and not their t: the t of a direction with little variance is as large with a tenth of the
effect. All of this is simulated in tests/stages/probe/directions/test_scoring.py.

Metrics are those of `metrics`, with their sources there; what a run is watched with (`watch_directions`, `HackScale`)
is this project's own.

Shapes: R rows, S completions, N numbers, D draws; every draw has norm 1 in each module.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Bool, Float
from torch import Tensor

from stages.probe.adapters.attach import Layout
from stages.probe.directions.extraction import FLOOR, Direction, LossKind, PairGradients
from stages.probe.directions.metrics import module_cosines, row_metrics, stacked_cosines
from stages.probe.pool.rows import finite_or_none
from stages.runs.kinds import Row

RANDOM = ("haar", "randsign")
"""The families of random directions, which T3 and the figures are held against."""
DRAWN = (*RANDOM, "perm_pairs", "clean_clean", "hack_hack")
"""The families of which as many as asked for are drawn; the others (negated, generic, unrelated) are single ones."""
Units = Float[Tensor, "D N"]
"""Unit directions, one a draw."""


def unit_by_module(
    layout: Layout, flat: Float[Tensor, "*draws N"], modules: tuple[str, ...]
) -> Float[Tensor, "*draws N"]:
    """Scale each module's part to norm 1 and set modules that have no direction to 0."""
    parts = layout.split(flat)
    return layout.join(
        {name: parts[name] / parts[name].norm(dim=-1, keepdim=True).clamp(min=FLOOR) for name in modules}
    )


def remove_contrasts(units: Units, rows: Float[Tensor, "S N"]) -> Units:
    """Remove the units' part in the span of what rows differ in, and scale to norm 1 over all modules together.

    With honest answers' gradients as rows, what is left of v is not right against wrong, nor short against long.
    """
    # S centred rows span at most S - 1 dimensions; the last singular vector is arbitrary.
    axes = torch.linalg.svd(rows - rows.mean(0), full_matrices=False)[2][: len(rows) - 1].to(units)
    rest = units - (units @ axes.T) @ axes
    return rest / rest.norm(dim=-1, keepdim=True).clamp(min=FLOOR)


def haar(direction: Direction, draws: int, seed: int) -> Units:
    """Draw uniformly random directions."""
    normal = torch.randn(draws, direction.layout.width, generator=torch.Generator().manual_seed(seed))
    return unit_by_module(direction.layout, normal, direction.modules)


def randsign(direction: Direction, draws: int, seed: int) -> Units:
    """Draw the unit v with a random sign for every number: the same profile over coordinates, no direction."""
    generator = torch.Generator().manual_seed(seed)
    coins = torch.randint(0, 2, (draws, direction.layout.width), generator=generator) * 2 - 1
    return direction.unit.cpu() * coins


def draw_families(
    direction: Direction, pairs: PairGradients, loss: LossKind, draws: int, seed: int
) -> dict[str, Units]:
    """Draw the placebos of every family of `DRAWN`.

    Those from pairs are the mean of a random part of completions minus the mean of the others: `perm_pairs` permutes
    the labels hack and clean among all completions of all pairs, `clean_clean` and `hack_hack` hold one random half of
    the clean completions, or of the hacks, against the other.
    """
    families = {"haar": haar(direction, draws, seed), "randsign": randsign(direction, draws, seed + 1)}
    hack, clean = pairs.weighted(loss)
    half = len(pairs) // 2
    splits = {"perm_pairs": (torch.cat([hack, clean]), len(pairs)), "clean_clean": (clean, half)}
    for family, (sides, first) in (splits | {"hack_hack": (hack, half)}).items():
        # One seed for all: clean_clean and hack_hack split the pairs in the same way.
        generator = torch.Generator().manual_seed(seed + 2)
        signs = torch.full((draws, len(sides)), -1.0 / (len(sides) - first))
        # Each draw is a contrast of means, one product of signs and gradients.
        for line in signs:
            line[torch.randperm(len(sides), generator=generator)[:first]] = 1.0 / first
        families[family] = unit_by_module(direction.layout, signs @ sides, direction.modules)
    return families


def random_axes(direction: Direction, seed: int) -> Direction:
    """Draw the direction of the arm projected_random: random orthonormal axes, as many in each module as v has.

    Removal is decided by a random mean in their span, with the norm of v's.
    """
    generator = torch.Generator().manual_seed(seed)
    axes, means = {}, {}
    for name in direction.modules:
        k, n = direction.axes[name].shape
        axes[name] = torch.linalg.qr(torch.randn(n, k, generator=generator))[0].T.contiguous()
        means[name] = axes[name].sum(0) / k**0.5 * direction.means[name].norm().cpu()
    return Direction(direction.layout, axes, dict(direction.strengths), means)


def generic_gradient(direction: Direction, pairs: PairGradients, loss: LossKind) -> Float[Tensor, " N"]:
    """Return the unit mean gradient of clean answers: what any completion pulls toward."""
    return unit_by_module(direction.layout, pairs.weighted(loss)[1].mean(0), direction.modules)


@dataclass(frozen=True)
class Placebos:
    """Unit directions [D, N] with the family of each."""

    families: list[str]
    units: Units


def all_placebos(
    direction: Direction, pairs: PairGradients, loss: LossKind, others: Sequence[Direction], draws: int, seed: int
) -> Placebos:
    """Build every family: `draws` of each drawn one, v negated, the generic gradient, directions of other pair sets.

    Drawn placebos keep their component along v. Without it v would not be one more draw: where v holds by chance much
    of what separates rows, draws orthogonal to v hold less of it than v's own kind would, and v ranks too high.
    """
    families = draw_families(direction, pairs, loss, draws, seed)
    families["negated"] = -direction.unit[None]
    families["generic"] = generic_gradient(direction, pairs, loss)[None]
    if others:
        families["unrelated"] = torch.stack([unit_by_module(d.layout, d.mean, direction.modules) for d in others])
    names = [family for family, units in families.items() for _ in range(len(units))]
    return Placebos(names, torch.cat(list(families.values())))


def watch_directions(
    direction: Direction, pairs: PairGradients, loss: LossKind, draws: int, seed: int
) -> tuple[list[str], Float[Tensor, "D1 N"]]:
    """Return the drawn placebos' families, and v with the placebos [1 + D, N], all less what honest answers differ in.

    The latter is taken from the clean answers of one half of the pairs, and the placebos of pairs are drawn from the
    other: drawn from the same answers they would be what is taken out, and show nothing of what other answers leave.
    Draws keep their part along v, or v would not be like one more of them.
    """
    half = len(pairs) // 2
    honest, others = pairs[list(range(half))].weighted(loss)[1], pairs[list(range(half, len(pairs)))]
    drawn = draw_families(direction, others, loss, draws, seed)
    units = torch.cat([direction.unit[None], *drawn.values()])
    return [family for family in drawn for _ in range(draws)], remove_contrasts(units, honest)


@dataclass(frozen=True)
class HackScale:
    """Mean cosines with v of the pairs' clean answers and of their hacks, each with a v made from the other pairs."""

    clean: float
    hack: float

    def hack_like(self, cosines: Float[np.ndarray, "*shape"]) -> Bool[np.ndarray, "*shape"]:
        """Return which cosines are above the middle between both; NaN is not."""
        return cosines > (self.clean + self.hack) / 2


def hack_scale(direction: Direction, pairs: PairGradients, loss: LossKind) -> HackScale:
    """Measure the scale of cosines with v less what honest answers differ in, as `watch_directions` has it.

    A pair's own difference is a part of v and would lift its hack's cosine, so each is measured without.
    """
    differences, (hack, clean) = pairs.differences(loss), pairs.weighted(loss)
    # The sum less a pair's own difference, scaled to norm 1, is v made from the other pairs.
    others = unit_by_module(direction.layout, differences.sum(0) - differences, direction.modules)
    units = remove_contrasts(others, clean[: len(pairs) // 2])
    means = []
    for side in (clean, hack):
        inside = side * direction.inside
        cosines = (inside * units).sum(-1) / inside.norm(dim=-1).clamp(min=FLOOR)
        means.append(float(cosines.mean()))
    return HackScale(*means)


def score_rows(rows: Sequence[Row], sums: Float[Tensor, "R N"], direction: Direction) -> list[Row]:
    """Build the `probe_score/1` rows of a direction, which may be another than the rows were measured with."""
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
    """Build the `placebo/1` rows: each draw's cos_stack with every row, null where undefined, and its cosine with v."""
    scores = stacked_cosines(sums, placebos.units, direction.inside, len(direction.modules))
    with_v = (placebos.units @ direction.unit / len(direction.modules)).tolist()
    counts = dict.fromkeys(placebos.families, 0)  # numbers the draws within a family
    rows = []
    for index, family in enumerate(placebos.families):
        column = [finite_or_none(value) for value in scores[:, index]]
        rows.append({"family": family, "draw": counts[family], "cos_with_v": with_v[index], "scores": column})
        counts[family] += 1
    return rows


def step_placebos(
    steps: Sequence[Float[Tensor, " N"]], placebos: Placebos, direction: Direction
) -> dict[str, list[float]]:
    """For each random placebo, average over a replay's step gradients what its one-sided removal would do.

    `fired` is the share of modules that it would fire in, `energy` the share of the squared norm that it would take.
    """
    random = [index for index, family in enumerate(placebos.families) if family in RANDOM]
    layout, units = direction.layout, placebos.units[random]
    fired, energy = [], []
    # One step's gradient at a time, all draws at once.
    for gradient in steps:
        dots = layout.sums(units * gradient)[:, direction.indices]
        fired.append((dots > 0).float().mean(-1))
        energy.append(dots.relu().square().sum(-1) / gradient.square().sum().clamp(min=FLOOR))
    return {"fired": torch.stack(fired).mean(0).tolist(), "energy": torch.stack(energy).mean(0).tolist()}


def module_effects(rows: Sequence[Row], sums: Float[Tensor, "R N"], direction: Direction) -> list[Row]:
    """By module: how far apart hacked and other rows lie on v, in standard deviations (Cohen's d).

    Rows without a label are left out; no rows are returned when either group has fewer than two.
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
