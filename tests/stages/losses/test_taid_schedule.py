"""TAID's t: bounded, never falling while losses are finite, and what a bad loss does to it."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from stages.losses import TaidSchedule, TaidState, advance

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
    state = states(schedule, [2.0])[-1]
    _, delta = advance(schedule, state, torch.tensor(2.0), 0, 10**9)
    torch.testing.assert_close(delta, torch.tensor(0.1 * 0.5 * 0.6))


def test_a_nan_loss_spoils_the_momentum_and_an_infinite_one_starts_afresh() -> None:
    schedule = TaidSchedule()
    spoilt = states(schedule, [2.0, float("nan"), 1.0])[-1]
    assert spoilt.momentum.isnan() and spoilt.t.isfinite()
    restarted = states(schedule, [2.0, float("inf")])[-1]
    state, delta = advance(schedule, restarted, torch.tensor(1.5), 2, 3)
    assert delta is None and state.prev_loss == 1.5
