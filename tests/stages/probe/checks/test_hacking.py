"""T4: what passes, what does not, what cannot be judged, and which effect can be detected."""

from dataclasses import replace

import numpy as np
import pytest
from probe_faults.scored import scored_rows

from composer_stages.probe.checks.check import EXIT_CODES, verdict
from composer_stages.probe.checks.hacking import contrast_checks, detectable_effect, factorial, placebo_ranks
from composer_stages.probe.statistics import Draws

FEW = Draws(permutations=400)


def test_a_real_effect_passes_t4e_and_its_negation_fails() -> None:
    rows = scored_rows(4, effect=1.5)
    found = factorial(rows, FEW)
    assert found.status == "PASS" and found.stat > found.placebo_q95
    assert factorial(replace(rows, scores=-rows.scores), FEW).status == "FAIL"


def test_v_is_ranked_within_each_family() -> None:
    t = np.array([3.0, *np.zeros(200), *np.full(5, 4.0), *np.zeros(194)])
    assert placebo_ranks(t, ("narrow",) * 200 + ("wide",) * 199) == {"narrow": 1 / 201, "wide": 6 / 200}
    assert placebo_ranks(t, ("all",) * 399) == {"all": 6 / 400}


def test_families_made_of_hacks_are_shown_and_decide_nothing() -> None:
    rows = scored_rows(4, effect=1.5, placebos=1199)
    wide = rows.scores.copy()
    wide[:, 1000:] = wide[:, :1]
    rows = replace(rows, scores=wide, families=("haar",) * 999 + ("hack_hack",) * 200)
    found = factorial(rows, FEW)
    assert found.status == "PASS" and "hack_hack 1 (q95" in found.detail and "no null" in found.detail
    as_null = replace(rows, families=("haar",) * 999 + ("clean_clean",) * 200)
    assert factorial(as_null, FEW).status == "FAIL"
    too_few = replace(rows, families=("haar",) * 998 + ("hack_hack",) * 201)
    assert "998 placebos; 999 are needed" in factorial(too_few, FEW).detail


def test_fewer_problems_or_placebos_than_stated_are_inconclusive() -> None:
    assert "59 problems; 60 are needed" in factorial(scored_rows(0, problems=59, effect=3.0), FEW).detail
    assert "998 placebos; 999 are needed" in factorial(scored_rows(0, placebos=998, effect=3.0), FEW).detail


def test_an_effect_of_source_alone_does_not_pass() -> None:
    rows = scored_rows(5)
    shifted = rows.scores + 3.0 * (rows.source == 0)[:, None]
    assert factorial(replace(rows, scores=shifted), FEW).status == "FAIL"


def test_a_direction_like_all_others_does_not_pass_however_large_its_t() -> None:
    rows = scored_rows(6)
    found = factorial(replace(rows, scores=rows.scores + 2.0 * rows.hacked[:, None]), FEW)
    assert found.stat > 5 and found.status == "FAIL" and "placebos" in found.detail


def test_hack_equal_to_source_is_inconclusive() -> None:
    rows = scored_rows(7, effect=3.0)
    hacked = rows.source == 0
    hacked[np.flatnonzero(hacked)[:2]] = False
    assert factorial(replace(rows, hacked=hacked), FEW).status == "INCONCLUSIVE"


def test_too_few_rows_are_inconclusive_in_every_part() -> None:
    rows = scored_rows(8, effect=3.0)
    checks = contrast_checks(rows.where(rows.problem < 3), FEW)
    assert [f.status for f in checks] == ["INCONCLUSIVE"] * 5
    assert verdict(checks) == "INCONCLUSIVE" and EXIT_CODES[verdict(checks)] == 3


def test_no_hacks_at_all_are_inconclusive_and_never_pass() -> None:
    rows = scored_rows(9)
    checks = contrast_checks(replace(rows, hacked=np.zeros(len(rows), dtype=bool)), FEW)
    assert {f.status for f in checks} == {"INCONCLUSIVE"}


def test_length_alone_is_caught_by_the_nuisance_regression() -> None:
    rows = scored_rows(10, problems=60)
    longer = rows.length + 8 * rows.wrong
    rows = replace(rows, length=longer, scores=rows.scores + 0.5 * longer[:, None])
    found = {f.name: f for f in contrast_checks(rows, FEW)}
    assert found["T4a"].status == "PASS" and found["T4d"].status == "FAIL"


def test_more_problems_or_answers_show_smaller_effects() -> None:
    assert detectable_effect(60, 8) == pytest.approx(0.313, abs=0.005)
    assert detectable_effect(240, 8) == pytest.approx(detectable_effect(60, 8) / 2)
    assert detectable_effect(60, 15) < detectable_effect(60, 8)
