"""A task on a repository: the tree to start from, the tests that decide, and how both are run here and elsewhere.

An environment makes a `RepoTask` of a `Task`; `RepoEnvironment` (session.py) plays and grades it, and
stages/envs/harbor/write.py writes it as a folder.
"""

import shlex
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from composer_stages.envs import folders
from composer_stages.envs.repo import trees
from composer_stages.envs.repo.grading import TestOutcomes, TestRuntime, run_pytest
from composer_stages.envs.repo.guest.composer_rules import COMMAND
from composer_stages.sandbox import Sandbox
from composer_stages.swebench.lists import TestLists
from composer_stages.terms import Ground

RunTask = Callable[[Path], TestOutcomes]
"""Runs the tests of a task on a tree with the hidden files in place."""


@dataclass(frozen=True)
class Export:
    """What a task needs to be played elsewhere, in addition to the other fields of its `RepoTask`.

    command: a shell command whose exit code 0 passes; without one pytest is called with `arguments`. timeout_s: of one
    run of the tests. requirements: distributions that the tests import. provenance: where the task is from.
    """

    command: str = ""
    arguments: tuple[str, ...] = ()
    timeout_s: float = 600.0
    requirements: tuple[str, ...] = ()
    provenance: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class RepoTask:
    """A task that is set up for a rollout; all paths are relative to its work folder.

    delivered: the tree of which the agent gets a copy, read-only. lists: the tests that must pass. open: opens a
    sandbox on a copy, for the agent. hidden: files that are written for grading alone. solution: returns the changes of
    the reference solution, None if there is none; a call, since a patch that does not apply must not end a rollout that
    needs no solution. tests: paths that count as tests whatever their names; source: paths that never do. modules:
    names of standard modules that the solution may shadow. commands: text of the shell commands that test. ids: names
    in `lists` that select several tests (a file, a class). test_files: files of tests, whose imports tell which
    standard modules the solution may shadow as well. ground: the ground of a pass. report_reason: why that is no more
    than a report, where the task could have more. shown: which results the agent sees, in words. max_flaky: at most
    this many tests of `pass_to_pass` may fail by chance before they are run again. package: the name of the
    repository's package. image: the container image. export: None for a task that cannot run elsewhere. release: called
    once, at the end of the rollout.
    """

    delivered: Path
    lists: TestLists
    open: Callable[[Path], Sandbox]
    run: RunTask
    hidden: trees.Changes = field(default_factory=dict)
    solution: Callable[[], trees.Changes] | None = None
    tests: Collection[str] = ()
    source: Collection[str] = ()
    modules: Collection[str] = ()
    commands: str = ""
    ids: tuple[str, ...] = ()
    test_files: trees.Changes = field(default_factory=dict)
    report_reason: str = ""
    shown: str = ""
    ground: Ground = "report"
    max_flaky: int = 0
    package: str = ""
    image: str | None = None
    export: Export | None = None
    release: Callable[[], None] = lambda: None


@runtime_checkable
class Packs(Protocol):
    """An environment whose tasks can be played elsewhere."""

    def packed(self) -> RepoTask:
        """Return the rollout's task with its `export`, after `reset` and before any step.

        Raises InfrastructureError for a task that cannot be played elsewhere.
        """
        ...


def pytest_runner(runtime: TestRuntime, *arguments: str, options: Sequence[str] = ()) -> RunTask:
    """Return a runner of pytest with these options and arguments."""
    return lambda folder: run_pytest(runtime, folder, [*options, *arguments])


def command_runner(runtime: TestRuntime, command: str) -> RunTask:
    """Return a runner of one command, whose exit code is the outcome of the only test."""

    def run(folder: Path) -> TestOutcomes:
        # In a shell of its own: `exit` of the command ends that, and not the sandbox's.
        result = runtime.run(folder, f"bash -c {shlex.quote(command)}")
        passed = result.returncode == 0 and not result.timed_out
        return TestOutcomes({COMMAND: "passed" if passed else "failed"}, False, result.output)

    return run


def read_files(folder: Path) -> trees.Changes:
    """Return the regular files of a delivered tree, without caches and history."""
    return {path: trees.read(folder, path) for path in trees.walk(folder)}


def filled_tree(fill: Callable[[Path], None]) -> Path:
    """Return a private folder that `fill` has filled; it is removed where that fails."""
    folder = folders.make("tree")
    try:
        fill(folder)
    except BaseException:
        folders.remove(folder)
        raise
    return folder
