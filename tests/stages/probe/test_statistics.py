"""The statistics against other ways to compute them, their error rates on dependent rows, labels and effect sizes."""

from dataclasses import replace

import numpy as np
import pytest
from probe_faults.scored import scored_rows
from scipy import stats

from composer_stages.probe.statistics import (
    Concordance,
    codes,
    compare_effects,
    concordance,
    intraclass_correlation,
    labelled,
    mixed,
    multiple_correlation,
    permutation_p,
    regress,
    welch,
    within,
)


def test_welch_is_scipys() -> None:
    rows = scored_rows(0)
    t, df = welch(rows.scores, rows.wrong)
    expected = stats.ttest_ind(rows.scores[rows.wrong], rows.scores[~rows.wrong], equal_var=False)
    assert np.allclose(t, expected.statistic) and np.allclose(df, expected.df)


def test_the_permutation_statistic_is_the_stated_one_and_its_p_is_exact_on_a_small_case() -> None:
    score, flags, strata = np.array([1.0, 2.0, 5.0, 4.0]), np.array([False, True, True, False]), np.array([0, 0, 1, 1])
    # of the four ways to deal labels in two strata of two, one is as extreme: both flags on the larger score
    assert permutation_p(score, flags, strata, 4000, 0) == pytest.approx(0.25, abs=0.03)
    n1, n0, gap = np.array([1, 1]), np.array([1, 1]), np.array([1.0, 1.0])
    assert within(score[:, None], strata)[flags].sum() == pytest.approx((n1 * n0 / (n1 + n0) * gap).sum())


def test_regression_is_least_squares_with_dummies_and_cluster_robust_errors() -> None:
    rows = scored_rows(1, problems=10, effect=0.3)
    nuisances = np.column_stack([rows.wrong, rows.length])
    found = regress(rows.scores[:, :1], rows.hacked, nuisances, rows.problem)
    design = np.column_stack([rows.hacked, nuisances, np.eye(10)[rows.problem]]).astype(float)
    beta, *_ = np.linalg.lstsq(design, rows.scores[:, 0], rcond=None)
    assert found.estimate[0] == pytest.approx(beta[0])
    bread = np.linalg.inv(design.T @ design)
    residual = rows.scores[:, 0] - design @ beta
    sums = np.stack([design[rows.problem == c].T @ residual[rows.problem == c] for c in range(10)])
    correction = 10 / 9 * 79 / (80 - 3)
    assert found.error[0] == pytest.approx(np.sqrt(correction * (bread @ sums.T @ sums @ bread)[0, 0]))
    assert found.p[0] == pytest.approx(stats.t.sf(found.t[0], 9))


def test_collinear_nuisances_drop_out_and_an_explained_flag_is_nan() -> None:
    rows = scored_rows(2)
    doubled = np.column_stack([rows.length, rows.length, np.ones(len(rows))])
    once = regress(rows.scores, rows.hacked, rows.length[:, None], rows.problem)
    assert np.allclose(regress(rows.scores, rows.hacked, doubled, rows.problem).estimate, once.estimate)
    assert np.isnan(regress(rows.scores, rows.hacked, rows.hacked[:, None], rows.problem).t).all()


def test_concordance_is_the_auroc_of_matched_rows() -> None:
    rows = scored_rows(3, problems=1, size=60)
    strata = np.zeros(60, dtype=int)
    u = stats.mannwhitneyu(rows.scores[rows.hacked, 0], rows.scores[~rows.hacked, 0]).statistic
    found = concordance(rows.scores, rows.hacked, strata, rows.problem)
    assert found.auroc()[0] == pytest.approx(u / (rows.hacked.sum() * (~rows.hacked).sum()))


def drawn_concordance(
    rng: np.random.Generator, auroc: float, problems: int, size: int, spread: float = 0.0
) -> Concordance:
    """Normal scores of `size` flagged and as many other rows of each problem; gaps differ between problems."""
    gap = stats.norm.ppf(auroc) * np.sqrt(2 + spread**2) + spread * rng.normal(size=problems)
    problem = np.repeat(np.arange(problems), 2 * size)
    flags = np.arange(len(problem)) % 2 == 0
    scores = rng.normal(size=len(problem)) + flags * gap[problem]
    return concordance(scores[:, None], flags, problem, problem)


