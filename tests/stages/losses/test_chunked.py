"""The chunked sum is the plain sum: same loss, same gradients, for any chunk, mask and further parameters."""

from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from parity.kernels.hidden_divergence import hidden_divergence
from parity.kernels.jsd import generalized_jsd
from torch import Tensor

from stages.losses.hidden import Head
from stages.losses.reduction import token_sum
from stages.losses.sdpo import self_distillation_loss
from stages.losses.taid import taid_loss
from tests.stages.losses.samples import gradient, logits

TOKENS, VOCABULARY = 7, 11


def per_token(student: Tensor, teacher: Tensor, *parameters: Tensor, seen: list[int] | None = None) -> Tensor:
    """A loss that mixes every entry of a row; records how many rows it was given."""
    if seen is not None:
        seen.append(len(student))
    student = sum(parameters, student)
    loss = (student.log_softmax(-1) * teacher.softmax(-1)).sum(-1)
    return torch.stack([loss, student.detach().sum(-1)], dim=-1)


@settings(max_examples=30, deadline=None)
@given(chunk=st.integers(1, 9), bits=st.integers(0, 2**TOKENS - 1))
def test_chunks_equal_the_plain_sum(chunk: int, bits: int) -> None:
    weights = torch.tensor([(bits >> i & 1) * (i + 0.5) for i in range(TOKENS)], dtype=torch.float64)
    results = []
    for chunk_tokens in (None, chunk):
        student = logits(0, TOKENS, VOCABULARY, wants_gradient=True)
        total, table = token_sum(per_token, student, logits(1, TOKENS, VOCABULARY), weights, chunk_tokens=chunk_tokens)
        results.append((total, table, *gradient(3 * total, student)))
    for plain, chunked in zip(*results, strict=True):
        torch.testing.assert_close(chunked, plain, rtol=1e-13, atol=1e-13)


def test_no_more_rows_than_a_chunk_are_ever_expanded() -> None:
    seen: list[int] = []
    weights = torch.ones(TOKENS, dtype=torch.float64)
    student = logits(0, TOKENS, VOCABULARY, wants_gradient=True)
    total, _ = token_sum(partial(per_token, seen=seen), student, logits(1, TOKENS, VOCABULARY), weights, chunk_tokens=3)
    total.backward()
    assert seen == [3, 3, 1]


def test_parameters_get_the_plain_gradient_and_the_teacher_none() -> None:
    results = []
    for chunk_tokens in (None, 2):
        shift, teacher = logits(2, VOCABULARY, wants_gradient=True), logits(1, TOKENS, VOCABULARY, wants_gradient=True)
        student, weights = logits(0, TOKENS, VOCABULARY), torch.ones(TOKENS, dtype=torch.float64)
        total, _ = token_sum(per_token, student, teacher, weights, shift, chunk_tokens=chunk_tokens)
        total.backward()
        assert teacher.grad is None
        results.append(shift.grad)
    torch.testing.assert_close(results[1], results[0], rtol=1e-13, atol=1e-13)


def test_a_retained_graph_gives_the_same_gradient_twice() -> None:
    student, weights = logits(0, TOKENS, VOCABULARY, wants_gradient=True), torch.ones(TOKENS, dtype=torch.float64)
    total, _ = token_sum(per_token, student, logits(1, TOKENS, VOCABULARY), weights, chunk_tokens=2)
    first = torch.autograd.grad(2.0 * total, student, retain_graph=True)[0]
    kept = first.clone()
    assert torch.equal(torch.autograd.grad(2.0 * total, student)[0], kept) and torch.equal(first, kept)


def test_no_gradient_is_computed_where_none_is_wanted() -> None:
    seen_gradient: list[bool] = []

    def spy(student: Tensor, teacher: Tensor) -> Tensor:
        seen_gradient.append(torch.is_grad_enabled() and student.requires_grad)
        return per_token(student, teacher)

    weights = torch.ones(TOKENS, dtype=torch.float64)
    total, _ = token_sum(spy, logits(0, TOKENS, VOCABULARY), logits(1, TOKENS, VOCABULARY), weights, chunk_tokens=4)
    assert not total.requires_grad and not any(seen_gradient)


