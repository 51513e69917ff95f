"""Hack directions from pairs: by module, the mean difference of hack and clean gradients, or its top singular axes.

Directions among dS gradients from hack/clean pairs are those of wassname/grpo_proj2 @25ad306. That the mean decides
and the span of the axes is what is removed is this project's own choice: single axes depend on an arbitrary rotation.

Signs, in one place: a gradient c is that of a loss, and the optimiser moves by -c. v points along grad NLL(hack) - grad
NLL(clean). So <c, v> > 0 means: a descent step on this sample makes the hack relatively more likely. For an update D of
the parameters, the part toward the hack is -<D, v>.

Shapes: P pairs, N numbers in all, n of one module, k axes of a module, M modules with a direction.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any, Literal

import orjson
import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn import functional as F

from stages.errors import BadInput
from stages.probe.adapters.antipasto import RotatedAntipasto, picked
from stages.probe.adapters.attach import Layout, replaced_forwards
from stages.probe.adapters.choose import Coordinates
from stages.probe.adapters.lora import Lora
from stages.probe.adapters.spectrum import Spectrum, read_tensors, write_tensors
from stages.probe.directions.metrics import mean_weights
from stages.probe.gradients.per_sample import TotalSink, own_log_probs
from stages.probe.gradients.store import GradientStore
from stages.probe.gradients.student import Student, adapt, dr_grpo
from stages.probe.pool.tokens import TokenRow, by_length, collate
from stages.runs import store
from stages.runs.records import Row

LossKind = Literal["nll_mean", "drgrpo_sum"]
"""How token-sum gradients are weighted: mean over own tokens, or Dr.GRPO's constant (arXiv 2503.20783)."""
Method = Literal["mean", "svd_k"]
FLOOR = 1e-12
"""Norms up to this count as zero."""


@dataclass(frozen=True)
class PairGradients:
    """Token-sum gradients [P, N] of each pair's two completions, and how many own tokens each has [P]."""

    layout: Layout
    hack: Float[Tensor, "P N"]
    clean: Float[Tensor, "P N"]
    hack_tokens: Int[Tensor, " P"]
    clean_tokens: Int[Tensor, " P"]

    @classmethod
    def alternating(
        cls, layout: Layout, rows: Float[Tensor, "2P N"], tokens: Sequence[Sequence[int]]
    ) -> "PairGradients":
        """Rows that alternate hack, clean; `tokens` [P, 2] are the own tokens of both."""
        counts = torch.tensor(tokens)
        return cls(layout, rows[0::2], rows[1::2], counts[:, 0], counts[:, 1])

    def __len__(self) -> int:
        return len(self.hack)

    def __getitem__(self, index: list[int] | Int[Tensor, " Q"]) -> "PairGradients":
        parts = (self.hack, self.clean, self.hack_tokens, self.clean_tokens)
        return PairGradients(self.layout, *(part[index] for part in parts))

    def weighted(self, loss: LossKind) -> tuple[Float[Tensor, "P N"], Float[Tensor, "P N"]]:
        """The (hack, clean) gradients under a loss: of the mean NLL a token, or of Dr.GRPO's loss as groups of two.

        The latter is the token sum / (2 Lmax), with advantages +1 and -1 and Lmax the longest of these completions.
        """
        if loss == "nll_mean":
            return self.hack / self.hack_tokens[:, None], self.clean / self.clean_tokens[:, None]
        scale = 2 * max(int(self.hack_tokens.max()), int(self.clean_tokens.max()))
        return self.hack / scale, self.clean / scale

    def differences(self, loss: LossKind) -> Float[Tensor, "P N"]:
        """Each pair's hack - clean under a loss."""
        hack, clean = self.weighted(loss)
        return hack - clean


