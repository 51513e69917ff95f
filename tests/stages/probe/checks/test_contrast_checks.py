"""T4: what passes, what does not, and what cannot be judged."""

import numpy as np

from stages.probe.checks.check import EXIT_CODES, verdict
from stages.probe.checks.contrast_checks import Draws, contrast_checks, factorial
from stages.probe.checks.labelled import Labelled
from tests.stages.probe.checks.scored import scored_rows

FEW = Draws(permutations=400, resamples=400)


def test_a_real_effect_passes_t4e_and_its_negation_fails() -> None:
    rows = scored_rows(4, effect=1.5)
    found = factorial(rows, FEW)
    assert found.status == "PASS" and found.stat > found.placebo_q95
    negated = Labelled(**{**vars(rows), "scores": -rows.scores})
    assert factorial(negated, FEW).status == "FAIL"


def test_no_effect_fails_in_at_least_98_of_100_random_labelings() -> None:
    passed = sum(factorial(scored_rows(seed, placebos=20), FEW).status == "PASS" for seed in range(100))
    assert passed <= 2


def test_an_effect_of_source_alone_does_not_pass() -> None:
    rows = scored_rows(5)
    shifted = rows.scores + 3.0 * (rows.source == 0)[:, None]
    assert factorial(Labelled(**{**vars(rows), "scores": shifted}), FEW).status == "FAIL"


def test_a_direction_like_all_others_does_not_pass_however_large_its_t() -> None:
    rows = scored_rows(6)
    everywhere = rows.scores + 2.0 * rows.hacked[:, None]
    found = factorial(Labelled(**{**vars(rows), "scores": everywhere}), FEW)
    assert found.stat > 5 and found.status == "FAIL" and "placebos" in found.detail


def test_hack_equal_to_source_is_inconclusive() -> None:
    rows = scored_rows(7, effect=3.0)
    hacked = rows.source == 0
    hacked[np.flatnonzero(hacked)[:2]] = False
    found = factorial(rows.relabelled(hacked), FEW)
    assert found.status == "INCONCLUSIVE"


def test_too_few_rows_are_inconclusive_in_every_part() -> None:
    rows = scored_rows(8, effect=3.0)
    checks = contrast_checks(rows.where(rows.problem < 3), FEW)
    assert [f.status for f in checks] == ["INCONCLUSIVE"] * 5
    assert verdict(checks) == "INCONCLUSIVE" and EXIT_CODES[verdict(checks)] == 3


def test_no_hacks_at_all_are_inconclusive_and_never_pass() -> None:
    rows = scored_rows(9)
    checks = contrast_checks(rows.relabelled(np.zeros(len(rows), dtype=bool)), FEW)
    assert {f.status for f in checks} == {"INCONCLUSIVE"}


def test_length_alone_is_caught_by_the_nuisance_regression() -> None:
    rows = scored_rows(10, problems=60)
    longer = rows.length + 8 * rows.wrong
    scores = rows.scores + 0.5 * longer[:, None]
    found = {f.name: f for f in contrast_checks(Labelled(**{**vars(rows), "length": longer, "scores": scores}), FEW)}
    assert found["T4a"].status == "PASS" and found["T4d"].status == "FAIL"
