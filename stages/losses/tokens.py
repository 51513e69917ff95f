"""Shared parts of the losses: log-probs of tokens, output heads, and sums over tokens that never hold all logits.

`over_tokens` adds up a kernel, a function of the logits of student and teacher, over the tokens of a step: a chunk at a
time, from hidden states and output heads, or from logits where there is no head. It takes each chunk's gradient while
the chunk's temporaries are in cache, so that neither a [tokens, vocabulary] temporary nor the logits survive the
forward pass: only the gradient does.

Shape letters: n tokens, v vocabulary, k a support chosen from it, c columns of values, h hidden width, p preference
pairs. Log-probs, entropies and losses are in nats. The tests check the shapes of every call.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from composer_stages.backends import resources

Scalar = Float[Tensor, ""]
Values = Float[Tensor, "*any"]
Distribution = Float[Tensor, "*batch v"]
Entries = Float[Tensor, "*batch e"]
WithTail = Float[Tensor, "*batch v+1"]
PerPosition = Float[Tensor, "*batch"]
PositionIds = Int[Tensor, "*batch"]
PerPair = Float[Tensor, " p"]
Packed = Float[Tensor, " seq"]
PackedMask = Bool[Tensor, " seq"]
Rows = Float[Tensor, "n v"]
TeacherRows = Float[Tensor, "n w"]
RowValues = Float[Tensor, " n"]
RowIds = Int[Tensor, " n"]
RowTable = Float[Tensor, "n c"]

Kernel = Callable[..., RowTable]
"""(student's logits, teacher's logits, *beside) -> values a token: the loss, then statistics without gradient."""


@dataclass(frozen=True)
class Head:
    """Output head: softcap * tanh(scale * (hidden @ weight.T + bias) / softcap), without softcap the inner part."""

    weight: Tensor
    bias: Tensor | None = None
    scale: float = 1.0
    softcap: float | None = None

    def logits(self, hidden: Tensor) -> Tensor:
        """Return logits [..., v], computed as the model does, in its own dtype, then widened to float32 at least."""
        # The product in the model's dtype, or the logits would differ from those that it samples from.
        raw = widened(F.linear(hidden, self.weight, self.bias) * self.scale)
        return raw if self.softcap is None else self.softcap * torch.tanh(raw / self.softcap)

    def cut(self, vocabulary: int) -> "Head":
        """Return the head of the first `vocabulary` tokens; the rest is padding that no tokenizer knows."""
        if len(self.weight) == vocabulary:
            return self  # the parameter itself: the gradient of a slice is a second, zero-padded tensor of its size
        return replace(
            self, weight=self.weight[:vocabulary], bias=None if self.bias is None else self.bias[:vocabulary]
        )


@dataclass(frozen=True)
class Predictors:
    """Predictions of n tokens: hidden states [n, h] with the output head, or logits [n, v] without a head."""

    rows: Rows
    head: Head | None = None

    @property
    def vocabulary(self) -> int:
        """The number of tokens that are predicted, a head's padding included."""
        return self.rows.shape[-1] if self.head is None else len(self.head.weight)

    def cut(self, vocabulary: int) -> "Predictors":
        """Return the predictors of the first `vocabulary` tokens."""
        if self.head is None:
            return replace(self, rows=self.rows[:, :vocabulary])
        return replace(self, head=self.head.cut(vocabulary))

    def logits(self, rows: TeacherRows) -> Rows:
        """Return the logits of some of the rows, in float32 at least."""
        return widened(rows) if self.head is None else self.head.logits(rows)


@dataclass(frozen=True)
class Listed:
    """Predictions of n tokens by the k likeliest ids of each alone: all others have probability 0.

    rows: [n, 2k], of each token k ids and then their log-probs; float32 holds every id below 2^24.
    """

    rows: TeacherRows
    vocabulary: int

    def cut(self, vocabulary: int) -> "Listed":
        """Return the same predictions in a smaller vocabulary, which must have all ids."""
        return replace(self, vocabulary=vocabulary)

    def logits(self, rows: TeacherRows) -> Rows:
        """Return log-probs over the vocabulary of some of the rows, minus infinity where none is told."""
        ids, log_probs = rows.chunk(2, dim=-1)
        return log_probs.new_full((len(rows), self.vocabulary), -torch.inf).scatter(-1, ids.long(), log_probs)


