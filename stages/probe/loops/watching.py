"""What a watched training shows at one checkpoint: where its update and its policy gradient point.

Everything is in the coordinates of the adapter in which v was extracted, at the weights that training started from.
There a change D of a weight counts as its part along the adapter, P(D), as a gradient does: for singular values
diag(U' D V), by linearity of the chain rule that `Adapter.contributions` implements. Rollouts of later checkpoints are
measured at those weights too: v means something there. In the planted world a hack's cosine with v is .5 to .7 at the
start's weights, and after some steps at the checkpoint's own weights no more than an honest answer's.

Shapes: R rows, N trained numbers, P directions, O outputs and I inputs of a Linear.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from jaxtyping import Float
from torch import Tensor

from stages.probe.adapters.attach import Adapter
from stages.probe.adapters.targets import target_linears
from stages.probe.gradients.per_sample import DotSink, Sink, TotalSink
from stages.probe.gradients.student import Student
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


@dataclass(frozen=True)
class Played:
    """What rollouts show: `cosines` [R, P] with P unit directions, the two policy gradients [2, N], log-probs.

    `logps` [R] are mean log-probs in nats a token, `advantages` [R] those of Dr.GRPO.
    """

    cosines: Float[Tensor, "R P"]
    policy: Float[Tensor, "two N"]
    logps: list[float]
    advantages: Float[Tensor, " R"]


def measure_played(
    student: Student, rows: Sequence[Row], units: Float[Tensor, "P N"], modules: Sequence[str]
) -> Played:
    """Measure rollouts at the student's weights, in one pass; `units` have norm 1 over these modules together.

    The policy gradients are sums of `policy_weights` times a row's token-sum gradient, over the number of rows.
    """
    weights = policy_weights(rows)
    totals = [TotalSink(student.adapter.layout, line.float() / len(rows), student.device) for line in weights]
    measured: list[tuple[list[int], DotSink]] = []

    def sink_of(indices: list[int]) -> Sink:
        dots, adds = DotSink(student.adapter.layout, units), [total.of(indices) for total in totals]
        measured.append((indices, dots))

        def sink(name: str, contribution: Float[Tensor, "B n"]) -> None:
            if name in modules:
                dots(name, contribution)
            for add in adds:
                add(name, contribution)

        return sink

    logps = student.stream([as_tokens(row) for row in rows], sink_of)
    order = torch.tensor([index for indices, _ in measured for index in indices]).argsort()
    cosines = torch.cat([(dots.dots / dots.squares.sqrt()[:, None]).cpu() for _, dots in measured])[order]
    policy = torch.stack([total.total.cpu() for total in totals])
    return Played(cosines, policy, [float(values.double().mean()) for values in logps], weights[0])


def policy_weights(rows: Sequence[Row]) -> Float[Tensor, "two R"]:
    """Advantages of Dr.GRPO (arXiv 2503.20783), and the same less length's part, in float64.

    At ratio 1 its loss's gradient is the sum of A_i times row i's token-sum gradient, up to a constant. For the second,
    what an answer's length explains of the advantages within a group is taken out of them, by least squares.
    """
    judged, _ = with_advantages(rows)
    advantages = torch.tensor([row["advantage"] for row in judged], dtype=torch.float64)
    lengths = _within_groups([as_tokens(row) for row in rows], [row["problem_id"] for row in rows])
    square = lengths.square().sum()
    explained = lengths * (lengths @ advantages) / square if float(square) else torch.zeros_like(advantages)
    return torch.stack([advantages, advantages - explained])


def _within_groups(tokens: Sequence[TokenRow], groups: Sequence[str]) -> Tensor:
    """Own tokens of each row less the mean of its group [R]."""
    lengths = torch.tensor([float(row.num_own) for row in tokens], dtype=torch.float64)
    means = {g: lengths[[other == g for other in groups]].mean() for g in set(groups)}
    return lengths - torch.stack([means[g] for g in groups])
