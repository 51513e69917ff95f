"""The hack direction v: extraction from hack/clean pairs, storage, placebo directions and their scores.

By module v is the mean difference of hack and clean gradients, or its top singular axes. Directions among dS gradients
from hack/clean pairs are those of wassname/grpo_proj2 @25ad306. That the mean decides whether to remove, and that the
span of the axes is removed, is this project's own choice: single axes depend on an arbitrary rotation.

Signs: a gradient c is that of a loss, and the optimiser moves by -c. v points along grad NLL(hack) - grad NLL(clean).
So <c, v> > 0 means: a descent step on this sample makes the hack relatively more likely. For an update D of the
parameters, the part toward the hack is -<D, v>.

A placebo has the shapes, modules and norms of v without its meaning: an effect that placebos show as well is no effect
of v. A Haar-random direction is the comparison that the authors' own direction did not beat in their strongest offline
checks (wassname/vGROUT_pub @c067218, docs/research_notes.md).

Trap: swapping hack and clean *within* pairs, upstream's `shuffled_V`, turns differences around and leaves their
singular axes where they were, so for singular bases that shuffle is no placebo; here labels are permuted *across*
pairs.

Families without a gradient of a hack (`haar`, `randsign`, `clean_clean`) are nulls: an unrelated v is exchangeable with
their draws, which therefore keep their part along v. `hack_hack` and `perm_pairs` are contrasts of gradients of hacks
and are only reported: they lie in the few dimensions that separate hacks from honest rows, so that ranking v among them
tests whether v is the best direction of hacking, not whether it is one (docs/probe-method.md, Placebo directions;
simulated by benchmarks/probe_statistics.py).

Metrics are those of `metrics`, with their sources there; the directions of `probe watch` (`watch_directions`,
`HackScale`) are this project's own.

Shapes: P pairs, N numbers in all, n of one module, k axes of a module, M modules with a direction, R rows, S
completions, D draws; every draw has norm 1 in each module.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import numpy as np
import orjson
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from composer_stages.errors import BadInput
from composer_stages.gradients.basis import Coordinates, coordinates
from composer_stages.gradients.per_row import MeasuredStudent, TokenRow, dr_grpo, open_student
from composer_stages.gradients.tensors import GradientStore, Layout, read_tensors, write_tensors
from composer_stages.policy.base import PolicyConfig
from composer_stages.runs import store
from composer_stages.runs.kinds import VECTORS, Row
from composer_stages.runs.run import Run, RunWriter

LossKind = Literal["nll_mean", "drgrpo_sum"]
"""The weighting of token-sum gradients: mean over own tokens, or Dr.GRPO's constant (arXiv 2503.20783)."""
Method = Literal["mean", "svd_k"]
FLOOR = 1e-12
"""Norms up to this count as zero."""
V_HACK_FILE, PAIRS = "v_hack.safetensors", "pairs.json"


@dataclass(frozen=True)
class PairGradients:
    """Token-sum gradients [P, N] of each pair's two completions, and their numbers of own tokens [P]."""

    layout: Layout
    hack: Float[Tensor, "P N"]
    clean: Float[Tensor, "P N"]
    hack_tokens: Int[Tensor, " P"]
    clean_tokens: Int[Tensor, " P"]

    @classmethod
    def alternating(
        cls, layout: Layout, rows: Float[Tensor, "2P N"], tokens: Sequence[Sequence[int]]
    ) -> "PairGradients":
        """Split rows that alternate hack, clean. tokens [P, 2]: the numbers of own tokens."""
        counts = torch.tensor(tokens)
        return cls(layout, rows[0::2], rows[1::2], counts[:, 0], counts[:, 1])

    def __len__(self) -> int:
        return len(self.hack)

    def __getitem__(self, index: list[int] | Int[Tensor, " Q"]) -> "PairGradients":
        parts = (self.hack, self.clean, self.hack_tokens, self.clean_tokens)
        return PairGradients(self.layout, *(part[index] for part in parts))

    def weighted(self, loss: LossKind) -> tuple[Float[Tensor, "P N"], Float[Tensor, "P N"]]:
        """Return the (hack, clean) gradients under a loss: the mean NLL a token, or Dr.GRPO's loss in groups of two.

        The latter is the token sum / (2 Lmax), with advantages +1 and -1 and Lmax the longest of these completions.
        """
        # Every loss is a recombination of stored token-sum gradients G: NLL mean G / |o|, Dr.GRPO A G / (N Lmax), so no
        # second backward pass is needed. The mean weights short completions more than Dr.GRPO's constant does.
        if loss == "nll_mean":
            return self.hack / self.hack_tokens[:, None], self.clean / self.clean_tokens[:, None]
        scale = 2 * max(int(self.hack_tokens.max()), int(self.clean_tokens.max()))
        return self.hack / scale, self.clean / scale

    def differences(self, loss: LossKind) -> Float[Tensor, "P N"]:
        """Return each pair's hack - clean under a loss."""
        hack, clean = self.weighted(loss)
        return hack - clean


