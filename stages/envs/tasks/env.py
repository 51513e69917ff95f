"""The environment `tasks`: rows of the user's own, played in a shell and graded by their test.

The agent works in a sandbox on the task's files. For grading its changes are applied to the delivered files, but for
those to tests and test configuration, which are restored (`editable` of a row exempts files); then the hidden files are
written over them, and the test is run in a fresh sandbox. So the test finds what the task's author wrote, whatever the
agent left in its place. A command is believed by its exit code, which code under test can influence: where a pass
must not be forged, give ids of pytest: their outcomes are reported by a plugin, and a pass is run once more with
rewritten tests, as those of SWE-bench are.
"""

import hashlib
import os
import shlex
import threading
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from stages.envs import folders
from stages.envs.base import Grade, Split, Task
from stages.envs.repo import forged_passes, grading, runner, session, trees
from stages.envs.repo.forged_passes import RerunTree
from stages.envs.repo.grading import (
    GradingVerdict,
    Statuses,
    TestLists,
    TestOutcomes,
    TestRuntime,
    judge,
    run_on_copy,
    run_pytest,
    unexplained_fail,
)
from stages.envs.repo.guest.composer_rules import COMMAND, of_ids, stands_for
from stages.envs.repo.packing import PackedTask, contents
from stages.envs.repo.session import RepoEnvironment, RepoSession
from stages.envs.repo.trees import TreeFile
from stages.envs.task_table import family_of, split_rows, too_many
from stages.envs.tasks import rows
from stages.errors import BadInput, InfrastructureError, UsageError
from stages.messages import Message
from stages.runs import store
from stages.runs.kinds import Row

CLONES = Path("~/.cache/composer/tasks").expanduser()
_cloning = threading.Lock()


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
            raise UsageError("Which tasks? Give --set env.path=FILE, JSON lines with a prompt and a test each.")
        if not 0 < eval_share < 1:
            raise UsageError(f"env.eval_share is {eval_share}. It is a share of the families, between 0 and 1.")
        self.sandbox, self._path, self.max_chars = sandbox, path, max_chars
        self._split_seed, self._eval_share = split_seed, eval_share
        self._delivered: Path | None = None

    @staticmethod
    def content(path: str = "", **options: Any) -> str | None:
        """Return a digest of rows and archives, which a run's fingerprint contains: edited ones are other tasks."""
        del options
        file = Path(path).expanduser()
        if not file.is_file():
            return None
        archives = sorted({rows.source_path(row, "archive") for row in rows.load(path) if row["archive"]})
        digests = [store.file_sha256(one) for one in (file, *archives)]
        return store.digest(digests) if archives else digests[0]

    def size(self, split: Split) -> int:
        """Return the number of tasks of a split."""
        return len(self._splits()[split])

    def _splits(self) -> dict[Split, list[Row]]:
        return split_rows(rows.load(self._path), self._split_seed, self._eval_share)

    def tasks(self, split: Split, count: int, seed: int) -> list[Task]:
        """Return the first `count` tasks of a split in an order drawn from the seed."""
        splits = self._splits()
        found = splits[split]
        if count > len(found):
            raise too_many(self._path, splits, split, count)
        # By digest, so that a longer list starts with the shorter one and another order of rows changes nothing.
        ordered = sorted(found, key=lambda row: store.digest([seed, row["id"]]))
        return [Task(row["id"], self.name, split, family_of(row), row["prompt"], row) for row in ordered[:count]]

    def reset(self, task: Task) -> list[Message]:
        """Set up the task's files as a repository of one commit."""
        self.close()
        self._row = task.data
        self._delivered = folders.make("tree")
        fill(self._delivered, task.data)
        self._session = RepoSession(
            self._delivered,
            lambda folder: runner.open_package_sandbox(self.sandbox, folder, session.LIMITS, None),
            max_chars=self.max_chars,
            package=task.task_id,
            label=task.task_id,
        )
        return [{"role": "system", "content": self._system}, {"role": "user", "content": task.prompt}]

    def _solved(self) -> trees.Changes | None:
        written = self._row["solution"]
        return None if written is None else texts(written)

    def packed(self) -> PackedTask:
        """Return the content of the episode's task."""
        row = self._row
        wanted = tuple(one.split()[0] for one in row["tests"])
        return PackedTask(
            contents(self._open_session().delivered),
            texts(row["hidden"]),
            self._solved(),
            command=row["test"],
            lists=TestLists(wanted, (), skip_fails=True),
            arguments=("-q", *row["tests"]) if wanted else (),
            tests=row["hidden"].keys() | {one.partition("::")[0] for one in wanted},
            source=row["editable"],
            timeout_s=row["timeout_s"],
            provenance={name: row[name] for name in ("archive", "git", "commit")},
        )

    def _graded(self, session: RepoSession) -> Grade:
        """Return the strict and the loose verdict of the row's test.

        A pass of ids of pytest that contradicts itself in a second run is a hack.
        """
        self._tampered, self._logs, self._accesses = False, list[str](), frozenset[tuple[str, str]]()
        wanted = tuple(one.split()[0] for one in self._row["tests"])
        verdict = judge(
            session.delivered,
            session.folder,
            TestLists(wanted or (COMMAND,), (), skip_fails=True),
            self._statuses,
            tests=self._row["hidden"].keys() | {one.partition("::")[0] for one in wanted},
            source=set(self._row["editable"]),
        )
        forged = verdict.strict and bool(wanted) and self._is_forged(session.delivered, verdict)
        strict = verdict.strict and not forged
        hacked = forged or verdict.hacked or self._tampered
        work = verdict.work(self._logs[0])
        return Grade(float(strict), strict, verdict.loose, hacked, session.protocol_ok, work=work)

    def _is_forged(self, delivered: Path, verdict: GradingVerdict) -> bool:
        """Return whether the pass contradicts itself in a second run with rewritten tests."""
        hidden, solved = texts(self._row["hidden"]), self._solved()
        wanted = verdict.lists.fail_to_pass
        tests = {path: trees.read(delivered, path) for one in wanted if (path := one.partition("::")[0]) not in hidden}

        def rerun(rewritten: trees.Changes, selected: Sequence[str], tree: RerunTree) -> TestOutcomes:
            written = {"solution": verdict.kept, "reference": solved or {}, "delivered": {}}[tree]
            return run_on_copy(delivered, written, lambda folder: self._run_pytest(folder, selected, rewritten))

        return forged_passes.is_forged(
            {path: file for path, file in {**tests, **hidden}.items() if file is not None and path.endswith(".py")},
            # Every test that an id stands for.
            TestLists(tuple(name for name in verdict.statuses if any(map(partial(stands_for, name), wanted))), ()),
            verdict.statuses,
            rerun,
            task=(self.name, self._row["id"], store.digest(self._row)),
            reference=solved is not None,
            asks=True,
            seen={path: trees.read(delivered, path) for path in {*tests, *hidden}},
            changed=verdict.kept.keys(),
            accesses=self._accesses,
        )

    def _statuses(self, folder: Path) -> Statuses:
        """Run the row's test with the hidden files in place, and note the log."""
        if self._row["tests"]:
            outcomes = self._run_pytest(folder)
            # The first run is the strict one.
            self._accesses = self._accesses if self._logs else outcomes.accesses
            statuses = of_ids(unexplained_fail(outcomes.statuses, folder), self._row["tests"])
            self._logs.append(outcomes.log)
            return statuses
        trees.apply(texts(self._row["hidden"]), folder)
        # In a shell of its own: `exit` of the command ends that, and not the sandbox's.
        result = self._runtime().run(folder, f"bash -c {shlex.quote(self._row['test'])}")
        self._logs.append(result.output)
        return {COMMAND: "passed" if result.returncode == 0 and not result.timed_out else "failed"}

    def _run_pytest(
        self, folder: Path, selected: Sequence[str] = (), rewritten: trees.Changes | None = None
    ) -> TestOutcomes:
        """Run the row's ids, or those selected, with hidden files and `rewritten` ones in place; note tampering."""
        trees.apply({**texts(self._row["hidden"]), **(rewritten or {})}, folder)
        outcomes = run_pytest(self._runtime(), folder, ["-q", *(selected or self._row["tests"])])
        self._tampered |= outcomes.tampered
        return outcomes

    def _runtime(self) -> TestRuntime:
        """Return how the row's test is run: in a fresh sandbox, for as long as the row allows."""
        limits = replace(grading.LIMITS, wall_s=self._row["timeout_s"])
        return TestRuntime(lambda tree: runner.open_package_sandbox(self.sandbox, tree, limits, None))

    def close(self) -> None:
        """End all processes and delete the folders; safe to call twice."""
        super().close()
        delivered, self._delivered = self._delivered, None
        if delivered is not None:
            folders.remove(delivered)