def widened(logits: Values) -> Values:
    """Return half-precision values as float32; float32 and float64 untouched. Meant for one chunk at a time."""
    return logits.float() if logits.dtype in (torch.float16, torch.bfloat16) else logits


def over_tokens(
    kernel: Kernel,
    student: Predictors,
    teacher: Predictors | Listed,
    weights: RowValues,
    *beside: Tensor,
    chunk_tokens: int | None = None,
) -> tuple[Scalar, RowTable]:
    """Sum weight * kernel(student logits, teacher logits, *beside)[:, 0] over tokens; return sum and table of values.

    Both logits are [chunk, v] in float32 at least, over the tokens that both models know; beside: further tensors [n,
    ...] without gradient. Tokens of weight 0 are not computed at all. Gradient to the student's rows and head.
    chunk_tokens None: by device and memory.
    """
    vocabulary = min(student.vocabulary, teacher.vocabulary)
    size = chunk_tokens or chunk_size(len(weights), vocabulary, weights.device)
    student, teacher = student.cut(vocabulary), teacher.cut(vocabulary)
    parameters = [] if student.head is None else [p for p in (student.head.weight, student.head.bias) if p is not None]

    def of_rows(student_rows: Tensor, teacher_rows: Tensor, *tensors: Tensor) -> RowTable:
        # token_sum passes leaves of its own for the parameters, whose gradients it collects chunk by chunk.
        kernel_inputs, leaves = tensors[: len(beside)], tensors[len(beside) :]
        head = student.head and replace(student.head, weight=leaves[0], bias=next(iter(leaves[1:]), None))
        with torch.no_grad():
            teacher_logits = teacher.logits(teacher_rows)
        return kernel(replace(student, head=head).logits(student_rows), teacher_logits, *kernel_inputs)

    return token_sum(of_rows, student.rows, teacher.rows, weights, *parameters, beside=beside, chunk_tokens=size)


HEAD_CHUNK_TOKENS = 128
"""On a CPU at most: every chunk adds one [vocabulary, width] product to the head's gradient."""
LARGEST_CHUNK_TOKENS = 2048
"""On a GPU. A chunk reads both heads and their gradient anew, and from about 500 tokens on that takes less time than
its matrix products."""


