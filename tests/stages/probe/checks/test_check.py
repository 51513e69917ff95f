"""The verdict of several checks."""

from composer_stages.probe.checks.check import EXIT_CODES, Check, table, verdict


def test_the_verdict_is_that_of_the_deciding_checks_and_inconclusive_without_any() -> None:
    def check(status: str, severity: str = "deciding") -> Check:
        return Check("X", "T", status, 1.0, "> 0", "because", severity)

    assert verdict([check("PASS"), check("FAIL", "report")]) == "PASS"
    assert verdict([check("PASS"), check("INCONCLUSIVE")]) == "INCONCLUSIVE"
    assert verdict([check("INCONCLUSIVE"), check("FAIL")]) == "FAIL"
    assert verdict([check("PASS", "report")]) == "INCONCLUSIVE"
    assert verdict([check("PASS"), check("NEGATIVE"), check("INCONCLUSIVE")]) == "NEGATIVE"
    assert verdict([check("NEGATIVE"), check("FAIL")]) == "FAIL"
    assert [status for status, code in EXIT_CODES.items() if code == 0] == ["PASS"]
    assert EXIT_CODES["NEGATIVE"] == EXIT_CODES["FAIL"] == 1 and EXIT_CODES["INCONCLUSIVE"] == 3
    assert check("NEGATIVE").as_json()["pass"] is False
    shown = table([check("PASS"), check("FAIL", "report")])
    assert "Verdict: PASS" in shown and "decides nothing" in shown
    assert check("INCONCLUSIVE").as_json()["pass"] is None
