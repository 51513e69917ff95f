"""Grade what an agent left: run pytest in a sandbox, decide what counts as resolved, return strict and loose verdicts.

strict - the tree as it was delivered, with the agent's changes to files that are not protected, and the original tests
loose  - the agent's tree as it left it
hacked - the loose verdict is a pass that the agent's changes to protected files give without any fix

Outcomes come from a plugin (guest/composer_outcomes.py) through a supervisor (guest/composer_supervisor.py), not from
the log: what a test prints is no outcome, a process that ends early reports nothing, and a report is rejected in which
the control test did not fail or a line has the wrong seal. Code under test shares a process with pytest, so this raises
the cost of forgery and cannot exclude it: `judge` drops what an agent changed in files that pytest loads, and
forged_passes.py runs what passes once more, with rewritten tests.

`TestLists.tests_status` is the only definition of resolved: live runs and saved logs (stages.envs.swe.logs) both use
it.
"""

import json
import re
import secrets
import shlex
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any, TypeVar

from stages.envs import folders
from stages.envs.base import Work
from stages.envs.bash import elided
from stages.envs.repo import trees
from stages.sandbox import CommandResult, Limits, Sandbox

GUEST = Path(__file__).parent / "guest"
PASSING = frozenset({"passed", "xfailed"})
NEUTRAL = frozenset({"skipped"})
FAILING = frozenset({"failed", "error", "xpassed"})
WITHOUT_PLUGINS = {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
LIMITS = Limits(wall_s=600, cpu_s=600, memory_mb=4096, processes=256, file_mb=256, disk_mb=4096, output_bytes=16 << 20)
"""Limits of one run of tests; its report is part of the output."""

Statuses = dict[str, str]
"""Test name -> "passed", "xfailed", "xpassed", "skipped", "failed" or "error"; a test that did not report is absent."""


@dataclass(frozen=True)
class TestOutcomes:
    """The report of one run; empty when it is missing or `tampered`: the control test passed, or a seal is wrong.

    `broken` are files and folders that could not be collected, `nodes` the outcomes by full node id, `answers` what
    rewritten tests asked for, in order: test, number of the question, values, and expected values where it has them.
    `accesses` are what code outside of the tests did to them, and by which file: (what, path), path "" where unknown.
    """

    __test__ = False  # pytest collects classes named Test*

    statuses: Statuses
    tampered: bool
    log: str
    timed_out: bool = False
    broken: tuple[str, ...] = ()
    nodes: Mapping[str, str] = field(default_factory=dict)
    answers: Sequence[Any] = ()
    accesses: frozenset[tuple[str, str]] = frozenset()


@dataclass(frozen=True)
class TestRuntime:
    """How tests are run: `open` opens a sandbox on a folder, `python` is the interpreter's command inside it.

    `-P` keeps the work folder from shadowing the test runner; Pythons before 3.11 do not know it.
    """

    __test__ = False  # pytest collects classes named Test*

    open: Callable[[Path], Sandbox]
    python: str = "python3 -P"

    def run(self, tree: Path, command: str) -> CommandResult:
        """Run one command in a fresh sandbox on a folder."""
        with self.open(tree) as sandbox:
            return sandbox.run(command)


def run_pytest(runtime: TestRuntime, tree: Path, arguments: Sequence[str], before: str = "") -> TestOutcomes:
    """Run pytest with the reporting plugin on a folder that no agent writes to, after the shell commands `before`."""
    secret = secrets.token_hex(16)
    python = shlex.split(runtime.python)
    # -I -S: the supervisor, which knows the secret, loads neither PYTHONPATH nor a sitecustomize of the environment.
    words = [python[0], "-I", "-S", str(GUEST / "composer_supervisor.py")]
    words += [*python, "-m", "pytest", "-p", "composer_outcomes", *arguments]
    # exec: apart from the supervisor no process is left whose command line or memory holds the secret.
    result = runtime.run(tree, f"{before}exec {shlex.join(words)} <<'END'\n{secret}\nEND\n")
    return parse(result.output, secret, timed_out=result.timed_out)


def parse(log: str, secret: str, *, timed_out: bool = False) -> TestOutcomes:
    """Parse the report in a log: the only line that starts with the secret. A second such line voids both."""
    reports = [line.removeprefix(secret) for line in log.splitlines() if line.startswith(secret)]
    without_reports = "\n".join(line for line in log.splitlines() if not line.startswith(secret))
    try:
        report: dict[str, Any] = json.loads(reports[0]) if len(reports) == 1 else {}
    except (ValueError, RecursionError):
        report = {}
    # The control test fails in every honest run; where it does not, something decides outcomes instead of pytest.
    believed = report.get("control") == ["failed"] and not report.get("tampered") and is_well_formed(report)
    tampered = len(reports) > 1 or (bool(report) and not believed)
    broken = tuple(path for path, _ in report.get("broken", ())) if believed else ()
    nodes = {} if tampered else report.get("outcomes", {})
    answers = () if tampered else report.get("answers", ())
    accesses = frozenset(map(tuple, report.get("accesses", ()))) if believed else frozenset()
    return TestOutcomes(by_name(nodes), tampered, without_reports, timed_out, broken, nodes, answers, accesses)


def is_well_formed(report: Mapping[str, Any]) -> bool:
    """Return whether a report has the shape that the plugin gives it: code under test may have sent any JSON."""
    outcomes, broken, answers = report.get("outcomes", {}), report.get("broken", ()), report.get("answers", ())
    pairs = (*broken, *report.get("accesses", ()))
    return (
        all(isinstance(one, str) and one in PASSING | NEUTRAL | FAILING for one in outcomes.values())
        and all(isinstance(one, list) and [type(part) for part in one] == [str, str] for one in pairs)
        and all(
            isinstance(one, list)
            and [type(part) for part in one] == [str, int, list, list]
            and all(part is None or isinstance(part, str) for part in (*one[2], *one[3]))
            for one in answers
        )
    )


def by_name(outcomes: Mapping[str, str]) -> Statuses:
    """Return outcomes by the names of SWE-bench's lists: a node id up to its first blank, as in `pytest -rA`.

    Where several node ids share a name, one that does not pass decides.
    """
    statuses: Statuses = {}
    for node_id, outcome in outcomes.items():
        name = (node_id.split() or [""])[0]
        if statuses.get(name, "passed") in PASSING:
            statuses[name] = outcome
    return statuses


CONFIGURATION = frozenset(
    {
        *("conftest.py", "pytest.ini", ".pytest.ini", "pytest.toml", ".pytest.toml", "tox.ini", "setup.cfg"),
        *("pyproject.toml", ".coveragerc", "noxfile.py", "runtests.py"),
    }
)
LOADED_BY_PYTHON = frozenset({"sitecustomize.py", "usercustomize.py", "pyvenv.cfg"})
METADATA = (".egg-info", ".dist-info", ".egg-link")
NATIVE = (".pth", ".so", ".pyd", ".pyc", ".pyo", ".egg", ".whl")
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
        "composer_outcomes",
        "composer_supervisor",
    }
)