def chunk_size(
    num_tokens: int,
    vocabulary: int,
    device: torch.device,
    tables: int = 8,
    free: Callable[[torch.device], int] = resources.gpu_free,
) -> int:
    """Return how many tokens to compute at once, where that takes `tables` float32 tables [tokens, vocabulary].

    On a CPU a 32nd of the tokens (with 8 tables), but 32 to 128: the tables then take a quarter of one for all tokens
    from 1,024 tokens on, and their parts stay in the processor's cache. On a GPU as many as an eighth of what is free
    holds, in even chunks. free: the free bytes of a GPU, 0 of a CPU.
    """
    free_bytes = free(device)
    if not free_bytes:
        return min(max(num_tokens // (4 * tables), 256 // tables), 8 * HEAD_CHUNK_TOKENS // tables)
    most = min(max(free_bytes // 8 // (4 * tables * vocabulary), 256 // tables), LARGEST_CHUNK_TOKENS)
    count = -(-num_tokens // most)
    return max(-(-num_tokens // max(count, 1)), 1)


def token_sum(
    per_token: Callable[..., RowTable],
    student: Rows,
    teacher: TeacherRows,
    weights: RowValues,
    *parameters: Tensor,
    beside: Sequence[Tensor] = (),
    chunk_tokens: int,
) -> tuple[Scalar, RowTable]:
    """Sum over tokens of weight * loss, and the table of values per token (detached, 0 for tokens of weight 0).

    per_token: (student's rows, teacher's rows, *beside, *parameters) -> values a token. The gradient reaches the
    student's rows and the parameters (an output head, say), never the teacher or the weights. Tokens of weight 0 are
    left out, so that a NaN there stays there.
    """
    rows = weights.nonzero().squeeze(1)
    constants = (teacher.detach(), *beside)
    return _ChunkedSum.apply(per_token, chunk_tokens, rows, weights.detach(), constants, student, *parameters)


class _ChunkedSum(torch.autograd.Function):
    """weights . loss, with the gradient of each chunk computed in the forward pass."""

    @staticmethod
    def forward(
        ctx: Any,  # torch's own class for it does not declare needs_input_grad
        per_token: Callable[..., RowTable],
        chunk_tokens: int,
        rows: Tensor,
        weights: Tensor,
        constants: tuple[Tensor, ...],
        student: Tensor,
        *parameters: Tensor,
    ) -> tuple[Tensor, Tensor]:
        inputs, learns = (student, *parameters), ctx.needs_input_grad[5:]
        # The gradient of the rows is in their own dtype, as each row is written once; that of a parameter is in float32
        # at least, as every chunk adds to it.
        dtypes = [student.dtype, *(torch.promote_types(x.dtype, torch.float32) for x in parameters)]
        triples = zip(inputs, dtypes, learns, strict=True)
        sums = [torch.zeros_like(x, dtype=dtype) if want else None for x, dtype, want in triples]
        table: Tensor
        for number, chunk in enumerate(rows.split(chunk_tokens)):  # one empty chunk where there are no rows
            leaves = [x.detach().requires_grad_(w) for x, w in zip((student[chunk], *parameters), learns, strict=True)]
            # Cut while gradients are off: these tensors get none, whatever they require outside.
            chunk_constants, shares = [rows_of[chunk] for rows_of in constants], weights[chunk]
            with torch.set_grad_enabled(any(learns)):
                values = per_token(leaves[0], *chunk_constants, *leaves[1:])
                if any(learns):
                    (values[:, 0] * shares).sum().backward()
            values = values.detach()
            # One table from the start: a small result kept a chunk would pin the large temporaries' memory around it.
            if number == 0:
                table = values.new_zeros(len(weights), values.shape[1])
            table.index_copy_(0, chunk, values)
            if sums[0] is not None and leaves[0].grad is not None:
                sums[0].index_copy_(0, chunk, leaves[0].grad)
            for total, leaf in zip(sums[1:], leaves[1:], strict=True):
                if total is not None and leaf.grad is not None:
                    total.add_(leaf.grad)
        saved = [None if total is None else total.to(x.dtype) for total, x in zip(sums, inputs, strict=True)]
        ctx.save_for_backward(*saved)
        ctx.mark_non_differentiable(table)
        return (table[:, 0] * weights).sum(), table

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_sum: Tensor, _: Tensor) -> tuple[Any, ...]:
        # The saved gradient is scaled in place unless another backward pass may follow and must find it unscaled.
        # torch's own compiled code asks the same before it writes into a saved buffer; a torch that cannot tell counts
        # as "may".
        ask = getattr(torch._C._autograd, "_get_current_graph_task_keep_graph", None)
        scale = torch.mul if ask is None or ask() else Tensor.mul_
        grads = (None if saved is None else scale(saved, grad_sum.to(saved.dtype)) for saved in ctx.saved_tensors)
        return (None,) * 5 + tuple(grads)


BLOCK_LOGITS = {"cpu": 2**19}
"""Logits of one reduction: 2 MB of float32 on a CPU, whose cache holds that (larger blocks take 1.7 times as long)."""
LARGEST_BLOCK = 2**26
"""Elsewhere: each launch costs the same, and the exponentials of 2**26 logits take 268 MB in float32."""


def token_log_probs(logits: Distribution, token_ids: PositionIds, *, temperature: float = 1.0) -> PerPosition:
    """Return values of log softmax(logits / temperature) at token_ids, in nats, with gradient.

    Calls TRL 1.16's selective_log_softmax.
    The logits at position t must be those that predict token_ids[t]: shift before calling.
    """
    from trl.trainer.utils import selective_log_softmax

    # TRL loops over the first axis to save memory: with tokens there, 4,096 of them cost 20,000 launches.
    size = logits.shape[-1]
    rows = max(BLOCK_LOGITS.get(logits.device.type, LARGEST_BLOCK) // size, 1)
    parts = zip(logits.reshape(-1, size).split(rows), token_ids.reshape(-1).split(rows), strict=True)
    log_probs = [selective_log_softmax(part[None], ids[None], temperature=temperature)[0] for part, ids in parts]
    return (log_probs[0] if len(log_probs) == 1 else torch.cat(log_probs)).view(token_ids.shape)
