import numpy as np
import pytest
from scipy.stats import binomtest

from stages.errors import UsageError
from stages.evaluation.flips import Flips, UnitSums, draw_signs, p_values
from stages.evaluation.paired import by_unit, pair, rejects, score, within_strata
from stages.evaluation.stats import FlipTest, cr2, fewest_units, paired_difference, rate_interval, wilson

KATA = [9, 8, 8, 8, 7, 7, 6, 6, 6, 6, 5, 5, 5, 5, 4, 4, 4, 4, 4, 3, 2, 2, 1, 1]
"""Tasks of each family in the first 120 of kata's evaluation split."""


def difference(d_T, families, **more):
    """A comparison in which the baseline fails where the treatment gains, and passes where it loses."""
    d_T = np.asarray(d_T, dtype=float)
    treatment, baseline = np.clip(d_T, 0, None), np.clip(-d_T, 0, None)
    return paired_difference(treatment[None], baseline[None], [str(family) for family in families], **more)


def units(sums, sizes=None):
    return UnitSums(
        np.asarray(sums, dtype=float), np.ones(len(sums)) if sizes is None else np.asarray(sizes, dtype=float)
    )


def mcnemar(wins, losses):
    return binomtest(wins, wins + losses).pvalue


def test_sign_flips_are_mcnemar_where_every_unit_is_one_task():
    exact = Flips(units([1.0] * 8 + [-1.0] * 2 + [0.0] * 2))
    assert exact.p(0.0) == pytest.approx(mcnemar(8, 2), abs=1e-12)
    drawn = Flips(units([1.0] * 30 + [-1.0] * 14 + [0.0] * 100))
    assert drawn.p(0.0) == pytest.approx(mcnemar(30, 14), abs=0.005)


def test_sign_flips_count_all_signs_of_few_units():
    # sums 3, 2, 1, -1 of equal units: |sum| >= 5 among the 16 assignments: 7 once, 5 twice, and their negatives
    assert Flips(units([3.0, 2.0, 1.0, -1.0])).p(0.0) == pytest.approx(6 / 16)


def test_sums_by_unit_do_not_depend_on_the_order_of_tasks():
    """Tasks in the order of their units are summed in place, others by a product of matrices."""
    values_XT, unit_T = np.random.default_rng(0).normal(size=(3, 7)), np.array([0, 0, 1, 2, 2, 2, 3])
    order = np.array([6, 2, 0, 5, 1, 3, 4])
    expected = [values_XT[:, unit_T == unit].sum(1) for unit in range(4)]
    assert pytest.approx(np.stack(expected)) == by_unit(values_XT, unit_T).T
    assert pytest.approx(np.stack(expected)) == by_unit(values_XT[:, order], unit_T[order]).T


def studentised(s_U, n_U):
    mean = s_U.sum() / n_U.sum()
    return abs(mean) / np.sqrt(((s_U - n_U * mean) ** 2).sum())


def test_unequal_units_are_studentised_anew_under_every_assignment():
    random = np.random.default_rng(0)
    s_U, n_U = random.normal(0.5, 2, 8), random.integers(1, 20, 8).astype(float)
    for mean in (0.0, 0.1, -0.3):
        rest_U = s_U - mean * n_U
        every = [studentised(signs * rest_U, n_U) for signs in draw_signs(8, random)]
        expected = np.mean(np.array(every) >= every[0] * (1 - 1e-9))
        assert Flips(units(s_U, n_U)).p(mean) == pytest.approx(expected, abs=1e-12)


