"""PRIME-RL's losses at its newest snapshot: components rl, ce and ref_kl, each over its own token weights.

`stages.integrations.prime_rl` runs `ref_kl_loss` inside PRIME-RL; the others serve the parity check only.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from operator import add

import torch
from torch import Tensor

from stages.errors import UsageError
from stages.losses.prime_rl import (
    TRUST_REGION,
    DefaultOptions,
    LossOutputs,
    Metrics,
    PackedTokens,
    mean_where,
    mismatch_metrics,
    policy_sum,
    region_metrics,
    trust_region,
)
from stages.losses.reduction import Packed, PackedMask, Scalar

OPD_KL_TAU = 1e-3


def default_loss_before_may19(
    tokens: PackedTokens, options: DefaultOptions | None = None, *, teacher_tau: float = 0.0
) -> LossOutputs:
    """default_loss whose signal gains teacher_tau * sg[reference - trainer] when there is a reference; other metrics.

    Serves the parity check only.
    Source: PrimeIntellect-ai/prime-rl d2f36c9 src/prime_rl/trainer/rl/loss.py:107-163.
    """
    options = options or DefaultOptions()
    region = trust_region(tokens, options.dppo_mask_low, options.dppo_mask_high)
    everything = torch.zeros_like(tokens.mask)
    overall = mismatch_metrics(tokens, everything)["unmasked_mismatch_kl"]
    metrics = region_metrics(tokens, region) | {"mismatch_kl": overall}
    signal = options.adv_tau * tokens.advantages
    if tokens.reference is not None:
        gap = (tokens.reference - tokens.trainer).detach()
        signal, metrics["teacher_kl"] = signal + teacher_tau * gap, mean_where(gap, tokens.mask)
    return LossOutputs(policy_sum(tokens, signal, region.outside, options.kl_tau), metrics)


def opd_loss(tokens: PackedTokens) -> LossOutputs:
    """policy_sum with signal sg[reference - trainer], kl_tau 1e-3; trust region 0.2 by the REWARD advantage's sign.

    Raises UsageError without reference log-probs. Serves the parity check only.
    Source: PrimeIntellect-ai/prime-rl 618de8a loss.py:168-218.
    """
    gap = reference_gap(tokens)
    region = trust_region(tokens, TRUST_REGION, TRUST_REGION)
    metrics = region_metrics(tokens, region) | {"teacher_kl": mean_where(gap, tokens.mask)}
    return LossOutputs(policy_sum(tokens, 0.0 * tokens.advantages + gap, region.outside, OPD_KL_TAU), metrics)


def reference_gap(tokens: PackedTokens) -> Packed:
    """Detached log-ratio a token, reference - trainer; UsageError without reference log-probs."""
    if tokens.reference is None:
        raise UsageError(
            "this loss distils from a reference, but the sequence has no reference log-probs: score it first"
        )
    return (tokens.reference - tokens.trainer).detach()


def nll_loss(tokens: PackedTokens) -> LossOutputs:
    """-sum of weight * log-prob over the mask, by index: an infinity outside does no harm. nll is the plain mean.

    Serves the parity check only.
    Source: PrimeIntellect-ai/prime-rl 618de8a loss.py:221-230 (sft), 559b447 loss.py:246-259 (ce, with weights).
    """
    nll = -tokens.trainer
    weighted = nll if tokens.weights is None else nll * tokens.weights
    return LossOutputs(weighted[tokens.mask].sum(), {"nll": mean_where(nll.detach(), tokens.mask)})


def compute_loss(
    sequences: Sequence[PackedTokens], loss: Callable[[PackedTokens], LossOutputs], loss_scale: Tensor | int
) -> tuple[Scalar, Metrics]:
    """Sum of the sequences' losses / loss_scale, and metrics with one value a sequence.

    PRIME-RL's loss_scale is the number of trainable tokens of the whole step, at least 1. Give one sequence at least.
    Serves the parity check only.
    Source: PrimeIntellect-ai/prime-rl 618de8a loss.py:261-338.
    """
    outputs = [loss(tokens) for tokens in sequences]
    total = reduce(add, (output.loss for output in outputs))
    return total / loss_scale, stacked([output.metrics for output in outputs])


def stacked(metrics: Sequence[Metrics]) -> Metrics:
    """One vector a key, over the sequences that have it; metrics that are vectors already are joined."""
    keys = dict.fromkeys(key for values in metrics for key in values)
    return {key: torch.cat([values[key].reshape(-1) for values in metrics if key in values]) for key in keys}


@dataclass(frozen=True)
class IpoOptions:
    """[trainer.loss] type="ipo": bound on a token's change of probability; scales of advantage and penalty."""

    ipo_threshold: float = 0.1
    adv_tau: float = 1.0
    kl_tau: float = 1e-3


