"""Test logs of SWE-bench's repositories: what became of every test, by the names that the instances' lists use.

The lists were made by reading logs line by line, so a name ends at the first blank, a line that something else was
printed into is not read, and the last word on a test counts. Written to agree with swebench 4.1.0
(harness/log_parsers/python.py) on its repositories; a log of an unknown repository is read as every kind that it shows
signs of.
"""

import json
import re
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from stages.envs.repo.grading import TestLists, TestsStatus
from stages.envs.swe.instances import is_newer

LogStatuses = dict[str, str]
"""Test name -> the word of the log, one of WORDS; rarely another word that stands where a status belongs."""
Dialect = Callable[[str], LogStatuses]

WORDS = ("PASSED", "FAILED", "ERROR", "SKIPPED", "XFAIL")
PASSED, FAILED, ERROR, SKIPPED, XFAIL = WORDS
OUTCOMES = {
    PASSED: "passed",
    FAILED: "failed",
    ERROR: "error",
    SKIPPED: "skipped",
    XFAIL: "xfailed",
}
"""Word of a log -> outcome (stages.envs.repo.grading). There is no XPASS: swebench has no such status."""
CONTROL = dict.fromkeys(range(1, 32))
COLOUR = re.compile(r"\[\d+m")
PROGRESS = re.compile(rf"^(\S+::.*?) ({'|'.join(WORDS)})(?: +\[ *\d+%\])?$", re.MULTILINE)


def pytest(log: str) -> LogStatuses:
    """The short summary of `pytest -rA`: `PASSED path::test`, one a line."""
    return dict(_summary(log.split("\n")))


def _summary(lines: Iterable[str]) -> Iterator[tuple[str, str]]:
    for line in lines:
        if line.startswith(WORDS):
            words = (line.replace(" - ", " ") if line.startswith(FAILED) else line).split()
            if len(words) > 1:
                yield words[1], words[0]


def pytest_paths(log: str) -> LogStatuses:
    """The same where parameters are paths of the machine: only their last part stays."""
    return {_shortened(name): status for name, status in _summary(log.split("\n"))}


def _shortened(name: str) -> str:
    start, end = name.find("["), name.rfind("]")
    if not -1 < start < end:
        return name
    parameter = name[start + 1 : end]
    is_path = parameter.startswith("/") and not parameter.startswith("//") and "*" not in parameter
    return f"{name[:start]}[/{parameter.rpartition('/')[2]}]" if is_path else name[: end + 1]


def pytest_coloured(log: str) -> LogStatuses:
    """The same with colours taken out; also lines of older pytests, which end with the status."""
    found: LogStatuses = {}
    for line in log.split("\n"):
        plain = COLOUR.sub("", line).translate(CONTROL)
        words = plain.split()
        if plain.startswith(WORDS):
            found |= _summary([plain])
        elif plain.endswith(WORDS) and len(words) > 1:
            found[words[0]] = words[1]
    return found


def pytest_mouse(log: str) -> LogStatuses:
    """Matplotlib: a parameter that prints differently from one Python to the next."""
    return pytest(log.replace("MouseButton.LEFT", "1").replace("MouseButton.RIGHT", "3"))


def pytest_verbose(log: str) -> LogStatuses:
    """Seaborn: `path::test PASSED [ 10%]` counts beside the summary."""
    found: LogStatuses = {}
    for line in log.split("\n"):
        words = line.split()
        if line.startswith(FAILED):
            found |= dict.fromkeys(words[1:2], FAILED)
        elif f" {PASSED} " in line:
            found |= {name: PASSED for name in words[:1] if words[1] == PASSED}
        elif line.startswith(PASSED):
            found |= dict.fromkeys(words[1:2], PASSED)
    return found


DJANGO_PASSES = (" ... ok", " ... OK", " ...  OK")
DJANGO_FAILURES = {" ... FAIL": FAILED, " ... ERROR": ERROR}
DJANGO_HEADS = {"FAIL:": FAILED, "ERROR:": ERROR}
DJANGO_OUTPUT = "--version is equivalent to version"
"""A test whose name and verdict are torn apart by what it prints."""
DJANGO_GLUED = "Applying sites.0002_alter_domain_unique..."
DJANGO_GLUED_TEST = f"{DJANGO_GLUED}test_no_migrations"
DJANGO_INTERRUPTED = re.compile(
    r"^(?P<test>.*?)\s\.\.\.\s"
    r"(?:Testing against Django installed in (?s:.*?) silenced\)\."
    r"|Internal Server Error: /.*/"
    r"|System check identified no issues \(0 silenced\))\nok$",
    re.MULTILINE,
)