def test_one_experiment_and_many_at_once_are_the_same_test():
    random = np.random.default_rng(1)
    d_XST = random.choice([-1.0, 0, 1], (20, 3, 60), p=[0.1, 0.7, 0.2])
    unit_T = np.repeat(np.arange(12), 5)
    many = pair(np.clip(d_XST, 0, 1), np.clip(-d_XST, 0, 1), unit_T)
    signs = draw_signs(12, random)
    for mean in (0.0, 0.02, 0.15):
        alone = [
            FlipTest(pair(np.clip(d, 0, 1)[None], np.clip(-d, 0, 1)[None], unit_T)).rejects(mean, 0.05) for d in d_XST
        ]
        assert alone == rejects(many, mean, signs).tolist()
    assert p_values(many.sums_XU, many.sizes_U, np.zeros(20), signs)[3] == Flips(units(many.sums_XU[3], [5] * 12)).p(
        0.0
    )


def test_the_interval_is_the_test_inverted():
    random = np.random.default_rng(2)
    for seeds in (1, 4):
        d_ST = random.choice([-1.0, 0, 1], (seeds, 120), p=[0.1, 0.6, 0.3])
        test = FlipTest(pair(np.clip(d_ST, 0, 1)[None], np.clip(-d_ST, 0, 1)[None], np.repeat(np.arange(24), 5)))
        low, high = test.interval(0.05)
        inside = [test.rejects(mean, 0.05) for mean in np.linspace(low + 1e-4, high - 1e-4, 25)]
        assert not any(inside) and test.rejects(low - 1e-3, 0.05) and test.rejects(high + 1e-3, 0.05)
        for mean in (low - 1e-3, low + 1e-3):
            assert (test.p(mean) < 0.05) == test.rejects(mean, 0.05)


def test_cr2_is_the_sandwich_with_leverage_and_satterthwaites_degrees():
    random = np.random.default_rng(3)
    n_U = np.array(KATA, dtype=float)
    s_U, num = random.normal(0, n_U), n_U.sum()
    hat = np.full((int(num), int(num)), 1 / num)
    rest = np.eye(int(num)) - hat
    member = np.repeat(np.arange(24), KATA)
    p_UT = np.zeros((24, int(num)))
    for unit in range(24):
        at = np.flatnonzero(member == unit)
        values, vectors = np.linalg.eigh(rest[np.ix_(at, at)])
        adjust = vectors @ np.diag(values**-0.5) @ vectors.T
        p_UT[unit] = rest[:, at] @ adjust @ np.full(len(at), 1 / num)
    gram = p_UT @ p_UT.T
    d_T = (s_U / n_U)[member]
    error, degrees = cr2(units(s_U, n_U))
    assert error == pytest.approx(np.sqrt(((p_UT @ d_T) ** 2).sum()))
    assert degrees == pytest.approx(np.trace(gram) ** 2 / (gram**2).sum())
    equal = cr2(units(random.normal(0, 1, 10), [4.0] * 10))
    assert equal[1] == pytest.approx(9), "equal units: the t test"


def test_tangos_score_against_the_profile_likelihood():
    random = np.random.default_rng(4)
    d_T = random.permutation([1.0] * 12 + [-1.0] * 2 + [0.0] * 36)
    one = pair(np.clip(d_T, 0, 1)[None, None], np.clip(-d_T, 0, 1)[None, None], np.arange(50))
    scaled = type(one)(
        **{**vars(one), "up_X": np.array([12.0]), "down_X": np.array([2.0]), "tasks_X": np.array([50.0])}
    )
    grid = np.linspace(-0.5, 0.6, 5501)
    kept = [mean for mean in grid if abs(score(scaled, np.array([mean]))[0]) <= 1.959964]
    expected = profiled(12, 2, 50)
    assert (kept[0], kept[-1]) == pytest.approx(expected, abs=4e-4)


def profiled(b, c, n):
    """The same limits from the profile likelihood by brute force: q maximises it under p_b - p_c = delta."""
    q = np.linspace(1e-6, 0.9, 40001)
    kept = []
    for delta in np.linspace(0.0, 0.4, 801):
        p_b, rest = q + delta, 1 - 2 * q - delta
        valid = rest > 0
        likelihood = b * np.log(p_b[valid]) + c * np.log(q[valid]) + (n - b - c) * np.log(rest[valid])
        best = q[valid][likelihood.argmax()]
        if abs(b - c - n * delta) / np.sqrt(n * (2 * best + delta * (1 - delta))) <= 1.959964:
            kept.append(delta)
    return kept[0], kept[-1]


