"""Parse and grade test logs of SWE-bench's repositories: the status of every test, by the names of the lists.

Parsing. The lists were made by reading logs line by line, so a name ends at the first blank, a line that other output
was printed into is not read, and the last word on a test counts. The parsers have the names of those of swebench 4.1.0
(harness/log_parsers/python.py) and agree with them; a log of an unknown repository is parsed as every kind that it
shows signs of.

Grading, by the rules of swebench 4.1.0 (harness/grading.py: get_logs_eval): the text between the markers is read; a log
which states that its patch did not apply, or that tests did not end, has no results. `TestLists`
(lists.py) decides what results mean for the lists of an instance, for saved logs and for live runs.
"""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass

from composer_stages.data_files import load_toml
from composer_stages.swebench.lists import TestLists, TestsStatus
from composer_stages.words import Sentence

LogStatuses = dict[str, str]
"""Test name -> the word of the log, one of WORDS; rarely another word in the place of a status."""
LogParser = Callable[[str], LogStatuses]

WORDS = ("PASSED", "FAILED", "ERROR", "SKIPPED", "XFAIL")
PASSED, FAILED, ERROR, SKIPPED, XFAIL = WORDS
OUTCOMES = {PASSED: "passed", FAILED: "failed", ERROR: "error", SKIPPED: "skipped", XFAIL: "xfailed"}
"""Word of a log -> outcome (lists.py). There is no XPASS: swebench has no such status."""
CONTROL = dict.fromkeys(range(1, 32))
COLOUR = re.compile(r"\[\d+m")
PROGRESS = re.compile(rf"^(\S+::.*?) ({'|'.join(WORDS)})(?: +\[ *\d+%\])?$", re.MULTILINE)


def parse_log_pytest(log: str) -> LogStatuses:
    """Parse the short summary of `pytest -rA`: `PASSED path::test`, one a line."""
    return dict(_summary(log.split("\n")))


def _summary(lines: Iterable[str]) -> Iterator[tuple[str, str]]:
    for line in lines:
        if line.startswith(WORDS):
            words = (line.replace(" - ", " ") if line.startswith(FAILED) else line).split()
            if len(words) > 1:
                yield words[1], words[0]


def whole_names(log: str) -> LogStatuses:
    """Parse the names with blanks of a summary of pytest in full, as swebench 5 does; the parsers end at a blank."""
    parts = (line.partition(" ") for line in log.split("\n") if line.startswith(WORDS) and "::" in line)
    names = {name.strip() if word == PASSED else name.partition(" - ")[0].strip(): word for word, _, name in parts}
    return {name: word for name, word in names.items() if " " in name}


def parse_log_pytest_options(log: str) -> LogStatuses:
    """Parse the summary where parameters are paths of the machine: only their last part is kept."""
    statuses: LogStatuses = {}
    for name, status in _summary(log.split("\n")):
        start, end = name.find("["), name.rfind("]")
        if -1 < start < end:
            parameter = name[start + 1 : end]
            is_path = parameter.startswith("/") and not parameter.startswith("//") and "*" not in parameter
            name = f"{name[:start]}[/{parameter.rpartition('/')[2]}]" if is_path else name[: end + 1]
        statuses[name] = status
    return statuses


def parse_log_pytest_v2(log: str) -> LogStatuses:
    """Parse the summary without colours; also lines of older pytests, which end with the status."""
    statuses: LogStatuses = {}
    for line in log.split("\n"):
        plain = COLOUR.sub("", line).translate(CONTROL)
        words = plain.split()
        if plain.startswith(WORDS):
            statuses |= _summary([plain])
        elif plain.endswith(WORDS) and len(words) > 1:
            statuses[words[0]] = words[1]
    return statuses


def parse_log_matplotlib(log: str) -> LogStatuses:
    """Parse Matplotlib's summary: one parameter prints differently from one Python to the next."""
    return parse_log_pytest(log.replace("MouseButton.LEFT", "1").replace("MouseButton.RIGHT", "3"))


def parse_log_seaborn(log: str) -> LogStatuses:
    """Parse Seaborn's log: `path::test PASSED [ 10%]` counts as well as the summary."""
    statuses: LogStatuses = {}
    for line in log.split("\n"):
        words = line.split()
        if line.startswith(FAILED):
            statuses |= dict.fromkeys(words[1:2], FAILED)
        elif f" {PASSED} " in line:
            statuses |= {name: PASSED for name in words[:1] if words[1] == PASSED}
        elif line.startswith(PASSED):
            statuses |= dict.fromkeys(words[1:2], PASSED)
    return statuses


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


def parse_log_django(log: str) -> LogStatuses:
    """Parse the log of Django's runner: `test (case) ... ok`, possibly with output between the dots and the verdict."""
    statuses: LogStatuses = {}
    waiting: str | None = None
    for line in map(str.strip, log.split("\n")):
        if DJANGO_OUTPUT in line:
            statuses[DJANGO_OUTPUT] = PASSED
        if " ... " in line:
            waiting = line.partition(" ... ")[0]
        result = line
        if end := next((end for end in DJANGO_PASSES if line.endswith(end)), None):
            result = line.removeprefix(DJANGO_GLUED) if line.startswith(DJANGO_GLUED_TEST) else line
            statuses[result.removesuffix(end)] = PASSED
        statuses |= {
            result.partition(end)[0]: status for end, status in DJANGO_FAILURES.items() if result.endswith(end)
        }
        if " ... skipped" in result:
            statuses[result.partition(" ... skipped")[0]] = SKIPPED
        for head, status in DJANGO_HEADS.items():
            if result.startswith(head) and len(result.split()) > 1:
                statuses[result.split()[1]] = status
        if line.startswith("ok") and waiting is not None:
            statuses[waiting] = PASSED
    return statuses | {match["test"]: PASSED for match in DJANGO_INTERRUPTED.finditer(log)}