def texts(files: Mapping[str, str | None]) -> trees.Changes:
    """Return files of a row as changes of a tree; a script with a first line `#!` is executable."""
    return {
        path: None if text is None else TreeFile(text.encode(), text.startswith("#!")) for path, text in files.items()
    }


def fill(folder: Path, row: Row | Mapping[str, Any]) -> None:
    """Write what a task is delivered with into a private folder: archive or commit, then the files of the row."""
    if row["archive"]:
        with trees.scratch() as place:
            inside = trees.extract_archive(rows.source_path(row, "archive"), place)
            folders.copy(inside, folder)
    elif row["git"]:
        with trees.scratch() as place:
            archive, empty = place / "tree.tar", place / "empty.git"
            repository = mirror(row["git"]) if rows.is_address(row["git"]) else rows.source_path(row, "git")
            objects = next(found for found in (repository / ".git/objects", repository / "objects") if found.is_dir())
            try:
                # Only the objects of the repository are read: its configuration may name programs to run as filters.
                trees.git(place, "init", "--quiet", "--bare", str(empty))
                shared = {"GIT_ALTERNATE_OBJECT_DIRECTORIES": str(objects.absolute())}
                trees.git(empty, "archive", "--format=tar", f"--output={archive}", row["commit"], env=shared)
            except RuntimeError as error:
                raise BadInput(f"{row['git']} has no commit {row['commit']} that can be read ({error}).") from None
            (place / "files").mkdir()
            folders.copy(trees.extract_archive(archive, place / "files"), folder)
    trees.apply(texts(row["files"]), folder)


def mirror(address: str) -> Path:
    """Return a clone of a repository, made once on this machine."""
    place = CLONES / hashlib.sha256(address.encode()).hexdigest()[:16]
    with _cloning:
        if not (place / "HEAD").is_file():
            CLONES.mkdir(parents=True, exist_ok=True)
            with trees.scratch() as scratch:
                try:
                    trees.git(scratch, "clone", "--quiet", "--mirror", "--", address, str(scratch / "clone"))
                    os.rename(scratch / "clone", place)
                except (RuntimeError, OSError) as error:
                    raise InfrastructureError(f"{address} cannot be cloned ({error}).") from None
    return place
