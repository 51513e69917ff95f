"""The hack direction v: extracted from hack/clean pairs, stored in `v_hack.safetensors`, and opened again.

By module v is the mean difference of hack and clean gradients, or its top singular axes. Directions among dS gradients
from hack/clean pairs are those of wassname/grpo_proj2 @25ad306. That the mean decides and the span of the axes is what
is removed is this project's own choice: single axes depend on an arbitrary rotation.

Signs, in one place: a gradient c is that of a loss, and the optimiser moves by -c. v points along grad NLL(hack) - grad
NLL(clean). So <c, v> > 0 means: a descent step on this sample makes the hack relatively more likely. For an update D of
the parameters, the part toward the hack is -<D, v>.

Shapes: P pairs, N numbers in all, n of one module, k axes of a module, M modules with a direction.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import orjson
import torch
from jaxtyping import Float, Int
from torch import Tensor

from stages.errors import BadInput
from stages.policy.base import PolicyConfig
from stages.probe.adapters.attach import Layout
from stages.probe.adapters.choose import Coordinates, coordinates, load_start
from stages.probe.adapters.spectrum import read_tensors, write_tensors
from stages.probe.gradients.store import GradientStore
from stages.probe.gradients.student import Student, dr_grpo, open_student
from stages.probe.pool.tokens import TokenRow
from stages.runs import store
from stages.runs.kinds import Row
from stages.runs.run import Run, RunWriter

LossKind = Literal["nll_mean", "drgrpo_sum"]
"""How token-sum gradients are weighted: mean over own tokens, or Dr.GRPO's constant (arXiv 2503.20783)."""
Method = Literal["mean", "svd_k"]
FLOOR = 1e-12
"""Norms up to this count as zero."""
V_HACK_FILE, PAIRS = "v_hack.safetensors", "pairs.json"


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
        """Split rows that alternate hack, clean; `tokens` [P, 2] are the own tokens of both."""
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

    Where a single direction is asked for it is the unit mean difference; what is removed is the span of the axes.
    `modules` are those that have a direction, in the order of the layout, `indices` their positions among its names.
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
        """Copy axes and means to a device at once, for the sinks that measure batches there; itself where they are."""
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

    # The vectors below are made on first use: for a LoRA of rank 32 at Qwen3-4B each takes 264 MB.
    @cached_property
    def unit(self) -> Float[Tensor, " N"]:
        """The unit mean directions, concatenated: norm 1 in each module, 0 where a module has none."""
        return self.layout.join({name: self.means[name] / self.means[name].norm() for name in self.modules})

    @cached_property
    def mean(self) -> Float[Tensor, " N"]:
        """The mean differences, concatenated: modules are weighted by how strongly they differ."""
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
        # Each axis points to where most pairs point or, at a tie, the mean.
        votes = (parts[name] @ vectors.T).sign().sum(0)
        votes = torch.where(votes == 0, (vectors @ mean[name]).sign(), votes.sign())
        axes[name] = vectors * votes[:, None]
    # One floor for all modules: a module in which no axis is strong has no direction.
    pooled = torch.cat(list(strengths.values()))
    floor = float(pooled.quantile(noise_floor)) if noise_floor else 0.0
    kept = {name: values >= floor for name, values in strengths.items() if bool((values >= floor).any())}
    return Direction(
        layout,
        {name: axes[name][chosen] for name, chosen in kept.items()},
        {name: strengths[name][chosen] for name, chosen in kept.items()},
        {name: mean[name] for name in kept},
    )


def save_direction(path: Path, direction: Direction, facts: Row) -> None:
    """Write a direction with `facts`: its coordinates (`adapters.choose.coordinates`) and how it was extracted.

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


def check_coordinates(facts: Row, here: Mapping[str, Any]) -> None:
    """`BadInput` when a direction with these facts was not extracted in the coordinates `here`."""
    # Only what gives the numbers a meaning is compared; the loss, the pairs and the method may differ.
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


def pair_rows(folder: Path) -> list[tuple[TokenRow, TokenRow]]:
    """Read the (hack, clean) rows that a direction was extracted from."""
    return [(TokenRow(**hack), TokenRow(**clean)) for hack, clean in store.read_json(folder / PAIRS)]


def open_direction(folder: Path) -> tuple[Direction, Row, PairGradients]:
    """Read a direction run's folder: the direction, its facts, and the gradients it was extracted from."""
    direction, facts = load_direction(folder / V_HACK_FILE)
    stored = GradientStore(folder)
    return direction, facts, PairGradients.alternating(stored.layout, stored.rows.float(), stored.facts["tokens"])


def open_probe(run: Run, svd: Run | None, policy: PolicyConfig, out: RunWriter) -> tuple[Student, Direction, Row]:
    """Open the student of a direction run, the direction and its facts; `BadInput` where their coordinates differ."""
    direction, facts, _ = open_direction(run.folder())
    settings = (facts["adapter"], facts["adapter_rank"], facts["adapter_seed"])
    student = open_student(policy, *settings, svd, out, load_start(run.folder()))
    check_coordinates(facts, coordinates(student.adapter))
    return student, direction, facts


def extract_again(folder: Path, facts: Row, student: Student) -> tuple[Direction, PairGradients]:
    """Extract the direction of the same pairs, with the settings in its `facts`, at the student's present weights."""
    rows = pair_rows(folder)
    gradients, _ = student.gradients([side for pair in rows for side in pair])
    tokens = [[side.num_own for side in pair] for pair in rows]
    pairs = PairGradients.alternating(student.adapter.layout, gradients, tokens)
    settings = (facts["method"], facts["k"], facts["noise_floor"])
    return extract(pairs.layout, pairs.differences(facts["loss_kind"]), *settings), pairs


def grpo_differences(student: Student, pairs: Sequence[tuple[TokenRow, TokenRow]]) -> Float[Tensor, "P N"]:
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
    """Build the `direction/1` rows: one for every module of the layout, also for those without a direction.

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
