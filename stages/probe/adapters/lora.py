"""Low-rank pairs: y = W x + B A x with B = 0 at the start, so that the base model is unchanged and A's gradient is 0.

`lora` trains both halves, from PEFT's default start. `lora_frozenA` trains B alone beside a frozen A of orthonormal
rows: the change of W is then linear in what is trained and a direction keeps its meaning, as with singular values but
in an arbitrary basis (wassname/grpo_proj2, spec 20260601). Directions of both live on B. `lora_random_B` starts at a
random B0 beside A0 and takes that start away again, y = W x + B A x - B0 A0 x: no change of the model, yet gradients of
both halves, and directions on both (wassname/vGROUT_pub @c067218, adapters/lora.py; that B0's columns are as long as
A0's rows is this project's own). `lora_warmup` is `lora` after some
steps on the pairs (`directions.preparation`), which give A a gradient too: directions on both halves, as LESS warms its
LoRA up before it takes gradients (arXiv 2402.04333). PEFT's scale alpha / r is 1 here: it would multiply gradients but
leave cosines as they are.

Shapes: B rows, T tokens, I inputs and O outputs of a Linear, r rank, n trained numbers of a half, N of all.
"""

import math
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional as F

from stages.errors import BadInput
from stages.probe.adapters.attach import Layout, replace_forward, target_linears
from stages.probe.adapters.spectrum import read_tensors, tensors_sha256
from stages.runs import store
from stages.runs.records import Row

if TYPE_CHECKING:
    from transformers import PreTrainedModel


A_HALF = ":A"
"""Ending of the name under which a Linear's A is stored; its B has the Linear's own name."""


