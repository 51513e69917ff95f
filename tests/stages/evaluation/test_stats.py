from dataclasses import replace

import numpy as np
import pytest

from stages.errors import UsageError
from stages.evaluation.stats import (
    ALPHA,
    all_sign_sums,
    cluster_interval,
    mcnemar,
    minimal_detectable_effect,
    paired_difference,
    sign_flip,
    wilson,
)


def differences_with_families(random: np.random.Generator, num_families: int, size: int, spread: float) -> np.ndarray:
    """Paired outcomes (-1, 0, 1) of tasks laid out by family; a family's own effect has standard deviation `spread`."""
    effects_F = random.normal(0.05, spread, num_families).clip(-0.5, 0.5)
    gained_T = np.repeat(0.25 + effects_F / 2, size)
    u_T = random.random(num_families * size)
    return (u_T < gained_T).astype(float) - (u_T > 0.5 + gained_T)


def coverage(num_runs: int, clustered: bool, num_families: int = 20, size: int = 10, spread: float = 0.3) -> float:
    """Share of intervals that hold the true mean, .05: the effects are symmetric about it and rarely clipped."""
    random = np.random.default_rng(5)
    families = np.repeat(np.arange(num_families), size)
    tasks = np.arange(num_families * size)
    hits = 0
    for _ in range(num_runs):
        d_T = differences_with_families(random, num_families, size, spread)
        groups = families if clustered else tasks
        interval = cluster_interval(np.bincount(groups, weights=d_T), np.bincount(groups))
        hits += interval.low <= 0.05 <= interval.high
    return hits / num_runs


def test_intervals_over_families_cover_and_intervals_over_tasks_do_not():
    assert coverage(200, clustered=True) >= 0.92
    assert coverage(200, clustered=False) <= 0.88


def test_few_families_still_cover():
    assert coverage(400, clustered=True, num_families=8) >= 0.93  # an ordinary BCa bootstrap: .87


def test_wilson_is_the_textbook_interval():
    # p = .5, n = 100, z = 1.95996: (p + z^2/2n -+ z sqrt(p(1-p)/n + z^2/4n^2)) / (1 + z^2/n)
    assert wilson(50, 100) == pytest.approx((0.40383, 0.59617), abs=1e-5)
    assert wilson(0, 20)[1] > 0.1
    assert wilson(0, 0) == (0, 1)


def test_mcnemar_is_the_exact_binomial():
    assert mcnemar(5, 0) == pytest.approx(2 * 0.5**5)
    assert mcnemar(46, 2) == pytest.approx(2 * (1 + 48 + 48 * 47 / 2) / 2**48)
    assert mcnemar(0, 0) == 1


def test_sign_flip_is_mcnemar_where_every_family_is_one_task():
    sums_F = np.array([1.0] * 30 + [-1.0] * 14 + [0.0] * 100)
    assert sign_flip(sums_F) == mcnemar(30, 14)


def test_sign_flip_counts_all_signs_of_few_families():
    sums_F = np.array([3.0, 2.0, 1.0, -1.0])
    assert sorted(all_sign_sums(np.array([1.0, 2.0]))) == [-3, -1, 1, 3]
    # |sum| >= 5 among the 16 signs of 1, 1, 2, 3: sums 7 (once) and 5 (1 negative, twice), and their negatives
    assert sign_flip(sums_F) == pytest.approx(6 / 16)


def test_drawn_sign_flips_agree_with_the_exact_ones():
    random = np.random.default_rng(0)
    sums_F = random.integers(-3, 5, 13).astype(float) + 0.5
    exact = sign_flip(sums_F)
    drawn = sign_flip(np.concatenate([sums_F, [1e-4, -1e-4]]))  # 15 families: past the exact limit, the same sums
    assert drawn == pytest.approx(exact, abs=0.02)


def test_sign_flip_sees_families_where_mcnemar_sees_tasks():
    d_T = [1] * 20 + [0] * 180
    families = ["a"] * 20 + [f"f{task // 20}" for task in range(180)]
    difference = paired_difference(d_T, families)
    assert difference.p_mcnemar < 1e-5
    assert difference.p_value == 1
    assert not difference.significant


