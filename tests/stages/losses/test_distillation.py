"""Divergences, self-distillation, TAID and EOPD: properties, ends of the interpolation, gradients, edges."""

import math

import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch import Tensor
from torch.autograd import gradcheck

from composer_stages.errors import UsageError
from composer_stages.losses.distillation import (
    EopdOptions,
    EopdTokens,
    TaidSchedule,
    TaidState,
    Taught,
    advance,
    divergence,
    divergence_sum,
    entries,
    eopd,
    importance_weights,
    moving_target,
    reverse_kl_from_log_probs,
    taid,
    trust_region_logits,
    update_average,
    with_tail,
)
from composer_stages.losses.tokens import Head, Predictors
from tests.stages.losses.samples import gradient, log_probs, logits, predictors, trained

BETAS = [0, 0.1, 0.5, 0.9, 1]
MASK = torch.tensor([1, 1, 0, 1, 0, 0, 1, 1, 1], dtype=torch.float64)
SUPPORTS = [
    {},
    {"top_k": 3},
    {"top_k": 3, "outside": "renormalised"},
    {"top_k": 3, "top_k_of": "teacher", "outside": "renormalised"},
    {"largest": 0.05},
    {"temperature": 1.7},
]


@settings(max_examples=40)
@given(seed=st.integers(0, 1000), beta=st.sampled_from(BETAS), temperature=st.floats(0.3, 3.0))
def test_divergence_is_not_negative_and_vanishes_only_at_equal_distributions(
    seed: int, beta: float, temperature: float
) -> None:
    student, teacher = logits(seed, 3, 5), logits(seed + 1, 3, 5)
    assert (divergence(student, teacher, beta=beta, temperature=temperature) > 0).all()
    shifted = student + logits(seed + 2, 3, 1)
    assert (divergence(student, shifted, beta=beta, temperature=temperature).abs() < 1e-12).all()


