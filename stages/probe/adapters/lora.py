"""LoRA: low-rank pairs that the probe trains, and finished ones of PEFT that are added to a model.

`Lora` is y = W x + B A x with B = 0 at the start, so that the base model is unchanged and A's gradient is 0. `lora`
trains both halves, from PEFT's default start. `lora_frozenA` trains B alone with a frozen A of orthonormal rows: the
change of W is then linear in what is trained and a direction keeps its meaning, as with singular values but in an
arbitrary basis (wassname/grpo_proj2, spec 20260601). Directions of both are on B. `lora_random_B` starts at a random
pair B0, A0 and takes that start away again, y = W x + B A x - B0 A0 x: no change of the model, yet gradients of both
halves, and directions on both (wassname/vGROUT_pub @c067218, adapters/lora.py; that B0's columns are as long as A0's
rows is this project's own). `lora_warmup` is `lora` after some steps on the pairs
(`gradients.student.start_from_pairs`), which give A a gradient too: directions on both halves, as LESS warms its LoRA
up before it takes gradients (arXiv 2402.04333). PEFT's scale alpha / r is 1 here: it would multiply gradients but leave
cosines as they are.

`apply_lora` adds a LoRA of PEFT, W' = W + s B A with s = alpha / r, or alpha / sqrt(r) with rsLoRA, as in PEFT; tested
against PEFT itself. It is merged in float32 where the weights' type can hold it, else it runs as a separate path.

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
from stages.probe.adapters.attach import Layout, target_linears
from stages.probe.adapters.spectrum import read_tensors, tensors_sha256
from stages.runs import hub, store
from stages.runs.kinds import Row

if TYPE_CHECKING:
    from transformers import PreTrainedModel


A_HALF = ":A"
"""Suffix of the name under which a Linear's A is stored; its B has the Linear's own name."""
PEFT_FILES = ("adapter_config.json", "adapter_model.safetensors")
PEFT_PREFIX = "base_model.model."
"""What PEFT puts before every module name."""
MAX_ROUNDING = 0.3
"""Largest rounding loss at which a LoRA is merged."""


class Lora:
    """A [r, I] and B [O, r] of every adapted Linear; the trained numbers are one flat vector `theta` [N]."""

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
        """Draw A with `seed`; B is zero, or with `random_b` drawn after A; a frozen A goes with a B of zero.

        `warm`: directions are on both halves, which `begin_at` then sets.
        """
        self.kind = "lora_random_B" if random_b else "lora_frozenA" if freeze_a else "lora_warmup" if warm else "lora"
        self.rank, self.freeze_a = rank, freeze_a
        generator = torch.Generator().manual_seed(seed)

        def uniform(width: int) -> Float[Tensor, "r width"]:
            """PEFT's start: uniform in +-1/sqrt(width), which is kaiming_uniform_ with a = sqrt(5)."""
            return (torch.rand(rank, width, generator=generator) * 2 - 1) / math.sqrt(width)

        if freeze_a:
            # Orthonormal rows: then ||B A|| = ||B||, so that theta's norm is the norm of the weights' change.
            draws = {n: torch.randn(linear.in_features, rank, generator=generator) for n, linear in targets.items()}
            self.initial = {name: torch.linalg.qr(draw)[0].T.contiguous() for name, draw in draws.items()}
        else:
            self.initial = {name: uniform(linear.in_features) for name, linear in targets.items()}
        self.taken: dict[str, Tensor] = {}
        """The B0 [O, r] of each Linear, where it is not zero."""
        if random_b:
            # All A first, then all B0: the order of draws decides the numbers, and A is then that of `lora`.
            self.taken = {name: uniform(linear.out_features).T.contiguous() for name, linear in targets.items()}
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
        """Move the halves to the model's device; they are rounded to the model's type as they are used."""
        # Kept in float32 at least: `delta` needs the exact halves, while `path` rounds them for the activations.
        wide = torch.promote_types(dtype, torch.float32)
        self.initial = {name: a.to(device, wide) for name, a in self.initial.items()}
        self.taken = {name: b.to(device, wide) for name, b in self.taken.items()}
        self.theta = self.theta.to(device)
        return self

    def halves(
        self, module: str, values: Mapping[str, Tensor], dtype: torch.dtype
    ) -> tuple[Float[Tensor, "O r"], Float[Tensor, "r I"]]:
        """Return B and A of a Linear from flat values, in this type."""
        start = self.initial[module]
        a = start if self.freeze_a else values[module + A_HALF].view(start.shape)
        return values[module].view(-1, self.rank).to(dtype), a.to(dtype)

    def delta(self, module: str, theta: Float[Tensor, " N"] | None = None) -> Float[Tensor, "O I"]:
        """Return B A - B0 A0, the change of a weight, in float32 at least."""
        now = self.theta if theta is None else theta
        wide = torch.promote_types(self.initial[module].dtype, now.dtype)
        b, a = self.halves(module, self.layout.only(now, module, module + A_HALF), wide)
        if module not in self.taken:
            return b @ a
        return b @ a - self.taken[module].to(wide) @ self.initial[module].to(wide)

    def path(self, module: str, x: Float[Tensor, "B T I"], values: Mapping[str, Tensor]) -> Float[Tensor, "B T O"]:
        """Compute B A x - B0 A0 x with the halves from `values`: the adapter as a separate path, for autograd."""
        b, a = self.halves(module, values, x.dtype)
        if module not in self.taken:
            return F.linear(F.linear(x, a), b)
        start = F.linear(F.linear(x, self.initial[module].to(x)), self.taken[module].to(x))
        return F.linear(F.linear(x, a), b) - start

    def row_gradients(
        self, module: str, x: Float[Tensor, "B T I"], g: Float[Tensor, "B T O"]
    ) -> tuple[dict[str, Float[Tensor, "B n"]], None]:
        """Compute each row's dB = sum_t g_t (A x_t)' and, where A is trained, dA = sum_t (B' g_t) x_t', flattened.

        By the chain rule from y = W x + B A x, whose B0 A0 x has no gradient; tested against autograd. Sums run over
        all positions, in float32 at least once they are taken. The gradient of x is cheapest by the weight.
        """
        b, a = self.halves(module, self.layout.only(self.theta, module, module + A_HALF), x.dtype)
        wide = torch.promote_types(g.dtype, torch.float32)
        # Each is a sum of outer products over tokens, a product of matrices by row: [B, O, r] and [B, r, I].
        gradients = {module: torch.bmm(g.transpose(1, 2), F.linear(x, a)).to(wide).flatten(1)}
        if not self.freeze_a:
            gradients[module + A_HALF] = torch.bmm((g @ b).transpose(1, 2), x).to(wide).flatten(1)
        return gradients, None