def test_the_minimal_detectable_effect_is_found_four_times_in_five():
    random = np.random.default_rng(2)
    pilot = paired_difference(random.choice([-1, 0, 1], 200, p=[0.15, 0.7, 0.15]), range(200))
    shift = pilot.mde / 2
    found = [
        paired_difference(random.choice([-1, 0, 1], 200, p=[0.15 - shift, 0.7, 0.15 + shift]), range(200)).significant
        for _ in range(200)
    ]
    assert 0.70 <= np.mean(found) <= 0.90
    assert minimal_detectable_effect(0.02, 10_000) == pytest.approx(2.8 * 0.02, rel=0.01)
    assert minimal_detectable_effect(0.5, 1) == 1


DEGENERATE = {
    "one task": ([1.0], ["a"], 0.9),
    "one task, no difference": ([0.0], ["a"], 0.9),
    "one family": ([1.0, 0.0, -1.0] * 40, ["a"] * 120, 0.9),
    "no discordance": ([0.0] * 400, range(400), 0.01),
    "no discordance in twenty families": ([0.0] * 400, [task // 20 for task in range(400)], 0.3),
    "all won": ([1.0] * 400, range(400), 0.009),
    "all equal parts": ([0.25] * 40, range(40), 0.1),
    "one discordant task": ([1.0] + [0.0] * 399, range(400), 0.01),
    "two families": ([1.0] * 50 + [0.0] * 50, ["a"] * 50 + ["b"] * 50, 0.9),
    "one giant family": ([1.0] * 95 + [0.0] * 5, ["a"] * 95 + list("bcdef"), 0.3),
}


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("name", DEGENERATE)
def test_degenerate_data_give_wide_intervals_and_no_certainty(name):
    d_T, families, width = DEGENERATE[name]
    difference = paired_difference(d_T, families)
    numbers = [difference.estimate, difference.low, difference.high, difference.p_mcnemar, difference.p_value]
    assert np.isfinite([*numbers, difference.mde]).all()
    assert -1 <= difference.low <= difference.estimate <= difference.high <= 1
    assert difference.high - difference.low >= width
    assert 0 < difference.p_value <= 1
    assert 0 < difference.mde <= 1
    assert difference.method == "exact binomial bounds over families"


def test_significance_needs_the_interval_and_the_test_over_families():
    found = paired_difference(np.tile([1.0, 1.0, 1.0, 0.0, -1.0], 40), range(200))
    assert found.significant
    assert not replace(found, p_value=0.05).significant
    assert not replace(found, low=-0.01).significant
    assert replace(found, p_mcnemar=0.5).significant


def test_five_families_are_never_significant_and_six_can_be():
    tasks = np.repeat(np.arange(6), 10)
    d_T = np.tile([1.0, 1.0, 1.0, 0.0, 0.0], 12) - (tasks == 0) * np.tile([0.0, 1.0], 30)
    assert paired_difference(d_T, tasks).significant
    assert not paired_difference(d_T[tasks < 5], tasks[tasks < 5]).significant


def test_the_same_seed_gives_the_same_numbers_and_another_gives_nearly_the_same():
    random = np.random.default_rng(3)
    d_T, families = random.choice([-1, 0, 1], 200, p=[0.1, 0.7, 0.2]), random.integers(0, 40, 200)
    first, again, other = (paired_difference(d_T, families, seed) for seed in (0, 0, 1))
    assert first == again
    assert (first.low, first.high, first.p_value) != (other.low, other.high, other.p_value)
    assert (first.low, first.high) == pytest.approx((other.low, other.high), abs=0.01)


def test_swapping_the_arms_swaps_the_answer():
    random = np.random.default_rng(4)
    d_T, families = random.choice([-1, 0, 1], 300, p=[0.1, 0.6, 0.3]), random.integers(0, 60, 300)
    forth, back = paired_difference(d_T, families), paired_difference(-d_T, families)
    assert forth.estimate == -back.estimate
    assert (forth.low, forth.high) == pytest.approx((-back.high, -back.low), abs=0.01)
    assert (forth.wins, forth.losses) == (back.losses, back.wins)
    assert forth.p_value < ALPHA and back.p_value < ALPHA


def test_nothing_to_compare_is_refused():
    with pytest.raises(UsageError, match="0 tasks"):
        paired_difference([], [])
    with pytest.raises(UsageError, match="2 tasks and 1 families"):
        paired_difference([1, 0], ["a"])
