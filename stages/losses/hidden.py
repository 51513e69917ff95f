"""Divergences between next-token distributions, and sums over tokens taken from hidden states and output heads.

`logits_sum` computes the losses of SDPO, TAID and EOPD: neither model's logits exist beyond one chunk of tokens.
"""

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn import functional as F

from stages.backends import resources
from stages.losses.reduction import (
    Distribution,
    PerToken,
    Rows,
    RowTable,
    RowValues,
    Scalar,
    Values,
    WithTail,
    token_sum,
)

LARGEST_LOG_MASS = -1e-7  # a support that holds all the mass still leaves a tail of 1e-7, so that its log is finite


def widened(logits: Values) -> Values:
    """Return half-precision values as float32; float32 and float64 untouched. Meant for one chunk at a time."""
    return logits.float() if logits.dtype in (torch.float16, torch.bfloat16) else logits


def elementwise_divergence(student: Distribution, teacher: Distribution, teacher_weight: float) -> Distribution:
    """Return entries of the generalised Jensen-Shannon divergence; sum over the last dimension for nats per token.

    student, teacher: log-probs. teacher_weight w:
        0    pT (lT - lS)                             forward KL(T || S)
        1    pS (lS - lT)                             reverse KL(S || T)
        else w pT (lT - lM) + (1-w) pS (lS - lM),     M = w pT + (1-w) pS
    The interior vanishes as w nears 0 or 1, so the family is discontinuous there. An entry where p = 0 is 0 * -inf =
    NaN, as upstream.
    Source: siyan-zhao/OPSD 590ec26 opsd_trainer.py; the same in TRL 1.16 and, with alpha for w, lasgroup/SDPO 0e6d510
    core_algos.py.
    """
    # torch's kl_div takes (log q, log p) and gives p (log p - log q): the arguments are those of KL(p || q) swapped.
    if teacher_weight == 0:
        return F.kl_div(student, teacher, reduction="none", log_target=True)
    if teacher_weight == 1:
        return F.kl_div(teacher, student, reduction="none", log_target=True)
    # Mixed in log space: far in the tail exp of a log-prob underflows, and its log would be -inf.
    mixture = torch.logaddexp(student + math.log1p(-teacher_weight), teacher + math.log(teacher_weight))
    to_teacher = F.kl_div(mixture, teacher, reduction="none", log_target=True)
    to_student = F.kl_div(mixture, student, reduction="none", log_target=True)
    return teacher_weight * to_teacher + (1 - teacher_weight) * to_student


def with_tail(log_probs: Distribution) -> WithTail:
    """Append log(1 - sum p), the mass outside the support; without gradient where that is below 1e-7.

    Source: lasgroup/SDPO 0e6d510 core_algos.py add_tail; TRL 1.16 experimental/sdpo/loss_utils.py, experimental/iw_opd.
    """
    log_mass = torch.logsumexp(log_probs, dim=-1, keepdim=True).clamp(max=LARGEST_LOG_MASS)
    # -expm1(log m) is 1 - m without cancellation, which matters as the support usually holds nearly all mass.
    return torch.cat([log_probs, torch.log(-torch.expm1(log_mass))], dim=-1)


def renormalised(log_probs: Distribution) -> Distribution:
    """Return log-probs conditional on the support: the tail is dropped."""
    return log_probs - torch.logsumexp(log_probs, dim=-1, keepdim=True)


HEAD_CHUNK_TOKENS = 128
"""Larger than for logits on a CPU: every chunk adds one [vocabulary, width] product to the head's gradient."""
LARGEST_CHUNK_TOKENS = 2048
"""On a GPU. A chunk reads both heads and their gradient anew, and from about 500 tokens on that takes less time than
its matrix products."""


def chunk_size(num_tokens: int, vocabulary: int, device: torch.device, tables: int = 8) -> int:
    """Return how many tokens to compute at once, where that takes `tables` float32 tables [tokens, vocabulary].

    On a CPU a 32nd of the tokens (with 8 tables), but 32 to 128: the tables then take a quarter of one for all tokens
    from 1,024 tokens on, and their parts stay in the processor's cache. On a GPU as many as an eighth of what is free
    holds, in even chunks.
    """
    free = resources.gpu_free(device)
    if not free:
        return min(max(num_tokens // (4 * tables), 256 // tables), 8 * HEAD_CHUNK_TOKENS // tables)
    most = min(max(free // 8 // (4 * tables * vocabulary), 256 // tables), LARGEST_CHUNK_TOKENS)
    count = -(-num_tokens // most)
    return max(-(-num_tokens // max(count, 1)), 1)


@dataclass(frozen=True)
class Head:
    """Output head: softcap * tanh(scale * (hidden @ weight.T + bias) / softcap), without softcap the inner part."""

    weight: Tensor
    bias: Tensor | None = None
    scale: float = 1.0
    softcap: float | None = None

    def logits(self, hidden: Tensor) -> Tensor:
        """Return logits [..., v], computed as the model does, in its own dtype, then widened to float32 at least."""
        # The product in the model's dtype, or the logits would differ from those that it samples from.
        raw = widened(F.linear(hidden, self.weight, self.bias) * self.scale)
        return raw if self.softcap is None else self.softcap * torch.tanh(raw / self.softcap)

    def cut(self, vocabulary: int) -> "Head":
        """Return the head of the first `vocabulary` tokens; the rest is padding that no tokenizer knows."""
        if len(self.weight) == vocabulary:
            return self  # the parameter itself: the gradient of a slice is a second, zero-padded tensor of its size
        return replace(
            self, weight=self.weight[:vocabulary], bias=None if self.bias is None else self.bias[:vocabulary]
        )


@dataclass(frozen=True)
class Predictors:
    """Hidden states [n, h] that predict n tokens, and the head that makes logits of them."""

    hidden: Rows
    head: Head


def logits_sum(
    per_token: PerToken,
    student: Predictors,
    teacher: Predictors,
    weights: RowValues,
    *beside: Tensor,
    chunk_tokens: int | None = None,
) -> tuple[Scalar, RowTable]:
    """Sum weight * per_token(student logits, teacher logits, *beside) over tokens; return sum and table of values.

    Both logits are [chunk, v] in float32 at least, over the tokens that both models know. Tokens of weight 0 are not
    computed at all. Gradient to the student's hidden states and head. chunk_tokens None: by device and memory.
    """
    vocabulary = min(len(student.head.weight), len(teacher.head.weight))
    size = chunk_tokens or chunk_size(len(weights), vocabulary, weights.device)
    own, other = student.head.cut(vocabulary), teacher.head.cut(vocabulary)
    parameters = (own.weight,) if own.bias is None else (own.weight, own.bias)

    def through_heads(student_rows: Tensor, teacher_rows: Tensor, *rest: Tensor) -> RowTable:
        # token_sum passes leaves of its own for the parameters, whose gradients it collects chunk by chunk.
        given, (weight, *bias) = rest[: len(beside)], rest[len(beside) :]
        with torch.no_grad():
            teacher_logits = other.logits(teacher_rows)
        head = replace(own, weight=weight, bias=next(iter(bias), None))
        return per_token(head.logits(student_rows), teacher_logits, *given)

    return token_sum(
        through_heads, student.hidden, teacher.hidden, weights, *parameters, beside=beside, chunk_tokens=size
    )
