"""A saved test log to a report as SWE-bench's harness writes it.

Rules of swebench 4.1.0 (harness/grading.py: get_logs_eval): what stands between the markers is read; a log that says
its patch did not apply, or that tests did not end, has no results. What results mean for the lists of an instance is
decided by `Lists` (stages.envs.repo.grading), for saved logs and for live runs alike.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from stages.envs.repo.grading import Lists, TestsStatus
from stages.envs.swe import logs
from stages.envs.swe.logs import LogStatuses

START, END = ">>>>> Start Test Output", ">>>>> End Test Output"
APPLIED = ">>>>> Applied Patch"
VOID = (">>>>> Patch Apply Failed", ">>>>> Reset Failed", ">>>>> Tests Errored", ">>>>> Tests Timed Out")
ENDED_EARLIER = (">>>>> All Tests Passed", ">>>>> Some Tests Failed")
VOID_EARLIER = (*VOID[:3], ">>>>> Init Failed", ">>>>> Init Timed Out", "Failed to reset task environment")
NO_RESULT = "the tests ended without a single result"
"""A patch that breaks the import, as a rule: no test passes, and the harness calls that unresolved."""


@dataclass(frozen=True)
class Report:
    """The grade of one log.

    `tests_status` is None where the log has no results, and then nothing is resolved; `why` says why there are none.
    `void`: there are none because the run failed, as the harness itself says.
    """

    resolved: bool
    tests_status: TestsStatus | None
    why: str | None = None
    void: bool = False


def lists_of(row: Mapping[str, Any]) -> Lists:
    """The two lists of an instance, which are JSON inside a string, or lists."""
    fail_to_pass, pass_to_pass = (_names(row[column]) for column in ("FAIL_TO_PASS", "PASS_TO_PASS"))
    return Lists(fail_to_pass, pass_to_pass)


def _names(value: Any) -> tuple[str, ...]:
    return tuple(json.loads(value) if isinstance(value, str) else value)


def graded(lists: Lists, statuses: LogStatuses) -> Report:
    """What the statuses of a log, whose tests ended, mean for the two lists."""
    found = logs.outcomes(statuses)
    return Report(lists.resolved(found), lists.tests_status(found), None if statuses else NO_RESULT)


def of_marked_log(log: str, lists: Lists, repo: str) -> Report:
    """A log of the harness in containers: results between two markers."""
    if mark := next((mark for mark in VOID if mark in log), None):
        return Report(False, None, f"the log says {mark!r}", void=True)
    if START not in log or END not in log:
        return Report(False, None, "the log has no complete test output")
    read = logs.dialect(repo)
    return graded(lists, read(log.split(START)[1].split(END)[0]) or read(log))


def of_plain_log(log: str, lists: Lists, repo: str) -> Report:
    """A log of the harness of early 2024: everything in one file, results after the last patch.

    Its last line (">>>>> All Tests Passed") is no grade.
    """
    if mark := next((mark for mark in VOID_EARLIER if mark in log), None):
        return Report(False, None, f"the log says {mark!r}", void=True)
    _, applied, results = log.rpartition(APPLIED)
    if not applied:
        return Report(False, None, "the log does not say that the patch was applied")
    statuses = logs.dialect(repo)(results)
    if statuses or any(mark in results for mark in ENDED_EARLIER):
        return graded(lists, statuses)
    return Report(False, None, "the log holds no result of any test")