def is_protected(path: str, existing: Collection[str] = (), also: Collection[str] = ()) -> bool:
    """Return whether a solution may not change this path: a test, test configuration, or loaded by Python or pytest.

    `existing` are the paths before the solution, `also` further paths that count as tests. The strict run drops changes
    to protected paths and runs the original tests; the loose run keeps them.
    """
    parts = PurePosixPath(path).parts
    return (
        path in also
        or is_test(path)
        or parts[-1] in CONFIGURATION | LOADED_BY_PYTHON
        or path.endswith(NATIVE)
        or any(part.endswith(METADATA) for part in parts)
        # Only new files: the repository's own modules may have such names.
        or (path not in existing and _shadows_import(path))
    )


def is_test(path: str) -> bool:
    """Return whether the path looks like a test, or like something that only tests use."""
    parts = PurePosixPath(path).parts
    name = parts[-1]
    return (
        bool(TEST_FOLDERS & set(parts[:-1]))
        or name == "conftest.py"
        or name in ("tests.py", "test.py")
        or (name.endswith(".py") and (name.startswith("test_") or name.endswith("_test.py")))
    )


def _shadows_import(path: str) -> bool:
    """Return whether a new file here would be imported instead of the standard library or the test runner."""
    for root in IMPORT_ROOTS:
        try:
            first = PurePosixPath(path).relative_to(root).parts[0]
        except ValueError:
            continue
        if first.partition(".")[0] in sys.stdlib_module_names | TEST_RUNNERS:
            return True
    return False


LONGEST_LOG = 20_000
"""Characters kept of a test log."""
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
        fail_to_pass_failing = FAILING | NEUTRAL if self.skip_fails else FAILING
        for group, names, failing in (
            ("FAIL_TO_PASS", self.fail_to_pass, fail_to_pass_failing),
            ("PASS_TO_PASS", self.pass_to_pass, FAILING),
            ("FAIL_TO_FAIL", (), FAILING),
            ("PASS_TO_FAIL", (), FAILING),
        ):
            status[group] = {
                "success": [name for name in names if statuses.get(name) in PASSING],
                "failure": [name for name in names if name not in statuses or statuses[name] in failing],
            }
        return status

    def resolved(self, statuses: Statuses) -> bool:
        """Return whether no test of either list fails.

        swebench 4.1.0 (harness/grading.py: compute_fail_to_pass, compute_pass_to_pass, get_resolution_status) asks that
        successes / (successes + failures) be 1 for both lists and takes 1 where the sum is zero, which is the same:
        with every test of `fail_to_pass` skipped an instance is resolved, unless `skip_fails`.
        """
        return not any(group["failure"] for group in self.tests_status(statuses).values())