class Direction:
    """By module: orthonormal axes [k, n], their singular values [k], the mean difference [n]; a module may have none.

    As a single direction it is the unit mean difference; a projection removes the span of the axes. `modules` have a
    direction, in the order of the layout; `indices` are their positions among the layout's names.
    """

    def __init__(
        self,
        layout: Layout,
        axes: Mapping[str, Float[Tensor, "k n"]],
        strengths: Mapping[str, Float[Tensor, " k"]],
        means: Mapping[str, Float[Tensor, " n"]],
    ) -> None:
        self.layout, self.axes, self.strengths, self.means = layout, axes, strengths, means
        self.modules = tuple(name for name in layout.names if name in axes)
        self.indices = [index for index, name in enumerate(layout.names) if name in axes]

    def to(self, device: torch.device | str, dtype: torch.dtype) -> "Direction":
        """Copy axes and means to a device in one transfer; return the direction itself if they are there."""
        parts = [*self.axes.values(), *self.means.values()]
        if all(part.device == torch.device(device) and part.dtype == dtype for part in parts):
            return self
        flat = torch.cat([part.flatten() for part in parts]).to(device).to(dtype)
        pieces = flat.split([part.numel() for part in parts])
        placed = [piece.view(part.shape) for piece, part in zip(pieces, parts, strict=True)]
        axes, means = placed[: len(self.axes)], placed[len(self.axes) :]
        return Direction(
            self.layout,
            dict(zip(self.axes, axes, strict=True)),
            self.strengths,
            dict(zip(self.means, means, strict=True)),
        )

    # The vectors below are computed on first use: for a LoRA of rank 32 at Qwen3-4B each takes 264 MB.
    @cached_property
    def unit(self) -> Float[Tensor, " N"]:
        """The unit mean directions, concatenated: norm 1 in each module, 0 where a module has none."""
        return self.layout.join({name: self.means[name] / self.means[name].norm() for name in self.modules})

    @cached_property
    def mean(self) -> Float[Tensor, " N"]:
        """The mean differences, concatenated: modules are weighted by the norm of their difference."""
        return self.layout.join({name: self.means[name] for name in self.modules})

    @cached_property
    def inside(self) -> Float[Tensor, " N"]:
        """1 where a module has a direction, else 0."""
        return self.layout.join({name: torch.ones_like(self.means[name]) for name in self.modules})


def from_flat(layout: Layout, flat: Float[Tensor, " N"], modules: tuple[str, ...]) -> Direction:
    """Return the direction whose mean difference is this vector in these modules."""
    means = {name: part for name, part in layout.split(flat).items() if name in modules}
    axes = {name: (mean / mean.norm())[None] for name, mean in means.items()}
    return Direction(layout, axes, {name: mean.norm()[None] for name, mean in means.items()}, means)


def extract(
    layout: Layout, differences: Float[Tensor, "P N"], method: Method = "mean", k: int = 1, noise_floor: float = 0.0
) -> Direction:
    """Extract the direction of these differences.

    `k` counts axes of a module under svd_k. `noise_floor` is a quantile: axes whose strength is below it among all
    modules' axes are dropped. A module without any gradient has no direction.
    """
    # Differences are never centred: centring would remove the mean, which is the signal.
    mean = layout.split(differences.mean(0))
    live = tuple(name for name, part in mean.items() if float(part.norm()) > FLOOR)
    if method == "mean":
        return from_flat(layout, differences.mean(0), live)
    parts, axes, strengths = layout.split(differences), dict[str, Tensor](), dict[str, Tensor]()
    for name in live:
        # The right singular vectors of the P differences: the sign of each is arbitrary.
        _, values, vectors = torch.linalg.svd(parts[name], full_matrices=False)
        vectors, strengths[name] = vectors[:k], values[:k]
        # Each axis has the sign of most pairs or, at a tie, of the mean.
        votes = (parts[name] @ vectors.T).sign().sum(0)
        votes = torch.where(votes == 0, (vectors @ mean[name]).sign(), votes.sign())
        axes[name] = vectors * votes[:, None]
    # One floor for all modules: a module in which no axis is strong has no direction.
    pooled = torch.cat(list(strengths.values()))
    floor = float(pooled.quantile(noise_floor)) if noise_floor else 0.0
    strong = {name: values >= floor for name, values in strengths.items() if bool((values >= floor).any())}
    return Direction(
        layout,
        {name: axes[name][chosen] for name, chosen in strong.items()},
        {name: strengths[name][chosen] for name, chosen in strong.items()},
        {name: mean[name] for name in strong},
    )


