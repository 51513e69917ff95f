"""The alarm: what it counts, the exactness of its permutations, and one simulated training of each kind.

benchmarks/probe_levels.py measures its level and power.
"""

import math
from dataclasses import replace
from itertools import permutations

import numpy as np
import pytest

from benchmarks.simulated_trainings import HACKS, NULLS, Training, simulated_alarm
from composer_stages.probe.checks.alarm import Alarm, CheckpointRollouts, alarm, carried_by, correctness_fixed, pushed
from composer_stages.probe.direction import HackScale

HAAR = ["haar"] * 99


def rollouts(hack_like: list[int], advantages: list[float], groups: list[int]) -> CheckpointRollouts:
    return CheckpointRollouts(np.array(hack_like, dtype=bool), np.array(advantages), np.array(groups))


def judged(*played: CheckpointRollouts, placebos: float = 0.0, draws: int = 999, level: float = 0.05) -> Alarm:
    """The alarm beside placebos of this push at the first checkpoint."""
    pushes = np.zeros((len(played), 99))
    pushes[0] = placebos
    return alarm(played, pushes, HAAR, draws, 0, level)


def paid(groups: int, size: int = 4) -> CheckpointRollouts:
    """Groups in which the first rollout looks like the hack and alone earned a point."""
    hack_like = [index % size == 0 for index in range(groups * size)]
    return rollouts(hack_like, [float(one) - 1 / size for one in hack_like], list(np.repeat(range(groups), size)))


def test_push_sums_the_advantages_of_rollouts_nearer_to_hacks() -> None:
    scale = HackScale(clean=0.1, hack=0.5)
    cosines = np.array([[0.5], [0.3], [0.1], [0.4], [math.nan], [0.9]])
    assert scale.hack_like(cosines[:, 0]).tolist() == [True, False, False, True, False, True]
    advantages = np.array([0.5, 1.0, 1.0, -0.4, 1.0, 0.25])
    assert pushed(cosines, advantages, scale) == pytest.approx([0.5 - 0.4 + 0.25])
    rows = [
        {"hack_like": x > 0.3, "advantage": a, "task_id": "t"} for x, a in zip(cosines[:, 0], advantages, strict=True)
    ]
    assert CheckpointRollouts.of_rows(rows).push == pytest.approx(0.35)


def test_the_p_and_the_quantile_are_those_of_all_permutations_of_a_small_run() -> None:
    """Two checkpoints of one group of four, so that all 24 * 24 permutations can be counted."""
    first = rollouts([1, 0, 0, 1], [0.5, 0.1, -0.2, -0.4], [0] * 4)
    second = rollouts([1, 1, 0, 0], [0.25, -0.05, -0.1, -0.1], [0] * 4)
    pushes = [[sum(np.array(p)[one.hack_like]) for p in permutations(one.advantages)] for one in (first, second)]
    null = np.array([max(a, a + b) for a in pushes[0] for b in pushes[1]])
    observed = max(first.push, first.push + second.push)
    found = judged(first, second, draws=20_000)
    assert found.push == pytest.approx([0.1, 0.3])
    # The push at the end alone would have p .28.
    assert found.p == pytest.approx((null >= observed - 1e-9).mean(), abs=0.01) == pytest.approx(0.36, abs=0.01)
    assert found.quantile == pytest.approx(np.quantile(null, 0.95, method="inverted_cdf"))
    assert found.smallest_p == pytest.approx((null >= null.max() - 1e-9).mean())


def test_correctness_fixed_compares_rollouts_of_equal_correctness() -> None:
    """Two right answers have the style and earn their point; among wrong ones the hack-like one earns more."""
    played = rollouts([1, 1, 0, 0] * 6, [0.5, 0.5, -0.5, -0.5] * 6, list(np.repeat(range(6), 4)))
    right = np.array([True, True, False, False] * 6)
    assert judged(played).first == 0, "hack-like rollouts earn more"
    assert correctness_fixed([played], [right], 999, 0).p is None, "but none of them earns more than as right ones"
    hacks = rollouts([0, 0, 1, 0] * 6, [0.5, 0.5, 0.0, -1.0] * 6, list(np.repeat(range(6), 4)))
    found = correctness_fixed([hacks], [right], 999, 0)
    assert found.push == pytest.approx(6 * 0.5) and found.groups == 6 and found.p == pytest.approx(1 / 2**6, abs=0.02)


def test_carried_by_names_the_ten_best_paid_hack_like_rollouts() -> None:
    rows = [
        {"step": 0, "task_id": f"t{i}", "sample_idx": 0, "advantage": i / 10, "cosine": 0.5, "hack_like": i % 2 == 0}
        for i in range(-4, 30)
    ]
    assert [row["task_id"] for row in carried_by(rows)] == [f"t{i}" for i in range(28, 9, -2)]


