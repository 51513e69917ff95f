"""A custom loss for PRIME-RL: its default loss, from our kernel. Hints are an algorithm: prime_rl_hints.py.

PRIME-RL calls `fn(inputs, **kwargs)` once a packed sequence that has rl tokens and divides the returned sum by the
number of rl tokens of the whole step; a custom loss applies `loss_weights` itself. Both shapes of its inputs are
understood: `teacher_logprobs` (May 2026) and `ref_logprobs` with `loss_weights` (since June 2026). Source of the
contract: PrimeIntellect-ai/prime-rl 618de8a and 559b447, src/prime_rl/trainer/rl/loss.py.
"""

from typing import Any

from composer_stages.errors import UsageError
from composer_stages.losses.prime_rl import DefaultOptions, LossOutputs, PackedTokens, default_loss


def composed_loss(
    inputs: Any,
    *,
    dppo_mask_low: float = 0.2,
    dppo_mask_high: float = 0.2,
    adv_tau: float = 1.0,
    kl_tau: float = 1e-3,
    hint_weight: float = 0.0,
) -> Any:
    """Return `default_loss`: a sum over the tokens of one sequence, in nats.

    inputs: log-probs `[seq]` of trainer and inference engine, advantages `[seq]`, loss_mask `[seq]`. Returns PRIME-RL's
    LossOutputs where prime-rl is installed, else one of the same shape. Raises `UsageError` when hint_weight is not 0:
    tokens of the reference KL never reach a custom loss, and reference log-probs are 0 where none were scored.
    """
    if hint_weight != 0.0:
        raise UsageError("integrations.hint-weight-in-custom-loss", hint_weight=hint_weight)
    # None, and not a missing attribute, where PRIME-RL has the field but scored no reference.
    reference = getattr(inputs, "ref_logprobs", None)
    packed = PackedTokens(
        trainer=inputs.trainer_logprobs,
        inference=inputs.inference_logprobs,
        advantages=inputs.advantages,
        mask=inputs.loss_mask,
        reference=getattr(inputs, "teacher_logprobs", None) if reference is None else reference,
        weights=getattr(inputs, "loss_weights", None),
    )
    result = default_loss(packed, DefaultOptions(dppo_mask_low, dppo_mask_high, adv_tau, kl_tau))
    try:
        # PRIME-RL's own class when it is installed: its code may check the type.
        from prime_rl.trainer.rl.loss import LossOutputs as PrimeLossOutputs
    except ImportError:
        return LossOutputs(result.loss, result.metrics)
    return PrimeLossOutputs(loss=result.loss, metrics=result.metrics)
