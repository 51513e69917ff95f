"""From per-token log-probs of a stacked batch (chosen rows, then rejected) to the DPO loss and its metrics.

Serves the parity check only: the trainer's channel sums per sequence itself and calls `dpo_losses`.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import reduce
from operator import add

import torch
from torch import Tensor
from torch.nn import functional as F

from stages.errors import UsageError
from stages.losses.dpo import DISCOPOP_TAU, FORMS, DpoTerms, PairLogProbs, PairLosses, _discopop, smoothed_sigmoid
from stages.losses.reduction import (
    Logits,
    PerPair,
    PerSequence,
    Scalar,
    StackedSequences,
    StackedTokenMask,
    StackedTokens,
    TokenMask,
    TokenValues,
    token_log_probs,
)


def sequence_log_probs(token_values: TokenValues, mask: TokenMask, *, average: bool = False) -> PerSequence:
    """Sum over the mask, or the mean: NaN for a sequence without tokens, as in princeton-nlp/SimPO 1b3e8f3.

    Serves the parity check only.
    """
    total = (token_values * mask).sum(-1)
    return total / mask.sum(-1) if average else total


def label_log_probs(logits: Logits, labels: Tensor, *, average: bool = True, ignored: int = -100) -> PerSequence:
    """Log-prob of each row's labels[1:] under logits[:-1], summed or averaged over the labels that are not `ignored`.

    Serves the parity check only.
    Source: princeton-nlp/SimPO 1b3e8f3 scripts/simpo_trainer.py:597-683 get_batch_logps.
    """
    targets = labels[:, 1:]
    mask = targets != ignored
    return sequence_log_probs(token_log_probs(logits[:, :-1], targets.masked_fill(~mask, 0)), mask, average=average)


def cpo_loss(
    chosen: PerPair,
    rejected: PerPair,
    *,
    beta: float = 0.1,
    simpo_gamma: float = 0.5,
    label_smoothing: float = 0.0,
    alpha: float = 0.0,
    loss_type: str = "simpo",
) -> PairLosses:
    """TRL's form: simpo's margin is simpo_gamma / beta, equal to SimPO's iff simpo_gamma = beta * gamma_beta_ratio.

    With d the difference of rewards, reward = log-prob, or (1 - p^-alpha)/alpha if alpha is not 0 (AlphaPO):
        simpo    smoothed_sigmoid at beta (d - simpo_gamma/beta)
        sigmoid  smoothed_sigmoid at beta d
        hinge    relu(1 - beta d)
        ipo      (d - 1/(2 beta))^2
    Logged rewards are beta * reward. Raises UsageError for another loss_type. Serves the parity check only.
    Source: TRL 1.16 experimental/cpo/cpo_trainer.py:678-749.
    """
    rewards = [values if alpha == 0.0 else (1 - values.exp().pow(-alpha)) / alpha for values in (chosen, rejected)]
    difference = rewards[0] - rewards[1]
    if loss_type in ("simpo", "sigmoid"):
        margin = simpo_gamma / beta if loss_type == "simpo" else 0.0
        losses = smoothed_sigmoid(beta * (difference - margin), label_smoothing)
    elif loss_type == "hinge":
        losses = torch.relu(1 - beta * difference)
    elif loss_type == "ipo":
        losses = (difference - 1 / (2 * beta)) ** 2
    else:
        raise UsageError(f"CPO's loss_type is {loss_type!r}; choose simpo, sigmoid, hinge or ipo")
    return PairLosses(losses, beta * rewards[0].detach(), beta * rewards[1].detach())


LARGEST_EXPONENT = {torch.float16: 11.0}  # of the alpha divergence; 80 for the wider dtypes


@dataclass(frozen=True)
class DpoOptions:
    """The options of TRL's DPOConfig. label_smoothing acts in robust, exo_pair and the two aot forms only."""

    beta: float = 0.1
    label_smoothing: float = 0.0
    f_divergence: str = "reverse_kl"
    f_alpha: float = 0.5
    discopop_tau: float = DISCOPOP_TAU


