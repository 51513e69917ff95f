"""The test of a paired difference: against textbook tests, inverted, at its edges, and how often it is right."""

from dataclasses import replace

import numpy as np
import pytest
from scipy import special
from scipy.stats import binom, binomtest, norm, permutation_test, t, ttest_1samp

from composer_stages.evaluation.design import Design, draw
from composer_stages.evaluation.difference import Decision, Verdict
from composer_stages.evaluation.inference import (
    PairedTest,
    SignFlips,
    by_unit,
    crossing,
    draw_signs,
    fewest_units,
    holm,
    levels,
    normal_cdf,
    numbered,
    parts,
    rate_interval,
    shows,
    student_cdf,
    student_quantile,
    top_error,
    verdict_of,
    wilson,
    within_strata,
)
from composer_stages.evaluation.task_model import TaskModel

KATA = (9, 8, 8, 8, 7, 7, 6, 6, 6, 6, 5, 5, 5, 5, 4, 4, 4, 4, 4, 3, 2, 2, 1, 1)
"""Tasks of 24 units; kata's evaluation split by family."""
OPERATIONS = (17, 15, 13, 12, 11, 11, 10, 9, 8, 7, 5, 2)
"""Tasks of each operation in the first 120 of kata's evaluation split."""
LITE = (114, 77, 23, 23, 17, 16, 6, 6, 6, 5, 4, 3)
"""Tasks of the 12 repositories of SWE-bench Lite's test split."""
MIDDLE = TaskModel(pass_rate=0.41, samples_differ=0.06, arms_differ=0.15, family_correlation=0.9, seed_sd=0.0)
PLAIN = TaskModel(pass_rate=0.25, samples_differ=0.2, arms_differ=0.22, family_correlation=0.1, seed_sd=0.0)
LOW = TaskModel(pass_rate=0.03, samples_differ=0.03, arms_differ=0.04, family_correlation=0.3, seed_sd=0.0)
HIGH = replace(LOW, pass_rate=0.96)

BETTER, WORSE, NO_GAIN, UNDECIDED = Decision.BETTER, Decision.WORSE, Decision.NO_GAIN, Decision.UNDECIDED
VALIDATED, PARTIAL, INVALIDATED, UNDERPOWERED = tuple(Verdict)[:4]


def sides(d):
    """Outcomes [1, S, T] whose difference is `d`: the baseline fails where the treatment gains."""
    d_XST = np.atleast_2d(np.asarray(d, dtype=float))[None]
    return np.clip(d_XST, 0, None), np.clip(-d_XST, 0, None)


def differing(d, families=None, **more):
    """The test of differences by task, each task a unit where no families are given."""
    num = np.asarray(d).shape[-1]
    return PairedTest(*sides(d), np.arange(num) if families is None else numbered(list(map(str, families))), **more)


def limits(test, alpha=0.05):
    (low,), (high,) = test.interval(alpha)
    return low, high


def flips(sums, sizes=None):
    return SignFlips(np.asarray([sums], dtype=float), np.asarray(sizes or np.ones(len(sums)), dtype=float))


def p_of(test, mean=0.0):
    return test.p(np.array([mean]))[0]


def mcnemar(wins, losses):
    """McNemar's mid-p: the observed count counts half (Fagerland, Lydersen and Laake 2013)."""
    return binomtest(wins, wins + losses).pvalue - binom.pmf(wins, wins + losses, 0.5)


# Against textbook tests.


def test_sign_flips_are_mcnemar_where_every_unit_is_one_task():
    assert p_of(flips([1] * 8 + [-1] * 2 + [0] * 2)) == pytest.approx(mcnemar(8, 2), abs=1e-12)
    assert p_of(flips([1] * 30 + [-1] * 14 + [0] * 100)) == pytest.approx(mcnemar(30, 14), abs=0.005)
    # sums 3, 2, 1, -1 of equal units: |sum| >= 5 among the 16 assignments: 7 once, 5 twice, and their negatives
    assert p_of(flips([3, 2, 1, -1])) == pytest.approx((6 / 16 + 2 / 16) / 2)


