"""The environment `swe-lite`: instances of SWE-bench Lite, or of any data set in its shape, with bash actions.

It runs in containers of the official images, or in bubblewrap on local checkouts.
"""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from stages.envs.base import Grade, SamplingUnit, Split, Task
from stages.envs.repo import forged_passes, trees
from stages.envs.repo.forged_passes import RerunTree
from stages.envs.repo.grading import (
    GradingVerdict,
    Statuses,
    TestOutcomes,
    judge,
    run_on_copy,
    unexplained_fail,
)
from stages.envs.repo.session import RepoEnvironment, RepoSession
from stages.envs.swe import engine, instance_runtime, instances, requirements
from stages.envs.swe.instance_runtime import InstanceRuntime
from stages.envs.swe.instances import find_mirror, patched_files, require_mirror, touched_paths
from stages.envs.swe.requirements import RequirementsReport
from stages.errors import ComposerError, UsageError
from stages.messages import Message
from stages.runs import store
from stages.runs.kinds import Row
from stages.sandbox import container_engine

HUB_SPLIT: dict[Split, str] = {"train": "dev", "eval": "test"}
"""The data set's own splits, which share no repository."""


class SweEnv(RepoEnvironment):
    """Implements Environment and ComparesOutcomes.

    `path`: a file of instances (JSON, JSON Lines, Parquet), all of which are served for both splits; else `dataset` is
    fetched from the hub, its dev split for train and its test split for eval. `instances`: only these ids.
    `repos`: a folder of git mirrors, `venvs`: a folder of virtual environments, made where they are missing; with them
    everything runs locally. `runs_in`: "auto" prefers containers unless `repos` is given. `max_chars`: of a longer
    output the agent sees head and tail. `verdict` is the last one, with the outcome of every test in the strict run.
    """

    name = "swe-lite"
    sampling_unit = SamplingUnit("repository", fixed=True)
    """The repositories are those of the benchmark, not a sample of repositories: only their tasks are drawn."""

    def __init__(
        self,
        sandbox: str = "bubblewrap",
        path: str = "",
        dataset: str = instances.LITE,
        instances: Sequence[str] = (),
        repos: str = "",
        venvs: str = "",
        runs_in: Literal["auto", "containers", "local"] = "auto",
        max_chars: int = 10_000,
    ) -> None:
        self._kind, self._path, self._dataset, self._only = sandbox, path, dataset, tuple(instances)
        self._repos, self._venvs = (os.path.abspath(folder) if folder else "" for folder in (repos, venvs))
        self._local = bool(self._repos) if runs_in == "auto" else runs_in == "local"
        self.max_chars = max_chars
        self._holds_runtime = False
        self.verdict: GradingVerdict | None = None
        self.sandbox = sandbox if self._local else "container"

    def tasks(self, split: Split, count: int, seed: int) -> list[Task]:
        """Return the first `count` instances under a seed, of those that can be set up here."""
        # Without an engine the sentence comes before anything is fetched, but not before a file that may be missing.
        chosen = self._chosen(split) if self._path else []
        if not self._local:
            engine.require_engine()
        # By digest, so that a longer list starts with the shorter one and another file order changes nothing.
        ordered = sorted(
            self._possible(chosen or self._chosen(split)), key=lambda row: store.digest([seed, row["instance_id"]])
        )
        return [self._task(row, split) for row in ordered[:count]]

    def _chosen(self, split: Split) -> list[Row]:
        """Return the rows of a split, or the named ones among them."""
        rows = self._rows(split)
        if unknown := sorted(set(self._only) - {row["instance_id"] for row in rows}):
            raise UsageError(f"There is no instance {unknown[0]!r} in {self._path or self._dataset}.")
        return [row for row in rows if not self._only or row["instance_id"] in self._only]

    def requirements(self, split: Split) -> RequirementsReport:
        """Return what this machine has and lacks for the rows of a split, in containers and on local checkouts."""
        try:
            rows = self._chosen(split)
            read = requirements.Requirement("rows", "ok", f"{len(rows)} of {self._path or self._dataset}")
        except ComposerError as error:
            rows = []
            read = requirements.Requirement("rows", "missing", str(error), "Give a file of rows with env.path.")
        folder = Path(self._venvs) if self._venvs else instance_runtime.DEFAULT_VENVS
        ways = [
            requirements.container_requirements(rows, container_engine.find_engine()),
            requirements.local_requirements(rows, self._repos, folder, self._kind),
        ]
        return RequirementsReport(read, ways, "local" if self._local else "containers")

    def _rows(self, split: Split) -> list[Row]:
        """Return all rows of a split."""
        return (
            instances.load(Path(self._path)) if self._path else instances.load_from_hub(self._dataset, HUB_SPLIT[split])
        )

    def _task(self, row: Row, split: Split) -> Task:
        """Return the task of a row; a family is a repository."""
        return Task(row["instance_id"], self.name, split, row["repo"], row["problem_statement"], row)

    def _possible(self, rows: list[Row]) -> list[Row]:
        """Return the rows whose repository has a mirror; all of them with containers.

        `UsageError` where a named instance has none, or no instance has one.
        """
        if not self._local:
            return rows
        here = [row for row in rows if find_mirror(Path(self._repos), row["repo"])]
        if missing := [row for row in rows if row not in here and (self._only or not here)]:
            require_mirror(Path(self._repos), missing[0]["repo"])  # raises
        return here

    def reset(self, task: Task) -> list[Message]:
        """Set up the repository at its base commit, as one commit without history."""
        self.close()
        self.verdict = None
        self._row = dict(task.data)
        self._runtime = self._open_runtime(self._row)
        self._holds_runtime = True
        self._session = RepoSession(
            self._runtime.delivered,
            self._runtime.open_for_agent,
            max_chars=self.max_chars,
            package=self._row["repo"].partition("/")[2],
            label=task.task_id,
        )
        return [{"role": "system", "content": self._system}, {"role": "user", "content": task.prompt}]

    def _open_runtime(self, row: Row) -> InstanceRuntime:
        """Set up the instance of a row."""
        if self._local:
            return instance_runtime.local_runtime(row, self._kind, self._repos, self._venvs)
        return instance_runtime.container_runtime(row, engine.require_engine())

    def _solved(self) -> trees.Changes | None:
        patch = self._row.get("patch") or ""
        return patched_files(self._open_session().delivered, patch) if patch else None

    def _graded(self, session: RepoSession) -> Grade:
        """Return the strict and the loose verdict, both with the instance's own tests.

        A pass that contradicts itself in a second run with rewritten tests is a hack.
        """
        self._tampered, self._logs, self._accesses = False, list[str](), frozenset[tuple[str, str]]()
        patch, runtime = self._row.get("patch") or "", self._runtime
        self.verdict = verdict = judge(
            session.delivered,
            session.folder,
            runtime.lists,
            self._statuses,
            tests=set(runtime.tests),
            # What the gold patch changes is source, even where its path looks like a test's: django/test/client.py.
            source=touched_paths(patch),
        )

        def rerun(rewritten: trees.Changes, selected: Sequence[str], tree: RerunTree) -> TestOutcomes:
            solution = {} if tree == "delivered" else patched_files(session.delivered, patch)
            written = verdict.kept if tree == "solution" else solution
            return run_on_copy(session.delivered, written, lambda folder: self._run(folder, rewritten, selected))

        forged = verdict.strict and forged_passes.is_forged(
            runtime.tests,
            verdict.lists,
            verdict.statuses,
            rerun,
            task=(self.name, session.delivered, store.digest(self._row)),
            reference=bool(patch),
            asks=runtime.asks,
            seen={path: trees.read(session.delivered, path) for path in runtime.tests},
            changed=verdict.kept.keys(),
            accesses=self._accesses,
        )
        strict = verdict.strict and not forged
        hacked = forged or verdict.hacked or self._tampered
        work = verdict.work(self._logs[0], runtime.image)
        return Grade(float(strict), strict, verdict.loose, hacked, session.protocol_ok, work=work)

    def _statuses(self, folder: Path) -> Statuses:
        """Run the instance's tests."""
        return unexplained_fail(self._run(folder).statuses, folder)

    def _run(self, folder: Path, rewritten: trees.Changes | None = None, selected: Sequence[str] = ()) -> TestOutcomes:
        """Run the instance's tests, with `rewritten` files written last, and note log and tampering."""
        trees.apply({**self._runtime.tests, **(rewritten or {})}, folder)
        outcomes = self._runtime.run_tests(folder, selected)
        self._tampered |= outcomes.tampered
        # The first run is the strict one.
        self._accesses = self._accesses if self._logs else outcomes.accesses
        self._logs.append(outcomes.log)
        return outcomes

    def close(self) -> None:
        """End all processes, delete the folder and release the instance; safe to call twice."""
        super().close()
        # Released once: a second release would take the shared tree from another episode.
        if self._holds_runtime:
            self._holds_runtime = False
            self._runtime.close()
