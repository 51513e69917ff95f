"""The two lists of tests of an instance, and whether the outcomes of its tests resolve it.

This is the only definition of resolved: live runs and saved logs both use it. The verifier of an exported task repeats
it (stages/envs/repo/guest/composer_rules.py), as it runs where Composer is not installed.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import orjson

LISTS = ("FAIL_TO_PASS", "PASS_TO_PASS")
"""The columns of the lists."""
PASSING = frozenset({"passed", "xfailed"})
FAILING = frozenset({"failed", "error", "xpassed"})
SKIPPED = "skipped"
Statuses = dict[str, str]
"""Test name -> "passed", "xfailed", "xpassed", "skipped", "failed" or "error"; a test that did not report is absent."""
TestsStatus = dict[str, dict[str, list[str]]]
"""List of tests -> "success" or "failure" -> names, as `tests_status` in the reports of SWE-bench's harness."""


@dataclass(frozen=True)
class TestLists:
    """The tests that must come to pass, and those that must stay passing."""

    __test__ = False  # pytest collects classes named Test*

    fail_to_pass: tuple[str, ...]
    pass_to_pass: tuple[str, ...]
    skip_fails: bool = False
    """Whether a skipped test of `fail_to_pass` fails: stricter than swebench, code under test can skip its test."""

    def tests_status(self, statuses: Statuses) -> TestsStatus:
        """Return the tests of each list that succeeded and that failed, by the rules of swebench 4.1.0.

        There (harness/grading.py: test_passed, test_failed, get_eval_tests_report), for both lists alike: "passed" and
        "xfailed" succeed; "failed", "error" and a test without a status fail; a skipped test is neither, also one that
        had to come to pass. Any other word that a log reader took for a status is neither as well. swebench has no
        status for XPASS, and its readers of pytest's logs pass over such a line, so that the test has no status:
        "xpassed" fails. This is the harness's kind "pass_and_fail"; "fail_only", for three JavaScript repositories, is
        not provided.
        """
        status: TestsStatus = {}
        for group, names, skips_fail in (
            ("FAIL_TO_PASS", self.fail_to_pass, self.skip_fails),
            ("PASS_TO_PASS", self.pass_to_pass, False),
            ("FAIL_TO_FAIL", (), False),
            ("PASS_TO_FAIL", (), False),
        ):
            status[group] = {
                "success": [name for name in names if statuses.get(name) in PASSING],
                "failure": [
                    name
                    for name in names
                    if statuses.get(name, "failed") in FAILING or (skips_fail and statuses[name] == SKIPPED)
                ],
            }
        return status

    def resolved(self, statuses: Statuses) -> bool:
        """Return whether no test of either list fails.

        swebench 4.1.0 (harness/grading.py: compute_fail_to_pass, compute_pass_to_pass, get_resolution_status) asks that
        successes / (successes + failures) be 1 for both lists and takes 1 where the sum is zero, which is the same:
        with every test of `fail_to_pass` skipped an instance is resolved, unless `skip_fails`.
        """
        return not any(group["failure"] for group in self.tests_status(statuses).values())


def is_name_list(value: Any) -> bool:
    """Return whether a value is a list of names, or the JSON text of one."""
    try:
        value = orjson.loads(value) if isinstance(value, str) else value
    except orjson.JSONDecodeError:
        return False
    return isinstance(value, list) and all(isinstance(name, str) for name in value)


def lists_of(row: Mapping[str, Any]) -> TestLists:
    """Return the two lists of a row, which are JSON inside a string, or lists."""
    values = [row[column] for column in LISTS]
    fail_to_pass, pass_to_pass = (json.loads(value) if isinstance(value, str) else value for value in values)
    return TestLists(tuple(fail_to_pass), tuple(pass_to_pass))