def save_direction(path: Path, direction: Direction, facts: Row) -> None:
    """Write a direction with `facts`: its coordinates (`gradients.basis.coordinates`) and how it was extracted.

    Keys: V/<module> [k, n], S/<module> [k], mean/<module> [n], float32. The torch version and the commit are in the
    run's manifest: in this file they would give equal directions different digests.
    """
    kinds = {"V": direction.axes, "S": direction.strengths, "mean": direction.means}
    tensors = {f"{kind}/{name}": part for kind, parts in kinds.items() for name, part in parts.items()}
    layout = store.encode(list(direction.layout.sizes.items())).decode()
    write_tensors(path, tensors, {"layout": layout, "facts": store.encode(facts).decode()})


def load_direction(path: Path) -> tuple[Direction, Row]:
    """Load a direction and its facts; `BadInput` when the file is missing or damaged."""
    tensors, metadata = read_tensors(path)
    layout = Layout(dict(orjson.loads(metadata["layout"])))
    parts = {
        kind: {name.removeprefix(kind + "/"): t for name, t in tensors.items() if name.startswith(kind + "/")}
        for kind in ("V", "S", "mean")
    }
    return Direction(layout, parts["V"], parts["S"], parts["mean"]), orjson.loads(metadata["facts"])


def check_coordinates(facts: Row, current: Mapping[str, Any]) -> None:
    """Raise `BadInput` if a direction with these facts was extracted in other coordinates than `current`."""
    # Only the coordinates are compared; the loss, the pairs and the method may differ.
    differ = [
        f"{name} {facts.get(name)!r} there, {current.get(name)!r} here"
        for name in Coordinates.__annotations__
        if facts.get(name) != current.get(name)
    ]
    if differ:
        raise BadInput("probe.other-coordinates", differ=differ)


def pair_rows(folder: Path) -> list[tuple[TokenRow, TokenRow]]:
    """Read the (hack, clean) rows of a direction's extraction."""
    return [(TokenRow(**hack), TokenRow(**clean)) for hack, clean in store.read_json(folder / PAIRS)]


def open_direction(folder: Path) -> tuple[Direction, Row, PairGradients]:
    """Read the folder of a direction run: the direction, its facts, and the gradients of its pairs."""
    direction, facts = load_direction(folder / V_HACK_FILE)
    stored = GradientStore(folder)
    return direction, facts, PairGradients.alternating(stored.layout, stored.rows.float(), stored.facts["tokens"])


def open_probe(
    run: Run, svd: Run | None, policy: PolicyConfig, out: RunWriter
) -> tuple[MeasuredStudent, Direction, Row]:
    """Open the student of a direction run, the direction and its facts; `BadInput` if their coordinates differ."""
    direction, facts, _ = open_direction(run.folder(VECTORS))
    settings = (facts["adapter"], facts["adapter_rank"], facts["adapter_seed"])
    student = open_student(policy, *settings, svd, out)
    check_coordinates(facts, coordinates(student.adapter))
    return student, direction, facts


def grpo_differences(student: MeasuredStudent, pairs: Sequence[tuple[TokenRow, TokenRow]]) -> Float[Tensor, "P N"]:
    """Take each pair's gradient of the Dr.GRPO loss by autograd, as a group with advantages +1 (hack) and -1 (clean).

    Dr.GRPO: arXiv 2503.20783. At ratio 1 it must equal `PairGradients.differences("drgrpo_sum")`, which recombines
    token-sum gradients.
    """
    rows = [side for pair in pairs for side in pair]
    l_max = max(row.num_own for row in rows)
    # A group is a pair, hence N = 2 whatever the number of pairs in the pass.
    gradients, _ = student.gradients(rows, dr_grpo([1.0, -1.0] * len(pairs), None, l_max, num_rows=2))
    return gradients[0::2] + gradients[1::2]