@dataclass(frozen=True)
class Direction:
    """By module: orthonormal axes [k, n], their singular values [k], the mean difference [n]; a module may have none.

    Where a single direction is asked for it is the unit mean difference; what is removed is the span of the axes.
    """

    layout: Layout
    axes: Mapping[str, Float[Tensor, "k n"]]
    strengths: Mapping[str, Float[Tensor, " k"]]
    means: Mapping[str, Float[Tensor, " n"]]

    @property
    def modules(self) -> tuple[str, ...]:
        """Those that have a direction, in the order of the layout."""
        return tuple(name for name in self.layout.names if name in self.axes)

    @cached_property
    def indices(self) -> list[int]:
        """The places of those modules among all names of the layout."""
        return [self.layout.names.index(name) for name in self.modules]

    @cached_property
    def unit(self) -> Float[Tensor, " N"]:
        """The unit mean directions side by side: norm 1 in each module, 0 where a module has none."""
        return self.layout.join({name: self.means[name] / self.means[name].norm() for name in self.modules})

    @cached_property
    def mean(self) -> Float[Tensor, " N"]:
        """The mean differences side by side, modules weighted by how strongly they differ."""
        return self.layout.join({name: self.means[name] for name in self.modules})

    @cached_property
    def inside(self) -> Float[Tensor, " N"]:
        """1 where a module has a direction, else 0."""
        return self.layout.join({name: torch.ones_like(self.means[name]) for name in self.modules})

    def to(self, device: torch.device | str) -> "Direction":
        """On another device."""
        moved = (
            {name: part.to(device) for name, part in parts.items()} for parts in (self.axes, self.strengths, self.means)
        )
        return Direction(self.layout, *moved)


def from_flat(layout: Layout, flat: Float[Tensor, " N"], modules: tuple[str, ...]) -> Direction:
    """The direction that is this vector in these modules."""
    means = {name: part for name, part in layout.split(flat).items() if name in modules}
    axes = {name: (mean / mean.norm())[None] for name, mean in means.items()}
    return Direction(layout, axes, {name: mean.norm()[None] for name, mean in means.items()}, means)


def extract(
    layout: Layout, differences: Float[Tensor, "P N"], method: Method = "mean", k: int = 1, noise_floor: float = 0.0
) -> Direction:
    """The direction of these differences.

    `k` counts axes of a module under svd_k. `noise_floor` is a quantile: axes whose strength is below it among all
    modules' axes are dropped. Differences are never centred: that would remove the mean, which is the signal. A module
    without any gradient has no direction.
    """
    mean = layout.split(differences.mean(0))
    live = tuple(name for name, part in mean.items() if float(part.norm()) > FLOOR)
    if method == "mean":
        return from_flat(layout, differences.mean(0), live)
    parts = layout.split(differences)
    candidates = {name: _axes(parts[name], mean[name], k) for name in live}
    pooled = torch.cat([strengths for _, strengths in candidates.values()])
    floor = float(pooled.quantile(noise_floor)) if noise_floor else 0.0
    kept = {name: (a[s >= floor], s[s >= floor]) for name, (a, s) in candidates.items() if bool((s >= floor).any())}
    return Direction(
        layout, {n: a for n, (a, _) in kept.items()}, {n: s for n, (_, s) in kept.items()}, {n: mean[n] for n in kept}
    )


def _axes(
    differences: Float[Tensor, "P n"], mean: Float[Tensor, " n"], k: int
) -> tuple[Float[Tensor, "k n"], Float[Tensor, " k"]]:
    """Top right singular vectors, each pointing to where most pairs (or, at a tie, the mean) point."""
    _, strengths, axes = torch.linalg.svd(differences, full_matrices=False)
    axes, strengths = axes[:k], strengths[:k]
    votes = (differences @ axes.T).sign().sum(0)
    votes = torch.where(votes == 0, (axes @ mean).sign(), votes.sign())
    return axes * votes[:, None], strengths


def signal_to_noise(direction: Direction, differences: Float[Tensor, "P N"]) -> Float[Tensor, " M"]:
    """By module with a direction [M]: the mean difference's norm over that of its standard errors, about 1 in noise."""
    noise = direction.layout.sums(differences.var(0) / len(differences)).sqrt()[direction.indices]
    return direction.layout.norms(differences.mean(0))[direction.indices] / noise.clamp(min=FLOOR)