def test_the_interval_of_a_perfect_separation_holds_less_than_one() -> None:
    """Newcombe's bound by hand: at 1 the share refutes every value v with (1 - v)^2 > t^2 V(v)."""
    few, many = (drawn_concordance(np.random.default_rng(0), 1 - 1e-12, problems, 3) for problems in (8, 80))
    assert few.auroc()[0] == many.auroc()[0] == 1.0
    assert few.interval()[1] == many.interval()[1] == 1.0
    assert 0.8 < few.interval()[0] < 0.9 and 0.98 < many.interval()[0] < 0.999
    low = few.interval()[0]
    variance = low * (1 - low) * (1 + 2 * ((1 - low) / (2 - low) + low / (1 + low))) / (9 * 8)
    assert (1 - low) ** 2 == pytest.approx(stats.t.ppf(0.975, 7) ** 2 * variance, rel=1e-6)
    wrong = Concordance(np.zeros_like(few.wins), few.pairs, few.sizes)
    assert wrong.interval() == pytest.approx((0.0, 1 - low))
    assert np.isnan(Concordance(few.wins * 0, few.pairs * 0, few.sizes * 0).interval()).all()


def test_the_interval_of_a_middling_share_is_as_wide_as_the_variance_between_problems() -> None:
    rng = np.random.default_rng(3)
    found = [drawn_concordance(rng, 0.75, 60, 4, spread) for spread in (0.0, 1.5) for _ in range(20)]
    widths = [np.diff(one.interval())[0] for one in found]
    assert np.mean(widths[20:]) > 1.25 * np.mean(widths[:20])
    shares = np.array([one.auroc()[0] for one in found[20:]])
    assert np.mean(widths[20:]) / (2 * stats.t.ppf(0.975, 59)) == pytest.approx(shares.std(ddof=1), rel=0.4)


def test_correlations_mixed_strata_and_codes() -> None:
    problem = np.repeat(np.arange(50), 8)
    level = np.random.default_rng(0).normal(size=50)[problem] + np.random.default_rng(1).normal(size=400)
    assert intraclass_correlation(level, problem) == pytest.approx(0.5, abs=0.12)
    assert intraclass_correlation(level, 3 * problem) == intraclass_correlation(level, problem)  # numbers without a row
    assert mixed(np.array([True, False, True, True]), np.array([0, 0, 1, 1])) == 1
    assert multiple_correlation(np.array([True, True, False]), np.array([0, 0, 1])) == pytest.approx(1.0)
    flags, groups = np.array([True, False, True, False, False]), np.array([0, 0, 1, 1, 1])
    assert multiple_correlation(flags, groups) == pytest.approx(abs(np.corrcoef(flags, groups)[0, 1]))
    assert len(np.unique(codes(["a", "a", "b"], [1, 1, 1]))) == 2


def test_rows_without_label_or_score_are_left_out() -> None:
    blank = dict.fromkeys(("hedge_count", "comment_count"), None)
    one = {"problem_id": "a", "src_pool": "base", "n_loss_tokens": 3, "logp_mean": -1.0, "cos_first128": 0.1, **blank}
    rows = [
        {**one, "hacked": True, "hidden_pass": False},
        {**one, "hacked": None, "hidden_pass": False},
        {**one, "hacked": True, "hidden_pass": True},
    ]
    found = labelled(rows, np.array([[0.1], [0.2], [np.nan]]))
    assert len(found) == 1 and found.wrong.tolist() == [True]


def test_effects_are_cohens_d_within_strata_and_paired() -> None:
    rows = scored_rows(0, problems=60, effect=1.0, placebos=1, icc=0.0)
    weaker = rows.scores.copy()
    weaker[:, 1] = rows.scores[:, 0] - 0.5 * rows.hacked
    found = compare_effects(replace(rows, scores=weaker), 500, 0)
    assert found.d[0] == pytest.approx(1.0, abs=0.25) and found.d[1] == pytest.approx(0.5, abs=0.25)
    assert found.ratio[1] < found.ratio[0] < found.ratio[2] < 0.8
    equal = compare_effects(replace(rows, scores=np.repeat(rows.scores[:, :1], 2, axis=1)), 100, 0)
    assert equal.ratio == (1.0, 1.0, 1.0) and equal.difference == (0.0, 0.0, 0.0)