def dpo_losses(pairs: PairLogProbs, loss_type: str = "sigmoid", options: DpoOptions | None = None) -> PerPair:
    """Return the loss of each pair in nats for TRL's fourteen forms and four f-divergences; the trainer takes the mean.

    Ten forms under reverse KL are the trainer's own (stages.losses.dpo); this adds those that no setting selects.
    Raises UsageError for an unknown form or f-divergence, for ipo and sigmoid_norm without token counts, for exo_pair
    without label_smoothing, and for robust with label_smoothing >= 0.5.
    Source: TRL 1.16 trainer/dpo_trainer.py:1338-1505.
    """
    options = options or DpoOptions()
    ref_chosen, ref_rejected = pairs.ref_chosen.detach(), pairs.ref_rejected.detach()
    c, r = pairs.chosen - ref_chosen, pairs.rejected - ref_rejected
    scores = f_score(c, options), f_score(r, options)
    x = DpoTerms(options.beta, c, r, *scores, pairs.chosen_tokens, pairs.rejected_tokens)
    e = options.label_smoothing
    if loss_type == "discopop":
        return _discopop(x, options.discopop_tau)
    if loss_type in FORMS:
        return FORMS[loss_type](x)
    if loss_type == "exo_pair":
        # KL( (q, 1-q) || (1-e, e) ), q = sigmoid(margin); e is float32 whatever the dtype of the log-probs, as in TRL.
        if e <= 0:
            raise UsageError(f"exo_pair takes the logarithm of label_smoothing, which is {e}; set 1e-3, say")
        smoothing = torch.tensor(e)
        won = torch.sigmoid(x.margin) * (F.logsigmoid(x.margin) - torch.log1p(-smoothing))
        lost = torch.sigmoid(-x.margin) * (F.logsigmoid(-x.margin) - torch.log(smoothing))
        return won + lost
    if loss_type == "robust":
        # [-(1-e) logsigmoid(m) + e logsigmoid(-m)] / (1 - 2e): unbiased if labels are flipped with probability e.
        if not 0 <= e < 0.5:
            raise UsageError(f"robust needs 0 <= label_smoothing < 0.5, got {e}")
        return (-(1 - e) * F.logsigmoid(x.margin) + e * F.logsigmoid(-x.margin)) / (1 - 2 * e)
    if loss_type == "aot":
        # Log-ratios of chosen to rejected under policy and reference, each sorted over the batch first.
        policy, reference = pairs.chosen - pairs.rejected, ref_chosen - ref_rejected
        return smoothed_sigmoid(options.beta * (policy.sort().values - reference.sort().values), e)
    if loss_type == "aot_unpaired":
        return smoothed_sigmoid(options.beta * (c.sort().values - r.sort().values), e)
    raise UsageError(f"DPO's loss_type is {loss_type!r}; choose one of {', '.join(LOSS_TYPES)}")


LOSS_TYPES = (*FORMS, "exo_pair", "robust", "aot", "aot_unpaired")


def f_score(log_ratio: PerPair, options: DpoOptions) -> PerPair:
    """Return f'(ratio) of the divergence that regularises the policy: the log-ratio itself for reverse_kl.

    The alpha divergence works in float64 too, where TRL raises KeyError. Raises UsageError for an unknown divergence.
    """
    power = options.f_alpha - 1.0
    if options.f_divergence == "reverse_kl" or (options.f_divergence == "alpha_divergence" and abs(power) < 1e-6):
        return log_ratio
    if options.f_divergence == "forward_kl":
        return 1 - torch.exp(-log_ratio)
    if options.f_divergence == "js_divergence":
        return math.log(2) + F.logsigmoid(log_ratio)
    if options.f_divergence == "alpha_divergence":
        exponent = (power * log_ratio).to(torch.promote_types(log_ratio.dtype, torch.float32))
        exponent = exponent.clamp(max=LARGEST_EXPONENT.get(log_ratio.dtype, 80.0))
        return (exponent.exp() - 1.0).to(log_ratio.dtype) / power
    raise UsageError(
        f"f_divergence is {options.f_divergence!r}; choose reverse_kl, forward_kl, js_divergence or alpha_divergence"
    )


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


def _typed_losses(batch: DpoBatch, pairs: PairLogProbs, loss_type: str, options: DpoOptions) -> PerPair:
    if loss_type != "sft":
        return dpo_losses(pairs, loss_type, options)
    chosen, mask = batch.log_probs.chunk(2)[0], batch.token_mask.chunk(2)[0].bool()
    return -chosen[mask].mean().expand(len(chosen))


def batch_pairs(batch: DpoBatch, ld_alpha: float | None = None) -> PairLogProbs:
    """Sequence sums of both models, split into chosen and rejected."""
    policy = sequence_sums(batch.log_probs, batch.token_mask, ld_alpha).chunk(2)
    reference = sequence_sums(batch.ref_log_probs, batch.token_mask, ld_alpha).detach().chunk(2)
    return PairLogProbs(*policy, *reference, *batch.completion_mask.sum(1).chunk(2))


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


def _metrics(pairs: PairLogProbs, beta: float) -> dict[str, Scalar]:
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