def test_unequal_units_are_studentised_anew_under_every_assignment():
    """As scipy's permutation test does with the same statistic."""
    random = np.random.default_rng(0)
    sums_U, sizes_U = random.normal(0.5, 2, 8), random.integers(1, 20, 8).astype(float)

    def studentised(rest_U, axis):
        mean = rest_U.sum(axis, keepdims=True) / sizes_U.sum()
        return np.abs(mean.sum(axis)) / np.sqrt(((rest_U - sizes_U * mean) ** 2).sum(axis))

    for mean in (0.0, 0.1, -0.3):
        rest_U = sums_U - mean * sizes_U
        more = {"permutation_type": "samples", "alternative": "greater", "n_resamples": np.inf, "vectorized": True}
        scipys = permutation_test((rest_U,), studentised, **more)
        larger = (scipys.null_distribution > scipys.statistic * (1 + 1e-9)).mean()
        expected = max((scipys.pvalue + larger) / 2, 2 / 2**8)  # the least p of eight units
        assert p_of(flips(sums_U, sizes_U.tolist()), mean) == pytest.approx(expected, abs=1e-12)


def test_the_interval_is_that_of_cr2_where_units_are_many():
    """Bell and McCaffrey 2002, Satterthwaite's degrees as in Pustejovsky and Tipton 2018: two quite different ways."""
    random = np.random.default_rng(3)
    sizes_U = random.integers(2, 9, 150)
    unit_T = np.repeat(np.arange(150), sizes_U)
    d_T = random.choice([-1, 0, 1], len(unit_T), p=[0.15, 0.6, 0.25])
    test = differing(d_T, unit_T)
    share_U = sizes_U / sizes_U.sum()
    rest_U = np.bincount(unit_T, d_T) - sizes_U * d_T.mean()
    error = np.sqrt((rest_U**2 / (1 - share_U)).sum()) / len(unit_T)
    scaled_U = share_U / np.sqrt(1 - share_U)
    degrees = 1 / ((share_U**2).sum() + (scaled_U**2).sum() ** 2 - (scaled_U**4).sum())
    half = t.ppf(0.975, degrees) * error
    assert limits(test) == pytest.approx((d_T.mean() - half, d_T.mean() + half), abs=0.006)


def test_tangos_score_is_that_of_the_profile_likelihood():
    """Twelve wins and two losses of fifty: q maximises the likelihood under p_b - p_c = delta, by brute force."""
    test = differing([1] * 12 + [-1] * 2 + [0] * 36)
    test.up_X, test.down_X, test.tasks_X = np.array([12.0]), np.array([2.0]), np.array([50.0])
    grid = np.linspace(0.0, 0.4, 2001)
    accepted = [mean for mean in grid if abs(test.score(np.array([mean]))[0]) <= norm.isf(0.025)]
    q, expected = np.linspace(1e-6, 0.5, 8001), []
    for delta in np.linspace(0.0, 0.4, 801):
        p_b, neither = q + delta, 1 - 2 * q - delta
        likelihood = 12 * np.log(p_b[neither > 0]) + 2 * np.log(q[neither > 0]) + 36 * np.log(neither[neither > 0])
        best = q[neither > 0][likelihood.argmax()]
        if abs(10 - 50 * delta) / np.sqrt(50 * (2 * best + delta * (1 - delta))) <= norm.isf(0.025):
            expected.append(delta)
    assert (accepted[0], accepted[-1]) == pytest.approx((expected[0], expected[-1]), abs=6e-4)


def test_means_of_several_samples_are_decided_as_by_students_t():
    """A difference counted as of a whole task would find half as much."""
    d_T = np.random.default_rng(14).binomial(16, 0.55, 50) / 16 - 0.5
    assert differing(d_T).p()[0] == pytest.approx(ttest_1samp(d_T, 0).pvalue, rel=0.05)


def test_wilson_is_the_textbook_interval():
    # p = .5, n = 100, z = 1.95996: (p + z^2/2n -+ z sqrt(p(1-p)/n + z^2/4n^2)) / (1 + z^2/n)
    assert wilson(0.5, 100) == pytest.approx((0.40383, 0.59617), abs=1e-5)
    expected = binomtest(3, 20).proportion_ci(method="wilson")
    assert wilson(3 / 20, 20) == pytest.approx((expected.low, expected.high))


