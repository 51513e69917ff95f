"""Rules of grading, for Composer and for the verifier of an exported task: protected paths, reports, excuses.

This file is copied into exported tasks beside composer_verify.py and imports nothing but the standard library.
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import PurePosixPath

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence
    from typing import Any

PASSING = frozenset({"passed", "xfailed"})
NEUTRAL = frozenset({"skipped"})
FAILING = frozenset({"failed", "error", "xpassed"})
COMMAND = "exit code 0"
"""The name of the only test of a task whose test is a command."""


def read_report(log: str, secret: str) -> tuple[dict[str, Any], bool, str]:
    """Return the report in a log, whether it was tampered with, and the log without reports.

    The report is the only line that starts with the secret, empty if it is missing; a second such line voids both.
    Without the control its passes do not count: the run ended early (`-x`), or another process runs the tests.
    """
    reports = [line[len(secret) :] for line in log.splitlines() if line.startswith(secret)]
    # With -v pytest prints the name of the control too, which readers of a log do not need.
    left_out = (secret, "::composer-control")
    without_reports = "\n".join(line for line in log.splitlines() if not line.startswith(left_out))
    try:
        report: dict[str, Any] = json.loads(reports[0]) if len(reports) == 1 else {}
    except (ValueError, RecursionError):
        report = {}
    # If the control test does not fail, something else than pytest decides outcomes.
    control = report.get("control")
    believed = control in ([], ["failed"]) and not report.get("tampered") and is_well_formed(report)
    tampered = len(reports) > 1 or (bool(report) and not believed)
    if believed and not control:
        failed = {name: outcome for name, outcome in report.get("outcomes", {}).items() if outcome in FAILING}
        report = {**report, "outcomes": failed}
    return report if believed else {}, tampered, without_reports


def is_well_formed(report: Mapping[str, Any]) -> bool:
    """Return whether a report has the shape that the plugin gives it: code under test may have sent any JSON."""
    outcomes, broken = report.get("outcomes", {}), report.get("broken", ())
    return all(
        isinstance(outcome, str) and outcome in PASSING | NEUTRAL | FAILING for outcome in outcomes.values()
    ) and all(isinstance(pair, list) and [type(part) for part in pair] == [str, str] for pair in broken)


def statuses_by_name(outcomes: Mapping[str, str]) -> dict[str, str]:
    """Return outcomes by the names of SWE-bench's lists: a node id up to its first blank, as in `pytest -rA`.

    If several node ids share a name, one that does not pass decides.
    """
    statuses: dict[str, str] = {}
    for node_id, outcome in outcomes.items():
        name = (node_id.split() or [""])[0]
        if statuses.get(name, "passed") in PASSING:
            statuses[name] = outcome
    return statuses


CONFIGURATION = frozenset(
    {
        *("conftest.py", "pytest.ini", ".pytest.ini", "pytest.toml", ".pytest.toml", "tox.ini", "setup.cfg"),
        *("pyproject.toml", ".coveragerc"),
    }
)
LOADED_BY_PYTHON = frozenset({"sitecustomize.py", "usercustomize.py", "pyvenv.cfg"})
METADATA = (".egg-info", ".dist-info", ".egg-link")
NATIVE = (".so", ".pyd", ".pyc", ".pyo")
LIBRARY = re.compile(r"[\w.-]+\.(?:so|pyd)\b")
SHARED = frozenset({"pyproject.toml", "setup.cfg", "tox.ini"})
"""Files whose sections about tests are test configuration, and whose other sections are not."""
CACHES = frozenset(
    {"__pycache__", ".pytest_cache", ".mypy_cache", ".ruff_cache", ".hypothesis", ".tox", ".nox", ".eggs"}
)
HISTORY = frozenset({".git", ".hg", ".svn", ".bzr"})
COMPILED = (".pyc", ".pyo")
TEST_FOLDERS = frozenset({"tests", "test", "testing", "__tests__"})
IMPORT_ROOTS = ("", "src", "lib")
TEST_RUNNERS = frozenset(
    {
        "pytest",
        "_pytest",
        "pluggy",
        "iniconfig",
        "packaging",
        "pygments",
        "coverage",
        "pytest_cov",
        "composer_pytest",
        "composer_outcomes",
        "composer_supervisor",
        "sitecustomize",
        "usercustomize",
    }
)
"""Modules that are imported before tests are, though no test names them."""


def is_protected(
    path: str, existing: Collection[str] = (), also: Collection[str] = (), modules: Collection[str] = ()
) -> bool:
    """Return whether a solution may not change this path: a test, test configuration, or loaded by Python or pytest.

    `existing` are the paths before the solution, `also` further paths that count as tests, `modules` the standard
    modules that a solution may shadow, and compiled files that the task asks for: nobody can read what others do in the
    process of the tests. The run of the hidden tests drops changes to protected paths.
    """
    parts = PurePosixPath(path).parts
    # What is not imported counts as a test where it was one: an answer may be asked for in a folder of tests.
    importable = path.endswith((".py", *NATIVE))
    return (
        path in also
        or (is_test(path) and (importable or path in existing))
        or parts[-1] in CONFIGURATION | LOADED_BY_PYTHON
        or any(part.endswith(METADATA) for part in parts)
        or (path.endswith(NATIVE) and parts[-1] not in modules)
        # Only new files: the repository's own modules may have such names.
        or (path not in existing and shadowed_module(path) not in ("", *modules))
    )


def is_dropped(
    path: str,
    before: bytes | None,
    after: bytes | None,
    *,
    is_link: bool,
    existing: Collection[str],
    tests: Collection[str],
    source: Collection[str],
    modules: Collection[str],
) -> bool:
    """Return whether a change of a path is left out of grading; `before` and `after`: the bytes there, None for none.

    `source` are paths that a solution may always change; the others as in `is_protected`.
    """
    shared = PurePosixPath(path).name in SHARED and path not in tests and not is_test(path) and not is_link
    if path in source or (shared and _test_sections(path, before) == _test_sections(path, after) is not None):
        return False
    # What a link names would be imported by the link's name.
    names = (path, f"{path}/__init__.py") if is_link else (path,)
    return any(is_protected(name, existing, tests, modules) for name in names)


def _test_sections(path: str, data: bytes | None) -> Any:
    """Return what a shared file says of tests: tables of TOML, or lines of sections; None where it cannot be read."""
    text = (data or b"").decode(errors="replace")
    if path.endswith(".toml"):
        try:
            import tomllib

            tool = tomllib.loads(text).get("tool", {})
            return {name: tool[name] for name in sorted(tool) if re.search("test|cov|tox", name)}
        except (ImportError, ValueError, TypeError, AttributeError, RecursionError):
            return None
    inside, lines = False, []
    for line in text.splitlines():
        inside = bool(re.search("test|cov|tox", line)) if line.startswith("[") else inside
        lines += [line] if inside else []
    return lines


def is_test(path: str) -> bool:
    """Return whether the path has the name of a test, or of a file that only tests use."""
    parts = PurePosixPath(path).parts
    name, importable = parts[-1].partition(".")[0], path.endswith((".py", *NATIVE))
    return bool(TEST_FOLDERS & set(parts[:-1])) or (
        importable and (name in ("conftest", "tests", "test") or name.startswith("test_") or name.endswith("_test"))
    )


def shadowed_module(path: str) -> str:
    """Return the module of the standard library or the test runner that a file would shadow, or "".

    Data with such a name is no module, nor is a folder without __init__.py.
    """
    for root in IMPORT_ROOTS:
        name = path[len(root) + 1 :] if root and path.startswith(f"{root}/") else path
        above, _, file = name.rpartition("/")
        module = f"{above}/{file.partition('.')[0]}".lstrip("/") if file.endswith((".py", *NATIVE)) else ""
        module = module[: -len("/__init__")] if module.endswith("/__init__") else module
        if module in sys.stdlib_module_names | TEST_RUNNERS:
            return module
    return ""


LONGEST_NOTE = 20
"""Limit on files that a note names."""
BY_REPORT = "by report: "
"""Prefix of the line of a test log that says why a pass is no more than a report."""
SHOWN = "shown: "
"""Prefix of the line of a test log that names results that no pass on values rests on."""
LEFT_OUT = "left out of grading: "
"""Prefix of a line of a test log that names a dropped change."""


def dropped_lines(dropped: Collection[str]) -> list[str]:
    """Return lines of a log that name dropped changes to protected paths, with the reason."""
    lines = []
    for path in sorted(dropped)[:LONGEST_NOTE]:
        module = shadowed_module(path)
        why = "tests and their configuration"
        if path.endswith(NATIVE):
            why = "compiled code that the task does not name"
        elif module:
            why = f"Python would import it instead of its own {module}"
        lines.append(f"{LEFT_OUT}{path!r} ({why})\n")
    more = len(dropped) - LONGEST_NOTE
    return [*lines, f"{LEFT_OUT}{more} more\n"] if more > 0 else lines


def uncounted_lines(paths: Collection[str]) -> list[str]:
    """Return a line of a log that names what a solution writes and no grading sees; none where there is nothing."""
    parts = {part for path in paths for part in PurePosixPath(path).parts}
    names = sorted(part for part in parts if part in CACHES | HISTORY or part.endswith(COMPILED))
    why = "caches, history, bytecode and times of files do not count"
    return [f"{LEFT_OUT}{', '.join(names)} ({why})\n"] if names else []


EXCUSES = {"xfailed": re.compile(r"xfail|expectedFailure"), "skipped": re.compile(r"skip", re.IGNORECASE)}
"""Outcome -> the word that a test file must contain for one of its tests to have it."""


def is_selected_by(name: str, test_id: str) -> bool:
    """Return whether a node id selects a test: the test itself, or its file, class or unparametrized function."""
    return name == test_id or name.startswith((f"{test_id}[", f"{test_id}::"))


def add_id_statuses(statuses: Mapping[str, str], ids: Sequence[str]) -> dict[str, str]:
    """Add the outcomes of node ids: an id of several tests fails with any of them, and else passes with any.

    As in pytest, where tests that are skipped beside others change nothing. An id without a run test has none.
    """
    merged = dict(statuses)
    for test_id in (name.split()[0] for name in ids):
        selected = [status for name, status in statuses.items() if is_selected_by(name, test_id)]
        if selected:
            merged[test_id] = min(selected, key=lambda status: (status not in FAILING, status not in PASSING))
    return merged


def fails(name: str, statuses: Mapping[str, str], *, skips_fail: bool) -> bool:
    """Return whether a test fails: it has no outcome, a failing one, or with `skips_fail` was skipped."""
    return name not in statuses or statuses[name] in (FAILING | NEUTRAL if skips_fail else FAILING)


def has_excuse(name: str, outcome: str, texts: Mapping[str, str]) -> bool:
    """Return whether the texts of a task's test files explain that a test was skipped or expected to fail."""
    path = name.partition("::")[0]
    shared = "\n".join(text for file, text in texts.items() if PurePosixPath(file).name == "conftest.py")
    # A test whose name has no file may be in any file.
    test_text = texts.get(path, "") if "::" in name and path in texts else "\n".join(texts.values())
    return bool(EXCUSES[outcome].search(test_text) or EXCUSES[outcome].search(shared))


def fail_unexplained(statuses: Mapping[str, str], texts: Mapping[str, str]) -> dict[str, str]:
    """Return outcomes in which a test fails that was skipped or expected to fail by other code than the tests."""
    return {
        name: "failed" if outcome in EXCUSES and not has_excuse(name, outcome, texts) else outcome
        for name, outcome in statuses.items()
    }
