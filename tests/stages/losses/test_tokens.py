"""Sums over tokens in chunks are plain sums with plain gradients, hold few logits, and leave masked tokens out."""

import weakref
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given, settings, strategies as st
from jaxtyping import TypeCheckError
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from trl.trainer.utils import selective_log_softmax

from composer_stages.losses.distillation import Taught, divergence, divergence_sum, eopd, taid
from composer_stages.losses.tokens import Head, Listed, Predictors, chunk_size, over_tokens, token_log_probs, token_sum
from tests.stages.losses.samples import gradient, logits, predictors, trained

TOKENS, VOCABULARY = 7, 11


def per_token(student: Tensor, teacher: Tensor, *parameters: Tensor, seen: list[int] | None = None) -> Tensor:
    """A loss that mixes every entry of a row; records how many rows it was given."""
    if seen is not None:
        seen.append(len(student))
    student = sum(parameters, student)
    loss = (student.log_softmax(-1) * teacher.softmax(-1)).sum(-1)
    return torch.stack([loss, student.detach().sum(-1)], dim=-1)


@settings(max_examples=30)
@given(chunk=st.integers(1, 9), bits=st.integers(0, 2**TOKENS - 1))
def test_chunks_equal_the_plain_sum(chunk: int, bits: int) -> None:
    weights = torch.tensor([(bits >> i & 1) * (i + 0.5) for i in range(TOKENS)], dtype=torch.float64)
    student, teacher = logits(0, TOKENS, VOCABULARY, wants_gradient=True), logits(1, TOKENS, VOCABULARY)
    total, table = token_sum(per_token, student, teacher, weights, chunk_tokens=chunk)
    plain = per_token(student, teacher) * (weights != 0)[:, None]
    expected = (plain[:, 0] * weights).sum()
    torch.testing.assert_close(total, expected, rtol=1e-13, atol=1e-13)
    torch.testing.assert_close(table, plain.detach(), rtol=1e-13, atol=1e-13)
    torch.testing.assert_close(gradient(3 * total, student), gradient(3 * expected, student), rtol=1e-13, atol=1e-13)


def test_no_more_rows_than_a_chunk_are_expanded_and_masked_ones_never() -> None:
    seen: list[int] = []
    weights = torch.tensor([1, 1, 0, 1, 1, 1, 1, 1, 1], dtype=torch.float64)
    kernel = partial(per_token, seen=seen)
    over_tokens(kernel, predictors(0), predictors(10), weights, chunk_tokens=3)[0].backward()
    assert seen == [3, 3, 2]


def test_parameters_get_the_plain_gradient_and_the_teacher_none() -> None:
    shift, teacher = logits(2, VOCABULARY, wants_gradient=True), logits(1, TOKENS, VOCABULARY, wants_gradient=True)
    student, weights = logits(0, TOKENS, VOCABULARY), torch.ones(TOKENS, dtype=torch.float64)
    total, _ = token_sum(per_token, student, teacher, weights, shift, chunk_tokens=2)
    expected = gradient(per_token(student, teacher, shift)[:, 0], shift)[0]
    torch.testing.assert_close(gradient(total, shift)[0], expected, rtol=1e-13, atol=1e-13)
    assert torch.autograd.grad(total, teacher, allow_unused=True, materialize_grads=False)[0] is None


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


def test_a_nan_at_a_masked_token_stays_there() -> None:
    student, weights = logits(0, TOKENS, VOCABULARY), torch.ones(TOKENS, dtype=torch.float64)
    student[2], weights[2] = torch.nan, 0.0
    total, _ = token_sum(per_token, student.requires_grad_(), logits(1, TOKENS, VOCABULARY), weights, chunk_tokens=2)
    assert total.isfinite() and gradient(total, student)[0][2].eq(0).all()


def kernel(student: Tensor, teacher: Tensor) -> Tensor:
    return divergence(student, teacher, beta=0.5)[:, None]


