"""SDPO from hidden states and output heads: no model's logits exist beyond a chunk of tokens."""

from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from stages.losses.hidden import FEWEST_CHUNK_TOKENS, HEAD_CHUNK_TOKENS, Predictors, logits_sum
from stages.losses.sdpo import logits_loss
from stages.losses.shapes import RowTable, RowValues, Scalar
from stages.losses.teachers import trust_region_logits


@dataclass(frozen=True)
class SelfTaught:
    """What teaches: one model's predictions or, in a trust region, lerp(kept, current, share) of two models' logits."""

    kept: Predictors
    current: Predictors | None = None
    share: float = 0.0


def sdpo_from_hidden(
    student: Predictors,
    teacher: SelfTaught,
    weights: RowValues,
    *,
    alpha: float = 0.5,
    top_k: int | None = None,
    add_tail: bool = True,
    temperature: float = 1.0,
    chunk_tokens: int | None = None,
) -> tuple[Scalar, RowValues]:
    """self_distillation_loss over N tokens: the sum of weight * loss, and the loss a token (detached), in nats.

    Tokens of weight 0 are not computed, and their loss is given as 0. Gradient to the student's hidden states and head
    alone. The two models of a trust region share a vocabulary. chunk_tokens None: a 64th of the tokens, but 16 to 64 of
    them, half of what `logits_sum` takes, as the mixture has twice as many temporaries.
    """
    chunk_tokens = chunk_tokens or min(max(len(weights) // 64, FEWEST_CHUNK_TOKENS // 2), HEAD_CHUNK_TOKENS // 2)
    loss = partial(logits_loss, alpha=alpha, top_k=top_k, add_tail=add_tail, temperature=temperature)
    current = teacher.current
    beside = () if current is None else (current.hidden.detach(),)

    def per_token(own: Tensor, kept: Tensor, *rows: Tensor) -> RowTable:
        if current is not None:
            with torch.no_grad():
                kept = trust_region_logits(kept, current.head.logits(rows[0])[..., : kept.shape[-1]], teacher.share)
        return loss(own, kept).unsqueeze(-1)

    total, table = logits_sum(per_token, student, teacher.kept, weights, *beside, chunk_tokens=chunk_tokens)
    return total, table[:, 0]