def test_wilson_is_the_textbook_interval():
    # p = .5, n = 100, z = 1.95996: (p + z^2/2n -+ z sqrt(p(1-p)/n + z^2/4n^2)) / (1 + z^2/n)
    assert wilson(0.5, 100) == pytest.approx((0.40383, 0.59617), abs=1e-5)
    expected = binomtest(3, 20).proportion_ci(method="wilson")
    assert wilson(3 / 20, 20) == pytest.approx((expected.low, expected.high))


def test_a_rate_knows_families():
    family_T = np.repeat(np.arange(24), KATA)
    random = np.random.default_rng(5)
    passed_T = (random.random(24) < 0.45)[family_T].astype(float)
    low, high = rate_interval(passed_T[None], family_T)
    alone = rate_interval(passed_T[None], np.arange(120))
    assert high - low > 1.8 * (alone[1] - alone[0]), "families pass or fail as one"
    assert alone == pytest.approx(wilson(passed_T.mean(), 120), abs=0.02)


def test_families_are_seen_where_mcnemar_sees_tasks():
    found = difference([1] * 20 + [0] * 180, ["a"] * 20 + [f"f{task // 20}" for task in range(180)])
    assert mcnemar(20, 0) < 1e-5
    assert found.p_value == 1 and not found.significant


def test_five_families_are_never_significant_and_six_can_be():
    tasks = np.repeat(np.arange(6), 10)
    d_T = np.tile([1.0, 1.0, 1.0, 0.0, 0.0], 12)
    assert difference(d_T, tasks).significant
    five = difference(d_T[tasks < 5], tasks[tasks < 5])
    assert (five.low, five.high) == (-1, 1), "no interval is refuted where no test can refute"
    assert five.mde is None and fewest_units() == 6 and fewest_units(0.01) == 8


def test_fixed_families_are_strata_and_new_ones_are_undecided():
    random = np.random.default_rng(6)
    d_T = random.choice([-1, 0, 1], 300, p=[0.05, 0.75, 0.2])
    repos = np.repeat(np.arange(5), [114, 77, 50, 40, 19])
    fixed, sampled = difference(d_T, repos, fixed=True), difference(d_T, repos)
    assert fixed.significant and "sign flips of each task's difference within its" in fixed.method
    assert fixed.elsewhere == (sampled.low, sampled.high) == (-1, 1)
    assert sampled.elsewhere is None


def test_near_zero_the_interval_is_as_narrow_as_the_data_allow():
    """Four differences in four of 24 families: bounds that take families for all or nothing would be 48 points wide."""
    random = np.random.default_rng(7)
    family_T = np.repeat(np.arange(24), KATA)
    baseline = (random.random(120) < 0.04).astype(float)
    treatment = baseline.copy()
    treatment[[2, 40, 70, 100]] = 1 - treatment[[2, 40, 70, 100]]
    found = paired_difference(treatment[None], baseline[None], list(map(str, family_T)))
    assert found.high - found.low < 0.13
    tasks = difference([0] * 400, range(400))
    assert (tasks.low, tasks.high) == pytest.approx((-0.0095, 0.0095), abs=5e-4), "0 of 400: Wilson's limit"


def test_three_training_seeds_are_the_top_level():
    random = np.random.default_rng(8)
    base = (random.random((1, 200)) < 0.4).astype(float).repeat(3, 0)
    gains = np.array([0.30, 0.05, 0.10])
    better = np.maximum(base, random.random((3, 200)) < gains[:, None] / 0.6)
    three = paired_difference(better, base, list(map(str, range(200))))
    one = paired_difference(better.mean(0)[None], base.mean(0)[None], list(map(str, range(200))))
    assert one.significant and not three.significant, "three trainings that differ so much show nothing"
    assert "3 training seeds" in three.method and three.p_value > 0.05 > one.p_value
    two = paired_difference(better[:2], base[:2], list(map(str, range(200))))
    assert two.significant and "seeds" not in two.method