def test_holms_correction():
    # 4 * .01, 3 * .02, then the largest so far: 2 * .03 = .06; .5 alone
    assert holm([0.5, 0.01, 0.03, 0.02]) == pytest.approx([0.5, 0.04, 0.06, 0.06])
    assert holm([]) == []


# One test, for one experiment and for many, inverted.


@pytest.mark.parametrize("fixed", [False, True])
def test_one_experiment_and_many_at_once_are_the_same_test(fixed):
    random = np.random.default_rng(1)
    d_XST = random.choice([-1.0, 0, 1], (20, 3, 60), p=[0.1, 0.7, 0.2])
    unit_T = np.repeat(np.arange(12), 5)
    many = PairedTest(np.clip(d_XST, 0, 1), np.clip(-d_XST, 0, 1), unit_T, fixed=fixed)
    alone = [differing(d_ST, unit_T, fixed=fixed) for d_ST in d_XST]
    for mean in (0.0, 0.02, 0.15):
        # Units that are alike are flipped together in one experiment, by other random numbers: p-values differ by .01.
        clear = np.abs(many.p(mean) - 0.05) > (0.02 if fixed else 0)
        assert (many.rejects(mean)[clear] == np.array([single.rejects(mean)[0] for single in alone])[clear]).all()


def test_the_interval_is_the_test_inverted():
    random = np.random.default_rng(2)
    for seeds in (1, 4):
        test = differing(random.choice([-1.0, 0, 1], (seeds, 120), p=[0.1, 0.6, 0.3]), np.repeat(np.arange(24), 5))
        low, high = limits(test)
        assert not any(test.rejects(mean)[0] for mean in np.linspace(low + 1e-4, high - 1e-4, 25))
        assert test.rejects(low - 1e-3)[0] and test.rejects(high + 1e-3)[0]
        for mean in (low - 1e-3, low + 1e-3):
            assert (test.p(mean)[0] < 0.05) == test.rejects(mean)[0]


@pytest.mark.parametrize("num_differ", [0, 1, 3])
def test_scores_of_which_few_differ_show_little_of_how_much_others_may(num_differ):
    """Where 2 % of 30 tasks gain 1, Hall's t alone held that in 46 % of 400 experiments, with the score test in all."""
    d = np.where(np.arange(60) < num_differ, 1.0, 0.0)
    (low,), (high,) = differing(d, scores=True).interval()
    (least,), (most,) = differing(d).interval()
    assert low <= least + 1e-6 and high >= most - 1e-6 and high - low > 0.1
    assert np.ptp(differing(d, scores=True, bounded=False).interval()) <= high - low


def test_the_same_data_give_the_same_numbers_and_swapping_the_arms_swaps_them():
    random = np.random.default_rng(9)
    d_T, families = random.choice([-1, 0, 1], 300, p=[0.1, 0.6, 0.3]), random.integers(0, 60, 300)
    forth, again, back = (limits(differing(d, families)) for d in (d_T, d_T, -d_T))
    assert forth == again and forth == pytest.approx((-back[1], -back[0]), abs=1e-9)
    scores_T = random.normal(0.1, 0.5, 300).clip(-1, 1)
    named, renamed = (limits(differing(scores_T, labels)) for labels in (families, random.permutation(60)[families]))
    assert named == pytest.approx(renamed, abs=1e-9), "units that all differ draw the same signs by any names"


def test_thousands_of_kinds_of_units_are_not_drawn_one_by_one():
    """4,000 signs of each of 6,000 kinds would take 200 MB: the interval is that of the normal limit."""
    d_T = np.random.default_rng(0).normal(0.001, 0.1, 50_000).round(4)
    test, low, high = differing(d_T, scores=True), *limits(differing(d_T, scores=True))
    assert test.flips.num_draws is None
    assert (low, high) == pytest.approx(d_T.mean() + np.array([-1.96, 1.96]) * d_T.std() / 50_000**0.5, abs=1e-5)


def test_sums_by_unit_do_not_depend_on_the_order_of_tasks():
    values_XT, unit_T = np.random.default_rng(0).normal(size=(3, 7)), np.array([0, 0, 1, 2, 2, 2, 3])
    order = np.array([6, 2, 0, 5, 1, 3, 4])
    expected = np.stack([values_XT[:, unit_T == unit].sum(1) for unit in range(4)])
    assert pytest.approx(expected) == by_unit(values_XT, unit_T).T
    assert pytest.approx(expected) == by_unit(values_XT[:, order], unit_T[order]).T