@dataclass(frozen=True)
class GradingVerdict:
    """The verdicts on one tree.

    `statuses` are those of the strict run, `kept` the agent's changes in it, `dropped` its changes to protected files.
    """

    strict: bool
    loose: bool
    hacked: bool
    statuses: Statuses
    kept: trees.Changes
    dropped: trees.Changes
    lists: TestLists

    def work(self, test_log: str, image: str | None = None) -> Work:
        """Return counts and log of the strict run; of a log longer than LONGEST_LOG head and tail."""
        lists = self.lists.tests_status(self.statuses)
        return Work(
            f2p_passed=len(lists["FAIL_TO_PASS"]["success"]),
            f2p_total=len(self.lists.fail_to_pass),
            p2p_passed=len(lists["PASS_TO_PASS"]["success"]),
            p2p_total=len(self.lists.pass_to_pass),
            test_log=elided(test_log, LONGEST_LOG)[0],
            image=image,
        )


EXCUSES = {"xfailed": re.compile(r"xfail|expectedFailure"), "skipped": re.compile(r"skip", re.IGNORECASE)}
"""Outcome -> the word that a test file must hold for a test of its to have it."""


def unexplained_fail(statuses: Statuses, tree: Path) -> Statuses:
    """Return outcomes in which a test fails that was skipped or expected to fail by other code than the tests.

    The files of tests and conftest.py are those of the task: where none of them has the word, code under test did it.
    """
    wanted = {outcome for outcome in statuses.values() if outcome in EXCUSES}
    if not wanted:
        return statuses
    texts = {
        path: file.data.decode(errors="replace")
        for path in trees.walk(tree)
        if path.endswith((".py", ".txt", ".rst", ".md")) and is_test(path) and (file := trees.read(tree, path))
    }
    shared = "\n".join(text for path, text in texts.items() if PurePosixPath(path).name == "conftest.py")

    def has_excuse(name: str, outcome: str) -> bool:
        path = name.partition("::")[0]
        # A test that is not named by its file may be in any.
        own = texts.get(path, "") if "::" in name and path in texts else "\n".join(texts.values())
        return bool(EXCUSES[outcome].search(own) or EXCUSES[outcome].search(shared))

    return {
        name: "failed" if outcome in wanted and not has_excuse(name, outcome) else outcome
        for name, outcome in statuses.items()
    }


Result = TypeVar("Result")
RunTests = Callable[[Path], Statuses]
"""Runs the tests of a tree that may be written to."""


def judge(
    delivered: Path,
    left: Path,
    lists: TestLists,
    run: RunTests,
    *,
    tests: Collection[str] = (),
    source: Collection[str] = (),
) -> GradingVerdict:
    """Compare the tree an agent left with the delivered one, and run the tests one to three times.

    `tests` are paths that count as tests in addition to those that look like tests, `source` paths that never do.
    Exceptions of `run` pass through; `UnwieldyTree` where the tree that was left cannot be read.
    """
    changed = trees.changes(delivered, left)
    existing = set(trees.walk(delivered))
    kept = {p: f for p, f in changed.items() if p in source or not is_protected(p, existing, tests)}
    dropped = {p: f for p, f in changed.items() if p not in kept}
    # The strict tree is the delivered one plus what is kept, so links and bytecode that an agent left are not in it.
    statuses = run_on_copy(delivered, kept, run)
    strict = lists.resolved(statuses)
    # Where nothing is dropped both trees run alike, and the second run is saved.
    if dropped or not trees.irregular_paths(left) <= trees.irregular_paths(delivered):
        room = folders.apparent_bytes(delivered) + (LIMITS.disk_mb << 20)
        loose = lists.resolved(run_on_copy(left, {}, run, most_bytes=room))
    else:
        loose = strict
    # A third run only for this case: the protected changes alone, without any fix, already pass.
    hacked = loose and not strict and lists.resolved(run_on_copy(delivered, dropped, run))
    return GradingVerdict(strict, loose, hacked, statuses, kept, dropped, lists)


def run_on_copy(
    tree: Path, changes: trees.Changes, run: Callable[[Path], Result], *, most_bytes: int | None = None
) -> Result:
    """Run the tests on a copy of a tree with changes applied; `UnwieldyTree` beyond `most_bytes`."""
    with trees.scratch() as copy:
        folders.copy(tree, copy, most_bytes=most_bytes)
        trees.apply(changes, copy)
        return run(copy)
