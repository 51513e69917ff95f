"""TRL's chunked divergence: mean divergence a token from the hidden states and output heads of both models."""

from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional as F

from stages.losses.hidden import HEAD_CHUNK_TOKENS, Head, elementwise_divergence
from stages.losses.reduction import Hidden, RowTable, Scalar, TeacherHidden, TokenMask, token_sum


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
    own = head_log_probs(head, student_rows, temperature)
    with torch.no_grad():
        other = head_log_probs(teacher, teacher_rows, temperature)
        entropy = -(own.exp() * own).sum(-1)
    return torch.stack([elementwise_divergence(own, other, beta).sum(-1), entropy], dim=-1)


def head_log_probs(head: Head, hidden: Tensor, temperature: float) -> Tensor:
    """Log-probs [..., v] of the next token from hidden states [..., h], in nats; computed in float32 at least."""
    hidden, weight = (x.to(torch.promote_types(x.dtype, torch.float32)) for x in (hidden, head.weight))
    logits = F.linear(hidden, weight) * head.scale
    if head.bias is not None:
        logits = logits + head.bias.to(torch.promote_types(head.bias.dtype, torch.float32)) * head.scale
    if head.softcap is not None:
        logits = head.softcap * torch.tanh(logits / head.softcap)
    return F.log_softmax(logits / temperature, dim=-1)