def lora_folder(lora: str, *, endpoint: str | None = None, cache: Path | None = None) -> tuple[Path, str | None]:
    """Resolve a LoRA given as a folder or as a hub id to its folder, and the commit of one from the hub.

    Of a repository only the adapter's settings and its safetensors are fetched, once; without a connection what was
    fetched before is used. endpoint, cache: None for those of the Hugging Face hub. `BadInput` where there is none.
    """
    given = Path(lora).expanduser()
    if given.is_dir():
        return given, None  # a folder enters a run's fingerprint by its bytes (`loops.config.SourceConfig.identity`)
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        offline = hub.unreachable(endpoint) is not None
        found = snapshot_download(
            lora, allow_patterns=list(PEFT_FILES), endpoint=endpoint, cache_dir=cache, local_files_only=offline
        )
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
        first = str(error).strip().splitlines()[0]
        raise BadInput(f"The LoRA {lora!r} is no folder, and not to be had from the hub ({first}).") from None
    return Path(found), Path(found).name  # the hub's cache names a snapshot's folder by its commit


@torch.no_grad()
def apply_lora(model: "PreTrainedModel", folder: Path) -> Row:
    """Add the LoRA of a folder to a model in place, and report the change.

    The report has `merged`, and by module `delta_norms`, ||D|| with D the change of a weight, and `rounding_losses`,
    ||round(W + D) - (W + D)|| / ||D|| in the weight's type; both are Frobenius norms. `BadInput` when the adapter is no
    plain LoRA, or changes a module that the probe does not adapt.
    """
    config = store.read_json(folder / PEFT_FILES[0])
    if config.get("peft_type") != "LORA" or config.get("use_dora"):
        raise BadInput(f"{folder} holds a {config.get('peft_type')} adapter; the probe reads plain LoRA.")
    rank = config["r"]
    # rsLoRA divides alpha by sqrt(r) instead of r.
    scale = config["lora_alpha"] / (rank**0.5 if config.get("use_rslora") else rank)
    tensors, _ = read_tensors(folder / PEFT_FILES[1])
    names = sorted({key.removeprefix(PEFT_PREFIX).rpartition(".lora_")[0] for key in tensors})
    halves = {n: tuple(tensors[f"{PEFT_PREFIX}{n}.lora_{half}.weight"] for half in "BA") for n in names}
    linears = target_linears(model)
    if unknown := sorted(halves.keys() - linears.keys()):
        raise BadInput(f"{folder} adapts {unknown[0]}, which the model does not have or the probe does not adapt.")
    deltas = {name: scale * b.float() @ a.float() for name, (b, a) in halves.items()}
    # A bfloat16 weight has 8 bits of mantissa, so that a small LoRA is rounded away on merging: the loss is measured
    # for every Linear before any weight is touched, and above MAX_ROUNDING the LoRA is kept as a path.
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


def has_path(linear: nn.Linear) -> bool:
    """Return whether a LoRA runs as a path of this Linear instead of being merged into it."""
    forward = vars(linear).get("forward")
    return isinstance(forward, partial) and forward.func is _with_lora