class Lora:
    """A [r, I] and B [O, r] of every adapted Linear; what is trained lies in one flat vector `theta` [N]."""

    def __init__(
        self,
        targets: Mapping[str, nn.Linear],
        rank: int,
        *,
        freeze_a: bool,
        seed: int,
        random_b: bool = False,
        warm: bool = False,
    ) -> None:
        """A drawn with `seed`, B at zero, or with `random_b` drawn after it; a frozen A goes with a B of zero.

        `warm`: directions lie on both halves, which `begin_at` then gives their values.
        """
        self.kind = "lora_random_B" if random_b else "lora_frozenA" if freeze_a else "lora_warmup" if warm else "lora"
        self.rank, self.freeze_a = rank, freeze_a
        generator = torch.Generator().manual_seed(seed)
        draw = _orthonormal_rows if freeze_a else _kaiming
        self.initial = {name: draw(rank, linear.in_features, generator) for name, linear in targets.items()}
        self.taken: dict[str, Tensor] = {}
        """The B0 [O, r] of each Linear, where it is not zero."""
        if random_b:
            drawn = {name: _kaiming(rank, linear.out_features, generator) for name, linear in targets.items()}
            self.taken = {name: b.T.contiguous() for name, b in drawn.items()}
        zeros = {name: torch.zeros(linear.out_features, rank) for name, linear in targets.items()}
        start = {name: b.flatten() for name, b in (zeros | self.taken).items()}
        if not freeze_a:
            start |= {name + A_HALF: a.flatten() for name, a in self.initial.items()}
        self.layout = Layout({name: part.numel() for name, part in start.items()})
        self.probed = self.layout.names if random_b or warm else tuple(targets)
        self.theta = self.layout.join(start)
        self.basis_sha256 = tensors_sha256([*self.initial.values(), *self.taken.values()])

    def begin_at(self, theta: Float[Tensor, " N"]) -> None:
        """Start from these values, which then belong to what identifies the coordinates."""
        self.theta = theta.clone()
        self.basis_sha256 = tensors_sha256([*self.initial.values(), *self.taken.values(), theta])

    def to(self, device: torch.device | str, dtype: torch.dtype) -> "Lora":
        """Move both to where the model computes; halves are rounded to the model's type as they are used."""
        wide = torch.promote_types(dtype, torch.float32)
        self.initial = {name: a.to(device, wide) for name, a in self.initial.items()}
        self.taken = {name: b.to(device, wide) for name, b in self.taken.items()}
        self.theta = self.theta.to(device)
        return self

    def halves(
        self, module: str, values: Mapping[str, Tensor], dtype: torch.dtype
    ) -> tuple[Float[Tensor, "O r"], Float[Tensor, "r I"]]:
        """B and A of a Linear from flat values, in this type."""
        start = self.initial[module]
        a = start if self.freeze_a else values[module + A_HALF].view(start.shape)
        return values[module].view(-1, self.rank).to(dtype), a.to(dtype)

    def delta(self, module: str, theta: Float[Tensor, " N"] | None = None) -> Float[Tensor, "O I"]:
        """B A - B0 A0: what the adapter adds to a weight, in float32 at least."""
        now = self.theta if theta is None else theta
        wide = torch.promote_types(self.initial[module].dtype, now.dtype)
        b, a = self.halves(module, self.layout.split(now), wide)
        if module not in self.taken:
            return b @ a
        return b @ a - self.taken[module].to(wide) @ self.initial[module].to(wide)

    def path(self, module: str, x: Float[Tensor, "B T I"], values: Mapping[str, Tensor]) -> Float[Tensor, "B T O"]:
        """B A x - B0 A0 x with the halves from `values`: the adapter as a separate path, for autograd."""
        b, a = self.halves(module, values, x.dtype)
        if module not in self.taken:
            return F.linear(F.linear(x, a), b)
        start = F.linear(F.linear(x, self.initial[module].to(x)), self.taken[module].to(x))
        return F.linear(F.linear(x, a), b) - start

    def contributions(
        self, module: str, x: Float[Tensor, "B T I"], g: Float[Tensor, "B T O"]
    ) -> dict[str, Float[Tensor, "B n"]]:
        """Each row's gradients, dB = sum_t g_t (A x_t)' and, where A is trained, dA = sum_t (B' g_t) x_t', flattened.

        By the chain rule from y = W x + B A x, whose B0 A0 x has no gradient; tested against autograd. Sums run over
        all positions, in float32 at least once they are taken.
        """
        b, a = self.halves(module, self.layout.split(self.theta), x.dtype)
        gradients = {module: _outer_sum(g, F.linear(x, a))}
        return gradients if self.freeze_a else gradients | {module + A_HALF: _outer_sum(g @ b, x)}

    def backward(
        self, module: str, x: Float[Tensor, "B T I"], g: Float[Tensor, "B T O"]
    ) -> tuple[dict[str, Float[Tensor, "B n"]], None]:
        """`contributions`; the gradient of x is cheapest by the weight."""
        return self.contributions(module, x, g), None


def _outer_sum(left: Float[Tensor, "B T m"], right: Float[Tensor, "B T k"]) -> Float[Tensor, "B mk"]:
    wide = torch.promote_types(left.dtype, torch.float32)
    return torch.bmm(left.transpose(1, 2), right).to(wide).flatten(1)


def _kaiming(rank: int, inputs: int, generator: torch.Generator) -> Float[Tensor, "r I"]:
    """PEFT's start: uniform in +-1/sqrt(I)."""
    return (torch.rand(rank, inputs, generator=generator) * 2 - 1) / math.sqrt(inputs)


def _orthonormal_rows(rank: int, inputs: int, generator: torch.Generator) -> Float[Tensor, "r I"]:
    return torch.linalg.qr(torch.randn(inputs, rank, generator=generator))[0].T.contiguous()


# ---- merge
# A PEFT LoRA added to a model: merged in float32 where the weights' type can hold it, else run as a path beside them.
#
# W' = W + s B A with s = alpha / r, or alpha / sqrt(r) with rsLoRA, as in PEFT; tested against PEFT itself.
#
# Shapes: B rows, T tokens, I inputs and O outputs of a Linear, r rank.

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
