"""A saved log and a live run are graded by one definition."""

import pytest

from stages.envs.repo.grading import TestLists
from stages.envs.swe import logs

LISTS = TestLists(("t.py::fixed", "t.py::other_fix"), ("t.py::kept",))
OTHERS = {"t.py::other_fix": "passed", "t.py::kept": "passed"}


@pytest.mark.parametrize("word", ["PASSED", "XFAIL", "SKIPPED", "FAILED", "ERROR", "XPASS", "words]"])
def test_a_saved_log_and_a_live_run_are_graded_alike(word: str) -> None:
    """The last two are no statuses: where swebench's reader takes such a word for one, it counts neither way."""
    outcomes = {"PASSED": "passed", "XFAIL": "xfailed", "SKIPPED": "skipped", "XPASS": "XPASS", "words]": "words]"}
    live = {"t.py::fixed": outcomes.get(word, word.lower()), **OTHERS}
    log = {name: {"passed": "PASSED"}.get(outcome, word) for name, outcome in live.items()}
    graded = logs.grade_statuses(LISTS, log)
    assert (graded.resolved, graded.tests_status) == (LISTS.resolved(live), LISTS.tests_status(live))
