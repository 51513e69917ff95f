"""The environment `swe-lite`: instances of SWE-bench Lite, or of any data set in its shape, with bash actions.

It runs in containers of the official images, or in bubblewrap on local checkouts.
"""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from stages.envs.base import SamplingUnit, Split, Task
from stages.envs.repo.session import RepoEnvironment
from stages.envs.repo.task import RepoTask
from stages.envs.swe import engine, instance_tasks, instances, requirements
from stages.envs.swe.instance_tasks import task_of
from stages.envs.swe.instances import find_mirror, require_mirror
from stages.envs.swe.requirements import RequirementsReport
from stages.errors import ComposerError
from stages.runs.kinds import Row
from stages.sandbox import containers

HUB_SPLIT: dict[Split, str] = {"train": "dev", "eval": "test"}
"""The data set's own splits, which share no repository."""


class SweEnv(RepoEnvironment):
    """Implements Environment, ComparesOutcomes and HasSolutions.

    `path`: a file of instances (JSON, JSON Lines, Parquet), all of which are served for both splits; else `dataset` is
    fetched from the hub, its dev split for train and its test split for eval. `instances`: only these ids.
    `repos`: a folder of git mirrors, `venvs`: a folder of virtual environments, made where they are missing; with them
    everything runs locally. `runs_in`: "auto" prefers containers unless `repos` is given. `max_chars`: of a longer
    output the agent sees head and tail.
    """

    name = "swe-lite"
    sampling_unit = SamplingUnit("repository", fixed=True)
    """The repositories are those of the benchmark, not a sample of repositories: only their tasks are drawn."""
    primary_outcome = "passed"

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
        self.sandbox = sandbox if self._local else "container"

    def tasks(self, split: Split, count: int, seed: int) -> list[Task]:
        """Return the first `count` instances under a seed, of those that can be set up here."""
        # Without an engine the sentence comes before anything is fetched, but not before a file that may be missing.
        chosen = self._chosen(split) if self._path else []
        if not self._local:
            engine.require_engine()
        ordered = instances.drawn(self._possible(chosen or self._chosen(split)), seed)
        return [task_of(row, self.name, split) for row in ordered[:count]]

    def _chosen(self, split: Split) -> list[Row]:
        """Return the rows of a split, or the named ones among them."""
        rows = (
            instances.load(Path(self._path)) if self._path else instances.load_from_hub(self._dataset, HUB_SPLIT[split])
        )
        return instances.named(rows, self._only, self._path or self._dataset)

    def requirements(self, split: Split) -> RequirementsReport:
        """Return what this machine has and lacks for the rows of a split, in containers and on local checkouts."""
        try:
            rows = self._chosen(split)
            read = requirements.Requirement("rows", "ok", f"{len(rows)} of {self._path or self._dataset}")
        except ComposerError as error:
            rows = []
            read = requirements.Requirement("rows", "missing", str(error), "Give a file of rows with env.path.")
        folder = Path(self._venvs) if self._venvs else instance_tasks.DEFAULT_VENVS
        ways = [
            requirements.container_requirements(rows, containers.find_engine()),
            requirements.local_requirements(rows, self._repos, folder, self._kind),
        ]
        return RequirementsReport(read, ways, "local" if self._local else "containers")

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

    def repo_task(self, task: Task) -> RepoTask:
        """Set up the repository of an instance at its base commit."""
        if self._local:
            return instance_tasks.local_task(task.data, self._kind, self._repos, self._venvs)
        return instance_tasks.container_task(task.data, engine.require_engine())
