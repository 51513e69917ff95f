"""A PEFT LoRA added to a model: merged in float32 where the weights' type can hold it, else run as a path beside them.

W' = W + s B A with s = alpha / r, or alpha / sqrt(r) with rsLoRA, as in PEFT; tested against PEFT itself.

Shapes: B rows, T tokens, I inputs and O outputs of a Linear, r rank.
"""

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional as F

from stages.errors import BadInput
from stages.probe.adapters.attach import replace_forward, target_linears
from stages.probe.adapters.spectrum import read_tensors
from stages.runs import store
from stages.runs.records import Row

if TYPE_CHECKING:
    from transformers import PreTrainedModel

FILES = ("adapter_config.json", "adapter_model.safetensors")
PREFIX = "base_model.model."
"""What PEFT puts before every module name."""
MAX_ROUNDING = 0.3
"""Largest rounding loss at which a LoRA is merged."""


def lora_folder(lora: str, *, endpoint: str | None = None, cache: Path | None = None) -> tuple[Path, str | None]:
    """The folder of a LoRA that is given as a folder or as a hub id, and the commit of one from the hub.

    Of a repository only the adapter's settings and its safetensors are fetched, once; without a connection what was
    fetched before is used. endpoint, cache: None for those of the Hugging Face hub. `BadInput` where there is none.
    """
    given = Path(lora).expanduser()
    if given.is_dir():
        return given, None
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        found = snapshot_download(lora, allow_patterns=list(FILES), endpoint=endpoint, cache_dir=cache)
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
        first = str(error).strip().splitlines()[0]
        raise BadInput(f"The LoRA {lora!r} is no folder, and not to be had from the hub ({first}).") from None
    return Path(found), Path(found).name


@torch.no_grad()
def apply_lora(model: "PreTrainedModel", folder: Path) -> Row:
    """Add the LoRA of a folder to a model in place, and report how that went.

    The report has `merged`, and by module `delta_norms`, ||D|| with D the change of a weight, and `rounding_losses`,
    ||round(W + D) - (W + D)|| / ||D|| in the weight's type; both are Frobenius norms. `BadInput` when the adapter is no
    plain LoRA, or changes a module that the probe does not adapt.
    """
    scale, halves = _read(folder)
    linears = target_linears(model)
    if unknown := sorted(halves.keys() - linears.keys()):
        raise BadInput(f"{folder} adapts {unknown[0]}, which the model does not have or the probe does not adapt.")
    deltas = {name: scale * b.float() @ a.float() for name, (b, a) in halves.items()}
    losses = {name: _rounding_loss(linears[name].weight, delta) for name, delta in deltas.items()}
    merged = max(losses.values(), default=0.0) < MAX_ROUNDING
    for name, delta in deltas.items():
        weight = linears[name].weight
        if merged:
            weight.copy_((weight.float() + delta.to(weight.device)).to(weight.dtype))
        else:
            b, a = (half.to(weight) for half in halves[name])
            replace_forward(linears[name], partial(_beside, linears[name], scale * b, a))
    norms = {name: float(delta.norm()) for name, delta in deltas.items()}
    return {"delta_norms": norms, "rounding_losses": losses, "merged": merged}


def _beside(
    linear: nn.Linear, b: Float[Tensor, "O r"], a: Float[Tensor, "r I"], x: Float[Tensor, "B T I"]
) -> Float[Tensor, "B T O"]:
    return F.linear(x, linear.weight, linear.bias) + F.linear(F.linear(x, a), b)


def has_path(linear: nn.Linear) -> bool:
    """Whether a LoRA runs beside this Linear instead of being merged into it."""
    forward = vars(linear).get("forward")
    return isinstance(forward, partial) and forward.func is _beside


def _rounding_loss(weight: Float[Tensor, "O I"], delta: Float[Tensor, "O I"]) -> float:
    exact = weight.float() + delta.to(weight.device)
    return float((exact.to(weight.dtype).float() - exact).norm() / delta.norm().clamp(min=1e-30))


def _read(folder: Path) -> tuple[float, dict[str, tuple[Tensor, Tensor]]]:
    """The scale, and (B, A) by module."""
    config = store.read_json(folder / FILES[0])
    if config.get("peft_type") != "LORA" or config.get("use_dora"):
        raise BadInput(f"{folder} holds a {config.get('peft_type')} adapter; the probe reads plain LoRA.")
    rank = config["r"]
    scale = config["lora_alpha"] / (rank**0.5 if config.get("use_rslora") else rank)
    tensors, _ = read_tensors(folder / FILES[1])
    names = sorted({key.removeprefix(PREFIX).rpartition(".lora_")[0] for key in tensors})
    return scale, {n: (tensors[f"{PREFIX}{n}.lora_B.weight"], tensors[f"{PREFIX}{n}.lora_A.weight"]) for n in names}