@settings(max_examples=20)
@given(seed=st.integers(0, 1000), beta=st.floats(0.01, 0.99))
def test_the_interior_is_bounded_and_symmetric(seed: int, beta: float) -> None:
    """At most the entropy of the mixing weights; exchanging the sides exchanges the weights."""
    student, teacher = 20 * logits(seed, 3, 5), 20 * logits(seed + 1, 3, 5)
    found = divergence(student, teacher, beta=beta)
    assert (found <= -(beta * math.log(beta) + (1 - beta) * math.log1p(-beta)) + 1e-12).all()
    torch.testing.assert_close(found, divergence(teacher, student, beta=1 - beta), rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("beta", [0, 1])
def test_the_ends_are_the_two_kls_and_the_interior_does_not_approach_them(beta: int) -> None:
    student, teacher = logits(0, 3, 5), logits(1, 3, 5)
    log_s, log_t = student.log_softmax(-1), teacher.log_softmax(-1)
    kl = (log_t.exp() * (log_t - log_s) if beta == 0 else log_s.exp() * (log_s - log_t)).sum(-1)
    torch.testing.assert_close(divergence(student, teacher, beta=float(beta)), kl, rtol=1e-12, atol=0)
    assert (divergence(student, teacher, beta=abs(beta - 1e-6)) < 1e-4 * kl).all()


def test_forward_and_reverse_are_not_exchanged() -> None:
    """The teacher is sure, the student is not: forward KL is log 2, reverse KL is large."""
    student, teacher = torch.zeros(1, 2), torch.tensor([[0.0, -30.0]])
    assert divergence(student, teacher, beta=0).item() == pytest.approx(math.log(2), abs=1e-6)
    assert divergence(student, teacher, beta=1).item() > 14


@pytest.mark.parametrize("beta", [0, 0.3, 1])
@pytest.mark.parametrize("options", SUPPORTS, ids=str)
def test_the_gradient_of_a_divergence_is_that_of_finite_differences(beta: float, options: dict) -> None:
    teacher = logits(1, 4, 6)
    assert gradcheck(lambda s: divergence(s, teacher, beta=beta, **options), logits(0, 4, 6, wants_gradient=True))


def test_the_top_k_is_of_the_named_side() -> None:
    student, teacher = torch.tensor([[9.0, 0.0, 0.0, 1.0]]), torch.tensor([[0.0, 9.0, 0.0, 1.0]])
    for side, support in (("student", [0, 3]), ("teacher", [1, 3])):
        expected = divergence(student[:, support], teacher[:, support], beta=0)
        found = divergence(student, teacher, beta=0, top_k=2, top_k_of=side, outside="renormalised")
        torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("beta", BETAS)
def test_a_teacher_of_minus_infinity_gives_no_number(beta: float) -> None:
    student, teacher = logits(0, 2, 4), logits(1, 2, 4)
    teacher[1, 2] = -torch.inf
    assert divergence(student, teacher, beta=beta).isfinite().tolist() == [True, False]


def test_a_student_of_minus_infinity_is_infinitely_far_in_forward_kl_and_undefined_in_reverse() -> None:
    student, teacher = logits(0, 2, 4), logits(1, 2, 4)
    student[1, 2] = -torch.inf
    assert divergence(student, teacher, beta=0)[1] == torch.inf
    assert divergence(student, teacher, beta=1)[1].isnan()


@settings(max_examples=30)
@given(seed=st.integers(0, 1000), k=st.integers(1, 4))
def test_a_tail_completes_the_distribution_and_merging_entries_never_adds_divergence(seed: int, k: int) -> None:
    student, teacher = (logits(s, 3, 5).log_softmax(-1) for s in (seed, seed + 1))
    torch.testing.assert_close(with_tail(student[:, :k]).exp().sum(-1), torch.ones(3, dtype=torch.float64))
    full = entries(student, teacher, 0.5).sum(-1)
    merged = entries(with_tail(student[:, :k]), with_tail(teacher[:, :k]), 0.5).sum(-1)
    assert (merged <= full + 1e-12).all()


def test_all_entries_as_top_k_leave_a_tail_of_1e_7() -> None:
    student, teacher = logits(0, 3, 5), logits(1, 3, 5)
    covered = divergence(student, teacher, beta=0.5, top_k=100)
    torch.testing.assert_close(covered, divergence(student, teacher, beta=0.5), rtol=1e-5, atol=1e-6)


# SDPO


@pytest.mark.parametrize("chunk_tokens", [None, 4])
@pytest.mark.parametrize("share", [None, 0.25])
@pytest.mark.parametrize(("top_k", "outside"), [(None, "tail"), (5, "tail"), (5, "renormalised"), (99, "tail")])
def test_sdpo_is_the_weighted_divergence_to_the_self_teacher(
    top_k: int | None, outside: str, share: float | None, chunk_tokens: int | None
) -> None:
    student, kept, current = predictors(0, biased=True), predictors(10), predictors(20)
    weights = MASK * torch.linspace(0.1, 2.0, 9, dtype=torch.float64)
    taught = Taught(kept) if share is None else Taught(kept, current, share)
    options = {"top_k": top_k, "outside": outside, "temperature": 1.3}
    found, per_token = divergence_sum(student, taught, weights, beta=0.3, chunk_tokens=chunk_tokens, **options)
    own, teacher, other = (model.head.logits(model.rows) for model in (student, kept, current))
    teacher = teacher if share is None else trust_region_logits(teacher, other, share)
    expected = divergence(own, teacher.detach(), beta=0.3, **options)
    torch.testing.assert_close(found, (expected * weights).sum(), rtol=1e-12, atol=1e-14)
    torch.testing.assert_close(per_token, expected.detach() * (weights != 0), rtol=1e-12, atol=1e-14)
    wanted = gradient(expected * weights, *trained(student))
    torch.testing.assert_close(gradient(found, *trained(student)), wanted, rtol=1e-10, atol=1e-14)
    for model in (kept, current):
        assert all(torch.autograd.grad(found, x, allow_unused=True)[0] is None for x in trained(model))


def test_the_gradient_of_sdpo_from_hidden_states_is_that_of_finite_differences() -> None:
    kept, student = predictors(10), predictors(0)

    def loss(hidden: Tensor, weight: Tensor) -> Tensor:
        own = Predictors(hidden, Head(weight, None, 1.5, 2.0))
        return divergence_sum(own, Taught(kept), MASK, beta=0.5, chunk_tokens=4)[0]

    assert gradcheck(loss, (student.rows, student.head.weight), rtol=1e-6, atol=1e-8, fast_mode=True)  # 192 inputs


def test_the_importance_clip_is_an_upper_one_without_gradient() -> None:
    student, old = torch.tensor([[0.0, -1.0, -3.0]], requires_grad=True), torch.tensor([[-3.0, -1.0, 0.0]])
    weights = importance_weights(student, old, 2.0)
    assert not weights.requires_grad
    torch.testing.assert_close(weights, torch.tensor([[2.0, 1.0, math.exp(-3)]]))


def test_a_broken_step_does_not_reach_an_average_that_takes_no_share_of_it() -> None:
    average, broken = torch.tensor([1.0, 2.0]), torch.tensor([torch.nan, torch.inf])
    update_average([average], [broken], 0.0)
    assert average.tolist() == [1.0, 2.0]


# TAID


@pytest.mark.parametrize("chunk_tokens", [None, 1])
def test_taid_is_the_weighted_cross_entropy_to_the_moving_target(chunk_tokens: int | None) -> None:
    student, teacher = predictors(0), predictors(10)
    found = taid(student, teacher, MASK, 0.3, chunk_tokens=chunk_tokens)
    own, other = (model.head.logits(model.rows) for model in (student, teacher))
    target = (0.7 * own.detach() + 0.3 * other.detach()).softmax(-1)
    expected = -(target * own.log_softmax(-1)).sum(-1) * MASK
    torch.testing.assert_close(found, expected.sum(), rtol=1e-12, atol=0)
    wanted = gradient(expected, *trained(student))
    torch.testing.assert_close(gradient(found, *trained(student)), wanted, rtol=1e-10, atol=1e-13)


def test_taid_ends_at_the_teachers_cross_entropy_and_starts_without_gradient() -> None:
    student, teacher = logits(0, 3, 5, wants_gradient=True), logits(1, 3, 5)
    expected = -(teacher.softmax(-1) * student.log_softmax(-1)).sum(-1)
    torch.testing.assert_close(moving_target(student, teacher, 1.0), expected)
    assert gradient(moving_target(student, teacher, 0.0), student)[0].abs().max() < 1e-6


def test_taid_drops_entries_that_the_student_rules_out() -> None:
    student, teacher = logits(0, 2, 4), logits(1, 2, 4)
    student[1, 2] = -torch.inf
    assert moving_target(student, teacher, 0.4).isfinite().all()


LOSSES = st.lists(st.floats(0.01, 50.0), min_size=2, max_size=12)


def states(schedule: TaidSchedule, losses: list[float]) -> list[TaidState]:
    states = [schedule.start()]
    for step, loss in enumerate(losses):
        states.append(advance(schedule, states[-1], torch.tensor(loss), step, len(losses))[0])
    return states


@given(losses=LOSSES, alpha=st.floats(0.0, 1.0))
def test_t_rises_from_start_to_at_most_end(losses: list[float], alpha: float) -> None:
    ts = [state.t.item() for state in states(TaidSchedule(t_start=0.2, t_end=0.9, alpha=alpha), losses)]
    assert ts == sorted(ts) and ts[0] >= 0.2 and ts[-1] <= 0.9 + 1e-6


@given(losses=LOSSES)
def test_without_the_adaptive_part_t_is_the_line(losses: list[float]) -> None:
    after = states(TaidSchedule(t_start=0.2, t_end=0.9, disable_adaptive=True), losses)[2:]
    for step, state in enumerate(after, start=1):
        assert abs(state.t.item() - (0.2 + 0.7 * step / len(losses))) < 1e-6


def test_the_first_call_only_stores_the_loss() -> None:
    schedule = TaidSchedule()
    state, delta = advance(schedule, schedule.start(), torch.tensor(2.0), 5, 10)
    assert delta is None and state.prev_loss == 2.0 and torch.equal(state.t, schedule.start().t)


def test_t_grows_at_zero_momentum() -> None:
    schedule = TaidSchedule(alpha=0.1, t_start=0.4)
    _, delta = advance(schedule, states(schedule, [2.0])[-1], torch.tensor(2.0), 0, 10**9)
    torch.testing.assert_close(delta, torch.tensor(0.1 * 0.5 * 0.6))


def test_a_nan_loss_spoils_the_momentum_and_an_infinite_one_starts_afresh() -> None:
    schedule = TaidSchedule()
    spoilt = states(schedule, [2.0, float("nan"), 1.0])[-1]
    assert spoilt.momentum.isnan() and spoilt.t.isfinite()
    restarted = states(schedule, [2.0, float("inf")])[-1]
    state, delta = advance(schedule, restarted, torch.tensor(1.5), 2, 3)
    assert delta is None and state.prev_loss == 1.5


@pytest.mark.parametrize("bad", [{"t_start": 1.5}, {"t_end": 0.0}, {"alpha": 2}], ids=str)
def test_a_pace_outside_its_range_is_refused(bad: dict) -> None:
    ((name, value),) = bad.items()
    with pytest.raises(UsageError, match=f"{name}={value}"):
        TaidSchedule(**bad)


# EOPD


@pytest.mark.parametrize("chunk_tokens", [None, 4])
def test_eopd_is_the_policy_gradient_and_the_gated_forward_kl(chunk_tokens: int | None) -> None:
    student, teacher = predictors(0), predictors(10)
    ids, old, options = torch.arange(9), logits(5, 9) - 4, EopdOptions(coef=0.7, entropy_threshold=2.7)
    found, totals = eopd(
        *(student, teacher, ids, old, MASK),
        num_tokens=5,
        top_k=4,
        temperature=1.3,
        options=options,
        chunk_tokens=chunk_tokens,
    )
    own, other = (model.head.logits(model.rows) / 1.3 for model in (student, teacher))
    table = own.log_softmax(-1).gather(-1, ids[:, None])[:, 0], other.log_softmax(-1).gather(-1, ids[:, None])[:, 0]
    entropy = -(other.softmax(-1) * other.log_softmax(-1)).sum(-1)
    top = other.topk(4, dim=-1)
    p, q = top.values.log_softmax(-1), own.gather(-1, top.indices).log_softmax(-1)
    forward_kl = (p.exp() * (p - q)).sum(-1)
    ratio, advantage = (table[0] - old).exp(), (table[1] - old).detach()
    losses = torch.maximum(-advantage * ratio, -advantage * ratio.clamp(0.8, 1.2))
    losses = torch.where(entropy >= 2.7, losses + 0.7 * forward_kl, losses) * MASK
    assert 0 < ((entropy >= 2.7) * MASK).sum() < MASK.sum(), "the gate must open at some tokens and not at others"
    torch.testing.assert_close(found, losses.sum() / 5, rtol=1e-10, atol=0)
    torch.testing.assert_close(
        gradient(5 * found, *trained(student)), gradient(losses, *trained(student)), rtol=1e-8, atol=1e-12
    )
    assert totals["soft_kd_token_ratio"][0] == ((entropy >= 2.7) * MASK).sum()
    torch.testing.assert_close(totals["rev_kl"][0], ((old - table[1]) * MASK).sum(), rtol=1e-10, atol=0)
    assert totals["rev_kl"][1] == MASK.sum()


def test_eopd_gates_at_the_threshold_inclusive_and_is_plain_distillation_above_it() -> None:
    own, teacher, old, entropy, forward_kl = (log_probs(seed, 3).abs() for seed in range(5))
    tokens, top = EopdTokens(own, teacher, old, entropy, forward_kl), entropy.max().item()
    plain = EopdTokens(own, teacher, old).losses(EopdOptions())
    at, above = (EopdOptions(entropy_threshold=top + more) for more in (0, 1e-9))
    assert (tokens.losses(at) != plain).sum() == tokens.totals(at)["soft_kd_avg_kl"][1] == 1
    assert torch.equal(tokens.losses(above), plain)


def test_without_a_distribution_of_the_teacher_the_policy_gradient_alone_is_left() -> None:
    own = log_probs(0, 9, wants_gradient=True)
    old, teacher = log_probs(1, 9), log_probs(2, 9)
    loss, totals = reverse_kl_from_log_probs(own, old, teacher, MASK, num_tokens=11)
    losses = EopdTokens(own, teacher, old).losses(EopdOptions()) * MASK
    torch.testing.assert_close(loss, losses.sum() / 11)
    torch.testing.assert_close(gradient(loss, own)[0], gradient(losses / 11, own)[0])
    assert totals["ppo_kl"][1] == MASK.sum() and "soft_kd_loss" not in totals


def test_the_gradient_of_eopd_is_that_of_finite_differences() -> None:
    old, teacher, entropy = log_probs(1, 9), log_probs(2, 9), log_probs(3, 9).abs()

    def loss(own: Tensor, forward_kl: Tensor) -> Tensor:
        return EopdTokens(own, teacher, old, entropy, forward_kl).losses(EopdOptions())

    assert gradcheck(loss, (log_probs(0, 9, wants_gradient=True), log_probs(4, 9, wants_gradient=True)))