def module_rows(direction: Direction, pairs: PairGradients, loss: LossKind) -> list[Row]:
    """Build the `direction/1` rows: one for every module of the layout, with a direction or without.

    `signal_to_noise` is the mean difference's norm over that of its standard errors, about 1 in noise. The columns are
    this project's own.
    """
    layout, differences = direction.layout, pairs.differences(loss)
    noise = layout.sums(differences.var(0) / len(differences)).sqrt()[direction.indices]
    ratios = layout.norms(differences.mean(0))[direction.indices] / noise.clamp(min=FLOOR)
    ratio_of = dict(zip(direction.modules, ratios.tolist(), strict=True))
    undefined = dict.fromkeys(("signal_to_noise", "split_half_cos", "leave_one_out_accuracy", "energy_explained"))
    rows: list[Row] = []
    for name, part in layout.split(differences).items():
        row: Row = {"module": name, "numbers": layout.sizes[name], "axes": 0, "norm": 0.0}
        if name not in ratio_of:
            rows.append(row | undefined)
            continue
        axes, total, half = direction.axes[name], part.sum(0), len(part) // 2
        right = [float(d @ (total - d)) > 0 for d in part]
        row |= {
            "axes": len(axes),
            "norm": float(direction.means[name].norm()),
            "signal_to_noise": ratio_of[name],
            "split_half_cos": float(torch.cosine_similarity(part[:half].mean(0), part[half:].mean(0), dim=0)),
            "leave_one_out_accuracy": sum(right) / len(right),
            "energy_explained": float((part @ axes.T).square().sum() / part.square().sum()),
        }
        rows.append(row)
    return rows


RANDOM = ("haar", "randsign")
"""The families of random directions, with which T3 and the figures compare."""
DRAWN = (*RANDOM, "perm_pairs", "clean_clean", "hack_hack")
"""The families of which many are drawn; the remaining families (negated, generic, unrelated) have one direction."""
Units = Float[Tensor, "D N"]
"""Unit directions, one for each draw."""


def unit_by_module(
    layout: Layout, flat: Float[Tensor, "*draws N"], modules: tuple[str, ...]
) -> Float[Tensor, "*draws N"]:
    """Scale each module's part to norm 1 and set modules that have no direction to 0."""
    parts = layout.split(flat)
    return layout.join(
        {name: parts[name] / parts[name].norm(dim=-1, keepdim=True).clamp(min=FLOOR) for name in modules}
    )


def remove_contrasts(units: Units, rows: Float[Tensor, "S N"]) -> Units:
    """Remove the units' part in the span of the rows' differences, and scale to norm 1 over all modules together.

    With gradients of honest answers as rows, this removes right against wrong, and short against long, from v.
    """
    # S centred rows span at most S - 1 dimensions; the last singular vector is arbitrary.
    axes = torch.linalg.svd(rows - rows.mean(0), full_matrices=False)[2][: len(rows) - 1].to(units)
    residuals = units - (units @ axes.T) @ axes
    return residuals / residuals.norm(dim=-1, keepdim=True).clamp(min=FLOOR)


def haar(direction: Direction, draws: int, seed: int) -> Units:
    """Draw uniformly random directions."""
    normal = torch.randn(draws, direction.layout.width, generator=torch.Generator().manual_seed(seed))
    return unit_by_module(direction.layout, normal, direction.modules)


def randsign(direction: Direction, draws: int, seed: int) -> Units:
    """Draw the unit v with a random sign for every number: the profile of v over coordinates, in a random direction."""
    generator = torch.Generator().manual_seed(seed)
    coins = torch.randint(0, 2, (draws, direction.layout.width), generator=generator) * 2 - 1
    return direction.unit.cpu() * coins


