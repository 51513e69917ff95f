"""Pairs' gradients and tokens in a direction run, gradients of the GRPO loss by autograd, and a table by module.

Extraction is that of `extraction`, with its source there; the columns of the table are this project's own.

Shapes: P pairs, N numbers in all, n numbers of one module.
"""

from collections.abc import Sequence
from pathlib import Path

import torch
from jaxtyping import Float
from torch import Tensor

from stages.probe.directions.extraction import Direction, LossKind, PairGradients, extract, signal_to_noise
from stages.probe.directions.v_hack import V_HACK_FILE, load_direction
from stages.probe.gradients.store import GradientStore
from stages.probe.gradients.student import Student
from stages.probe.gradients.surrogate import dr_grpo
from stages.probe.pool.tokens import TokenRow
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