# What is shown.


def test_what_is_shown_holds_in_every_test():
    gain, loss, equal = differing([1] * 40 + [0] * 60), differing([-1] * 40 + [0] * 60), differing([0] * 400)
    little = differing([1, -1] + [0] * 20)
    for tests, expected in (([gain], BETTER), ([loss], WORSE), ([equal], NO_GAIN), ([little], UNDECIDED)):
        assert shows(tests)[0] == expected
    assert shows([gain, little])[0] == shows([equal, gain])[0] == UNDECIDED
    assert shows([differing([1] * 40 + [0] * 60)], min_gain=0.9)[0] == Decision.BETTER_BY_LESS
    assert shows([differing([1] * 40 + [0] * 60)], min_gain=0.45)[0] == BETTER, "it may reach the bar"
    assert shows([differing([0] * 40)], min_gain=0.2)[0] == NO_GAIN and shows([differing([0] * 40)])[0] == UNDECIDED


@pytest.mark.parametrize("seeds", [1, 2, 3])
def test_below_three_training_seeds_neither_direction_is_of_other_trainings(seeds):
    verdicts = {decision: verdict_of(decision, seeds) for decision in (BETTER, WORSE, NO_GAIN, UNDECIDED)}
    if seeds < 3:
        assert verdicts == {BETTER: PARTIAL, **dict.fromkeys((WORSE, NO_GAIN, UNDECIDED), UNDERPOWERED)}
    else:
        assert verdicts == {BETTER: VALIDATED, WORSE: INVALIDATED, NO_GAIN: INVALIDATED, UNDECIDED: UNDERPOWERED}


# Units, strata, training seeds.


def test_families_are_seen_where_mcnemar_sees_tasks():
    test = differing([1] * 20 + [0] * 180, ["a"] * 20 + [f"f{task // 20}" for task in range(180)])
    assert mcnemar(20, 0) < 1e-5 and test.p()[0] == 0.5 and not test.rejects(0.0)[0]


def test_five_families_are_never_significant_and_six_can_be():
    tasks, d_T = np.repeat(np.arange(6), 10), np.tile([1.0, 1.0, 1.0, 0.0, 0.0], 12)
    assert differing(d_T, tasks).rejects(0.0)[0]
    assert limits(differing(d_T[tasks < 5], tasks[tasks < 5])) == (-1, 1), "nothing is refuted where no test can refute"
    assert fewest_units() == 6 and fewest_units(0.01) == 8


def test_fixed_families_are_strata_and_new_ones_are_undecided():
    d_T = np.random.default_rng(6).choice([-1, 0, 1], 300, p=[0.05, 0.75, 0.2])
    repositories = np.repeat(np.arange(5), [114, 77, 50, 40, 19])
    assert differing(d_T, repositories, fixed=True).rejects(0.0)[0]
    assert limits(differing(d_T, repositories)) == (-1, 1)


def test_near_zero_the_interval_is_as_narrow_as_the_data_allow():
    """Four differences in four of 24 families: bounds that take families for all or nothing would be 48 points wide."""
    family_T = np.repeat(np.arange(24), KATA)
    baseline = (np.random.default_rng(7).random(120) < 0.04).astype(float)
    treatment = baseline.copy()
    treatment[[2, 40, 70, 100]] = 1 - treatment[[2, 40, 70, 100]]
    low, high = limits(PairedTest(treatment[None, None], baseline[None, None], family_T))
    assert high - low < 0.13
    assert limits(differing([0] * 400)) == pytest.approx((-0.0095, 0.0095), abs=5e-4), "0 of 400: Wilson's limit"


def test_three_training_seeds_are_the_top_level():
    random = np.random.default_rng(8)
    base = (random.random((1, 200)) < 0.4).astype(float).repeat(3, 0)
    better = np.maximum(base, random.random((3, 200)) < np.array([0.30, 0.05, 0.10])[:, None] / 0.6)
    three = PairedTest(better[None], base[None], np.arange(200))
    single = PairedTest(better.mean(0)[None, None], base.mean(0)[None, None], np.arange(200))
    assert three.p()[0] > 0.05 > single.p()[0], "three trainings that differ so much show nothing"
    two = PairedTest(better[None, :2], base[None, :2], np.arange(200))
    assert two.rejects(0.0)[0] and two.top_error_X is None


