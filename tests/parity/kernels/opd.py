"""On-policy distillation from single-sample KL estimates: through PPO or directly (verl), or as advantages (tinker).

Serves the parity check only: no channel uses it.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import reduce
from operator import add

import torch

from stages.errors import UsageError
from stages.losses.reduction import Packed, Scalar, TokenMask, TokenValues, Values, aggregate, masked_mean

LARGEST_LOG_RATIO = 20.0
LARGEST_K3 = 10.0


def kl_estimate(log_probs: Values, ref_log_probs: Values, kind: str) -> Values:
    """Estimate a token of KL(policy || reference), nats.

    k1 (kl): l - r.  abs: |l - r|.  k2 (mse): (l - r)^2 / 2.  k3 (low_var_kl): clamp(e^d - d - 1, +-10), d = clamp(r -
    l, +-20). A trailing + keeps the value and takes k2's gradient, the only one that is unbiased. Raises UsageError for
    another kind. Serves the parity check only.
    Source: verl-project/verl 1dda039 verl/trainer/ppo/core_algos.py:2187-2250 kl_penalty.
    """
    if not kind.endswith("+") or kind in ("k2+", "mse+"):
        return _estimate(log_probs, ref_log_probs, kind.removesuffix("+"))
    through = 0.5 * (log_probs - ref_log_probs).square()
    return through - through.detach() + _estimate(log_probs, ref_log_probs, kind.removesuffix("+")).detach()


def _estimate(log_probs: Values, ref_log_probs: Values, kind: str) -> Values:
    difference = log_probs - ref_log_probs
    if kind in ("k1", "kl"):
        return difference
    if kind == "abs":
        return difference.abs()
    if kind in ("k2", "mse"):
        return 0.5 * difference.square()
    if kind in ("k3", "low_var_kl"):
        d = (-difference).clamp(-LARGEST_LOG_RATIO, LARGEST_LOG_RATIO)
        return (d.exp() - d - 1).clamp(-LARGEST_K3, LARGEST_K3)
    raise UsageError(f"KL estimator {kind!r} is unknown; choose k1, abs, k2 or k3, with + for k2's gradient")


@dataclass(frozen=True)
class PpoOptions:
    """Bounds of the ratio; ratio_cap (dual clip, > 1) bounds it where the advantage is negative."""

    clip_low: float = 0.2
    clip_high: float = 0.2
    ratio_cap: float = 3.0
    agg_mode: str = "token-mean"


def ppo_loss(
    log_probs: TokenValues,
    old_log_probs: TokenValues,
    advantages: TokenValues,
    mask: TokenMask,
    options: PpoOptions | None = None,
    *,
    rollout_weights: TokenValues | None = None,
) -> tuple[Scalar, dict[str, Scalar]]:
    """Dual-clip PPO: agg( max(-A r, -A clip(r)) ), at most -A ratio_cap where A < 0; r = exp(clamp(l - old, +-20)).

    Raises UsageError unless ratio_cap > 1. Serves the parity check only.
    Source: verl-project/verl 1dda039 verl/trainer/ppo/core_algos.py:1285-1376.
    """
    options = options or PpoOptions()
    if options.ratio_cap <= 1.0:
        raise UsageError(f"ratio_cap is {options.ratio_cap}; dual clip needs more than 1")
    log_ratio = (log_probs - old_log_probs).clamp(-LARGEST_LOG_RATIO, LARGEST_LOG_RATIO)
    ratio = log_ratio.exp()
    free, bounded = -advantages * ratio, -advantages * ratio.clamp(1 - options.clip_low, 1 + options.clip_high)
    clipped, cap = torch.maximum(free, bounded), -advantages * options.ratio_cap
    losses = torch.where(advantages < 0, torch.minimum(cap, clipped), clipped)
    if rollout_weights is not None:
        losses = losses * rollout_weights
    metrics = {
        "pg_clipfrac": masked_mean((bounded > free).float(), mask),
        "ppo_kl": masked_mean(-log_ratio.detach(), mask),
        "pg_clipfrac_lower": masked_mean((clipped > cap) * (advantages < 0).float(), mask),
    }
    return aggregate(losses, mask, options.agg_mode), metrics


def distillation_loss(
    log_probs: TokenValues,
    teacher_log_probs: TokenValues,
    mask: TokenMask,
    old_log_probs: TokenValues | None = None,
    *,
    estimator: str = "k3",
    use_policy_gradient: bool = True,
    largest: float | None = 10.0,
    options: PpoOptions | None = None,
    rollout_weights: TokenValues | None = None,
) -> tuple[Scalar, dict[str, Scalar]]:
    """ppo_loss with A = -sg[v], or agg(v) directly; v = clamp(kl_estimate, +-largest), None: no clamp. Nats.

    Raises UsageError for k1 without the policy gradient (its gradient ignores the teacher) and for a policy gradient
    without old_log_probs. Serves the parity check only.
    Source: verl-project/verl 1dda039 verl/trainer/distillation/losses.py.
    """
    options = options or PpoOptions()
    values = kl_estimate(log_probs, teacher_log_probs.detach(), estimator)
    if largest is not None:
        values = values.clamp(-largest, largest)
    if use_policy_gradient:
        if old_log_probs is None:
            raise UsageError(
                "the policy gradient needs old_log_probs, the log-probs of the policy that sampled the tokens"
            )
        loss, metrics = ppo_loss(
            log_probs, old_log_probs, -values.detach(), mask, options, rollout_weights=rollout_weights
        )
        return loss, {f"distillation/{key}": value for key, value in metrics.items()}
    if estimator in ("k1", "kl"):
        raise UsageError("k1 itself has a gradient that ignores the teacher; choose k2 or k3, or use_policy_gradient")
    return aggregate(values, mask, options.agg_mode), {}


@dataclass(frozen=True)
class Datum:
    """One sequence: log-probs at rollout time, the teacher's for the same tokens, a 0/1 mask, advantages to add to."""

    sampled: Packed
    teacher: Packed
    mask: Packed
    advantages: Packed


def reverse_kl_advantages(
    data: Sequence[Datum], *, coef: float = 1.0, discount: float = 0.0
) -> tuple[list[Packed], Scalar]:
    """Each datum's advantages - coef * mask * (sampled - teacher), and the mean reverse KL a token; no gradient.

    discount > 0 replaces the penalty by the discounted sum of the current and the future ones, masked positions
    included. The KL is NaN if every mask is empty. Raises UsageError without data.
    Serves the parity check only.
    Source: thinking-machines-lab/tinker-cookbook 9dfcc3a distillation/train_on_policy.py:53-131, rl/metrics.py:192-211.
    """
    if not data:
        raise UsageError("no sequences to score: give at least one datum")
    reverse_kl = [(datum.sampled - datum.teacher) * datum.mask for datum in data]
    penalties = [-coef * datum.mask * kl for datum, kl in zip(data, reverse_kl, strict=True)]
    if discount > 0:
        penalties = [_discounted(penalty, discount) for penalty in penalties]
    mean_kl = reduce(add, (kl.sum() for kl in reverse_kl)) / reduce(add, (datum.mask.sum() for datum in data))
    return [datum.advantages + penalty for datum, penalty in zip(data, penalties, strict=True)], mean_kl


def _discounted(values: Packed, discount: float) -> Packed:
    sums, running = torch.empty_like(values), values.new_zeros(())
    for position in reversed(range(len(values))):
        running = values[position] + discount * running
        sums[position] = running
    return sums