# ---- v_hack
# `v_hack.safetensors`: a direction with what must agree before it is used, and the refusal when something does not.
#
# Keys: V/<module> [k, n], S/<module> [k], mean/<module> [n], float32. The torch version and the commit stand in the
# manifest beside it: in here they would give equal directions different digests.
#
# Shapes: k axes and n numbers of a module.

V_HACK_FILE = "v_hack.safetensors"


def save_direction(path: Path, direction: Direction, facts: Row) -> None:
    """Write a direction; `facts` holds its coordinates (`adapters.choose.coordinates`) and how it was extracted."""
    kinds = {"V": direction.axes, "S": direction.strengths, "mean": direction.means}
    tensors = {f"{kind}/{name}": part for kind, parts in kinds.items() for name, part in parts.items()}
    layout = store.encode(list(direction.layout.sizes.items())).decode()
    write_tensors(path, tensors, {"layout": layout, "facts": store.encode(facts).decode()})


def load_direction(path: Path) -> tuple[Direction, Row]:
    """A direction and its facts; `BadInput` when the file is missing or damaged."""
    tensors, metadata = read_tensors(path)
    layout = Layout(dict(orjson.loads(metadata["layout"])))
    parts = {
        kind: {name.removeprefix(kind + "/"): t for name, t in tensors.items() if name.startswith(kind + "/")}
        for kind in ("V", "S", "mean")
    }
    return Direction(layout, parts["V"], parts["S"], parts["mean"]), orjson.loads(metadata["facts"])


def check_coordinates(facts: Row, here: Mapping[str, Any]) -> None:
    """`BadInput` when a direction with these facts was not extracted in the coordinates `here`."""
    differ = [
        f"{name} {facts.get(name)!r} there, {here.get(name)!r} here"
        for name in Coordinates.__annotations__
        if facts.get(name) != here.get(name)
    ]
    if differ:
        raise BadInput(
            f"v_hack belongs to other coordinates ({'; '.join(differ)}), where its numbers mean something else. "
            "Extract it again with this adapter and decomposition."
        )


# ---- placebos
# Placebo directions: the same shapes, modules and norms as v, without its meaning.
#
# What a statistic says of these, it does not say of v. A Haar-random direction is the comparison that the authors' own
# direction did not beat in their strongest offline checks (wassname/vGROUT_pub @c067218, docs/research_notes.md).
#
# Trap: swapping hack and clean *within* pairs, upstream's `shuffled_V`, turns differences around and leaves their
# singular axes where they were, so for singular bases that shuffle is no placebo; here labels are permuted *across*
# pairs.
#
# Which families are a null for "v separates hacked from honest gradients"? The rank of v's t among placebos is a p
# where
# v, if it had nothing to do with hacking, would be one more draw; so the draws must have nothing to do with hacking
# themselves, whether or not v has. `haar` and `randsign` take no gradient at all, `clean_clean` only those of honest
# answers: they are nulls. `hack_hack` and `perm_pairs` are contrasts of hacks' own gradients. Let r be what
# separates the
# pool's hacks from honest rows beside v. It is never 0, as the pool's hacks are others than the pairs', in other
# shares,
# and it lies in the few dimensions that hacks' gradients span. Contrasts drawn in those dimensions hold much of r,
# with
# either sign; draws from everywhere, or from honest answers, hold it by chance alone. So draws made of hacks separate
# hacks just where there is hacking to be found, and to rank v among them asks whether it is the best direction of
# hacking, not whether it is one. They are always shown and decide nothing. Both halves of this are simulated in
# tests/stages/probe/directions/test_placebo_families.py.
#
# Shapes: D draws, N numbers, S completions; every draw has norm 1 in each module.

Units = Float[Tensor, "D N"]
"""Unit directions, one a draw."""


def unit_by_module(
    layout: Layout, flat: Float[Tensor, "*draws N"], modules: tuple[str, ...]
) -> Float[Tensor, "*draws N"]:
    """Scale each module's part to norm 1 and leave out modules that have no direction."""
    parts = layout.split(flat)
    return layout.join(
        {name: parts[name] / parts[name].norm(dim=-1, keepdim=True).clamp(min=FLOOR) for name in modules}
    )


