"""Pairs' gradients and tokens in a direction run, gradients of the GRPO loss by autograd, and a table by module.

Extraction is that of `extraction`, with its source there; the columns of the table are this project's own.

Shapes: P pairs, N numbers in all, n numbers of one module.
"""

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional as F

from stages.probe.adapters.attach import replaced_forwards
from stages.probe.adapters.lora import Lora
from stages.probe.adapters.rotated import RotatedAntipasto, picked
from stages.probe.adapters.spectrum import Spectrum
from stages.probe.directions.extraction import (
    V_HACK_FILE,
    Direction,
    LossKind,
    PairGradients,
    extract,
    load_direction,
    signal_to_noise,
)
from stages.probe.directions.metrics import mean_weights
from stages.probe.gradients.per_sample import TotalSink, own_log_probs
from stages.probe.gradients.store import GradientStore
from stages.probe.gradients.student import Student, adapt, dr_grpo
from stages.probe.pool.tokens import TokenRow, by_length, collate
from stages.runs import store
from stages.runs.records import Row

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