def test_no_tokens_give_zero() -> None:
    student = predictors(0)
    total, _ = over_tokens(kernel, student, predictors(10), torch.zeros(9, dtype=torch.float64))
    assert total == 0 and all(g.eq(0).all() for g in gradient(total, *trained(student)))


@pytest.mark.parametrize("biased", [False, True])
def test_hidden_states_behind_a_head_give_the_sum_of_their_logits(biased: bool) -> None:
    student, teacher, weights = predictors(0, biased=biased), predictors(10), torch.ones(9, dtype=torch.float64)
    tables = [model.head.logits(model.rows) for model in (student, teacher)]
    found = over_tokens(kernel, student, teacher, weights, chunk_tokens=4)[0]
    plain = over_tokens(kernel, *(Predictors(table) for table in tables), weights, chunk_tokens=4)[0]
    torch.testing.assert_close(found, plain, rtol=1e-12, atol=0)
    torch.testing.assert_close(
        gradient(found, *trained(student)), gradient(plain, *trained(student)), rtol=1e-10, atol=1e-13
    )
    assert all(torch.autograd.grad(found, x, allow_unused=True)[0] is None for x in trained(teacher))


def test_heads_of_other_padding_are_compared_on_what_both_know() -> None:
    student, wide, mask = predictors(0), predictors(10, vocabulary=28), torch.ones(9, dtype=torch.float64)
    narrow = Predictors(wide.rows, Head(wide.head.weight[:23], None, 1.5, 2.0))
    expected = over_tokens(kernel, student, narrow, mask)[0]
    torch.testing.assert_close(over_tokens(kernel, student, wide, mask)[0], expected)
    assert gradient(over_tokens(kernel, wide, student, mask)[0], wide.head.weight)[0][23:].eq(0).all()


def test_half_precision_logits_are_computed_in_float32_and_get_a_half_precision_gradient() -> None:
    student, teacher, ones = logits(0, 6, 50).bfloat16().requires_grad_(), logits(1, 6, 50).bfloat16(), torch.ones(6)
    wide = student.detach().float().requires_grad_()
    loss, expected = (over_tokens(kernel, Predictors(own), Predictors(teacher), ones)[0] for own in (student, wide))
    assert torch.equal(loss, expected)
    assert torch.equal(gradient(loss, student)[0], gradient(expected, wide)[0].bfloat16())


def test_the_head_of_a_bfloat16_model_gets_its_gradient_summed_in_float32() -> None:
    hidden, teacher = logits(0, 80, 8).bfloat16(), Head(logits(2, 20, 8).bfloat16())
    grads = []
    for chunk_tokens in (80, 1):
        weight = logits(1, 20, 8).bfloat16().requires_grad_()
        models = Predictors(hidden, Head(weight)), Predictors(hidden, teacher)
        loss, _ = over_tokens(kernel, *models, torch.full((80,), 1 / 80), chunk_tokens=chunk_tokens)
        grads.append(gradient(loss, weight)[0].float())
    torch.testing.assert_close(grads[1], grads[0], rtol=2e-2, atol=1e-4)


class Peak(TorchDispatchMode):
    """The most bytes that tensors made inside held at once."""

    def __init__(self) -> None:
        super().__init__()
        self.held: dict[int, int] = {}
        self.most = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        for value in torch.utils._pytree.tree_leaves(result):
            if isinstance(value, Tensor) and (storage := value.untyped_storage())._cdata not in self.held:
                self.held[storage._cdata] = storage.nbytes()
                weakref.finalize(storage, self.held.pop, storage._cdata, None)
                self.most = max(self.most, sum(self.held.values()))
        return result


def test_the_measure_sees_what_is_held_and_what_is_freed() -> None:
    with Peak() as peak:
        for _ in range(3):
            held = torch.zeros(250) + torch.ones(250)
            del held
    assert 2000 <= peak.most <= 3000


