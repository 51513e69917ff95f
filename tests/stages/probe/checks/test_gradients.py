"""Checks of measured rows."""

from composer_stages.probe.checks.gradients import coverage


def test_coverage_fails_for_missing_rows() -> None:
    rows = [{"cos_S_contrib": 0.1, "null_reason": None}] * 9 + [{"cos_S_contrib": None, "null_reason": "zero_grad"}]
    assert coverage(rows, 10).status == "PASS"
    assert coverage(rows[:9], 10).status == "FAIL"
    assert coverage([*rows[:9], {"cos_S_contrib": None, "null_reason": None}], 10).status == "FAIL"
