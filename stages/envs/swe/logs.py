"""Test logs of SWE-bench's repositories: what became of every test, by the names that the instances' lists use.

The lists were made by reading logs line by line, so a name ends at the first blank, a line that something else was
printed into is not read, and the last word on a test counts. Written to agree with swebench 4.1.0
(harness/log_parsers/python.py) on its repositories; a log of an unknown repository is read as every kind that it shows
signs of.
"""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping

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
"""Word of a log -> outcome (stages.envs.repo.outcomes). There is no XPASS: swebench has no such status."""
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
