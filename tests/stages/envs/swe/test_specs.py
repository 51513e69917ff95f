"""Outcomes of a live run get the names and the meaning that the log of the same run would have for swebench."""

from pathlib import Path
from types import SimpleNamespace

import pytest

from composer_stages.envs.swe import specs
from composer_stages.envs.swe.specs import DJANGO, EnvironmentSpec
from composer_stages.sandbox import CommandResult
from composer_stages.swebench import logs
from composer_stages.swebench.lists import TestLists

NODES = {"t.py::a": "passed", "t.py::b[x y]": "xfailed", "t.py::c": "skipped", "t.py::d": "xpassed", "t.py::e": "error"}
SUMMARY = """\
SKIPPED [1] t.py:4: no reason
PASSED t.py::a
XFAIL t.py::b[x y]
XPASS t.py::d
ERROR t.py::e - boom
"""
"""Those outcomes as `pytest -rA` writes them: it folds skips, and names no test in them."""


def test_live_outcomes_are_those_of_the_log() -> None:
    statuses = specs.statuses_by_log_name(NODES, "pallets/flask")
    of_log = {"t.py::a": "passed", "t.py::b[x": "xfailed", "t.py::e": "error"}
    assert statuses == of_log | {"t.py::b[x y]": "xfailed"}, "lists of other programs have names in full"
    assert logs.to_outcomes(logs.log_parser("pallets/flask")(SUMMARY)) == {"[1]": "skipped", **of_log}
    assert not TestLists(("t.py::c",), ()).resolved(statuses), "a skipped test is missing for swebench, and fails"


@pytest.mark.parametrize(
    ("parser", "log", "code", "resolved"),
    [
        ("parse_log_pytest", "PASSED t.py::b[x y]", 0, True),
        ("parse_log_astropy", "PASSED t.py::b[x y]", "", True),
        ("parse_log_pytest", "FAILED t.py::b[x y] - assert 1 - 2", 1, False),
        ("parse_log_pytest", "PASSED t.py::b[x y]\nPASSED t.py::c", 1, False),  # printed by another than pytest
        ("parse_log_pytest", "SKIPPED t.py::b[x y]", 0, False),
        ("parse_log_django", "t.py::b[x y] ... ok", 0, True),
    ],
)
def test_a_rows_script_is_read_by_the_rows_parser(parser: str, log: str, code: object, resolved: bool) -> None:
    output = f"{logs.START}\n{log}\n{logs.END}\n{specs.EXIT_CODE}: {code}\n"
    result = CommandResult(output, 0, 0.0, timed_out=False, output_bytes=len(output), killed_for=None)
    runtime = SimpleNamespace(run=lambda tree, command: result)
    row = {"repo": "new/one", "eval_script": "", "log_parser": parser}
    outcomes = specs.run_eval_script(row, runtime, Path())  # type: ignore[arg-type]
    assert TestLists(("t.py::b[x y]",), (), skip_fails=True).resolved(outcomes.statuses) is resolved


def test_a_test_that_djangos_runner_skips_is_named_and_counts_neither_way() -> None:
    outcomes = logs.to_outcomes(logs.log_parser("django/django")("test_a (T) ... ok\ntest_b (T) ... skipped 'no'\n"))
    assert outcomes == {"test_a (T)": "passed", "test_b (T)": "skipped"}
    assert TestLists(("test_a (T)", "test_b (T)"), ()).resolved(outcomes)


def test_names_that_are_no_tests_do_not_count_where_pytest_runs() -> None:
    of_pytest = specs.InstanceTests(EnvironmentSpec("3.11"), "a/b", ())
    of_django = specs.InstanceTests(EnvironmentSpec("3.11", test_command=DJANGO), "django/django", ())
    lists = TestLists(("t.py::a", "[100%]"), ("[1]",), skip_fails=True)
    assert of_pytest.filtered(lists) == TestLists(("t.py::a",), (), skip_fails=True)
    assert of_django.filtered(lists) == lists
    unknown = TestLists(("t.py::a",), ("test_gone (tests.test_add.TestX)",), skip_fails=True)
    assert of_pytest.filtered(unknown) == unknown, "a name of no test is one that SWE-bench asks for"
    unreadable = of_pytest.filtered(TestLists(("[100%]",), ("t.py::b",)))
    assert not unreadable.resolved({"t.py::b": "passed"}), "without a test that came to pass nothing is resolved"