DEGENERATE = {
    "one task": ([1.0], ["a"], 0.9),
    "one task, no difference": ([0.0], ["a"], 0.9),
    "one family": ([1.0, 0.0, -1.0] * 40, ["a"] * 120, 0.9),
    "no discordance": ([0.0] * 400, range(400), 0.01),
    "no discordance in twenty families": ([0.0] * 400, [task // 20 for task in range(400)], 0.3),
    "all won": ([1.0] * 400, range(400), 0.009),
    "one discordant task": ([1.0] + [0.0] * 399, range(400), 0.01),
    "two families": ([1.0] * 50 + [0.0] * 50, ["a"] * 50 + ["b"] * 50, 0.9),
    "one giant family": ([1.0] * 95 + [0.0] * 5, ["a"] * 95 + list("bcdef"), 0.3),
}


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("name", DEGENERATE)
def test_degenerate_data_give_wide_intervals_and_no_certainty(name):
    d_T, families, width = DEGENERATE[name]
    found = difference(d_T, families)
    assert np.isfinite([found.estimate, found.low, found.high, found.cr2_low, found.cr2_high, found.mde or 0]).all()
    assert -1 <= found.low <= found.estimate <= found.high <= 1
    assert found.high - found.low >= width
    assert 0 < found.p_value <= 1
    assert (found.mde is None) == (found.num_units < 6) and (found.mde is None or 0 < found.mde <= 1)


def test_the_same_data_give_the_same_numbers_and_swapping_the_arms_swaps_them():
    random = np.random.default_rng(9)
    d_T, families = random.choice([-1, 0, 1], 300, p=[0.1, 0.6, 0.3]), random.integers(0, 60, 300)
    forth, again, back = difference(d_T, families), difference(d_T, families), difference(-d_T, families)
    assert forth == again and forth.estimate == -back.estimate
    assert (forth.low, forth.high) == pytest.approx((-back.high, -back.low), abs=0.01)
    assert (forth.wins, forth.losses) == (back.losses, back.wins)


def test_what_does_not_fit_together_is_refused():
    with pytest.raises(UsageError, match="0 units"):
        paired_difference(np.zeros((1, 0)), np.zeros((1, 0)), [])
    with pytest.raises(UsageError, match="1 units"):
        paired_difference(np.zeros((1, 2)), np.zeros((1, 2)), ["a"])


def test_within_strata_values_keep_their_mean_and_spread_as_a_stratified_mean_does():
    random = np.random.default_rng(1)
    stratum_T = np.repeat(np.arange(3), [5, 8, 1])
    values = random.normal(size=(2, 14)) + np.array([0, 5, -5])[stratum_T]
    spread = within_strata(values, stratum_T)
    assert spread.mean(1) == pytest.approx(values.mean(1))
    pooled = np.where(stratum_T == 2, 0, stratum_T)  # a lone task joins the smallest other stratum
    sizes = np.bincount(pooled)[:2]
    for row, found in zip(values, spread, strict=True):
        variance = sum(n * row[pooled == h].var(ddof=1) for h, n in enumerate(sizes))
        assert ((found - row.mean()) ** 2).sum() == pytest.approx(variance)
    assert within_strata(values, np.arange(14)) == pytest.approx(within_strata(values, np.zeros(14, int)))


def test_strata_of_equal_outcomes_are_no_certainty():
    found = difference([1.0] * 60 + [0.0] * 60, ["a"] * 60 + ["b"] * 60, fixed=True)
    assert 0.45 < found.low < 0.49 and 0.51 < found.high < 0.55
    nothing = difference([0.0] * 400, np.repeat(np.arange(5), 80), fixed=True)
    assert (nothing.low, nothing.high) == pytest.approx((-0.0095, 0.0095), abs=5e-4), "as without strata"