def draw_families(
    direction: Direction, pairs: PairGradients, loss: LossKind, draws: int, seed: int
) -> dict[str, Units]:
    """Draw the placebos of every family of `DRAWN`.

    The families of pairs are the mean of a random part of completions minus the mean of the remaining ones:
    `perm_pairs` permutes the labels hack and clean among all completions of all pairs, `clean_clean` and `hack_hack`
    contrast two random halves of the clean completions, or of the hacks.
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

    A random mean in their span, with the norm of v's mean, decides the removal.
    """
    generator = torch.Generator().manual_seed(seed)
    axes, means = {}, {}
    for name in direction.modules:
        k, n = direction.axes[name].shape
        axes[name] = torch.linalg.qr(torch.randn(n, k, generator=generator))[0].T.contiguous()
        means[name] = axes[name].sum(0) / k**0.5 * direction.means[name].norm().cpu()
    return Direction(direction.layout, axes, dict(direction.strengths), means)


def generic_gradient(direction: Direction, pairs: PairGradients, loss: LossKind) -> Float[Tensor, " N"]:
    """Return the unit mean gradient of clean answers, which any completion shares."""
    return unit_by_module(direction.layout, pairs.weighted(loss)[1].mean(0), direction.modules)


@dataclass(frozen=True)
class Placebos:
    """Unit directions [D, N] with the family of each."""

    families: list[str]
    units: Units


def all_placebos(
    direction: Direction, pairs: PairGradients, loss: LossKind, unrelated: Sequence[Direction], draws: int, seed: int
) -> Placebos:
    """Build every family: `draws` of each drawn one, v negated, the generic gradient, directions of other pair sets.

    Drawn placebos keep their component along v: without it v is not exchangeable with them and ranks too high.
    """
    families = draw_families(direction, pairs, loss, draws, seed)
    families["negated"] = -direction.unit[None]
    families["generic"] = generic_gradient(direction, pairs, loss)[None]
    if unrelated:
        families["unrelated"] = torch.stack([unit_by_module(d.layout, d.mean, direction.modules) for d in unrelated])
    names = [family for family, units in families.items() for _ in range(len(units))]
    return Placebos(names, torch.cat(list(families.values())))


def watch_directions(
    direction: Direction, pairs: PairGradients, loss: LossKind, draws: int, seed: int
) -> tuple[list[str], Float[Tensor, "D1 N"]]:
    """Return the drawn placebos' families, and v with the placebos [1 + D, N], without the contrasts of honest answers.

    The contrasts are those of the clean answers of one half of the pairs; placebos of pairs are drawn from the other
    half, since drawn from the same answers they would be removed with the contrasts. Draws keep their part along v, so
    that v is exchangeable with them.
    """
    half = len(pairs) // 2
    honest, drawn_from = pairs[list(range(half))].weighted(loss)[1], pairs[list(range(half, len(pairs)))]
    drawn = draw_families(direction, drawn_from, loss, draws, seed)
    units = torch.cat([direction.unit[None], *drawn.values()])
    return [family for family in drawn for _ in range(draws)], remove_contrasts(units, honest)


@dataclass(frozen=True)
class HackScale:
    """Mean cosines of the pairs' clean answers and of their hacks with v, by leave-one-out over pairs."""

    clean: float
    hack: float

    def hack_like(self, cosines: Float[np.ndarray, "*shape"]) -> Bool[np.ndarray, "*shape"]:
        """Return which cosines are above the middle of both means; NaN is not."""
        return cosines > (self.clean + self.hack) / 2


def hack_scale(direction: Direction, pairs: PairGradients, loss: LossKind) -> HackScale:
    """Measure the scale of cosines with v, without the contrasts of honest answers as in `watch_directions`.

    A pair's own difference is a part of v and would lift the cosine of its hack, so it is left out.
    """
    differences, (hack, clean) = pairs.differences(loss), pairs.weighted(loss)
    # The sum less a pair's own difference, scaled to norm 1, is v of the remaining pairs.
    left_out = unit_by_module(direction.layout, differences.sum(0) - differences, direction.modules)
    units = remove_contrasts(left_out, clean[: len(pairs) // 2])
    means = []
    for side in (clean, hack):
        inside = side * direction.inside
        cosines = (inside * units).sum(-1) / inside.norm(dim=-1).clamp(min=FLOOR)
        means.append(float(cosines.mean()))
    return HackScale(*means)


def step_placebos(
    steps: Sequence[Float[Tensor, " N"]], placebos: Placebos, direction: Direction
) -> dict[str, list[float]]:
    """Compute, for each random placebo, the mean effect of its one-sided removal over a replay's step gradients.

    `fired` is the share of modules in which it would fire, `energy` the share of the squared norm that it would remove.
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
