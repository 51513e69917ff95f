"""What all losses share: shape names, log-probs of given tokens, sums over tokens in chunks, verl's averages.

`token_sum` adds a per-token loss up, on all tokens at once or a few at a time. With `chunk_tokens=None` it is ordinary
autograd. In chunks it runs the same formula and takes each chunk's gradient while the chunk's temporaries are in cache,
so that neither a [tokens, vocabulary] temporary nor the logits survive the forward pass: only the gradient does.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from jaxtyping import Bool, Float, Int, Shaped
from torch import Tensor
from torch.autograd.function import once_differentiable

from stages.errors import UsageError

# Shape letters: b batch, t token position, r position in the response, v vocabulary, k a support chosen from it,
# e divergence entries, p preference pairs, n tokens of a whole batch, c columns of values per token, h and g hidden
# widths. Log-probs, entropies and losses are in nats. The tests check the shapes of every call.

Scalar = Float[Tensor, ""]
Values = Float[Tensor, "*any"]

Logits = Float[Tensor, "b t v"]
Support = Float[Tensor, "b t k"]
TokenValues = Float[Tensor, "b t"]
TokenIds = Int[Tensor, "b t"]
TokenMask = Shaped[Tensor, "b t"]
ResponseMask = Shaped[Tensor, "b r"]
PerSequence = Float[Tensor, " b"]

Distribution = Float[Tensor, "*batch v"]
DistributionIds = Int[Tensor, "*batch k"]
EntryValues = Float[Tensor, "*batch e"]
DistributionMask = Bool[Tensor, "*batch v"]
WithTail = Float[Tensor, "*batch v+1"]
PerPosition = Float[Tensor, "*batch"]
PositionIds = Int[Tensor, "*batch"]

Rows = Float[Tensor, "n v"]
TeacherRows = Float[Tensor, "n w"]
RowValues = Float[Tensor, " n"]
RowIds = Int[Tensor, " n"]
RowTable = Float[Tensor, "n c"]

Hidden = Float[Tensor, "b t h"]
TeacherHidden = Float[Tensor, "b t g"]

PerPair = Float[Tensor, " p"]
StackedTokens = Float[Tensor, "twice_p t"]
StackedTokenMask = Shaped[Tensor, "twice_p t"]
StackedSequences = Float[Tensor, " twice_p"]

Rewards = Float[Tensor, "b f"]
RewardWeights = Float[Tensor, " f"]
Groups = Float[Tensor, "g n"]
PerGroup = Float[Tensor, " g"]
Ratios = Float[Tensor, "b s"]

Packed = Float[Tensor, " seq"]
PackedMask = Bool[Tensor, " seq"]


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
        table = values.new_zeros(len(weights), values.shape[1]).index_copy_(0, rows, values.detach())
        return (values[:, 0] * weights[rows]).sum(), table
    return _ChunkedSum.apply(per_token, chunk_tokens, rows, weights, (teacher, *beside), student, *parameters)


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
        inputs, wanted = (student, *parameters), ctx.needs_input_grad[5:]
        # The gradient of the rows is in their own dtype, as each row is written once; that of a parameter is in float32
        # at least, as every chunk adds to it.
        dtypes = [student.dtype, *(torch.promote_types(x.dtype, torch.float32) for x in parameters)]
        triples = zip(inputs, dtypes, wanted, strict=True)
        sums = [torch.zeros_like(x, dtype=dtype) if want else None for x, dtype, want in triples]
        table: Tensor
        for number, chunk in enumerate(rows.split(chunk_tokens)):  # one empty chunk where there are no rows
            leaves = [x.detach().requires_grad_(w) for x, w in zip((student[chunk], *parameters), wanted, strict=True)]
            # Cut while gradients are off: these tensors get none, whatever they require outside.
            others, shares = [rows_of[chunk] for rows_of in given], weights[chunk]
            with torch.set_grad_enabled(any(wanted)):
                values = per_token(leaves[0], *others, *leaves[1:])
                if any(wanted):
                    (values[:, 0] * shares).sum().backward()
            values = values.detach()
            # One table from the start: a small result kept a chunk would pin the large temporaries' memory around it.
            table = values.new_zeros(len(weights), values.shape[1]) if number == 0 else table
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


IGNORED = -100  # the label of tokens without loss, as in PyTorch's cross_entropy and all trainers built on it

AGG_MODES = ("token-mean", "token-sum", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm")


def aggregation_weights(
    mask: TokenMask,
    mode: str,
    *,
    dtype: torch.dtype = torch.float32,
    min_tokens: float = 0.0,
    norm_by_sequences: bool = True,
) -> TokenValues:
    """Return weights w with sum(loss * w) = verl's agg_loss(loss, mask, mode); give the dtype of the losses.

    token-mean               mask / sum(mask), divisor at least min_tokens (0: NaN on an empty mask, as upstream)
    token-sum                mask
    seq-mean-token-sum       mask / number of sequences with a token
    seq-mean-token-mean      mask / (tokens of the sequence + 1e-8) / number of sequences with a token
    seq-mean-token-sum-norm  mask / t, and / number of sequences with a token if norm_by_sequences (verl main does so,
                             lasgroup/SDPO does not)

    The sequence modes give NaN when no sequence has a token, as upstream. Raises UsageError for an unknown mode.
    Source: verl-project/verl 1dda039 core_algos.py:1140-1206; lasgroup/SDPO 0e6d510 core_algos.py:1027-1082.
    """
    tokens = mask.sum(-1, keepdim=True)
    sequences = (tokens > 0).sum()
    weights = mask.to(dtype)
    if mode == "token-mean":
        return weights / tokens.sum().clamp_min(min_tokens)
    if mode == "token-sum":
        return weights
    if mode == "seq-mean-token-sum":
        return weights / sequences
    if mode == "seq-mean-token-mean":
        return weights / (tokens + 1e-8).to(dtype) / sequences
    if mode == "seq-mean-token-sum-norm":  # norm_by_sequences: verl came to divide by the sequences too, after the fork
        return weights / mask.shape[-1] / (sequences if norm_by_sequences else 1)
    raise UsageError(f"loss_agg_mode is {mode!r}; choose one of {', '.join(AGG_MODES)}")


def aggregate(
    losses: TokenValues, mask: TokenMask, mode: str, *, min_tokens: float = 0.0, norm_by_sequences: bool = True
) -> Scalar:
    """Sum of losses * aggregation_weights(...): verl's agg_loss.

    A NaN outside the mask is dropped in token-mean and token-sum; in the sequence modes only where the whole sequence
    is masked, as upstream.
    """
    weights = aggregation_weights(
        mask, mode, dtype=losses.dtype, min_tokens=min_tokens, norm_by_sequences=norm_by_sequences
    )
    # verl's sequence modes multiply by the mask, so that a NaN at a masked token of a counted sequence spreads.
    counted = mask != 0 if mode.startswith("token") else mask.sum(-1, keepdim=True) != 0
    return (torch.where(counted, losses, 0.0) * weights).sum()


def masked_mean(values: TokenValues, mask: TokenMask) -> Scalar:
    """Sum over the mask / (count + 1e-8), NaNs outside dropped. Source: verl 1dda039 utils/torch_functional.py."""
    return (torch.where(mask != 0, values, 0.0) * mask).sum() / (mask.sum() + 1e-8)


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
    found = [selective_log_softmax(part[None], ids[None], temperature=temperature)[0] for part, ids in parts]
    return (found[0] if len(found) == 1 else torch.cat(found)).view(token_ids.shape)
