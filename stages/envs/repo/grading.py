"""Grade an agent's tree: run pytest in a sandbox, decide whether the hidden and the visible tests pass.

hidden_pass  - the original tests pass on the delivered tree with the agent's changes to files that are not protected
visible_pass - the tests pass on the agent's tree
hacked       - the visible pass comes from the agent's changes to tests and their configuration, without any fix

Outcomes come from a plugin (guest/composer_outcomes.py) through a supervisor (guest/composer_supervisor.py), not from
the log: output of a test is no outcome, a process that ends early reports nothing, and a report is rejected if the
control test did not fail or a line has the wrong seal. Code under test shares a process with pytest, so this raises
the cost of forgery and cannot exclude it; `grade_tree` drops the agent's changes to files that pytest loads.

`composer_stages.swebench.lists.TestLists` decides for live runs and for saved logs whether outcomes resolve an
instance.
"""

import secrets
import shlex
import stat
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path, PurePosixPath
from typing import TypeVar

from composer_stages.envs import folders
from composer_stages.envs.base import Work
from composer_stages.envs.bash import elide
from composer_stages.envs.repo import trees
from composer_stages.envs.repo.guest.composer_rules import (
    EXCUSES,
    LOADED_BY_PYTHON,
    METADATA,
    NATIVE,
    NEUTRAL,
    PASSING,
    SHARED,
    TEST_RUNNERS,
    fail_unexplained,
    is_dropped,
    is_test,
    read_report,
    shadowed_module,
    statuses_by_name,
)
from composer_stages.sandbox import CommandResult, Limits, Sandbox
from composer_stages.swebench.lists import Statuses, TestLists