@pytest.mark.parametrize("name", ["taid", "eopd", "sdpo", "sdpo-top-k", "sdpo-trust-region"])
def test_memory_stays_under_half_a_table_of_logits(name: str) -> None:
    """From [N, V] logits the same losses held 3.7 and 5.1 tables; both models' own tables not counted."""
    tokens, vocabulary, width = 1024, 512, 8
    torch.manual_seed(0)
    models = [
        Predictors(torch.randn(tokens, width).requires_grad_(), Head(torch.randn(vocabulary, width).requires_grad_()))
        for _ in range(2)
    ]
    own, ids, old = torch.ones(tokens), torch.zeros(tokens, dtype=torch.long), torch.full((tokens,), -6.0)
    with Peak() as peak:
        if name == "taid":
            loss = taid(*models, own, 0.4)
        elif name.startswith("sdpo"):
            near = (models[1], 0.05) if name == "sdpo-trust-region" else (None, 0.0)
            top_k = 100 if name == "sdpo-top-k" else None
            loss, _ = divergence_sum(models[0], Taught(models[1], *near), own / tokens, top_k=top_k)
        else:
            loss, _ = eopd(*models, ids, old, own, num_tokens=tokens, top_k=16)
        loss.backward()
    assert peak.most < 0.5 * tokens * vocabulary * 4


def test_chunks_are_what_a_cpu_s_cache_and_a_gpu_s_memory_hold() -> None:
    cpu, gpu, vocabulary = torch.device("cpu"), torch.device("cuda"), 151_936
    assert [chunk_size(n, vocabulary, cpu) for n in (0, 9, 2048, 10**6)] == [32, 32, 64, 128]
    assert [chunk_size(n, vocabulary, cpu, tables=16) for n in (9, 2048, 10**6)] == [16, 32, 64]

    def with_free(gib: float, tokens: int, tables: int = 8) -> int:
        return chunk_size(tokens, vocabulary, gpu, tables, free=lambda device: int(gib * 2**30))

    assert [with_free(100, n) for n in (0, 1, 2048, 2500, 8192)] == [1, 1, 2048, 1250, 2048]
    for gib in (2, 8, 20):
        for tables in (8, 16):
            size = with_free(gib, 8192, tables)
            assert 256 // tables < size < 2048
            assert gib * 2**30 / 16 < 4 * tables * vocabulary * size <= gib * 2**30 / 8
    assert with_free(0.01, 8192) == 32, "never less than on a CPU"


IDS = torch.tensor([[1, 4, 2], [0, 3, 5]])


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_token_log_probs_are_those_of_the_whole_table(temperature: float) -> None:
    student = logits(0, 2, 3, 6, wants_gradient=True)
    table = (student / temperature).log_softmax(-1).gather(-1, IDS.unsqueeze(-1)).squeeze(-1)
    got = token_log_probs(student, IDS, temperature=temperature)
    torch.testing.assert_close(got, table, rtol=1e-13, atol=1e-13)
    gradients = [torch.autograd.grad(values.square().sum(), student)[0] for values in (got, table)]
    torch.testing.assert_close(*gradients, rtol=1e-12, atol=1e-13)


def test_what_a_server_does_not_list_has_probability_0() -> None:
    none = -torch.inf
    listed = Listed(torch.tensor([[3.0, 1.0, -0.5, -20.0], [0.0, 4.0, -1.0, -2.0]]), 9).cut(5)
    assert listed.logits(listed.rows[1:]).tolist() == [[-1.0, none, none, none, -2.0]]
    assert listed.logits(listed.rows)[0].tolist() == [none, -20.0, none, -0.5, none]


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
        # TRL's go token by token. A log-prob is right to some eps of its size, up to 10, and so is its probability.
        torch.testing.assert_close(found, expected, rtol=1e-6, atol=0)
        torch.testing.assert_close(ours, table.grad, rtol=1e-5, atol=1e-7)
        counts.append(counted.count)
    assert counts[0] == counts[1] <= 40


def test_shapes_of_signatures_are_checked_in_tests() -> None:
    with pytest.raises(TypeCheckError):
        divergence(logits(0, 3, 5), logits(1, 3, 6), beta=0.5)
    with pytest.raises(TypeCheckError):
        token_log_probs(logits(0, 2, 3, 5), torch.zeros(2, 3))
