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

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional as F

from stages.probe.adapters.attach import Layout
from stages.probe.adapters.spectrum import tensors_sha256

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
