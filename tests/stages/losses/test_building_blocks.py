"""What the composed trainer builds on: the gradient reaches the student alone, and padding changes nothing."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from parity.kernels.hidden_divergence import hidden_divergence
from parity.kernels.jsd import divergence_loss
from parity.kernels.preference import LOSS_TYPES, DpoOptions, dpo_losses, label_log_probs
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from trl.trainer.utils import selective_log_softmax

from stages.losses import (
    EopdOptions,
    Head,
    PairLogProbs,
    aggregation_weights,
    eopd_loss,
    self_distillation_loss,
    simpo_loss,
    soft_targets,
    taid_loss,
    token_log_probs,
)
from tests.stages.losses.samples import log_probs, logits

IDS = torch.tensor([[1, 4, 2], [0, 3, 5]])
MASK = torch.tensor([[1, 1, 0], [1, 1, 1]])


def _self_distillation(student: Tensor, teacher: Tensor) -> Tensor:
    return self_distillation_loss(student, teacher, aggregation_weights(MASK, "token-mean"), top_k=3)[0]


def _eopd(student: Tensor, teacher: Tensor) -> Tensor:
    own, other = token_log_probs(student, IDS), token_log_probs(teacher, IDS)
    soft = soft_targets(student, teacher, top_k=3)
    return eopd_loss(own, own, other, MASK, soft, EopdOptions(entropy_threshold=0.0))[0]


CHANNELS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "jsd": lambda student, teacher: divergence_loss(student, teacher, MASK),
    "sdpo": _self_distillation,
    "taid": lambda student, teacher: taid_loss(student, teacher, MASK, 0.4, skip_masked=True),
    "eopd": _eopd,
}


@pytest.mark.parametrize("name", CHANNELS)
def test_the_gradient_reaches_the_student_at_counted_tokens_and_never_the_teacher(name: str) -> None:
    student, teacher = logits(0, 2, 3, 6, wants_gradient=True), logits(1, 2, 3, 6, wants_gradient=True)
    CHANNELS[name](student, teacher).backward()
    reached = student.grad.abs().sum(-1) > 1e-9
    assert torch.equal(reached, MASK.bool()) and teacher.grad is None


@pytest.mark.parametrize("name", CHANNELS)
def test_padding_changes_nothing(name: str) -> None:
    """What stands at masked positions has no influence, infinities included."""
    student, teacher = logits(0, 2, 3, 6), logits(1, 2, 3, 6)
    loss = CHANNELS[name](student, teacher)
    for tensor in (student, teacher):
        tensor[0, 2] = logits(7, 6) * 100
    assert torch.equal(CHANNELS[name](student, teacher), loss)


def test_padding_of_infinite_logits_changes_nothing_in_the_divergences() -> None:
    student, teacher = logits(0, 2, 3, 6), logits(1, 2, 3, 6)
    names = ("jsd", "sdpo", "taid")
    losses = [CHANNELS[name](student, teacher) for name in names]
    student[0, 2, 1:], teacher[0, 2, :-1] = -torch.inf, -torch.inf
    assert all(torch.equal(CHANNELS[name](student, teacher), loss) for name, loss in zip(names, losses, strict=True))


@pytest.mark.parametrize("loss_type", LOSS_TYPES)
def test_dpo_reaches_the_policy_and_not_the_reference(loss_type: str) -> None:
    chosen, rejected, *reference = (log_probs(seed, 3, wants_gradient=True) for seed in range(4))
    counts = torch.tensor([2, 3, 4]), torch.tensor([1, 5, 2])
    losses = dpo_losses(PairLogProbs(chosen, rejected, *reference, *counts), loss_type, DpoOptions(label_smoothing=0.1))
    losses.mean().backward()
    assert losses.shape == (3,) and chosen.grad.abs().sum() > 0 and rejected.grad.abs().sum() > 0
    assert reference[0].grad is None and reference[1].grad is None


def test_simpo_from_logits() -> None:
    student = logits(0, 2, 3, 6, wants_gradient=True)
    chosen = label_log_probs(student, torch.tensor([[1, 4, 2], [-100, 3, -100]]))
    rejected = label_log_probs(student, torch.tensor([[1, 2, -100], [-100, 1, 1]]))
    simpo_loss(chosen, rejected).losses.mean().backward()
    assert torch.equal(student.grad[:, -1], torch.zeros(2, 6, dtype=torch.float64))
    assert (student.grad[:, 0].abs().sum(-1) > 0).all()


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_token_log_probs_are_those_of_the_whole_table(temperature: float) -> None:
    student = logits(0, 2, 3, 6, wants_gradient=True)
    table = (student / temperature).log_softmax(-1).gather(-1, IDS.unsqueeze(-1)).squeeze(-1)
    got = token_log_probs(student, IDS, temperature=temperature)
    torch.testing.assert_close(got, table, rtol=1e-13, atol=1e-13)
    gradients = [torch.autograd.grad(values.square().sum(), student)[0] for values in (got, table)]
    torch.testing.assert_close(*gradients, rtol=1e-12, atol=1e-13)


class Counted(TorchDispatchMode):
    """Counts operations, each of which is a kernel or a view."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += 1
        return func(*args, **(kwargs or {}))


def test_token_log_probs_take_as_many_operations_for_many_tokens_as_for_few() -> None:
    counts = []
    for tokens in (4, 400):
        table = torch.randn(tokens, 1000, generator=torch.Generator().manual_seed(0)).requires_grad_()
        ids = torch.arange(tokens)
        with Counted() as counted:
            found = token_log_probs(table, ids)
            found.sum().backward()
        ours, table.grad = table.grad, None
        expected = selective_log_softmax(table, ids)  # token by token
        expected.sum().backward()
        assert torch.equal(found, expected)
        assert ours is not None and torch.equal(ours, table.grad)
        counts.append(counted.count)
    assert counts[0] == counts[1] <= 40


def test_hidden_states_give_the_divergence_of_their_logits() -> None:
    hidden, weight = logits(0, 2, 3, 4, wants_gradient=True), logits(1, 6, 4, wants_gradient=True)
    teacher_hidden, teacher_weight = logits(2, 2, 3, 5), logits(3, 6, 5)
    result = hidden_divergence(hidden, teacher_hidden, Head(weight), Head(teacher_weight), MASK, beta=0.5)
    expected = divergence_loss(hidden @ weight.T, teacher_hidden @ teacher_weight.T, MASK)
    torch.testing.assert_close(result.loss, expected, rtol=1e-12, atol=0)
    for ours, theirs in zip(*(torch.autograd.grad(x, (hidden, weight)) for x in (result.loss, expected)), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-11, atol=1e-13)
