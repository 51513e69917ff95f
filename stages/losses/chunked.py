"""Sums a loss over tokens, on all of them at once or on a few at a time with no [tokens, vocabulary] temporaries.

The plain form (chunk_tokens=None) is ordinary autograd. The chunked form runs the same formula on chunks and takes each
chunk's gradient while its temporaries are warm, so that only the gradient itself survives the forward pass; neither
logits are kept for the backward pass.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from stages.losses.shapes import Rows, RowTable, RowValues, Scalar, TeacherRows

PerToken = Callable[..., RowTable]
"""(student rows, teacher rows, *beside, *parameters) -> values a token: the loss, then statistics without gradient."""

DEFAULT_CHUNK_TOKENS = 32  # 32 x 151,936 float32 are 19 MB a temporary; 16 to 64 tokens take the same time on a CPU


def token_sum(
    per_token: PerToken,
    student: Rows,
    teacher: TeacherRows,
    weights: RowValues,
    *parameters: Tensor,
    beside: Sequence[Tensor] = (),
    chunk_tokens: int | None = DEFAULT_CHUNK_TOKENS,
    skip_masked: bool = True,
) -> tuple[Scalar, RowTable]:
    """Sum over tokens of weight * loss, and the table of values per token (detached, 0 for skipped tokens).

    The gradient reaches the student rows and the parameters (an output head, say), never the teacher or the weights.
    beside: further tensors [n, ...] without gradient, of which per_token gets the rows of its chunk.
    skip_masked leaves tokens of weight 0 out, so that a NaN there stays there; without it they are multiplied by 0, and
    a NaN spreads.
    """
    rows = weights.nonzero().squeeze(1) if skip_masked else torch.arange(len(weights), device=weights.device)
    teacher, weights = teacher.detach(), weights.detach()
    if chunk_tokens is None:
        values = per_token(student[rows], teacher[rows], *(values[rows] for values in beside), *parameters)
        return (values[:, 0] * weights[rows]).sum(), _spread(values.detach(), rows, len(weights))
    return _ChunkedSum.apply(per_token, chunk_tokens, rows, weights, (teacher, *beside), student, *parameters)


def _spread(values: Tensor, rows: Tensor, num_tokens: int) -> Tensor:
    return values.new_zeros(num_tokens, values.shape[1]).index_copy_(0, rows, values)


class _ChunkedSum(torch.autograd.Function):
    """weights . loss, with the gradient of each chunk computed in the forward pass."""

    @staticmethod
    def forward(
        ctx: Any,  # torch's own class for it does not declare needs_input_grad
        per_token: PerToken,
        chunk_tokens: int,
        rows: Tensor,
        weights: Tensor,
        given: tuple[Tensor, ...],
        student: Tensor,
        *parameters: Tensor,
    ) -> tuple[Tensor, Tensor]:
        wanted = ctx.needs_input_grad[5:]
        sums = _empty_sums((student, *parameters), wanted)
        table: Tensor
        for number, chunk in enumerate(rows.split(chunk_tokens)):  # one empty chunk where there are no rows
            leaves = [x.detach().requires_grad_(w) for x, w in zip((student[chunk], *parameters), wanted, strict=True)]
            values = _chunk(per_token, leaves, [rows_of[chunk] for rows_of in given], weights[chunk])
            # One table from the start: a small result kept a chunk would pin the large temporaries' memory around it.
            table = values.new_zeros(len(weights), values.shape[1]) if number == 0 else table
            table.index_copy_(0, chunk, values)
            _add(sums, leaves, chunk)
        ctx.save_for_backward(*_like(sums, (student, *parameters)))
        ctx.mark_non_differentiable(table)
        return (table[:, 0] * weights).sum(), table

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_sum: Tensor, _: Tensor) -> tuple[Any, ...]:
        scale = torch.mul if _graph_is_kept() else Tensor.mul_
        grads = (None if saved is None else scale(saved, grad_sum.to(saved.dtype)) for saved in ctx.saved_tensors)
        return (None,) * 5 + tuple(grads)


def _graph_is_kept() -> bool:
    """Whether another backward pass may follow this one and must find the saved gradient unscaled; True if unknown.

    torch's own compiled code asks the same before it writes into a buffer that the forward pass saved.
    """
    ask = getattr(torch._C._autograd, "_get_current_graph_task_keep_graph", None)
    return ask is None or ask()


def _chunk(per_token: PerToken, leaves: Sequence[Tensor], given: Sequence[Tensor], weights: Tensor) -> RowTable:
    """Values of one chunk's tokens; puts the gradient of their weighted sum into .grad of the leaves that want one."""
    wanted = any(leaf.requires_grad for leaf in leaves)
    with torch.set_grad_enabled(wanted):
        values = per_token(leaves[0], *given, *leaves[1:])
        if wanted:
            (values[:, 0] * weights).sum().backward()
    return values.detach()


def _empty_sums(inputs: Sequence[Tensor], wanted: Sequence[bool]) -> list[Tensor | None]:
    """Rows in their own dtype, as each is written once; parameters in float32 at least, as every chunk adds to them."""
    dtypes = [inputs[0].dtype] + [torch.promote_types(x.dtype, torch.float32) for x in inputs[1:]]
    triples = zip(inputs, dtypes, wanted, strict=True)
    return [torch.zeros_like(x, dtype=dtype) if want else None for x, dtype, want in triples]


def _add(sums: Sequence[Tensor | None], leaves: Sequence[Tensor], chunk: Tensor) -> None:
    if sums[0] is not None and leaves[0].grad is not None:
        sums[0].index_copy_(0, chunk, leaves[0].grad)
    for total, leaf in zip(sums[1:], leaves[1:], strict=True):
        if total is not None and leaf.grad is not None:
            total.add_(leaf.grad)


def _like(sums: Sequence[Tensor | None], inputs: Sequence[Tensor]) -> list[Tensor | None]:
    return [None if total is None else total.to(x.dtype) for total, x in zip(sums, inputs, strict=True)]
