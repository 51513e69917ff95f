"""The environment `tasks`: rows of the user's own, played in a shell and graded by their test.

The agent works in a sandbox on the task's files. For grading its changes are applied to the delivered files, but for
those to tests and test configuration, which are restored (`editable` of a row exempts files); then the hidden files are
written over them, and the test is run in a fresh sandbox. So the test finds what the task's author wrote, whatever the
agent left in its place. By `calls` or `script` a pass is harder to forge: what they return, print or write is compared
outside of the sandbox (values.py), each call in a process of its own, and no hidden file is there; a row that shows all
results (shown.py) gives a report. So do ids of pytest, which a plugin reports, and a command, which is
believed by its exit code.
"""

import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from composer_stages.envs import folders
from composer_stages.envs.base import Split, Task
from composer_stages.envs.repo import grading, mirrors, runner, session, trees
from composer_stages.envs.repo.grading import TestRuntime
from composer_stages.envs.repo.guest.composer_rules import COMMAND, HISTORY, SHOWN, is_test, shadowed_module
from composer_stages.envs.repo.session import RepoEnvironment
from composer_stages.envs.repo.task import Export, RepoTask, command_runner, filled_tree, pytest_runner, read_files
from composer_stages.envs.repo.trees import EXECUTABLE, REGULAR, TreeFile
from composer_stages.envs.task_table import check_eval_share, draw_rows, family_of, split_rows
from composer_stages.envs.tasks import rows, shown, values
from composer_stages.errors import BadInput, UsageError
from composer_stages.runs import store
from composer_stages.runs.kinds import Row
from composer_stages.swebench.lists import TestLists


class TasksEnv(RepoEnvironment):
    """Implements Environment, ComparesOutcomes, HasSolutions, HasSize and Packs.

    `path`: a file of JSON lines or Parquet, or a data set of the hub. Without splits in the rows they are divided by
    family: `eval_share` of the families, drawn by `split_seed`, are held out. `max_chars`: of a longer output the agent
    sees the head and the tail.
    """

    name = "tasks"

    def __init__(
        self,
        sandbox: str = "bubblewrap",
        path: str = "",
        split_seed: int = 0,
        eval_share: float = 0.25,
        max_chars: int = 10_000,
    ) -> None:
        if not path:
            raise UsageError("envs.tasks.no-path")
        check_eval_share(eval_share)
        self.sandbox, self._path, self.max_chars = sandbox, path, max_chars
        self._split_seed, self._eval_share = split_seed, eval_share

    @staticmethod
    def content(path: str = "", **options: Any) -> str | None:
        """Return a digest of rows and archives, which a run's fingerprint contains: edited ones are other tasks."""
        del options
        file = Path(path).expanduser()
        if not file.is_file():
            return None
        archives = sorted({rows.source_path(row, "archive") for row in rows.load(path) if row["archive"]})
        digests = [store.file_sha256(path) for path in (file, *archives)]
        return store.digest(digests) if archives else digests[0]

    def size(self, split: Split) -> int:
        """Return the number of tasks of a split."""
        return len(self._splits()[split])

    def _splits(self) -> dict[Split, list[Row]]:
        return split_rows(rows.load(self._path), self._split_seed, self._eval_share)

    def tasks(self, split: Split, count: int, seed: int) -> list[Task]:
        """Return the first `count` tasks of a split in an order drawn from the seed."""
        chosen = draw_rows(self._path, self._splits(), split, count, seed)
        return [Task(row["id"], self.name, split, family_of(row), row["prompt"], row) for row in chosen]

    def report_reason(self, task: Task) -> str:
        """Return why a pass of a task can be no more than a report; "" for calls and scripts that nothing shows."""
        if not (compared := values.test_names(task.data)):
            return super().report_reason(task)
        with trees.scratch() as folder:
            write_files(folder, task.data)
            return _find_shown(task.data, compared, folder)[0]

    def repo_task(self, task: Task) -> RepoTask:
        """Set up the task's files in a folder, and its test in a fresh sandbox with the limit of its row."""
        row = task.data
        hidden, solution = file_changes(row["hidden"]), row["solution"]
        ids = tuple(test.split()[0] for test in row["tests"])
        paths = tuple(dict.fromkeys(test_id.partition("::")[0] for test_id in ids))
        limits = replace(grading.LIMITS, wall_s=row["timeout_s"])
        runtime = TestRuntime(lambda tree: runner.open_package_sandbox(self.sandbox, tree, limits, None))
        delivered = filled_tree(lambda folder: write_files(folder, row))
        compared = values.test_names(row)
        runs_hidden = bool(compared and shown.hidden_inputs(row))
        reason, results_shown = _find_shown(row, compared, delivered) if compared else ("", "")

        def write_reference(folder: Path) -> None:
            folders.copy(delivered, folder)
            trees.apply({**file_changes(solution or {}), **(hidden if runs_hidden else {})}, folder)

        originals = {path: trees.read(delivered, path) for path in paths if path not in hidden}
        return RepoTask(
            delivered,
            TestLists(compared or ids or (COMMAND,), (), skip_fails=True),
            lambda folder: runner.open_package_sandbox(self.sandbox, folder, session.LIMITS, None),
            values.compare_values(self.sandbox, row, None if solution is None else write_reference)
            if compared
            else pytest_runner(runtime, *row["tests"], options=["-q"])
            if ids
            else command_runner(runtime, row["test"]),
            hidden={} if compared and not runs_hidden else hidden,
            solution=None if solution is None else lambda: file_changes(solution),
            tests={*hidden, *paths},
            source=row["editable"],
            modules=find_standard_names(row, delivered),
            commands="\n".join([row["test"], *(script["command"] for script in row["script"])]),
            ids=ids,
            test_files={**originals, **hidden} if ids else {},
            ground="values" if compared else "report",
            report_reason=reason,
            shown=results_shown,
            # A verifier elsewhere would import the code that it judges, and pay by its report.
            export=None
            if compared
            else Export(
                command=row["test"],
                arguments=("-q", *row["tests"]) if ids else (),
                timeout_s=row["timeout_s"],
                provenance={name: row[name] for name in ("archive", "git", "commit")},
            ),
            release=lambda: folders.remove(delivered),
        )


