"""PRIME-RL's losses at its newest snapshot: components rl, ce and ref_kl, each over its own token weights.

`stages.integrations.prime_rl` runs `ref_kl_loss` inside PRIME-RL; the others serve the parity check only.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from torch import Tensor

from stages.losses.prime_rl import (
    OPD_KL_TAU,
    TRUST_REGION,
    LossOutputs,
    Metrics,
    PackedTokens,
    mean_where,
    mismatch_metrics,
    nll_loss,
    policy_sum,
    reference_gap,
    stacked,
)
from stages.losses.reduction import Packed, PackedMask, Scalar


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
