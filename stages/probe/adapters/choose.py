"""An adapter by name, and what identifies the coordinates that it works in.

Where each adapter comes from stands in its file; the check of coordinates is this project's own.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, TypedDict

import torch
from torch import Tensor

from stages.errors import BadInput, UsageError
from stages.probe.adapters.antipasto import Antipasto, RotatedAntipasto
from stages.probe.adapters.attach import Adapter, target_linears
from stages.probe.adapters.lora import Lora
from stages.probe.adapters.names import SPECTRAL, AdapterName
from stages.probe.adapters.spectrum import Spectrum, read_tensors, reconstruction_error, write_tensors

if TYPE_CHECKING:
    from transformers import PreTrainedModel

START = "start.safetensors"
"""In the folder of a direction: where its adapter starts, if the pairs decided that."""
Start = Mapping[str, Tensor]
"""`theta` [N], and for antipasto_paper the singular directions of each Linear, `dims/NAME`."""


class Coordinates(TypedDict):
    """What two adapters must share for a direction of one to mean the same in the other."""

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
) -> Adapter:
    """The named adapter at its start, for this model, with theta in float32.

    `rank` counts for all but antipasto_full, `seed` for what is drawn, `start` for adapters whose start the pairs
    decide (`directions.preparation`), which without one are as they are before. `UsageError` when the adapter needs a
    decomposition and there is none; `BadInput` when the decomposition's shapes are not the model's.
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
    _check_shapes(model, spectrum)
    if name != "antipasto_paper":
        return Antipasto(spectrum, None if name == "antipasto_full" else rank).to(*where)
    dims = {n.removeprefix("dims/"): t.tolist() for n, t in (start or {}).items() if n != "theta"}
    rotated = RotatedAntipasto(spectrum, rank, seed=seed, dims=dims or None)
    if start:
        rotated.begin_at(start["theta"])
    return rotated.to(*where)


def save_start(folder: Path, adapter: Adapter) -> None:
    """Write where an adapter starts."""
    dims = adapter.dims if isinstance(adapter, RotatedAntipasto) else {}
    tensors = {"theta": adapter.theta} | {f"dims/{name}": torch.tensor(of) for name, of in dims.items()}
    write_tensors(folder / START, tensors, {})


def load_start(folder: Path) -> Start | None:
    """Where the adapter of a direction starts, if its folder says so."""
    return read_tensors(folder / START)[0] if (folder / START).exists() else None


def _check_shapes(model: "PreTrainedModel", spectrum: Spectrum) -> None:
    expected = {name: tuple(linear.weight.shape) for name, linear in target_linears(model).items()}
    decomposed = {name: (f.U.shape[0], f.Vh.shape[1]) for name, f in spectrum.factors.items()}
    differ = sorted(n for n in expected.keys() | decomposed.keys() if expected.get(n) != decomposed.get(n))
    if differ:
        raise BadInput(
            f"The decomposition is of another model: {len(differ)} Linears differ, the first is {differ[0]}."
        )


def check_spectrum(model: "PreTrainedModel", spectrum: Spectrum, tolerance: float = 1e-4) -> None:
    """`BadInput` when a decomposition does not give this model's weights back: it was made of another checkpoint.

    `tolerance` bounds ||W - U diag(S) Vh|| / ||W|| of every adapted Linear.
    """
    for name, linear in target_linears(model).items():
        factors = spectrum.factors[name].to(linear.weight.device, torch.float32)
        error = reconstruction_error(linear.weight, factors)
        if error > tolerance:
            raise BadInput(
                f"The decomposition is not of this model's weights: {name} is off by {error:.2g} of its norm. "
                "Run `composer probe svd` on this model."
            )


def coordinates(adapter: Adapter) -> Coordinates:
    """The coordinates that an adapter's trained values live in."""
    return {
        "adapter": adapter.kind,
        "rank": adapter.rank,
        "basis_sha256": adapter.basis_sha256,
        "modules_sha256": adapter.layout.sha256,
    }