def test_training_seeds_that_agree_are_no_evidence_about_tasks():
    """Noise of single seeds is taken out of the units' share, but alike trainings make no difference clearer."""
    random = np.random.default_rng(5)
    for _ in range(30):
        d_ST = np.sign(random.random((5, 40)) - 0.42)
        five, units = differing(d_ST), differing(d_ST.mean(0))
        assert five.p()[0] >= units.p()[0] - 1e-6


@pytest.mark.parametrize(
    "design",
    [
        Design((5,) * 24, seeds=3),
        Design((10,) * 12, seeds=6, fixed=True),
        Design((1,) * 100, seeds=5, samples=4),
        Design((20,) * 6, seeds=3),
    ],
)
def test_the_level_of_training_seeds_never_makes_p_smaller(design):
    unit_T = np.repeat(np.arange(len(design.sizes)), design.sizes)
    for spread in (0.0, 0.03):
        arms = draw(replace(PLAIN, seed_sd=spread), design, 0.05, 40, np.random.default_rng(1))
        of_seeds, of_means = (
            PairedTest(*each, unit_T, fixed=design.fixed, num_flips=399).p()
            for each in (arms, [arm_XST.mean(1, keepdims=True) for arm_XST in arms])
        )
        assert (of_seeds >= of_means - 1e-9).all() and (of_seeds > of_means + 1e-6).mean() > 0.3


def test_seeds_are_named_where_tasks_cannot_help():
    """The width of three trainings of 3 points is theirs, and no number of tasks takes it away."""
    model, design, random = replace(PLAIN, seed_sd=0.03), Design((1,) * 200, seeds=3), np.random.default_rng(1)
    sizes = [PairedTest(*draw(model, design, 0.0, 1, random), np.arange(200)).size_for(0.05) for _ in range(20)]
    assert np.median([size.seeds or 3 for size in sizes]) > 5
    alone = [PairedTest(*(arm[:, :1] for arm in draw(PLAIN, design, 0.0, 1, random)), np.arange(200)) for _ in "abcde"]
    assert all(test.size_for(0.05).seeds is None for test in alone)
    (few, *_), (many, *_) = (alone[0].size_for(gain) for gain in (0.1, 0.05))
    assert many == pytest.approx(4 * few, abs=4)


def test_gains_of_collections_give_the_t_test_over_collections():
    gain_S, of_collection = np.random.default_rng(0).normal(0.02, 0.05, 24), np.repeat(np.arange(6), 4)
    error, num = top_error(gain_S[None], of_collection)
    means = gain_S.reshape(6, 4).mean(1)
    assert num == 6 and error[0] == pytest.approx(means.std(ddof=1) / 6**0.5)
    assert top_error(gain_S[None], np.repeat([0, 1], 12))[1] == 24, "two collections have no spread that could be used"
    base = np.full((1, 24, 50), 0.5)
    arms = base + gain_S[None, :, None], base
    of_seeds, of_pairs = (
        PairedTest(*arms, np.arange(50), collection_S=collections) for collections in (None, of_collection)
    )
    assert of_pairs.top_error_X == pytest.approx(error) and of_pairs.top_error_X != pytest.approx(of_seeds.top_error_X)


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
    test = differing(d_T, families)
    low, high = limits(test)
    assert -1 <= low <= test.estimate_X[0] <= high <= 1 and high - low >= width and 0 < test.p()[0] <= 1


def test_within_strata_values_keep_their_mean_and_spread_as_a_stratified_mean_does():
    random = np.random.default_rng(1)
    stratum_T = np.repeat(np.arange(3), [5, 8, 1])
    values = random.normal(size=(2, 14)) + np.array([0, 5, -5])[stratum_T]
    spread = within_strata(values, stratum_T)
    assert spread.mean(1) == pytest.approx(values.mean(1))
    pooled = np.where(stratum_T == 2, 0, stratum_T)  # a lone task joins the smallest other stratum
    sizes = np.bincount(pooled)[:2]
    for row, spread_row in zip(values, spread, strict=True):
        variance = sum(n * row[pooled == h].var(ddof=1) for h, n in enumerate(sizes))
        assert ((spread_row - row.mean()) ** 2).sum() == pytest.approx(variance)
    assert within_strata(values, np.arange(14)) == pytest.approx(within_strata(values, np.zeros(14, int)))


