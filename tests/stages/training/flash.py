"""A kernel for CPUs of torch's variable-length flash attention, which torch has for GPUs alone."""

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from composer_stages.training import packing

Segment = tuple[Tensor, Tensor, Tensor, Tensor]
"""Queries [Q, H, D], keys and values [K, H, D] of a segment in float64, and its probabilities [H, Q, K]."""


@contextmanager
def flash_on_cpu(shift: int = 0) -> Iterator[list[tuple[int, int]]]:
    """While open, torch has the kernel on a CPU; gives the longest queries and keys of each forward call.

    The last query of a segment sees all its keys. shift: keys behind a prompt that each query sees too few.
    """
    calls: list[tuple[int, int]] = []

    def segments(q: Tensor, k: Tensor, v: Tensor, of_q: Tensor, of_k: Tensor, scale: float) -> Iterator[Segment]:
        for (a, b), (c, d) in zip(pairwise(of_q.tolist()), pairwise(of_k.tolist()), strict=True):
            heads = q.shape[1] // k.shape[1]
            queries, keys, values = q[a:b].double(), *(x[c:d].double().repeat_interleave(heads, 1) for x in (k, v))
            more = d - c - (b - a)
            seen = torch.ones(b - a, d - c, dtype=torch.bool).tril(more - min(shift, more))
            scores = torch.einsum("qhd,khd->hqk", queries, keys) * scale
            yield queries, keys, values, scores.masked_fill(~seen, float("-inf")).softmax(-1)

    def forward(
        q: Tensor, k: Tensor, v: Tensor, of_q: Tensor, of_k: Tensor, max_q: int, max_k: int, dropout: float,
        causal: bool, debug: bool, *, scale: float, **given: Any,
    ) -> tuple[Tensor, ...]:  # fmt: skip
        # What the kernels of torch 2.13 ask for (aten/src/ATen/native/transformers/cuda/flash_attn/flash_api.cpp).
        assert causal and not dropout and given["window_size_left"] == -1 and given["window_size_right"] == 0
        assert of_q.dtype == of_k.dtype == torch.int32 and all(x.stride(-1) == 1 for x in (q, k, v))
        assert (max_q, max_k) == (int(of_q.diff().max()), int(of_k.diff().max()))
        assert len(q) == of_q[-1] and len(k) == len(v) == of_k[-1]
        calls.append((max_q, max_k))
        parts = [
            torch.einsum("hqk,khd->qhd", seen, values) for _, _, values, seen in segments(q, k, v, of_q, of_k, scale)
        ]
        empty = torch.empty(0)
        return torch.cat(parts).to(q.dtype), torch.zeros(q.shape[1], len(q)), empty, empty, empty

    def backward(
        gradient: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, of_q: Tensor, of_k: Tensor,
        *more: Any, scale: float, **given: Any,
    ) -> tuple[Tensor, ...]:  # fmt: skip
        found: list[tuple[Tensor, ...]] = []
        groups, begin = k.shape[1], 0
        for queries, keys, values, seen in segments(q, k, v, of_q, of_k, scale):
            g = gradient[begin : begin + len(queries)].double()
            begin += len(queries)
            of_seen = torch.einsum("qhd,khd->hqk", g, values)
            of_scores = seen * (of_seen - (of_seen * seen).sum(-1, keepdim=True)) * scale
            of_keys = torch.einsum("hqk,qhd->khd", of_scores, queries)
            of_values = torch.einsum("hqk,qhd->khd", seen, g)
            shared = (x.unflatten(1, (groups, -1)).sum(2) for x in (of_keys, of_values))
            found.append((torch.einsum("hqk,khd->qhd", of_scores, keys), *shared))
        return tuple(torch.cat(x).to(q.dtype) for x in zip(*found, strict=True))

    library = torch.library.Library("aten", "IMPL")
    library.impl("_flash_attention_forward", forward, "CPU")
    library.impl("_flash_attention_backward", backward, "CPU")
    packing.flash_agrees.cache_clear()
    try:
        yield calls
    finally:
        library._destroy()
        packing.flash_agrees.cache_clear()