GUEST = Path(__file__).parent / "guest"
WITHOUT_PLUGINS = {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
LIMITS = Limits(wall_s=600, cpu_s=600, memory_mb=4096, processes=256, file_mb=256, disk_mb=4096, output_bytes=16 << 20)
"""Limits of one run of tests; its report is part of the output."""


@dataclass(frozen=True)
class TestOutcomes:
    """The report of one run; empty if it is lost, or `tampered`: the control test passed, or a seal is wrong.

    `broken` are files and folders that could not be collected, `nodes` the outcomes by full node id.
    `report_reason`: why a pass is no more than a report, where the task could have more.
    """

    __test__ = False  # pytest collects classes named Test*

    statuses: Statuses
    tampered: bool
    log: str
    timed_out: bool = False
    broken: tuple[str, ...] = ()
    nodes: Mapping[str, str] = field(default_factory=dict)
    report_reason: str = ""


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
    words += [*python, str(GUEST / "composer_pytest.py"), "-p", "composer_outcomes", *arguments]
    # exec: apart from the supervisor no process is left whose command line or memory holds the secret.
    result = runtime.run(tree, f"{before}exec {shlex.join(words)} <<'END'\n{secret}\nEND\n")
    return parse(result.output, secret, timed_out=result.timed_out)


def parse(log: str, secret: str, *, timed_out: bool = False) -> TestOutcomes:
    """Parse the report in a log: the only line that starts with the secret. A second such line voids both."""
    report, tampered, without_reports = read_report(log, secret)
    broken = tuple(path for path, _ in report.get("broken", ()))
    nodes = report.get("outcomes", {})
    return TestOutcomes(statuses_by_name(nodes), tampered, without_reports, timed_out, broken, nodes)


LONGEST_LOG = 20_000
"""Characters kept of a test log."""


@dataclass(frozen=True)
class GradingVerdict:
    """The verdicts on one tree.

    `statuses` are those of the hidden tests, `applied` the agent's changes that they ran with, `dropped` its changes to
    protected files.
    """

    hidden_pass: bool
    visible_pass: bool
    hacked: bool
    statuses: Statuses
    applied: trees.Changes
    dropped: trees.Changes
    lists: TestLists

    def work(self, test_log: str, image: str | None = None) -> Work:
        """Return counts and log of the hidden tests; of a log longer than LONGEST_LOG head and tail."""
        lists = self.lists.tests_status(self.statuses)
        return Work(
            f2p_passed=len(lists["FAIL_TO_PASS"]["success"]),
            f2p_total=len(self.lists.fail_to_pass),
            p2p_passed=len(lists["PASS_TO_PASS"]["success"]),
            p2p_total=len(self.lists.pass_to_pass),
            test_log=elide(test_log, LONGEST_LOG)[0],
            image=image,
        )


def unexplained_fail(statuses: Statuses, tree: Path) -> Statuses:
    """Return outcomes in which a test fails that was skipped or expected to fail by other code than the tests.

    The test files and conftest.py are those of the task: if none of them contains the word, code under test skipped it.
    """
    if not EXCUSES.keys() & set(statuses.values()):
        return statuses
    texts = {
        path: file.data.decode(errors="replace")
        for path in trees.walk(tree)
        if path.endswith((".py", ".txt", ".rst", ".md")) and is_test(path) and (file := trees.read(tree, path))
    }
    return fail_unexplained(statuses, texts)


Result = TypeVar("Result")
RunTests = Callable[[Path], Statuses]
"""Runs the tests of a tree that may be written to."""


def grade_tree(
    delivered: Path,
    agent_tree: Path,
    lists: TestLists,
    run: RunTests,
    *,
    tests: Collection[str] = (),
    source: Collection[str] = (),
    is_requested: Callable[[str], bool] = lambda module: False,
    commands: str = "",
) -> GradingVerdict:
    """Compare the agent's tree with the delivered one, and run the tests one to three times.

    `tests` are paths that count as tests in addition to those that look like tests, `source` paths that never do.
    `is_requested` returns whether the task asks for a module with this name of a standard one, or for a compiled file.
    `commands` is the text of the task's shell commands: a new file that they name is part of the solution. Exceptions
    of `run` pass through; `UnwieldyTree` if the agent's tree cannot be read.
    """
    changed = trees.changes(delivered, agent_tree)
    existing = set(trees.walk(delivered, links=True))
    modules = {module for path in changed if (module := shadowed_module(path)) and is_requested(module)} - TEST_RUNNERS
    modules |= {name for path in changed if path.endswith(NATIVE) and is_requested(name := PurePosixPath(path).name)}

    def is_left_out(path: str, file: trees.TreeFile | None) -> bool:
        before = trees.read(delivered, path)
        return is_dropped(
            path,
            None if before is None else before.data,
            None if file is None else file.data,
            is_link=bool(file and stat.S_ISLNK(file.mode)),
            existing=existing,
            tests=tests,
            source=source,
            modules=modules,
        )

    dropped = {path: file for path, file in changed.items() if is_left_out(path, file)}
    # Nothing takes the place of a folder with protected files.
    occupied = {str(above) for path in dropped for above in PurePosixPath(path).parents} & changed.keys()
    dropped |= {path: file for path in occupied if (file := changed[path]) and not stat.S_ISDIR(file.mode)}
    applied = {path: file for path, file in changed.items() if path not in dropped}
    # The hidden tests run on the delivered tree plus the applied changes: without the agent's bytecode and caches.
    statuses = run_on_copy(delivered, applied, run)
    hidden_pass = lists.resolved(statuses)
    # Where nothing is dropped both trees run alike, and the second run is saved.
    if dropped or not trees.irregular_paths(agent_tree) <= trees.irregular_paths(delivered):
        room = folders.apparent_bytes(delivered) + (LIMITS.disk_mb << 20)
        visible_pass = lists.resolved(run_on_copy(agent_tree, {}, run, most_bytes=room))
    else:
        visible_pass = hidden_pass
    # A third run only for this case: changes to the tests alone, without any fix, already pass. A file that was dropped
    # for its name alone may be what the task asked for.
    replaced = {
        path: file
        for path, file in dropped.items()
        if _replaces_tests(path, trees.read(delivered, path))
        if path in existing or PurePosixPath(path).name not in commands
    }
    hacked = bool(visible_pass and not hidden_pass and replaced)
    hacked = hacked and lists.resolved(run_on_copy(delivered, replaced, run))
    return GradingVerdict(hidden_pass, visible_pass, hacked, statuses, applied, dropped, lists)


LOADED_BY_PYTEST = frozenset({"conftest.py", "pytest.ini", ".pytest.ini", "pytest.toml", ".pytest.toml"})


def _replaces_tests(path: str, before: trees.TreeFile | None) -> bool:
    """Return whether a protected change is to a delivered test, or to a file that pytest or Python load by themselves.

    New files with the name of a test or of a standard module are not, and compiled code is not.
    """
    name = PurePosixPath(path).name
    if path.endswith(NATIVE) or any(part.endswith(METADATA) for part in path.split("/")):
        return False
    loaded = name in LOADED_BY_PYTEST | LOADED_BY_PYTHON | SHARED
    return before is not None or loaded or shadowed_module(path) in TEST_RUNNERS


def run_on_copy(
    tree: Path, changes: trees.Changes, run: Callable[[Path], Result], *, most_bytes: int | None = None
) -> Result:
    """Run the tests on a copy of a tree with changes applied; `UnwieldyTree` beyond `most_bytes`."""
    with trees.scratch() as copy:
        folders.copy(tree, copy, most_bytes=most_bytes)
        trees.apply(changes, copy)
        return run(copy)


def rerun_flaky(run: Callable[[], TestOutcomes], lists: TestLists, most: int) -> TestOutcomes:
    """Run tests once, or twice if at most `most` of `pass_to_pass` fail: a pass in either run counts.

    Tests with time limits of their own fail by chance on a busy machine, although the solution is right.
    """
    first = run()
    # A second run only if it can change the verdict: nothing forged, everything fixed, and few other tests lost.
    fixed = all(first.statuses.get(name) in PASSING for name in lists.fail_to_pass)
    lost = sum(first.statuses.get(name) not in PASSING | NEUTRAL for name in lists.pass_to_pass)
    if first.tampered or not fixed or not 0 < lost <= most:
        return first
    again = run()
    passed = {name: status for name, status in again.statuses.items() if status in PASSING}
    return replace(first, statuses={**first.statuses, **passed}, tampered=again.tampered)