SYMPY_ENDS = {" E": ERROR, " F": FAILED, " ok": PASSED}
SYMPY_FAILURE = re.compile(r"_* (.*)\.py:(.*) _*")


def parse_log_sympy(log: str) -> LogStatuses:
    """Parse Sympy's bin/test --verbose: `test_name ok`, and a heading `__ file.py:test_name __` over every failure."""
    lines = log.split("\n")
    headings = (heading for line in lines if ".py:" in line for heading in SYMPY_FAILURE.findall(line))
    statuses = {f"{file}.py:{test}": FAILED for file, test in headings}
    for line in map(str.strip, lines):
        for end, status in SYMPY_ENDS.items():
            if line.startswith("test_") and line.endswith(end):
                statuses[line.split()[0]] = status
    return statuses


def parse_log_unknown(log: str) -> LogStatuses:
    """Parse a log of no known repository: pytest's progress with full names and its summary, else other runners'."""
    of_pytest = dict(PROGRESS.findall(log)) | parse_log_pytest_v2(log)
    statuses = {name: status for name, status in of_pytest.items() if "::" in name}
    return statuses or {**parse_log_sympy(log), **parse_log_django(log)}


PARSERS: tuple[LogParser, ...] = (
    *(parse_log_pytest, parse_log_pytest_options, parse_log_pytest_v2, parse_log_matplotlib, parse_log_seaborn),
    *(parse_log_django, parse_log_sympy),
)
_BY_NAME = {parser.__name__: parser for parser in PARSERS}
LOG_PARSERS = {repo: _BY_NAME[name] for repo, name in load_toml(__package__, "parsers.toml").items()}
NAMED_PARSERS = {
    **{f"parse_log_{repo.partition('/')[2].partition('-')[0]}": parser for repo, parser in LOG_PARSERS.items()},
    **_BY_NAME,
}
"""Parsers by the names that rows of swebench 5.0.2 have (harness/log_parsers: PARSER_REGISTRY), those for Python."""


def to_outcomes(statuses: Mapping[str, str]) -> dict[str, str]:
    """Convert statuses of a log to outcomes, by test; a word that is no status is kept and counts neither way."""
    return {name: OUTCOMES.get(word, word) for name, word in statuses.items()}


def log_parser(repo: str) -> LogParser:
    """Return the parser of a repository's logs."""
    return LOG_PARSERS.get(repo, parse_log_unknown)


START, END = ">>>>> Start Test Output", ">>>>> End Test Output"
APPLIED = ">>>>> Applied Patch"
VOID = (">>>>> Patch Apply Failed", ">>>>> Reset Failed", ">>>>> Tests Errored", ">>>>> Tests Timed Out")
ENDED_EARLIER = (">>>>> All Tests Passed", ">>>>> Some Tests Failed")
VOID_EARLIER = (*VOID[:3], ">>>>> Init Failed", ">>>>> Init Timed Out", "Failed to reset task environment")
NO_RESULT = "the tests ended without a single result"
"""Usually a patch that breaks the import: no test passes, and the harness calls that unresolved."""


@dataclass(frozen=True)
class LogGrade:
    """The grade of one log.

    `tests_status` is None where the log has no results, and then nothing is resolved; `why` is the reason. `void`: the
    run failed, as the harness itself reports.
    """

    resolved: bool
    tests_status: TestsStatus | None
    why: str | None = None
    void: bool = False


def grade_statuses(lists: TestLists, statuses: LogStatuses) -> LogGrade:
    """Grade the statuses of a log whose tests ended."""
    outcomes = to_outcomes(statuses)
    return LogGrade(lists.resolved(outcomes), lists.tests_status(outcomes), None if statuses else NO_RESULT)


def grade_container_log(log: str, lists: TestLists, repo: str) -> LogGrade:
    """Grade a log of the harness in containers: results between two markers."""
    if mark := next((mark for mark in VOID if mark in log), None):
        return LogGrade(False, None, f"the log says {mark!r}", void=True)
    if START not in log or END not in log:
        return LogGrade(False, None, Sentence("swebench.log-incomplete"))
    parse = log_parser(repo)
    return grade_statuses(lists, parse(log.split(START)[1].split(END)[0]) or parse(log))


def grade_early_log(log: str, lists: TestLists, repo: str) -> LogGrade:
    """Grade a log of the harness of early 2024: everything in one file, results after the last patch.

    Its last line (">>>>> All Tests Passed") is no grade.
    """
    if mark := next((mark for mark in VOID_EARLIER if mark in log), None):
        return LogGrade(False, None, f"the log says {mark!r}", void=True)
    _, applied, results = log.rpartition(APPLIED)
    if not applied:
        return LogGrade(False, None, Sentence("swebench.patch-not-reported"))
    statuses = log_parser(repo)(results)
    if statuses or any(mark in results for mark in ENDED_EARLIER):
        return grade_statuses(lists, statuses)
    return LogGrade(False, None, Sentence("swebench.log-without-results"))