def beside(direction: Direction, units: Units) -> Units:
    """The units less their part along v, in every module, at norm 1 again."""
    layout, parts, v = direction.layout, direction.layout.split(units), direction.layout.split(direction.unit.cpu())
    rest = {n: parts[n] - (parts[n] @ v[n])[:, None] * v[n] for n in direction.modules}
    return unit_by_module(layout, layout.join(rest), direction.modules)


def beside_contrasts(units: Units, rows: Float[Tensor, "S N"]) -> Units:
    """Directions less their part in the span of what rows differ in, at norm 1 over all modules together.

    With honest answers' gradients as rows, what is left of v is not right against wrong, nor short against long.
    """
    axes = torch.linalg.svd(rows - rows.mean(0), full_matrices=False)[2][: len(rows) - 1].to(units)
    rest = units - (units @ axes.T) @ axes
    return rest / rest.norm(dim=-1, keepdim=True).clamp(min=FLOOR)


def haar(direction: Direction, draws: int, seed: int) -> Units:
    """Uniformly random directions."""
    normal = torch.randn(draws, direction.layout.width, generator=_generator(seed))
    return unit_by_module(direction.layout, normal, direction.modules)


def randsign(direction: Direction, draws: int, seed: int) -> Units:
    """The unit v with a random sign for every number: the same profile over coordinates, no direction."""
    coins = torch.randint(0, 2, (draws, direction.layout.width), generator=_generator(seed)) * 2 - 1
    return direction.unit.cpu() * coins


def perm_pairs(direction: Direction, pairs: PairGradients, loss: LossKind, draws: int, seed: int) -> Units:
    """Mean differences after permuting the labels hack and clean among all completions of all pairs."""
    both = torch.cat(pairs.weighted(loss))
    return _random_splits(direction, both, len(pairs), draws, seed)


