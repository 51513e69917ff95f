"""Losses taken from hidden states and output heads: neither model's logits exist beyond one chunk of tokens.

`logits_sum` is what the channels SDPO, TAID and EOPD are computed by; `hidden_divergence` serves the parity check and
`benchmarks/losses.py` only.
"""

from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional as F

from stages.losses.chunked import PerToken, token_sum
from stages.losses.divergence import elementwise_divergence, widened
from stages.losses.shapes import Hidden, Rows, RowTable, RowValues, Scalar, TeacherHidden, TokenMask

# Larger than for logits: every chunk adds one [vocabulary, width] product to the head's gradient.
HEAD_CHUNK_TOKENS = 128
FEWEST_CHUNK_TOKENS = 32


@dataclass(frozen=True)
class Head:
    """Output head: softcap * tanh(scale * (hidden @ weight.T + bias) / softcap) / temperature, in float32 at least."""

    weight: Tensor
    bias: Tensor | None = None
    scale: float = 1.0
    softcap: float | None = None

    def log_probs(self, hidden: Tensor, temperature: float) -> Tensor:
        """Log-probs [..., v] of the next token from hidden states [..., h], in nats."""
        logits = F.linear(_at_least_float32(hidden), _at_least_float32(self.weight)) * self.scale
        if self.bias is not None:
            logits = logits + _at_least_float32(self.bias) * self.scale
        if self.softcap is not None:
            logits = self.softcap * torch.tanh(logits / self.softcap)
        return F.log_softmax(logits / temperature, dim=-1)

    def logits(self, hidden: Tensor) -> Tensor:
        """Logits [..., v] as the model itself gives them, in its own dtype, then widened to float32 at least."""
        raw = widened(F.linear(hidden, self.weight, self.bias) * self.scale)
        return raw if self.softcap is None else self.softcap * torch.tanh(raw / self.softcap)

    def cut(self, vocabulary: int) -> "Head":
        """The same head for the first so many tokens; the rest is padding that no tokenizer knows."""
        if len(self.weight) == vocabulary:
            return self
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
    """Sum over tokens of weight * per_token(student logits, teacher logits, *beside), and the table of its values.

    Both logits are [chunk, v] in float32 at least, over the tokens that both models know. Tokens of weight 0 are not
    computed at all. Gradient to the student's hidden states and head. chunk_tokens None: a 32nd of the tokens, but 32
    to 128 of them: about eight temporaries then take a quarter of one [n, v] table from n = 1024 on.
    """
    size = chunk_tokens or min(max(len(weights) // 32, FEWEST_CHUNK_TOKENS), HEAD_CHUNK_TOKENS)
    vocabulary = min(len(student.head.weight), len(teacher.head.weight))
    own, other = student.head.cut(vocabulary), teacher.head.cut(vocabulary)
    parameters = (own.weight,) if own.bias is None else (own.weight, own.bias)

    def through_heads(student_rows: Tensor, teacher_rows: Tensor, *rest: Tensor) -> RowTable:
        given, (weight, *bias) = rest[: len(beside)], rest[len(beside) :]
        with torch.no_grad():
            teacher_logits = other.logits(teacher_rows)
        head = replace(own, weight=weight, bias=next(iter(bias), None))
        return per_token(head.logits(student_rows), teacher_logits, *given)

    return token_sum(
        through_heads, student.hidden, teacher.hidden, weights, *parameters, beside=beside, chunk_tokens=size
    )


@dataclass(frozen=True)
class HiddenDivergence:
    """loss with gradient; the sum of the student's entropies in nats; the number of tokens."""

    loss: Scalar
    entropy_sum: Scalar
    num_tokens: int


def hidden_divergence(
    student_hidden: Hidden,
    teacher_hidden: TeacherHidden,
    student: Head,
    teacher: Head,
    mask: TokenMask,
    *,
    beta: float = 1.0,
    temperature: float = 1.0,
    num_items: Tensor | int | None = None,
    chunk_tokens: int | None = HEAD_CHUNK_TOKENS,
) -> HiddenDivergence:
    """Mean divergence a token over mask != 0, or sum / num_items; 0 on an empty mask. beta is the teacher's weight.

    Gradient to the student's hidden states, weight and bias. The models may differ in width, not in vocabulary.
    Serves the parity check only.
    Source: TRL 1.16 trainer/distillation_trainer.py _chunked_divergence_loss, kernels/chunked_divergence.py.
    """
    active = (mask != 0).flatten()
    rows = student_hidden.flatten(0, 1), teacher_hidden.flatten(0, 1)
    weights = active.to(torch.promote_types(student_hidden.dtype, torch.float32))
    per_token = partial(_per_token, student, teacher, beta, temperature)
    parameters = (student.weight,) if student.bias is None else (student.weight, student.bias)
    total, table = token_sum(per_token, *rows, weights, *parameters, chunk_tokens=chunk_tokens)
    count = int(active.sum())
    return HiddenDivergence(total / (max(count, 1) if num_items is None else num_items), table[:, 1].sum(), count)


def _per_token(
    student: Head,
    teacher: Head,
    beta: float,
    temperature: float,
    student_rows: Tensor,
    teacher_rows: Tensor,
    *parameters: Tensor,
) -> RowTable:
    head = replace(student, weight=parameters[0], bias=parameters[1] if len(parameters) == 2 else None)
    own = head.log_probs(student_rows, temperature)
    with torch.no_grad():
        other = teacher.log_probs(teacher_rows, temperature)
        entropy = -(own.exp() * own).sum(-1)
    return torch.stack([elementwise_divergence(own, other, beta).sum(-1), entropy], dim=-1)


def _at_least_float32(values: Tensor) -> Tensor:
    return values.to(torch.promote_types(values.dtype, torch.float32))