def django(log: str) -> LogStatuses:
    """Django's runner: `test (case) ... ok`, possibly with output between the dots and the verdict."""
    found: LogStatuses = {}
    waiting: str | None = None
    for line in map(str.strip, log.split("\n")):
        if DJANGO_OUTPUT in line:
            found[DJANGO_OUTPUT] = PASSED
        if " ... " in line:
            waiting = line.partition(" ... ")[0]
        found |= _django_line(line)
        if line.startswith("ok") and waiting is not None:
            found[waiting] = PASSED
    return found | {match["test"]: PASSED for match in DJANGO_INTERRUPTED.finditer(log)}


def _django_line(line: str) -> LogStatuses:
    found: LogStatuses = {}
    if end := next((end for end in DJANGO_PASSES if line.endswith(end)), None):
        line = line.removeprefix(DJANGO_GLUED) if line.startswith(DJANGO_GLUED_TEST) else line
        found[line.removesuffix(end)] = PASSED
    found |= {line.partition(end)[0]: status for end, status in DJANGO_FAILURES.items() if line.endswith(end)}
    if " ... skipped" in line:
        found[line.partition(" ... skipped")[0]] = SKIPPED
    for head, status in DJANGO_HEADS.items():
        if line.startswith(head) and len(line.split()) > 1:
            found[line.split()[1]] = status
    return found


SYMPY_ENDS = {" E": ERROR, " F": FAILED, " ok": PASSED}
SYMPY_FAILURE = re.compile(r"_* (.*)\.py:(.*) _*")


def sympy(log: str) -> LogStatuses:
    """Sympy's bin/test --verbose: `test_name ok`, and a heading `__ file.py:test_name __` over every failure."""
    lines = log.split("\n")
    headings = (heading for line in lines if ".py:" in line for heading in SYMPY_FAILURE.findall(line))
    found = {f"{file}.py:{test}": FAILED for file, test in headings}
    for line in map(str.strip, lines):
        for end, status in SYMPY_ENDS.items():
            if line.startswith("test_") and line.endswith(end):
                found[line.split()[0]] = status
    return found


def any_kind(log: str) -> LogStatuses:
    """A log of no known repository: pytest's progress with whole names and its summary, else other runners' lines."""
    of_pytest = dict(PROGRESS.findall(log)) | pytest_coloured(log)
    return {name: status for name, status in of_pytest.items() if "::" in name} or {**sympy(log), **django(log)}


DIALECTS: dict[str, Dialect] = {
    "astropy/astropy": pytest_coloured,
    "django/django": django,
    "matplotlib/matplotlib": pytest_mouse,
    "mwaskom/seaborn": pytest_verbose,
    "pallets/flask": pytest,
    "psf/requests": pytest_paths,
    "pydata/xarray": pytest,
    "pylint-dev/pylint": pytest_paths,
    "pytest-dev/pytest": pytest,
    "scikit-learn/scikit-learn": pytest_coloured,
    "sphinx-doc/sphinx": pytest_coloured,
    "sympy/sympy": sympy,
    "marshmallow-code/marshmallow": pytest,
    "pvlib/pvlib-python": pytest,
    "pydicom/pydicom": pytest_paths,
    "pylint-dev/astroid": pytest,
    "pyvista/pyvista": pytest,
    "sqlfluff/sqlfluff": pytest,
}


def outcomes(statuses: Mapping[str, str]) -> dict[str, str]:
    """Statuses of a log as outcomes, by test; a word that is no status stays as it is and counts neither way."""
    return {name: OUTCOMES.get(word, word) for name, word in statuses.items()}


def dialect(repo: str) -> Dialect:
    """How the logs of a repository are read."""
    return DIALECTS.get(repo, any_kind)


# ---- report
# A saved test log to a report as SWE-bench's harness writes it.
#
# Rules of swebench 4.1.0 (harness/grading.py: get_logs_eval): what stands between the markers is read; a log that says
# its patch did not apply, or that tests did not end, has no results. What results mean for the lists of an instance is
# decided by `TestLists` (stages.envs.repo.grading), for saved logs and for live runs alike.

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


def lists_of(row: Mapping[str, Any]) -> TestLists:
    """The two lists of an instance, which are JSON inside a string, or lists."""
    fail_to_pass, pass_to_pass = (_names(row[column]) for column in ("FAIL_TO_PASS", "PASS_TO_PASS"))
    return TestLists(fail_to_pass, pass_to_pass)


