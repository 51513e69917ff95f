"""Divergences, self-distillation, TAID and EOPD: what upstream's recorded numbers (tests/parity) do not show."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from stages.errors import UsageError
from stages.losses.distillation import (
    EopdOptions,
    TaidSchedule,
    TaidState,
    Taught,
    advance,
    divergence,
    divergence_sum,
    entries,
    eopd,
    trust_region_logits,
    update_average,
    with_tail,
)
from tests.stages.losses.samples import gradient, logits, predictors, trained

BETAS = [0, 0.1, 0.5, 0.9, 1]
MASK = torch.tensor([1, 1, 0, 1, 0, 0, 1, 1, 1], dtype=torch.float64)


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
    for a, b in zip(gradient(found, *trained(student)), wanted, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-14)
    for model in (kept, current):
        assert all(torch.autograd.grad(found, x, allow_unused=True)[0] is None for x in trained(model))


def test_a_broken_step_does_not_reach_an_average_that_takes_no_share_of_it() -> None:
    average, broken = torch.tensor([1.0, 2.0]), torch.tensor([torch.nan, torch.inf])
    update_average([average], [broken], 0.0)
    assert average.tolist() == [1.0, 2.0]


# TAID


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
    for a, b in zip(gradient(5 * found, *trained(student)), gradient(losses, *trained(student)), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-8, atol=1e-12)
    assert totals["soft_kd_token_ratio"][0] == ((entropy >= 2.7) * MASK).sum()
    torch.testing.assert_close(totals["rev_kl"][0], ((old - table[1]) * MASK).sum(), rtol=1e-10, atol=0)
    assert totals["rev_kl"][1] == MASK.sum()