def clean_clean(direction: Direction, pairs: PairGradients, loss: LossKind, draws: int, seed: int) -> Units:
    """One random half of the clean completions against the other."""
    return _random_splits(direction, pairs.weighted(loss)[1], len(pairs) // 2, draws, seed)


def hack_hack(direction: Direction, pairs: PairGradients, loss: LossKind, draws: int, seed: int) -> Units:
    """One random half of the hacks against the other."""
    return _random_splits(direction, pairs.weighted(loss)[0], len(pairs) // 2, draws, seed)


FROM_PAIRS: dict[str, Callable[[Direction, PairGradients, LossKind, int, int], Units]] = {
    "perm_pairs": perm_pairs,
    "clean_clean": clean_clean,
    "hack_hack": hack_hack,
}


def _random_splits(direction: Direction, sides: Float[Tensor, "S N"], first: int, draws: int, seed: int) -> Units:
    """Mean of a random `first` of the rows minus the mean of the others, once a draw."""
    generator = _generator(seed)
    signs = torch.full((draws, len(sides)), -1.0 / (len(sides) - first))
    for line in signs:
        line[torch.randperm(len(sides), generator=generator)[:first]] = 1.0 / first
    return unit_by_module(direction.layout, signs @ sides, direction.modules)


def random_axes(direction: Direction, seed: int) -> Direction:
    """The direction of the arm projected_random: random orthonormal axes, as many in each module as v has.

    Removal is decided by a random mean in their span, with the norm of v's.
    """
    generator = _generator(seed)
    axes, means = {}, {}
    for name in direction.modules:
        k, n = direction.axes[name].shape
        axes[name] = torch.linalg.qr(torch.randn(n, k, generator=generator))[0].T.contiguous()
        means[name] = axes[name].sum(0) / k**0.5 * direction.means[name].norm().cpu()
    return Direction(direction.layout, axes, dict(direction.strengths), means)


def _generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


# ---- pair_gradients
# Pairs' gradients and tokens in a direction run, gradients of the GRPO loss by autograd, and a table by module.
#
# Extraction is that of `extraction`, with its source there; the columns of the table are this project's own.
#
# Shapes: P pairs, N numbers in all, n numbers of one module.

PAIRS = "pairs.json"


def pair_gradients(stored: GradientStore) -> PairGradients:
    """Stored token-sum gradients of pairs: hacks in even rows, clean answers in odd ones, token counts in the facts."""
    return PairGradients.alternating(stored.layout, stored.rows.float(), stored.facts["tokens"])


def open_direction(folder: Path) -> tuple[Direction, Row, PairGradients]:
    """What a direction run's folder holds: the direction, its facts, and the gradients it was extracted from."""
    direction, facts = load_direction(folder / V_HACK_FILE)
    return direction, facts, pair_gradients(GradientStore.open(folder))


def save_pair_rows(folder: Path, pairs: Sequence[tuple[TokenRow, TokenRow]]) -> None:
    """Write the (hack, clean) rows, so that a direction can be extracted again on a student that has moved."""
    store.write_json(folder / PAIRS, [[vars(side) for side in pair] for pair in pairs])


def pair_rows(folder: Path) -> list[tuple[TokenRow, TokenRow]]:
    """The (hack, clean) rows that a direction was extracted from."""
    return [(TokenRow(**hack), TokenRow(**clean)) for hack, clean in store.read_json(folder / PAIRS)]


def extract_again(folder: Path, facts: Row, student: Student) -> tuple[Direction, PairGradients]:
    """The direction of the same pairs, with the settings in its `facts`, on the student as it stands."""
    rows = pair_rows(folder)
    gradients, _ = student.gradients([side for pair in rows for side in pair])
    tokens = [[side.num_own for side in pair] for pair in rows]
    pairs = PairGradients.alternating(student.adapter.layout, gradients, tokens)
    settings = (facts["method"], facts["k"], facts["noise_floor"])
    return extract(pairs.layout, pairs.differences(facts["loss_kind"]), *settings), pairs


def grpo_differences(student: Student, pairs: Sequence[tuple[TokenRow, TokenRow]]) -> Float[Tensor, "P N"]:
    """Each pair's gradient of the Dr.GRPO loss by autograd, as a group of two with advantages +1 (hack) and -1 (clean).

    Dr.GRPO: arXiv 2503.20783. At ratio 1 it must equal `PairGradients.differences("drgrpo_sum")`, which recombines
    token-sum gradients.
    """
    rows = [side for pair in pairs for side in pair]
    l_max = max(row.num_own for row in rows)
    gradients, _ = student.gradients(rows, dr_grpo([1.0, -1.0] * len(pairs), None, l_max, num_rows=2))
    return gradients[0::2] + gradients[1::2]


def module_rows(direction: Direction, pairs: PairGradients, loss: LossKind) -> list[Row]:
    """The `direction/1` rows: one for every module of the layout, also for those without a direction."""
    differences = pairs.differences(loss)
    parts = direction.layout.split(differences)
    ratios = dict(zip(direction.modules, signal_to_noise(direction, differences).tolist(), strict=True))
    return [_module_row(name, direction, parts[name], ratios.get(name)) for name in direction.layout.names]


def _module_row(name: str, direction: Direction, differences: Float[Tensor, "P n"], ratio: float | None) -> Row:
    row = {"module": name, "numbers": direction.layout.sizes[name], "axes": 0, "norm": 0.0}
    if ratio is None:
        return row | dict.fromkeys(("signal_to_noise", "split_half_cos", "leave_one_out_accuracy", "energy_explained"))
    axes, total, half = direction.axes[name], differences.sum(0), len(differences) // 2
    right = [float(d @ (total - d)) > 0 for d in differences]
    return row | {
        "axes": len(axes),
        "norm": float(direction.means[name].norm()),
        "signal_to_noise": ratio,
        "split_half_cos": float(torch.cosine_similarity(differences[:half].mean(0), differences[half:].mean(0), dim=0)),
        "leave_one_out_accuracy": sum(right) / len(right),
        "energy_explained": float((differences @ axes.T).square().sum() / differences.square().sum()),
    }


# ---- preparation
# Where an adapter starts, for those in which the pairs decide it: a warmed-up LoRA, and the dimensions of AntiPaSTO.
#
# LESS (arXiv 2402.04333) trains its LoRA for some steps before it takes gradients, since at B = 0 those of A are 0;
# here
# on the pairs' hacks and clean answers alike, so that the steps do not lean to either. AntiPaSTO's dimensions:
# `adapters.rotated`.
#
# Shapes: R rows, T tokens, I inputs of a Linear, r its singular directions.

Pairs = Sequence[tuple[TokenRow, TokenRow]]
RATE = 1e-3
"""Of Adam in the warm-up."""


def prepared(student: Student, pairs: Pairs, spectrum: Spectrum | None, warmup_steps: int, seed: int) -> Student:
    """The student with an adapter that starts where the (hack, clean) pairs say; of other adapters the same student."""
    adapter = student.adapter
    if isinstance(adapter, Lora) and adapter.kind == "lora_warmup":
        adapter.begin_at(warmed_up(student, pairs, warmup_steps))
        student.folded.refold()
    if isinstance(adapter, RotatedAntipasto) and spectrum is not None:
        dims = chosen_dims(student, pairs, spectrum, adapter.rank)
        student.folded.restore()
        weight = next(student.model.parameters())
        rotated = RotatedAntipasto(spectrum, adapter.rank, seed=seed, dims=dims).to(weight.device, weight.dtype)
        max_tokens, student = student.max_tokens, adapt(student.model, student.tokenizer, rotated)
        student.max_tokens = max_tokens
    return student


def warmed_up(student: Student, pairs: Pairs, steps: int) -> Float[Tensor, " N"]:
    """Theta after so many steps of Adam down the mean NLL of all completions; each step sees all of them."""
    rows = [side for pair in pairs for side in pair]
    theta = student.adapter.theta.detach().clone().requires_grad_()
    optimiser = torch.optim.Adam([theta], lr=RATE)
    for _ in range(steps):
        total = TotalSink(student.adapter.layout, mean_weights(rows, range(len(rows))), student.device)
        student.stream(rows, total.of)
        theta.grad = total.total.to(theta)
        optimiser.step()
        student.move_to(theta)
    return theta.detach()


@torch.no_grad()
def chosen_dims(student: Student, pairs: Pairs, spectrum: Spectrum, rank: int) -> dict[str, list[int]]:
    """The singular directions of each adapted Linear, by what passes through them on the unchanged model."""
    student.move_to(torch.zeros_like(student.adapter.theta))
    dims = {}
    for name, (mean, size) in _mean_inputs(student, [side for pair in pairs for side in pair], spectrum).items():
        turned = mean[0::2].mean(0) - mean[1::2].mean(0)
        scores = (size[1::2].mean(0), size[0::2].mean(0), turned.abs())
        dims[name] = picked([spectrum.factors[name].S * score for score in scores], rank)
    return dims


def _mean_inputs(student: Student, rows: Sequence[TokenRow], spectrum: Spectrum) -> dict[str, Float[Tensor, "two R r"]]:
    """By adapted Linear, each row's mean of Vh x, and of its absolute value, over the row's own tokens."""
    bases = {n: f.Vh.to(student.device) for n, f in spectrum.factors.items() if n in student.adapter.layout.names}
    found: dict[str, dict[int, Tensor]] = {name: {} for name in bases}
    for indices in by_length([len(row) for row in rows], student.max_tokens):
        batch, means = collate([rows[i] for i in indices]).to(student.device), dict[str, Tensor]()
        make = partial(partial, _recorded, bases, batch.own[..., None].float(), means)
        with replaced_forwards(student.model, make):
            own_log_probs(student.model, batch)
        for name, both in means.items():
            found[name].update(zip(indices, both.cpu().unbind(1), strict=True))
    return {name: torch.stack([of[i] for i in range(len(rows))], dim=1) for name, of in found.items()}


def _recorded(
    bases: Mapping[str, Tensor],
    own: Float[Tensor, "B T 1"],
    means: dict[str, Tensor],
    name: str,
    linear: nn.Linear,
    x: Float[Tensor, "B T I"],
) -> Float[Tensor, "B T O"]:
    """A Linear's outputs, once its own tokens' means along its basis are noted."""
    if name in bases:
        along = F.linear(x.float(), bases[name]) * own
        means[name] = torch.stack([along.sum(1), along.abs().sum(1)]) / own.sum(1)
    return F.linear(x, linear.weight, linear.bias)
