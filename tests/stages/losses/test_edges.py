"""What the losses do at the edges: equal distributions, ends of the interpolation, empty masks, infinite logits."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from parity.kernels import distillation_baselines as baselines
from parity.kernels.hidden_divergence import hidden_divergence
from parity.kernels.iw_opd import iw_opd, top_k_jsd
from parity.kernels.jsd import divergence_loss, generalized_jsd
from parity.sdpo import mean_of_sequence_means

from stages.losses import (
    EopdOptions,
    SoftTargets,
    aggregation_weights,
    eopd_loss,
    importance_weights,
    self_distillation_loss,
    soft_targets,
    taid_loss,
)
from stages.losses.hidden import Head, elementwise_divergence, renormalised, with_tail
from stages.losses.prime_rl import DefaultOptions, PackedTokens, default_loss
from stages.losses.reduction import aggregate
from tests.stages.losses.samples import gradient, log_probs, logits

BETAS = [0, 0.1, 0.5, 0.9, 1]
EMPTY = torch.full((2, 3), -100)


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 1000), beta=st.sampled_from(BETAS), temperature=st.floats(0.3, 3.0))
def test_divergence_is_not_negative_and_vanishes_only_at_equal_distributions(
    seed: int, beta: float, temperature: float
) -> None:
    student, teacher = logits(seed, 1, 3, 5), logits(seed + 1, 1, 3, 5)
    assert generalized_jsd(student, teacher, beta=beta, temperature=temperature) > 0
    shifted = student + logits(seed + 2, 1, 3, 1)
    assert abs(generalized_jsd(student, shifted, beta=beta, temperature=temperature)) < 1e-12


@settings(max_examples=20, deadline=None)
@given(seed=st.integers(0, 1000), beta=st.floats(0.01, 0.99))
def test_the_interior_is_bounded_and_symmetric(seed: int, beta: float) -> None:
    """At most the entropy of the mixing weights; exchanging the sides exchanges the weights."""
    student, teacher = 20 * logits(seed, 1, 3, 5), 20 * logits(seed + 1, 1, 3, 5)
    loss = generalized_jsd(student, teacher, torch.zeros(1, 3, dtype=torch.long), beta=beta)
    assert loss <= -(beta * math.log(beta) + (1 - beta) * math.log1p(-beta)) + 1e-12
    swapped = generalized_jsd(teacher, student, torch.zeros(1, 3, dtype=torch.long), beta=1 - beta)
    torch.testing.assert_close(loss, swapped, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("beta", [0, 1])
def test_the_ends_are_the_two_kls_and_the_interior_does_not_approach_them(beta: int) -> None:
    student, teacher = logits(0, 1, 3, 5), logits(1, 1, 3, 5)
    log_s, log_t = student.log_softmax(-1), teacher.log_softmax(-1)
    kl = (log_t.exp() * (log_t - log_s) if beta == 0 else log_s.exp() * (log_s - log_t)).sum() / 3
    ones = torch.ones(1, 3)
    torch.testing.assert_close(divergence_loss(student, teacher, ones, beta=float(beta)), kl, rtol=1e-12, atol=0)
    assert divergence_loss(student, teacher, ones, beta=abs(beta - 1e-6)) < 1e-4 * kl


def test_forward_and_reverse_are_not_exchanged() -> None:
    """The teacher is sure, the student is not: forward KL is log 2, reverse KL is large."""
    student, teacher = torch.zeros(1, 1, 2), torch.tensor([[[0.0, -30.0]]])
    mask = torch.ones(1, 1)
    assert divergence_loss(student, teacher, mask, beta=0.0).item() == pytest.approx(math.log(2), abs=1e-6)
    assert divergence_loss(student, teacher, mask, beta=1.0).item() > 14


@pytest.mark.parametrize("chunk_tokens", [None, 2])
def test_an_empty_mask_is_nan_as_upstream_and_zero_for_training(chunk_tokens: int | None) -> None:
    student, teacher = logits(0, 2, 3, 5, wants_gradient=True), logits(1, 2, 3, 5)
    zeros, options = torch.zeros(2, 3), {"chunk_tokens": chunk_tokens}
    upstream = [
        generalized_jsd(student, teacher, EMPTY, **options),
        taid_loss(student, teacher, zeros, 0.4, **options),
        eopd_loss(log_probs(0, 2, 3), log_probs(1, 2, 3), log_probs(2, 2, 3), zeros)[0],
        aggregate(log_probs(0, 2, 3), zeros, "seq-mean-token-mean"),
    ]
    assert all(loss.isnan() for loss in upstream)
    training = [
        divergence_loss(student, teacher, zeros, **options),
        taid_loss(student, teacher, zeros, 0.4, min_tokens=1, **options),
        self_distillation_loss(student, teacher, aggregation_weights(zeros, "token-mean", min_tokens=1.0), **options)[
            0
        ],
        top_k_jsd(student, teacher, EMPTY, top_k=2, **options),
        iw_opd(student, torch.zeros(2, 3, dtype=torch.long), EMPTY, log_probs(0, 2, 3)).loss,
    ]
    for loss in training:
        assert loss == 0 and gradient(loss, student)[0].eq(0).all()
    own = log_probs(0, 2, 3, wants_gradient=True)
    assert eopd_loss(own, log_probs(1, 2, 3), log_probs(2, 2, 3), zeros, min_tokens=1.0)[0] == 0
    assert mean_of_sequence_means(own, zeros) == 0


def test_an_empty_mask_of_hidden_states_is_zero() -> None:
    hidden, head = logits(0, 2, 3, 4, wants_gradient=True), Head(logits(1, 5, 4))
    result = hidden_divergence(hidden, hidden.detach(), head, head, torch.zeros(2, 3))
    assert result.loss == 0 and result.num_tokens == 0 and gradient(result.loss, hidden)[0].eq(0).all()


@pytest.mark.parametrize("beta", BETAS)
def test_a_teacher_of_minus_infinity_is_nan_unless_its_token_is_masked(beta: float) -> None:
    student, teacher = logits(0, 1, 2, 4), logits(1, 1, 2, 4)
    teacher[0, 1, 2] = -torch.inf
    assert not generalized_jsd(student, teacher, torch.tensor([[0, 0]]), beta=beta).isfinite()
    assert generalized_jsd(student, teacher, torch.tensor([[0, -100]]), beta=beta).isfinite()


def test_a_student_of_minus_infinity_is_infinitely_far_in_forward_kl_and_undefined_in_reverse() -> None:
    student, teacher = logits(0, 1, 2, 4), logits(1, 1, 2, 4)
    student[0, 1, 2] = -torch.inf
    assert generalized_jsd(student, teacher, beta=0) == torch.inf
    assert generalized_jsd(student, teacher, beta=1).isnan()


def test_taid_drops_entries_the_student_rules_out_and_masks_them_on_request() -> None:
    student, teacher, mask = logits(0, 1, 2, 4), logits(1, 1, 2, 4), torch.tensor([[1, 0]])
    student[0, 1, 2] = -torch.inf
    assert taid_loss(student, teacher, torch.ones(1, 2), 0.4).isfinite()
    assert taid_loss(student, teacher, mask, 1.0).isnan(), "0 * inf at a masked token spreads, as upstream"
    assert taid_loss(student, teacher, mask, 1.0, skip_masked=True).isfinite()


def test_an_infinite_log_prob_at_a_masked_token_spreads_in_prime_rl_as_upstream() -> None:
    inference = torch.tensor([-0.5, -torch.inf])
    tokens = PackedTokens(torch.tensor([-0.4, -0.3]), inference, torch.ones(2), torch.tensor([True, False]))
    assert default_loss(tokens, DefaultOptions()).loss.isnan()


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 1000), k=st.integers(1, 4))
def test_a_tail_completes_the_distribution_and_merging_entries_never_adds_divergence(seed: int, k: int) -> None:
    student, teacher = (logits(s, 3, 5).log_softmax(-1) for s in (seed, seed + 1))
    for whole in (with_tail(student[:, :k]), renormalised(student[:, :k])):
        torch.testing.assert_close(whole.exp().sum(-1), torch.ones(3, dtype=torch.float64))
    full = elementwise_divergence(student, teacher, 0.5).sum(-1)
    merged = elementwise_divergence(with_tail(student[:, :k]), with_tail(teacher[:, :k]), 0.5).sum(-1)
    assert (merged <= full + 1e-12).all()


def test_all_entries_as_top_k_leave_a_tail_of_1e_7() -> None:
    student, teacher, ones = logits(0, 1, 3, 5), logits(1, 1, 3, 5), torch.ones(1, 3)
    full, _ = self_distillation_loss(student, teacher, ones)
    covered, _ = self_distillation_loss(student, teacher, ones, top_k=100)
    torch.testing.assert_close(covered, full, rtol=1e-5, atol=1e-6)


def test_the_importance_clip_is_an_upper_one_without_gradient() -> None:
    student, old = torch.tensor([[0.0, -1.0, -3.0]], requires_grad=True), torch.tensor([[-3.0, -1.0, 0.0]])
    weights = importance_weights(student, old, 2.0)
    assert not weights.requires_grad
    torch.testing.assert_close(weights, torch.tensor([[2.0, 1.0, math.exp(-3)]]))


def test_taid_ends_at_the_teachers_cross_entropy_and_starts_without_gradient() -> None:
    student, teacher, mask = logits(0, 1, 3, 5, wants_gradient=True), logits(1, 1, 3, 5), torch.ones(1, 3)
    torch.testing.assert_close(taid_loss(student, teacher, mask, 1.0), baselines.forward_kl(student, teacher, mask))
    assert gradient(taid_loss(student, teacher, mask, 0.0), student)[0].abs().max() < 1e-6


def test_eopd_gates_at_the_threshold_inclusive_and_is_plain_distillation_above_it() -> None:
    own, old, teacher, mask = log_probs(0, 1, 3), log_probs(1, 1, 3), log_probs(2, 1, 3), torch.ones(1, 3)
    soft = soft_targets(logits(3, 1, 3, 6), logits(4, 1, 3, 6), top_k=3)
    top = soft.teacher_entropy.max().item()
    plain, _ = eopd_loss(own, old, teacher, mask)
    _, at = eopd_loss(own, old, teacher, mask, soft, EopdOptions(entropy_threshold=top))
    above, _ = eopd_loss(own, old, teacher, mask, soft, EopdOptions(entropy_threshold=top + 1e-9))
    assert at["actor/soft_kd_num_tokens"] == 1 and torch.equal(above, plain)


def test_eopd_forward_kl_vanishes_at_equal_distributions_only_when_renormalised() -> None:
    same = logits(0, 1, 3, 6)
    for full, zero in ((False, True), (True, False)):
        soft = soft_targets(same, same, top_k=3, student_full_vocabulary=full)
        soft = SoftTargets(soft.teacher_entropy, soft.teacher, soft.student)
        own = log_probs(1, 1, 3)
        _, metrics = eopd_loss(own, own, own, torch.ones(1, 3), soft, EopdOptions(entropy_threshold=0.0))
        assert (abs(metrics["actor/soft_kd_loss"].item()) < 1e-12) is zero