def test_strata_of_equal_outcomes_are_no_certainty():
    low, high = limits(differing([1.0] * 60 + [0.0] * 60, ["a"] * 60 + ["b"] * 60, fixed=True))
    assert 0.45 < low < 0.49 and 0.51 < high < 0.55
    nothing = limits(differing([0.0] * 400, np.repeat(np.arange(5), 80), fixed=True))
    assert nothing == pytest.approx((-0.0095, 0.0095), abs=5e-4), "as without strata"


def test_the_interval_of_a_rate_knows_families():
    family_T = np.repeat(np.arange(24), KATA)
    passed_T = (np.random.default_rng(5).random(24) < 0.45)[family_T].astype(float)
    low, high = rate_interval(passed_T[None], family_T)
    alone = rate_interval(passed_T[None], np.arange(120))
    assert high - low > 1.8 * (alone[1] - alone[0]), "families pass or fail as one"
    assert alone == pytest.approx(wilson(passed_T.mean(), 120), abs=0.02)


# How often the test is right, by simulation: with X experiments a share has an error of sqrt(.05 * .95 / X).

LAYOUTS = {
    "operations, fixed, 3 seeds": (replace(MIDDLE, seed_sd=0.05), Design(OPERATIONS, seeds=3, fixed=True), 0.05),
    "six units": (PLAIN, Design((20,) * 6), 0.0),
    "kata near 0": (LOW, Design(KATA), 0.0),
    "Lite, fixed": (PLAIN, Design(LITE, fixed=True), 0.0),
    "the start, 3 seeds": (replace(PLAIN, seed_sd=0.03), Design(KATA, seeds=3, one_baseline=True), 0.0),
}
"""Each takes another branch of the test; `benchmarks/levels.py` has more layouts and more experiments."""