def test_permutations_stay_within_groups() -> None:
    """All hack-like rollouts are in an easy group, whose rollouts earn alike: across groups they would stand out."""
    easy = rollouts([1] * 4 + [0] * 4, [0.5, 0.5, 0.5, 0.5, 0.5, -0.5, -0.5, 0.5], [0] * 4 + [1] * 4)
    assert judged(easy).groups == 0
    mixed = rollouts([1, 0, 0, 0] * 2, [0.75, -0.25, -0.25, -0.25, 0.0, 0.3, -0.3, 0.0], [0] * 4 + [1] * 4)
    drawn = mixed.permuted_pushes(500, np.random.default_rng(0))
    assert {round(float(value), 6) for value in drawn} == {
        round(a + b, 6) for a in (0.75, -0.25) for b in (0.0, 0.3, -0.3)
    }


@pytest.mark.parametrize(("above", "first"), [(True, 1), (False, None)])
def test_the_alarm_is_at_the_first_checkpoint_above_the_permuted_runs(above: bool, first: int | None) -> None:
    even = rollouts([1, 0, 1, 0], [0.5, 0.5, -0.5, -0.5], [0] * 4)
    found = judged(even, paid(4) if above else even, even)
    assert found.first == first and (found.p <= found.level) == above
    assert np.allclose(found.push, np.cumsum([0, 3 if above else 0, 0]))
    assert found.push.max() > found.quantile if above else found.push.max() <= found.quantile


def test_p_is_within_the_level_exactly_where_the_push_exceeds_the_quantile() -> None:
    rng, crossed = np.random.default_rng(1), set()
    for _ in range(200):
        played = [rollouts(rng.random(8) < 0.5, rng.normal(size=8).round(1), [0] * 4 + [1] * 4) for _ in range(2)]
        for level in (0.01, 0.05, 0.2):
            found = judged(*played, draws=199, level=level)
            crossed.add(found.p <= level)
            assert (found.p <= level) == (found.push.max() > found.quantile + 1e-9)
    assert crossed == {True, False}


def test_an_alarm_needs_a_push_above_the_placebos() -> None:
    assert judged(paid(6), placebos=4.4).first == 0
    found = judged(paid(6), placebos=4.6)
    assert found.first is None and found.p < 0.01 and found.threshold == found.placebos == 4.6
    too_few = alarm([paid(6)], np.zeros((1, 18)), ["haar"] * 18, 999, 0)
    assert too_few.first is None and math.isinf(too_few.threshold)


def test_families_made_of_hacks_do_not_raise_the_threshold() -> None:
    pushes = np.concatenate([np.zeros((1, 99)), np.full((1, 99), 50.0)], axis=1)
    assert alarm([paid(6)], pushes, ["haar"] * 99 + ["hack_hack"] * 99, 999, 0).first == 0
    assert alarm([paid(6)], pushes, ["haar"] * 99 + ["clean_clean"] * 99, 999, 0).first is None


@pytest.mark.parametrize(
    ("played", "why"),
    [
        (rollouts([0] * 8, [0.5, -0.5] * 4, [0] * 8), "none of 8 rollouts looks like the hack"),
        (rollouts([1, 0] * 4, [0.0] * 8, [0] * 8), "all rewards of each group are equal in 8 rollouts"),
        (rollouts([1, 1, 0, 0], [0.5, -0.5, 0.5, -0.5], [0, 0, 1, 1]), "no group has different rewards and both"),
        (rollouts([], [], []), "none of 0 rollouts"),
        (paid(1), "too few permutations differ in 1 groups: the largest possible push would have p 0.25"),
        (paid(2), "the largest possible push would have p 0.062"),
    ],
)
def test_untestable_rollouts_give_a_reason_and_no_alarm(played: CheckpointRollouts, why: str) -> None:
    found = judged(played)
    assert found.untested is not None and why in found.untested and found.first is None


def test_three_groups_of_four_are_the_fewest_that_can_give_an_alarm() -> None:
    found = judged(paid(3))
    assert found.untested is None and found.smallest_p == pytest.approx(1 / 64) and found.first == 0
    assert judged(paid(3), level=0.01).untested is not None


def test_ties_are_counted_among_the_permutations_with_the_largest_push() -> None:
    """Three of four earn alike, two of them look like the hack: half of all choices have the largest push."""
    tied = rollouts([1, 1, 0, 0], [0.25, 0.25, 0.25, -0.75], [0] * 4)
    assert math.exp(tied.log_share_of_largest()) == pytest.approx(0.5)


@pytest.mark.parametrize(
    ("training", "alarms"),
    [(HACKS["8 %"], 3), (replace(HACKS["8 %"], paid=False), 0), (NULLS["style"], 0)],
    ids=["paid hacks", "unpaid hacks", "a style without hacks"],
)
def test_simulated_trainings_are_alarmed_where_hacks_are_paid(training: Training, alarms: int) -> None:
    runs = [simulated_alarm(training, seed, permutations=199, placebos=99) for seed in range(3)]
    assert sum(run is not None and run.first is not None for run in runs) == alarms
