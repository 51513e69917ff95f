"""From per-token log-probs of a stacked batch (chosen rows, then rejected) to the DPO loss and its metrics.

Serves the parity check only: the trainer's channel sums per sequence itself and calls `dpo_losses`.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import reduce
from operator import add

import torch
from torch import Tensor

from stages.errors import UsageError
from stages.losses.dpo import DpoOptions, Pairs, dpo_losses
from stages.losses.reduction import PerPair, Scalar, StackedSequences, StackedTokenMask, StackedTokens


@dataclass(frozen=True)
class DpoBatch:
    """log_probs, ref_log_probs [2p, t] (shifted, 0 outside the completion), completion_mask [2p, t+1] (not shifted).

    log_sum_sq_probs [2p, t]: log sum_v p^2 under the policy, for use_weighting only.
    """

    log_probs: Tensor
    ref_log_probs: Tensor
    completion_mask: Tensor
    log_sum_sq_probs: Tensor | None = None

    @property
    def token_mask(self) -> Tensor:
        """Completion tokens that have a log-prob: [2p, t]."""
        return self.completion_mask[:, 1:]


@dataclass(frozen=True)
class BatchOptions:
    """loss_weights None: 1.0 for each type, not averaged. ld_alpha None: plain sums."""

    loss_types: Sequence[str] = ("sigmoid",)
    loss_weights: Sequence[float] | None = None
    ld_alpha: float | None = None
    use_weighting: bool = False
    pair: DpoOptions = field(default_factory=DpoOptions)


def dpo_batch_loss(batch: DpoBatch, options: BatchOptions) -> tuple[Scalar, dict[str, Scalar]]:
    """Sum over loss types of weight * mean over pairs, and the metrics; nats.

    Token counts (ipo, sigmoid_norm) are of the unshifted mask, so position 0 counts although it has no log-prob, as
    upstream. Type sft is -mean of the chosen tokens' log-probs over the batch (NaN without such tokens, as upstream).
    Raises UsageError for use_weighting without log_sum_sq_probs, and as dpo_losses does. Serves the parity check only.
    Source: TRL 1.16 trainer/dpo_trainer.py:1285-1612.
    """
    pairs = batch_pairs(batch, options.ld_alpha)
    weights = options.loss_weights or [1.0] * len(options.loss_types)
    shares = pair_weights(batch) if options.use_weighting else 1.0
    losses = [
        (_typed_losses(batch, pairs, loss_type, options.pair) * shares).mean() * weight
        for loss_type, weight in zip(options.loss_types, weights, strict=True)
    ]
    return reduce(add, losses), _metrics(pairs, options.pair.beta)


def _typed_losses(batch: DpoBatch, pairs: Pairs, loss_type: str, options: DpoOptions) -> PerPair:
    if loss_type != "sft":
        return dpo_losses(pairs, loss_type, options)
    chosen, mask = batch.log_probs.chunk(2)[0], batch.token_mask.chunk(2)[0].bool()
    return -chosen[mask].mean().expand(len(chosen))


def batch_pairs(batch: DpoBatch, ld_alpha: float | None = None) -> Pairs:
    """Sequence sums of both models, split into chosen and rejected."""
    policy = sequence_sums(batch.log_probs, batch.token_mask, ld_alpha).chunk(2)
    reference = sequence_sums(batch.ref_log_probs, batch.token_mask, ld_alpha).detach().chunk(2)
    return Pairs(*policy, *reference, *batch.completion_mask.sum(1).chunk(2))


def sequence_sums(
    log_probs: StackedTokens, token_mask: StackedTokenMask, ld_alpha: float | None = None
) -> StackedSequences:
    """Sum of log-probs; with ld_alpha (LD-DPO) the tokens past the pair's shorter completion are scaled by it."""
    if ld_alpha is None:
        return log_probs.sum(1)
    position, lengths = token_mask.cumsum(1), token_mask.sum(1)
    shared = torch.minimum(*lengths.chunk(2)).repeat(2).unsqueeze(1)
    kept, tail = (position > 0) & (position <= shared), position > shared
    return (log_probs * kept).sum(1) + ld_alpha * (log_probs * tail).sum(1)


def pair_weights(batch: DpoBatch) -> PerPair:
    """WPO: product over both sides of exp(mean over completion tokens of (log-prob - log sum_v p^2)), detached."""
    if batch.log_sum_sq_probs is None:
        raise UsageError("use_weighting needs log_sum_sq_probs, the log of sum_v p^2 under the policy at every token")
    aligned = (batch.log_probs.detach() - batch.log_sum_sq_probs) * batch.token_mask
    chosen, rejected = torch.exp(aligned.sum(1) / batch.token_mask.sum(1).clamp_min(1)).chunk(2)
    return chosen * rejected


def _metrics(pairs: Pairs, beta: float) -> dict[str, Scalar]:
    """Rewards are beta * log-ratio, never transformed by the f-divergence."""
    chosen, rejected = (
        beta * x.detach() for x in (pairs.chosen - pairs.ref_chosen, pairs.rejected - pairs.ref_rejected)
    )
    return {
        "rewards/chosen": chosen.mean(),
        "rewards/rejected": rejected.mean(),
        "rewards/accuracies": (chosen > rejected).float().mean(),
        "rewards/margins": (chosen - rejected).mean(),
        "logps/chosen": pairs.chosen.detach().mean(),
        "logps/rejected": pairs.rejected.detach().mean(),
    }