def simulated(model, design, gain, num):
    """Tests of `num` simulated experiments, 250 at a time."""
    random, unit_T = np.random.default_rng(0), np.repeat(np.arange(len(design.sizes)), design.sizes)
    for _ in range(num // 250):
        yield PairedTest(*draw(model, design, gain, 250, random), unit_T, fixed=design.fixed, num_flips=399)


def share(flags):
    return float(np.concatenate(list(flags)).mean())


@pytest.mark.parametrize("name", LAYOUTS)
def test_intervals_cover_and_gains_are_not_invented(name):
    model, design, gain = LAYOUTS[name]
    truth = gain
    if design.fixed:  # the true mean in fixed families, by many tasks of each
        many = replace(design, sizes=tuple(400 * size for size in design.sizes), seeds=1)
        treatment, baseline = draw(replace(model, seed_sd=0.0), many, gain, 1, np.random.default_rng(5))
        truth = float((treatment - baseline).mean())
    tests = list(simulated(model, design, gain, 750))
    coverage = 1 - share(test.rejects(truth) for test in tests)
    assert coverage >= 0.935 - 2.6 * np.sqrt(0.05 * 0.95 / 750)
    if name == "Lite, fixed":  # with few units, or few differences, an exact test is conservative
        assert coverage <= 0.985
    if gain == 0:
        assert share(test.above(truth) for test in tests) <= 0.025 + 2.6 * np.sqrt(0.025 * 0.975 / 750)


@pytest.mark.parametrize("model", [MIDDLE, HIGH])
def test_the_interval_of_one_arm_covers(model):
    _, baseline = draw(model, Design(KATA), 0.0, 100, np.random.default_rng(3))
    family_T = np.repeat(np.arange(24), KATA)
    intervals = [rate_interval(passed_ST, family_T) for passed_ST in baseline]
    assert np.mean([low <= model.pass_rate <= high for low, high in intervals]) >= 0.88


def test_the_interval_of_one_arm_covers_other_trainings():
    """An interval without its trainings in it covers in less than 87 %."""
    random = np.random.default_rng(9)
    rates_XS = 0.45 + 0.12 * random.normal(size=(60, 3))
    passed_XST = (random.random((60, 3, 200)) < rates_XS[:, :, None]).astype(float)
    intervals = [rate_interval(passed_ST, np.arange(200)) for passed_ST in passed_XST]
    assert np.mean([low <= 0.45 <= high for low, high in intervals]) >= 0.87, "95 %, with an error of 2.8"


# Planned looks: bounds as tabled, and the level over all looks.

TABLED = {1: 1.960, 2: 1.977, 3: 2.004, 4: 2.024, 5: 2.040, 10: 2.087}
"""Jennison and Turnbull, Group Sequential Methods (2000), table 2.3, two-sided .05."""


@pytest.mark.parametrize(("num_looks", "constant"), TABLED.items())
def test_bounds_of_looks_are_those_of_the_tables(num_looks, constant):
    bounds = norm.isf(np.array(levels(num_looks)) / 2)
    assert bounds == pytest.approx([constant * np.sqrt(num_looks / k) for k in range(1, num_looks + 1)], abs=6e-4 * 3)
    assert crossing(constant * np.sqrt(num_looks), num_looks) == pytest.approx(0.05, abs=2e-4)
    assert levels(1) == (0.05,), "one look is the test itself"


@pytest.mark.parametrize(("num_tasks", "num_looks"), [(120, 4), (7, 3), (2, 5), (1, 1), (0, 3)])
def test_every_task_is_in_one_look(num_tasks, num_looks):
    looks = parts(num_tasks, num_looks)
    assert [index for part in looks for index in part] == list(range(num_tasks)) and all(map(len, looks))


def by_look(model, design, gain, num_looks, num):
    """Each look's number of tasks and test, tasks in random order as they are drawn."""
    random = np.random.default_rng(3)
    order = random.permutation(design.num_tasks)
    family_T = np.repeat(np.arange(len(design.sizes)), design.sizes)
    arms = [arm[:, :, order] for arm in draw(model, design, gain, num, random)]
    for part in parts(design.num_tasks, num_looks):
        unit_T = numbered(family_T[order[: part.stop]].astype(str).tolist())
        yield part.stop, PairedTest(*(a[:, :, : part.stop] for a in arms), unit_T, fixed=design.fixed, num_flips=799)


def test_intervals_of_all_looks_hold_together():
    """So it may be stopped at any of them. Plain 95 % intervals fail: four of them hold together in 85 to 90 %."""
    model, design, num_looks = replace(PLAIN, family_correlation=0.0), Design((1,) * 120, fixed=True), 4
    tests = [test for _, test in by_look(model, design, 0.05, num_looks, 400)]
    noise = 2.6 * np.sqrt(0.05 * 0.95 / 400)
    for each_at, holds in ((levels(num_looks), True), ((0.05,) * num_looks, False)):
        wrong = [test.rejects(0.05, level) for test, level in zip(tests, each_at, strict=True)]
        assert (1 - np.logical_or.reduce(wrong).mean() >= 0.935 - noise) == holds


def test_draws_of_signs_are_all_for_few_units_and_begin_with_the_identity():
    random = np.random.default_rng(0)
    assert len({tuple(row) for row in draw_signs(5, random)}) == 32
    drawn = draw_signs(40, random, 399)
    assert drawn.shape == (400, 40) and (drawn[0] == 1).all() and set(np.unique(drawn)) == {-1, 1}


T = np.concatenate([-np.logspace(-3, 3, 60), [0], np.logspace(-3, 3, 60)])


@pytest.mark.parametrize("df", [2, 3, 4, 49, 1999, 999_999])
def test_student(df: int) -> None:
    assert np.allclose(student_cdf(df, T), special.stdtr(df, T), rtol=1e-8, atol=1e-300)
    p = 1 - np.logspace(-6, np.log10(0.5), 30)
    assert np.allclose(student_quantile(df, p), special.stdtrit(df, p), rtol=1e-7, atol=1e-8)


def test_normal() -> None:
    assert np.allclose(normal_cdf(T / 30), special.ndtr(T / 30), rtol=1e-12, atol=1e-300)
