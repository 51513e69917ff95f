"""The report of a run of tests: which lines of the plugin are believed, and which reports and skips are not."""

import hashlib
import hmac
import json
from typing import Any

import pytest

from composer_stages.envs.repo.guest.composer_rules import fail_unexplained, read_report
from composer_stages.envs.repo.guest.composer_supervisor import SealedReport

TEST = "t.py::test_it"


def sealed(number: int, *content: Any, key: str = "key") -> bytes:
    """Return a line as the plugin seals it."""
    body = json.dumps(content).encode()
    return hmac.new(key.encode(), b"%d " % number + body, hashlib.sha256).hexdigest().encode() + b" " + body


@pytest.mark.parametrize(
    "forged",
    [
        b'0 ["outcome", ["t.py::test_it", "passed"]]',
        sealed(0, "outcome", [TEST, "passed"], key="guessed"),
        sealed(1, "outcome", [TEST, "passed"]),
    ],
    ids=["no seal", "another key", "another place"],
)
def test_a_line_without_its_seal_is_tampering_and_is_not_recorded(forged: bytes) -> None:
    report = SealedReport("key")
    report.take(forged)
    assert report.tampered and report.outcomes == {}


def test_no_line_counts_twice_or_after_the_end() -> None:
    for lines in (
        [sealed(0, "broken", ["a", "b"])] * 2,
        [sealed(0, "end", {}), sealed(1, "outcome", [TEST, "passed"])],
    ):
        report = SealedReport("key")
        for line in lines:
            assert not report.tampered
            report.take(line)
        assert report.tampered and report.outcomes == {}


def test_a_test_that_raised_cannot_pass_and_a_failure_is_final() -> None:
    report = SealedReport("key")
    report.take(sealed(0, "phase", [TEST, True]))
    report.take(sealed(1, "outcome", [TEST, "passed"]))
    assert report.tampered and report.outcomes == {}
    report = SealedReport("key")
    for number, outcome in enumerate(("failed", "passed")):
        report.take(sealed(number, "outcome", [TEST, outcome]))
    assert not report.tampered and report.outcomes == {TEST: "failed"}


GOOD = {"outcomes": {TEST: "passed"}, "control": ["failed"]}


LINE = f"secret {json.dumps(GOOD)}"


@pytest.mark.parametrize(
    "text",
    [
        f"{LINE}\n{LINE}",
        *(
            f"secret {json.dumps(GOOD | change)}"
            for change in ({"control": ["passed"]}, {"tampered": True}, {"outcomes": {TEST: "PASSED"}})
        ),
    ],
    ids=["two reports", "control passed", "tampered", "no outcome"],
)
def test_a_report_is_void_without_a_failed_control_or_of_another_shape(text: str) -> None:
    assert read_report(text, "secret")[:2] == ({}, True)


def test_a_report_is_read_between_other_lines_and_none_is_no_tampering() -> None:
    assert read_report(f"before\n{LINE}\nafter", "secret") == (GOOD, False, "before\nafter")
    assert read_report("2 passed", "secret") == ({}, False, "2 passed")
    # Where no test could be collected no control runs.
    report = {"outcomes": {}, "control": [], "broken": [["t.py", "SyntaxError"]]}
    assert read_report(f"secret {json.dumps(report)}", "secret")[:2] == (report, False)


def test_passes_without_the_control_do_not_count() -> None:
    """A run may end at the first failure (-x), or before the control because of what a test calls."""
    report = {"outcomes": {TEST: "passed", "t.py::test_b": "skipped", "t.py::test_c": "failed"}, "control": []}
    believed, tampered, _ = read_report(f"secret {json.dumps(report)}", "secret")
    assert (believed["outcomes"], tampered) == ({"t.py::test_c": "failed"}, False)


@pytest.mark.parametrize(("text", "outcome"), [("pytest.skip('later')", "skipped"), ("assert f(1)", "failed")])
def test_a_skip_that_no_test_asks_for_is_a_failure(text: str, outcome: str) -> None:
    assert fail_unexplained({TEST: "skipped"}, {"t.py": f"def test_it():\n    {text}\n"}) == {TEST: outcome}