def ipo_loss(tokens: PackedTokens, options: IpoOptions | None = None) -> LossOutputs:
    """policy_sum with signal adv_tau * advantage, without tokens of |change of probability| > ipo_threshold.

    Serves the parity check only.
    Source: PrimeIntellect-ai/prime-rl 559b447 src/prime_rl/trainer/rl/loss.py:164-196.
    """
    options = options or IpoOptions()
    outside = (tokens.trainer.exp() - tokens.inference.exp()).abs() > options.ipo_threshold
    loss = policy_sum(tokens, options.adv_tau * tokens.advantages, outside, options.kl_tau)
    return LossOutputs(loss, mismatch_metrics(tokens, outside))


def ref_kl_loss(tokens: PackedTokens) -> LossOutputs:
    """policy_sum with signal sg[reference - trainer], kl_tau 1e-3, without tokens whose probability fell by > 0.2.

    The advantages are not read. Raises UsageError without reference log-probs. Source: PrimeIntellect-ai/prime-rl
    559b447 loss.py:199-243.
    """
    gap = reference_gap(tokens)
    outside = tokens.trainer.exp() - tokens.inference.exp() < -TRUST_REGION
    metrics = {f"ref_kl/{key}": value for key, value in mismatch_metrics(tokens, outside).items()}
    return LossOutputs(policy_sum(tokens, gap, outside, OPD_KL_TAU), metrics | {"ref_kl": mean_where(gap, tokens.mask)})


@dataclass(frozen=True)
class Streams:
    """Token weights of one sequence; None: every trainable token with weight 1 in rl, no token in ce and ref_kl."""

    rl: Packed | None = None
    ce: Packed | None = None
    ref_kl: Packed | None = None


@dataclass(frozen=True)
class Scales:
    """Divisor of each component: PRIME-RL's count of its tokens over the whole step, at least 1."""

    rl: Tensor | int = 1
    ce: Tensor | int = 1
    ref_kl: Tensor | int = 1


def compute_component_loss(
    sequences: Sequence[PackedTokens],
    streams: Sequence[Streams],
    scales: Scales,
    rl_loss: Callable[[PackedTokens], LossOutputs],
) -> tuple[Scalar, Metrics]:
    """Sum of rl / rl_scale, ce / ce_scale and ref_kl / ref_kl_scale, each over all sequences, and their metrics.

    A token belongs to rl if trainable and its rl weight is not 0, to ce and ref_kl if that weight is not 0, trainable
    or not. A component without tokens in a sequence adds no loss and no metrics there; the total always carries a
    gradient, of zeros if nothing counts. Serves the parity check only.
    Source: PrimeIntellect-ai/prime-rl 559b447 loss.py:285-390.
    """
    total, metrics = sequences[0].trainer.sum() * 0.0, []
    for tokens, stream in zip(sequences, streams, strict=True):
        for loss, scale, mask, weights in _components(tokens, stream, scales, rl_loss):
            if weights is None or bool(mask.any()):
                output = loss(replace(tokens, mask=mask, weights=weights))
                total = total + output.loss / scale
                metrics.append(output.metrics)
    return total, stacked(metrics)


def _components(
    tokens: PackedTokens, stream: Streams, scales: Scales, rl_loss: Callable[[PackedTokens], LossOutputs]
) -> list[tuple[Callable[[PackedTokens], LossOutputs], Tensor | int, PackedMask, Packed | None]]:
    """(loss, scale, member tokens, weights) of every component that the sequence has."""
    trainable = tokens.mask if stream.rl is None else tokens.mask & (stream.rl != 0)
    components = [(rl_loss, scales.rl, trainable, stream.rl)]
    if stream.ce is not None:
        components.append((nll_loss, scales.ce, stream.ce != 0, stream.ce))
    if stream.ref_kl is not None:
        components.append((ref_kl_loss, scales.ref_kl, stream.ref_kl != 0, stream.ref_kl))
    return components
