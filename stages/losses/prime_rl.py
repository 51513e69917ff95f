"""PRIME-RL's losses on packed sequences, as on main in May 2026: default, opd and sft. Sums: compute_loss divides.

`composer_stages.integrations.prime_rl` runs `default_loss` inside PRIME-RL; what it does not use says that it serves
the parity check only.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from composer_stages.losses.tokens import Packed, PackedMask, Scalar

TRUST_REGION = 0.2

Metrics = dict[str, Tensor]


@dataclass(frozen=True)
class PackedTokens:
    """One packed sequence: log-probs of trainer (gradient) and inference engine, advantages, trainable tokens.

    reference is the teacher's log-probs in May's opd and ref_logprobs at the snapshot's head; weights scale the loss a
    token (head only).
    """

    trainer: Packed
    inference: Packed
    advantages: Packed
    mask: PackedMask
    reference: Packed | None = None
    weights: Packed | None = None


@dataclass(frozen=True)
class LossOutputs:
    """A sum over tokens with gradient, and 0-dim metrics: the two names that PRIME-RL reads off a custom loss."""

    loss: Scalar
    metrics: Metrics


@dataclass(frozen=True)
class DefaultOptions:
    """[trainer.loss] type="default": bounds on a token's change of probability; scales of advantage and penalty."""

    dppo_mask_low: float = TRUST_REGION
    dppo_mask_high: float = TRUST_REGION
    adv_tau: float = 1.0
    kl_tau: float = 1e-3


@dataclass(frozen=True)
class TrustRegion:
    """outside: tokens without policy gradient; low, high: those of them with a negative, a positive advantage."""

    outside: PackedMask
    low: PackedMask
    high: PackedMask


def trust_region(tokens: PackedTokens, low: float, high: float) -> TrustRegion:
    """Return the tokens outside: exp(trainer) - exp(inference) > high where the advantage is > 0, else < -low."""
    # A difference of probabilities and not a ratio, so that a rare token may become many times likelier.
    change = tokens.trainer.exp() - tokens.inference.exp()
    risen, fallen = change > high, change < -low
    # Only a move that the advantage itself drives on is cut: up with a positive one, down with any other. The sign is
    # that of the raw advantage, before adv_tau.
    positive = tokens.advantages > 0
    return TrustRegion(torch.where(positive, risen, fallen), (tokens.advantages < 0) & fallen, positive & risen)


def policy_sum(tokens: PackedTokens, signal: Packed, outside: PackedMask, kl_tau: float) -> Scalar:
    """Sum weight * ( -keep * signal * r + kl_tau * mask * (log r)^2 ), r = exp(trainer - inference).

    keep = mask & ~outside. The squared log-ratio covers the whole mask. Masks multiply: an infinite log-prob at a
    masked token gives NaN, as upstream.
    """
    # No 1/2 before the square and no mean over tokens. Upstream keeps infinities out by its data: masked positions
    # carry inference log-probs of 0. Its formula with the keep mask in both terms is from side branches that never
    # reached main.
    log_ratio = tokens.trainer - tokens.inference
    losses = -((tokens.mask & ~outside) * signal * log_ratio.exp()) + kl_tau * (tokens.mask * log_ratio**2)
    return (losses if tokens.weights is None else losses * tokens.weights).sum()


def mismatch_metrics(tokens: PackedTokens, outside: PackedMask) -> Metrics:
    """Return k3 = r - log r - 1 outside and inside the trust region, and the share outside; 0 without tokens."""
    log_ratio = (tokens.trainer - tokens.inference).detach()
    mismatch = log_ratio.exp() - log_ratio - 1
    return {
        "masked_mismatch_kl": mean_where(mismatch, tokens.mask & outside),
        "unmasked_mismatch_kl": mean_where(mismatch, tokens.mask & ~outside),
        "is_masked": mean_where(outside, tokens.mask),
    }


def mean_where(values: Tensor, mask: PackedMask) -> Scalar:
    """Return the mean over the mask, 0 if it is empty; of a boolean, a float32 share."""
    return values[mask].sum() / mask.sum().clamp_min(1)


def region_metrics(tokens: PackedTokens, region: TrustRegion) -> Metrics:
    """Return mismatch_metrics and the shares of dropped tokens by side of the region and by sign of the advantage."""
    dropped = tokens.mask & region.outside
    return mismatch_metrics(tokens, region.outside) | {
        "is_masked_low": mean_where(region.low, tokens.mask),
        "is_masked_high": mean_where(region.high, tokens.mask),
        "masked_advantage_positive": mean_where(tokens.advantages > 0, dropped),
        "masked_advantage_negative": mean_where(tokens.advantages < 0, dropped),
    }


def default_loss(tokens: PackedTokens, options: DefaultOptions | None = None) -> LossOutputs:
    """Return policy_sum with signal adv_tau * advantage and the trust region of the raw advantage's sign.

    In nats, a SUM over tokens. The importance ratio is neither clamped nor detached. 0 with zero gradient on an empty
    mask.
    Source: PrimeIntellect-ai/prime-rl 618de8a src/prime_rl/trainer/rl/loss.py:116-165; with tokens.weights
    559b447:109-161.
    """
    options = options or DefaultOptions()
    region = trust_region(tokens, options.dppo_mask_low, options.dppo_mask_high)
    loss = policy_sum(tokens, options.adv_tau * tokens.advantages, region.outside, options.kl_tau)
    return LossOutputs(loss, region_metrics(tokens, region))