@pytest.mark.parametrize("chunk_tokens", [None, 2])
def test_a_nan_at_a_skipped_token_stays_there_and_spreads_from_a_multiplied_one(chunk_tokens: int | None) -> None:
    student, weights = logits(0, TOKENS, VOCABULARY), torch.ones(TOKENS, dtype=torch.float64)
    student[2], weights[2] = torch.nan, 0.0
    options = {"chunk_tokens": chunk_tokens}
    skipped, _ = token_sum(per_token, student.requires_grad_(), logits(1, TOKENS, VOCABULARY), weights, **options)
    assert skipped.isfinite() and gradient(skipped, student)[0][2].eq(0).all()
    multiplied, _ = token_sum(per_token, student, logits(1, TOKENS, VOCABULARY), weights, skip_masked=False, **options)
    assert multiplied.isnan()


KERNELS = {
    "jsd": partial(generalized_jsd, beta=0.3, temperature=1.3),
    "jsd top-k clip": partial(generalized_jsd, top_k=4, token_clip=0.05),
    "taid": lambda s, t, labels, **options: taid_loss(s.float(), t.float(), labels + 1, 0.4, **options),
    "sdpo": lambda s, t, labels, **options: self_distillation_loss(s, t, (labels >= 0).double(), **options)[0],
    "sdpo top-k": lambda s, t, labels, **options: self_distillation_loss(
        s, t, (labels >= 0).double(), top_k=3, **options
    )[0],
}


@pytest.mark.parametrize("name", KERNELS)
@pytest.mark.parametrize("chunk", [1, 4, 64])
def test_vocabulary_sized_losses_are_the_same_in_chunks(name: str, chunk: int) -> None:
    labels = torch.tensor([[0, 1, -1, 2], [3, -1, 0, 0], [1, 1, 1, 1]]).where(torch.arange(4) < 3, 1)
    results = []
    for chunk_tokens in (None, chunk):
        student = logits(0, 3, 4, VOCABULARY, wants_gradient=True)
        loss = KERNELS[name](student, logits(1, 3, 4, VOCABULARY), labels, chunk_tokens=chunk_tokens)
        results.append((loss.double(), *gradient(loss, student)))
    tolerance = 1e-6 if name == "taid" else 1e-12
    for plain, chunked in zip(*results, strict=True):
        torch.testing.assert_close(chunked, plain, rtol=tolerance, atol=tolerance)


def test_half_precision_logits_are_computed_in_float32_and_get_a_half_precision_gradient() -> None:
    student, teacher = logits(0, 2, 3, 50).bfloat16().requires_grad_(), logits(1, 2, 3, 50).bfloat16()
    loss = generalized_jsd(student, teacher)
    wide = student.detach().float().requires_grad_()
    expected = generalized_jsd(wide, teacher.float())
    assert torch.equal(loss, expected)
    assert torch.equal(gradient(loss, student)[0], gradient(expected, wide)[0].bfloat16())


def test_the_head_of_a_bfloat16_model_gets_its_gradient_summed_in_float32() -> None:
    hidden, mask = logits(0, 2, 40, 8).bfloat16(), torch.ones(2, 40)
    teacher = Head(logits(2, 20, 8).bfloat16())
    grads = []
    for chunk_tokens in (None, 1):
        weight = logits(1, 20, 8).bfloat16().requires_grad_()
        result = hidden_divergence(hidden, hidden, Head(weight), teacher, mask, chunk_tokens=chunk_tokens)
        grads.append(gradient(result.loss, weight)[0].float())
    torch.testing.assert_close(grads[1], grads[0], rtol=2e-2, atol=1e-4)