def _find_shown(row: Mapping[str, Any], tests: Sequence[str], delivered: Path) -> tuple[str, str]:
    """Return why a row of calls and scripts gives a report, and which of their results are shown; "" for neither."""
    if (digest := store.digest(dict(row))) in _shown:
        return _shown[digest]
    results = [*shown.expected_results(row, values.calls_of(row), tests)]
    places = shown.find_shown(results, row["prompt"], read_files(delivered))
    described = shown.describe_shown(places)
    reason = shown.hidden_inputs(row) or (SHOWN + described if shown.decide_nothing(results, places) else "")
    _shown[digest] = reason, described
    return reason, described


_shown: dict[str, tuple[str, str]] = {}
"""Digest of a row -> what `_find_shown` found, which every play of it asks."""


MODULE_FILE = re.compile(r"(?<![\w./-])(?:\./|/testbed/)?((?:src/|lib/)?\w+(?:/__init__)?\.py)\b")
CODE_OF_A_COMMAND = re.compile(r"\s-(\w*[cm])?(\s|$)|<<")
"""Python code or a module in a command itself: python3 -c, python3 -m, python3 -, a here document."""


def find_standard_names(row: Mapping[str, Any], delivered: Path) -> frozenset[str]:
    """Return the standard-library names that the agent's modules may take: those that the row names.

    All where values decide, and no code runs that the agent cannot change: nothing can be gained then.
    """
    scripts = [script["command"] for script in row["script"]]
    if row["calls"] or scripts:
        fixed = row["hidden"] or any(map(is_test, trees.walk(delivered))) or any(map(CODE_OF_A_COMMAND.search, scripts))
        if not scripts or not fixed:
            return frozenset(sys.stdlib_module_names)
    named = [row["prompt"], row["test"], *scripts, *(row["solution"] or ())]
    files = (match[1] for text in named for match in MODULE_FILE.finditer(text))
    return frozenset(map(shadowed_module, files)) & sys.stdlib_module_names


def file_changes(files: Mapping[str, str | None]) -> trees.Changes:
    """Convert files of a row to changes of a tree; a file with a first line `#!` is executable."""
    return {
        path: None if text is None else TreeFile(text.encode(), EXECUTABLE if text.startswith("#!") else REGULAR)
        for path, text in files.items()
    }


def write_files(folder: Path, row: Row | Mapping[str, Any]) -> None:
    """Write a task's delivered files into a folder: the archive or commit, then the files of the row."""
    if row["archive"]:
        with trees.scratch() as scratch:
            inside = trees.extract_archive(rows.source_path(row, "archive"), scratch)
            # Without a repository: its history may hold the solution, and its configuration names programs to run.
            folders.copy(inside, folder, lambda path, _: Path(path).name in HISTORY)
    elif row["git"]:
        address, commit = row["git"], row["commit"]
        source = mirrors.clone(address, commit) if mirrors.is_address(address) else rows.source_path(row, "git")
        try:
            mirrors.check_out(mirrors.git_directory(source) or source, commit, folder)
        except RuntimeError as error:
            raise BadInput("envs.tasks.commit-not-readable", repository=address, commit=commit, error=error) from None
    trees.apply(file_changes(row["files"]), folder)
