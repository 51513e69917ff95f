"""How the logs of each test runner are read, on pieces of logs as the runners write them."""

import pytest

from composer_stages.swebench import logs
from composer_stages.swebench.lists import TestLists
from composer_stages.swebench.logs import ERROR, FAILED, PASSED, SKIPPED, XFAIL, log_parser

SUMMARY = """\
=========== short test summary info ============
PASSED tests/test_a.py::test_one
PASSED tests/test_a.py::test_two[/a/b/c-1]
PASSED tests/test_a.py::test_blank[some words]
FAILED tests/test_a.py::test_three - assert 1 == 2
ERROR tests/test_b.py - ImportError: no
SKIPPED [1] tests/test_a.py:4: no reason
XFAIL tests/test_a.py::test_four
PASSED
1 failed, 3 passed in 0.10s
"""


DJANGO = """\
test_a (app.tests.T) ... ok
test_b (app.tests.T) ... FAIL
test_c (app.tests.T) ... ERROR
test_d (app.tests.T) ... skipped 'no database'
A docstring stands for its test. ... ok
test_e (app.tests.T) ... Testing against Django installed in '/testbed/django'
Importing application app ... done
System check identified no issues (1 silenced).
ok
test_f (app.tests.T) ... some output
ok
FAIL: test_g (app.tests.T)
"""
SYMPY = """\
sympy/core/tests/test_a.py[4] 
test_one ok
test_two F
test_three E
test_four ok                                          [FAIL]

_____________ sympy/core/tests/test_a.py:test_two _____________
AssertionError
"""
COLOURED = "\x1b[32mPASSED\x1b[0m t.py::\x1b[1mtest_it\x1b[0m\n"
LOGS = [
    (
        "pallets/flask",
        SUMMARY,
        {
            "tests/test_a.py::test_one": PASSED,
            "tests/test_a.py::test_two[/a/b/c-1]": PASSED,
            "tests/test_a.py::test_blank[some": PASSED,
            "tests/test_a.py::test_three": FAILED,
            "tests/test_b.py": ERROR,
            "[1]": SKIPPED,
            "tests/test_a.py::test_four": XFAIL,
        },
    ),
    # Of parameters that are paths only the last part is kept.
    ("psf/requests", "PASSED t.py::a[/b/c-1]\n", {"t.py::a[/c-1]": PASSED}),
    ("psf/requests", "PASSED t.py::u[//host/a]\n", {"t.py::u[//host/a]": PASSED}),
    ("psf/requests", "PASSED t.py::v[/a/*]\n", {"t.py::v[/a/*]": PASSED}),
    ("astropy/astropy", COLOURED, {"t.py::test_it": PASSED}),
    ("pallets/flask", COLOURED, {}),
    ("scikit-learn/scikit-learn", "sklearn/t.py::test_it PASSED\n", {"sklearn/t.py::test_it": PASSED}),
    ("mwaskom/seaborn", "t.py::a PASSED [ 50%]\nFAILED t.py::b - x\n", {"t.py::a": PASSED, "t.py::b": FAILED}),
    # Lines with two verdicts are read as swebench reads them.
    ("mwaskom/seaborn", "PASSED t.py::a PASSED\nt.py::b PASSED x\n", {"t.py::a": PASSED, "t.py::b": PASSED}),
    ("mwaskom/seaborn", "PASSED PASSED t.py::c\nFAILED\n", {"PASSED": PASSED}),
    ("django/django", "test_a (T) ... FAIL ... FAIL\n", {"test_a (T)": FAILED}),
    (
        "django/django",
        "Applying sites.0002_alter_domain_unique...test_no_migrations (T) ... ok\n",
        {"test_no_migrations (T)": PASSED},
    ),
    (
        "matplotlib/matplotlib",
        "PASSED t.py::test_it[MouseButton.LEFT-MouseButton.RIGHT]\n",
        {"t.py::test_it[1-3]": PASSED},
    ),
    (
        "django/django",
        DJANGO,
        {
            "test_a (app.tests.T)": PASSED,
            "test_b (app.tests.T)": FAILED,
            "test_c (app.tests.T)": ERROR,
            "test_d (app.tests.T)": SKIPPED,
            "A docstring stands for its test.": PASSED,
            "test_e (app.tests.T)": PASSED,
            "Importing application app": PASSED,
            "test_f (app.tests.T)": PASSED,
            "test_g": FAILED,
        },
    ),
    (
        "sympy/sympy",
        SYMPY,
        {"sympy/core/tests/test_a.py:test_two": FAILED, "test_one": PASSED, "test_two": FAILED, "test_three": ERROR},
    ),
]


@pytest.mark.parametrize(("repo", "text", "statuses"), LOGS)
def test_the_log_of_a_repository_is_parsed_to_statuses(repo: str, text: str, statuses: dict[str, str]) -> None:
    assert log_parser(repo)(text) == statuses


@pytest.mark.parametrize(
    ("text", "name"),
    [
        (SUMMARY, "tests/test_a.py::test_one"),
        ("tests/t.py::test_it[some words] PASSED      [ 3%]\n", "tests/t.py::test_it[some words]"),
        (DJANGO, "test_a (app.tests.T)"),
        (SYMPY, "test_one"),
    ],
)
def test_a_log_of_an_unknown_repository_is_read_by_what_it_shows(text: str, name: str) -> None:
    assert log_parser("some/thing")(text)[name] == PASSED


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
