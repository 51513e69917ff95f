"""What a watched training shows at one checkpoint: where its update and its policy gradient point.

Everything is in the coordinates of the adapter in which v was extracted, at the weights that training started from.
There a change D of a weight counts as its part along the adapter, P(D), as a gradient does: for singular values
diag(U' D V), by linearity of the chain rule that `Adapter.contributions` implements.

Shapes: R rows, N trained numbers, O outputs and I inputs of a Linear.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from jaxtyping import Float
from torch import Tensor

from stages.probe.adapters.attach import Adapter
from stages.probe.adapters.targets import target_linears
from stages.probe.gradients.student import MAX_TOKENS, adapt
from stages.probe.loops.rollouts import with_advantages
from stages.probe.pool.tokens import TokenRow, as_tokens
from stages.runs.records import Row

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@torch.no_grad()
def place(model: "PreTrainedModel", adapter: Adapter) -> Float[Tensor, " N"]:
    """P(W) of all adapted weights, in float64, so that differences of places keep small changes.

    `contributions` sums g x' over tokens: with the unit vectors as x and the rows of W' as g that sum is W.
    """
    parts: dict[str, Tensor] = {}
    for name, linear in target_linears(model).items():
        weight = linear.weight.detach().double()
        unit = torch.eye(weight.shape[1], dtype=weight.dtype, device=weight.device)
        parts |= {n: part[0] for n, part in adapter.contributions(name, unit[None], weight.T[None]).items()}
    return adapter.layout.join({name: part.cpu() for name, part in parts.items()})


def row_gradients(
    model: "PreTrainedModel", tokenizer: Any, adapter: Adapter, rows: Sequence[Row], max_tokens: int = MAX_TOKENS
) -> tuple[Float[Tensor, "R N"], list[float]]:
    """Each row's token-sum gradient at these weights, and its mean log-prob in nats a token."""
    student = adapt(model, tokenizer, adapter)
    sums, logps = student.gradients([as_tokens(row) for row in rows], max_tokens=max_tokens)
    student.folded.restore()
    return sums, [float(values.double().mean()) for values in logps]


def policy_gradients(rows: Sequence[Row], sums: Float[Tensor, "R N"]) -> Float[Tensor, "two N"]:
    """The gradient of Dr.GRPO's loss on rows of a policy's own (arXiv 2503.20783), and the same less length's part.

    At ratio 1 it is the sum of A_i times row i's token-sum gradient, up to a constant. For the second, what an answer's
    length explains of the advantages within a group is taken out of them, by least squares.
    """
    judged, _ = with_advantages(rows)
    advantages = torch.tensor([row["advantage"] for row in judged], dtype=torch.float64)
    lengths = _within_groups([as_tokens(row) for row in rows], [row["problem_id"] for row in rows])
    square = lengths.square().sum()
    explained = lengths * (lengths @ advantages) / square if float(square) else torch.zeros_like(advantages)
    return torch.stack([advantages, advantages - explained]).to(sums.dtype) @ sums


def _within_groups(tokens: Sequence[TokenRow], groups: Sequence[str]) -> Tensor:
    """Own tokens of each row less the mean of its group [R]."""
    lengths = torch.tensor([float(row.num_own) for row in tokens], dtype=torch.float64)
    means = {g: lengths[[other == g for other in groups]].mean() for g in set(groups)}
    return lengths - torch.stack([means[g] for g in groups])
