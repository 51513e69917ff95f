"""An adapter by name, its start on disk, and what identifies the coordinates of its trained values.

The source of each adapter is named in its file; the check of coordinates is this project's own.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, TypedDict

import torch
from torch import Tensor

from stages.errors import BadInput, UsageError
from stages.probe.adapters.antipasto import Antipasto, RotatedAntipasto
from stages.probe.adapters.attach import ProbeAdapter, target_linears
from stages.probe.adapters.lora import Lora
from stages.probe.adapters.names import SPECTRAL, AdapterName
from stages.probe.adapters.spectrum import Spectrum, read_tensors, reconstruction_error, write_tensors

if TYPE_CHECKING:
    from transformers import PreTrainedModel

START = "start.safetensors"
"""File in the folder of a direction: where its adapter starts, if the pairs decided that."""
Start = Mapping[str, Tensor]
"""`theta` [N], and for antipasto_paper the singular directions of each Linear, `dims/NAME`."""


class Coordinates(TypedDict):
    """The facts that two adapters must share for a direction of one to mean the same in the other."""

    adapter: str
    rank: int | None
    basis_sha256: str
    modules_sha256: str


def open_adapter(
    name: AdapterName,
    model: "PreTrainedModel",
    spectrum: Spectrum | None,
    rank: int,
    seed: int,
    start: Start | None = None,
) -> ProbeAdapter:
    """Open the named adapter at its start, for this model, with theta in float32.

    `rank` applies to all but antipasto_full, `seed` to random starts, `start` to adapters whose start the pairs decide
    (`gradients.student.start_from_pairs`), which without one are as they are before. `UsageError` when the adapter
    needs a decomposition and there is none; `BadInput` when the decomposition's shapes are not the model's.
    """
    parameter = next(model.parameters())
    where = (parameter.device, parameter.dtype)
    if name not in SPECTRAL:
        kinds = {
            "freeze_a": name == "lora_frozenA",
            "random_b": name == "lora_random_B",
            "warm": name == "lora_warmup",
        }
        lora = Lora(target_linears(model), rank, seed=seed, **kinds)
        if start:
            lora.begin_at(start["theta"])
        return lora.to(*where)
    if spectrum is None:
        raise UsageError(
            f"The adapter {name} works in singular coordinates. Give a run of `composer probe svd` with --from."
        )
    # Shapes alone are compared here, which needs no product; `check_spectrum` compares the weights.
    expected = {name: tuple(linear.weight.shape) for name, linear in target_linears(model).items()}
    decomposed = {name: (f.U.shape[0], f.Vh.shape[1]) for name, f in spectrum.factors.items()}
    differ = sorted(n for n in expected.keys() | decomposed.keys() if expected.get(n) != decomposed.get(n))
    if differ:
        raise BadInput(
            f"The decomposition is of another model: {len(differ)} Linears differ, the first is {differ[0]}."
        )
    if name != "antipasto_paper":
        return Antipasto(spectrum, None if name == "antipasto_full" else rank).to(*where)
    dims = {n.removeprefix("dims/"): t.tolist() for n, t in (start or {}).items() if n != "theta"}
    rotated = RotatedAntipasto(spectrum, rank, seed=seed, dims=dims or None)
    if start:
        rotated.begin_at(start["theta"])
    return rotated.to(*where)


def save_start(folder: Path, adapter: ProbeAdapter) -> None:
    """Write the values that an adapter starts from."""
    dims = adapter.dims if isinstance(adapter, RotatedAntipasto) else {}
    tensors = {"theta": adapter.theta} | {f"dims/{name}": torch.tensor(of) for name, of in dims.items()}
    write_tensors(folder / START, tensors, {})


def load_start(folder: Path) -> Start | None:
    """Load the start of a direction's adapter; None where its folder holds none."""
    return read_tensors(folder / START)[0] if (folder / START).exists() else None


def check_spectrum(model: "PreTrainedModel", spectrum: Spectrum, tolerance: float = 1e-4) -> None:
    """`BadInput` when a decomposition does not reproduce this model's weights: it was made of another checkpoint.

    `tolerance` bounds ||W - U diag(S) Vh|| / ||W|| of every adapted Linear.
    """
    # In float32 on the model's device, one Linear at a time: the product U diag(S) Vh is as large as the weight.
    for name, linear in target_linears(model).items():
        factors = spectrum.factors[name].to(linear.weight.device, torch.float32)
        error = reconstruction_error(linear.weight, factors)
        if error > tolerance:
            raise BadInput(
                f"The decomposition is not of this model's weights: {name} is off by {error:.2g} of its norm. "
                "Run `composer probe svd` on this model."
            )


def coordinates(adapter: ProbeAdapter) -> Coordinates:
    """Return the coordinates of an adapter's trained values."""
    return {
        "adapter": adapter.kind,
        "rank": adapter.rank,
        "basis_sha256": adapter.basis_sha256,
        "modules_sha256": adapter.layout.sha256,
    }
