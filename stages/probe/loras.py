"""Add LoRAs of PEFT to the models of a pool: W' = W + s B A, s = alpha / r, or alpha / sqrt(r) with rsLoRA.

A LoRA is merged in float32 where the weights' type preserves the change, else it runs as a separate path. Tested
against PEFT.

Shapes: B rows, T tokens, I inputs and O outputs of a Linear, r rank.
"""

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional as F

from composer_stages.errors import BadInput
from composer_stages.gradients.basis import target_linears
from composer_stages.gradients.tensors import read_tensors
from composer_stages.runs import hub, store
from composer_stages.runs.kinds import Row

if TYPE_CHECKING:
    from transformers import PreTrainedModel


PEFT_FILES = ("adapter_config.json", "adapter_model.safetensors")
PEFT_PREFIX = "base_model.model."
"""The prefix of every module name of PEFT."""
MAX_ROUNDING = 0.3
"""Largest rounding loss at which a LoRA is merged."""


def lora_folder(lora: str, *, endpoint: str | None = None, cache: Path | None = None) -> tuple[Path, str | None]:
    """Resolve a LoRA, a folder or a hub id, to its folder and the commit of a hub repository.

    Only the adapter's settings and its safetensors are fetched, once; without a connection the cached files are used.
    endpoint, cache: None for those of the Hugging Face hub. `BadInput` if the LoRA does not exist.
    """
    path = Path(lora).expanduser()
    if path.is_dir():
        return path, None  # a folder enters a run's fingerprint by its bytes (`loops.config.SourceConfig.identity`)
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        offline = hub.unreachable(endpoint) is not None
        snapshot = snapshot_download(
            lora, allow_patterns=list(PEFT_FILES), endpoint=endpoint, cache_dir=cache, local_files_only=offline
        )
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
        first = str(error).strip().splitlines()[0]
        raise BadInput("probe.no-such-lora", lora=lora, error=first) from None
    return Path(snapshot), Path(snapshot).name  # the hub's cache names a snapshot's folder by its commit


@torch.no_grad()
def apply_lora(model: "PreTrainedModel", folder: Path) -> Row:
    """Add the LoRA of a folder to a model in place, and report the change.

    The report has `merged`, and by module `delta_norms`, ||D|| with D the change of a weight, and `rounding_losses`,
    ||round(W + D) - (W + D)|| / ||D|| in the weight's type; both are Frobenius norms. `BadInput` when the adapter is no
    plain LoRA, or changes a module that the probe does not adapt.
    """
    config = store.read_json(folder / PEFT_FILES[0])
    if config.get("peft_type") != "LORA" or config.get("use_dora"):
        raise BadInput("probe.not-plain-lora", folder=folder, kind=config.get("peft_type"))
    rank = config["r"]
    # rsLoRA divides alpha by sqrt(r) instead of r.
    scale = config["lora_alpha"] / (rank**0.5 if config.get("use_rslora") else rank)
    tensors, _ = read_tensors(folder / PEFT_FILES[1])
    names = sorted({key.removeprefix(PEFT_PREFIX).rpartition(".lora_")[0] for key in tensors})
    halves = {n: tuple(tensors[f"{PEFT_PREFIX}{n}.lora_{half}.weight"] for half in "BA") for n in names}
    linears = target_linears(model)
    if unknown := sorted(halves.keys() - linears.keys()):
        raise BadInput("probe.module-not-adapted", folder=folder, module=unknown[0])
    deltas = {name: scale * b.float() @ a.float() for name, (b, a) in halves.items()}
    # A bfloat16 weight has 8 bits of mantissa, so that a small LoRA is rounded away on merging: the loss is measured
    # for every Linear before any weight changes, and above MAX_ROUNDING the LoRA runs as a path.
    losses = {}
    for name, delta in deltas.items():
        weight = linears[name].weight
        exact = weight.float() + delta.to(weight.device)
        losses[name] = float((exact.to(weight.dtype).float() - exact).norm() / delta.norm().clamp(min=1e-30))
    merged = max(losses.values(), default=0.0) < MAX_ROUNDING
    for name, delta in deltas.items():
        weight = linears[name].weight
        if merged:
            weight.copy_((weight.float() + delta.to(weight.device)).to(weight.dtype))
        else:
            b, a = (half.to(weight) for half in halves[name])
            vars(linears[name])["forward"] = partial(_with_lora, linears[name], scale * b, a)
    norms = {name: float(delta.norm()) for name, delta in deltas.items()}
    return {"delta_norms": norms, "rounding_losses": losses, "merged": merged}


def _with_lora(
    linear: nn.Linear, b: Float[Tensor, "O r"], a: Float[Tensor, "r I"], x: Float[Tensor, "B T I"]
) -> Float[Tensor, "B T O"]:
    return F.linear(x, linear.weight, linear.bias) + F.linear(F.linear(x, a), b)


def runs_unmerged(linear: nn.Linear) -> bool:
    """Return whether a LoRA runs as a path of this Linear instead of being merged into it."""
    forward = vars(linear).get("forward")
    return isinstance(forward, partial) and forward.func is _with_lora