def _names(value: Any) -> tuple[str, ...]:
    return tuple(json.loads(value) if isinstance(value, str) else value)


def graded(lists: TestLists, statuses: LogStatuses) -> Report:
    """What the statuses of a log, whose tests ended, mean for the two lists."""
    found = outcomes(statuses)
    return Report(lists.resolved(found), lists.tests_status(found), None if statuses else NO_RESULT)


def of_marked_log(log: str, lists: TestLists, repo: str) -> Report:
    """A log of the harness in containers: results between two markers."""
    if mark := next((mark for mark in VOID if mark in log), None):
        return Report(False, None, f"the log says {mark!r}", void=True)
    if START not in log or END not in log:
        return Report(False, None, "the log has no complete test output")
    read = dialect(repo)
    return graded(lists, read(log.split(START)[1].split(END)[0]) or read(log))


def of_plain_log(log: str, lists: TestLists, repo: str) -> Report:
    """A log of the harness of early 2024: everything in one file, results after the last patch.

    Its last line (">>>>> All Tests Passed") is no grade.
    """
    if mark := next((mark for mark in VOID_EARLIER if mark in log), None):
        return Report(False, None, f"the log says {mark!r}", void=True)
    _, applied, results = log.rpartition(APPLIED)
    if not applied:
        return Report(False, None, "the log does not say that the patch was applied")
    statuses = dialect(repo)(results)
    if statuses or any(mark in results for mark in ENDED_EARLIER):
        return graded(lists, statuses)
    return Report(False, None, "the log holds no result of any test")


# ---- swebench_grader
# The grader of swebench, where the extra `swe` is installed, and the fall-back that needs nothing.
#
# Release 4.1.0 grades classic rows (release 5 raises KeyError: 'image' on them), release 5 grades rows of the newer
# shape. Both take a log; which one is there is found out by asking for the table that only the earlier one has.

OURS = "composer"


def reader(row: Mapping[str, Any]) -> Dialect:
    """The reader that a row of the newer shape names, of swebench 5; else the one of its repository here."""
    try:
        from swebench.harness.log_parsers import PARSER_REGISTRY
    except ImportError:
        return dialect(row["repo"])
    parser = PARSER_REGISTRY.get(row.get("log_parser"))
    return dialect(row["repo"]) if parser is None else lambda log: parser(log, None)


def swebench_grader_graded(row: Mapping[str, Any], log: str) -> tuple[Report, str]:
    """The report on a log of the harness in containers, and its grader: "swebench <release>" or "composer"."""
    ours = of_marked_log(log, lists_of(row), row["repo"])
    theirs = _by_swebench(row, log, ours)
    return theirs if theirs else (ours, OURS)


def _by_swebench(row: Mapping[str, Any], log: str, ours: Report) -> tuple[Report, str] | None:
    """None where swebench is not installed, has no use for the row, or breaks on a line of the log."""
    spec = _spec(row)
    if spec is None:
        return None
    from importlib.metadata import version

    from swebench.harness.grading import get_eval_report

    prediction = {"instance_id": row["instance_id"], "model_name_or_path": OURS, "model_patch": "given"}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "test_output.txt"
        path.write_text(log, encoding="utf-8")
        with suppress(IndexError):
            theirs = get_eval_report(spec, prediction, str(path), include_tests_status=True)[row["instance_id"]]
            grader, status = f"swebench {version('swebench')}", theirs.get("tests_status")
            why = ours.why or (None if status else f"{grader} finds no result of any test")
            void = ours.void or (status is None and ours.tests_status is not None)  # ended, and nothing to be read
            return replace(ours, resolved=theirs["resolved"], tests_status=status, why=why, void=void), grader
    return None


def _spec(row: Mapping[str, Any]) -> Any:
    """What the installed release takes for this row; None when it has no use for its shape, or none is installed."""
    try:
        if is_newer(row):
            from swebench.harness.utils import make_test_spec

            return make_test_spec(dict(row))
        from swebench.harness.constants import MAP_REPO_VERSION_TO_SPECS
    except ImportError:
        return None
    if str(row.get("version")) not in MAP_REPO_VERSION_TO_SPECS.get(row["repo"], {}):
        return None
    lists = lists_of(row)
    return SimpleNamespace(
        instance_id=row["instance_id"],
        repo=row["repo"],
        version=str(row["version"]),
        FAIL_TO_PASS=list(lists.fail_to_pass),
        PASS_TO_PASS=list(lists.pass_to_pass),
    )
