"""The environment `swe-lite`: instances of SWE-bench Lite, or of any data set in its shape, with bash actions.

It runs in containers of the official images, or in bubblewrap on local checkouts.
"""

import os
import platform
import shutil
import subprocess
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from composer_stages.envs.base import Split, Task
from composer_stages.envs.repo.mirrors import has_commit
from composer_stages.envs.repo.session import RepoEnvironment
from composer_stages.envs.repo.task import RepoTask
from composer_stages.envs.swe import engine, instance_tasks, instances, venvs
from composer_stages.envs.swe.instance_tasks import TEST_LIMITS, task_of
from composer_stages.envs.swe.instances import find_mirror, require_mirror
from composer_stages.envs.swe.specs import GUESSED, EnvironmentSpec, spec_of
from composer_stages.envs.task_table import order_rows
from composer_stages.errors import ComposerError, InfrastructureError, UsageError
from composer_stages.runs.kinds import Row
from composer_stages.sandbox import containers, probe
from composer_stages.terms import REPOSITORY
from composer_stages.words import Sentence

ALL_IMAGES_GB, ALL_IMAGES = 120, 300
"""The disk space that SWE-bench's own README asks for, and its number of images."""
State = Literal["ok", "note", "missing"]
ENVIRONMENT_MB = 250
"""Disk space assumed for one environment: Django's and Sphinx's took 10 and 75 MB, those with numpy take more."""


@dataclass(frozen=True)
class Requirement:
    """One requirement. State `note`: optional, but recommended; `way_out`: what the user can do."""

    name: str
    state: State
    found: str
    way_out: str = ""

    @classmethod
    def of(cls, name: str, met: object, found: str, way_out: str) -> "Requirement":
        """Return a requirement that is met, or else is missing with a way out."""
        return cls(name, "ok", found) if met else cls(name, "missing", found, way_out)


@dataclass(frozen=True)
class WayToRun:
    """One way to run the rows, in containers or on local clones, and its requirements."""

    name: str
    parts: list[Requirement]

    @property
    def ready(self) -> bool:
        """Whether `collect` can begin."""
        return all(part.state != "missing" for part in self.parts)


@dataclass(frozen=True)
class RequirementsReport:
    """The rows, the requirements of both ways to run them, and the name of the one that the settings choose."""

    rows: Requirement
    ways: list[WayToRun]
    chosen: str

    @property
    def ready(self) -> bool:
        """Whether `collect` can begin with these settings."""
        return self.rows.state != "missing" and all(way.ready for way in self.ways if way.name == self.chosen)

    def document(self) -> Row:
        """Return the report as JSON."""
        ways = [{"way": way.name, "ready": way.ready, "parts": [vars(part) for part in way.parts]} for way in self.ways]
        return {"ready": self.ready, "chosen": self.chosen, "rows": vars(self.rows), "ways": ways}


def container_requirements(rows: Sequence[Row], program: str | None) -> WayToRun:
    """Check the requirements of running in containers. program: an engine that answers, None where there is none."""
    if program is None:
        failures = "; ".join(f"{name} {containers.engine_failure(name) or 'answers'}" for name in containers.ENGINES)
        no_engine = Requirement("engine", "missing", failures, Sentence("envs.swe.install-engine"))
        return WayToRun("containers", [no_engine, _architecture(), _memory()])
    info = containers.engine_info(program)
    parts = [Requirement("engine", "ok", f"{program}, {'rootless' if info.rootless else 'as root'}")]
    parts += [_architecture(), _memory()]
    images = {engine.image_name(row) for row in rows}
    command = [program, "images", "--format", "{{.Repository}}:{{.Tag}}"]
    listed = subprocess.run(command, capture_output=True, text=True, timeout=containers.START_S).stdout.split()
    # docker's names omit the registry.
    missing = sorted(images - {*listed, *(f"docker.io/{name}" for name in listed)})
    if images:
        reason = containers.manifest_failure(program, missing[0]) if missing else None
        state = Sentence("envs.swe.images-state", num_images=len(images), missing=missing, reason=reason)
        parts.append(Requirement.of("images", reason is None, state, Sentence("envs.swe.connect-to-registry")))
    needed_mb = ALL_IMAGES_GB * 1000 * len(missing) // ALL_IMAGES
    return WayToRun("containers", [*parts, _disk(info.storage or Path("/"), needed_mb, "images")])


def _architecture() -> Requirement:
    """Check whether the official images run on this kind of machine."""
    machine = platform.machine()
    fits = machine == "x86_64"
    state = machine if fits else Sentence("envs.swe.images-for-x86-only", machine=machine)
    return Requirement.of("architecture", fits, state, "Use clones instead.")


def _memory() -> Requirement:
    """Check whether one run of tests under its limit fits; several at once need more."""
    total, needed = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") >> 20, TEST_LIMITS.memory_mb
    state = Sentence("envs.swe.memory-state", total_mb=total, needed_mb=needed)
    return Requirement.of("memory", total >= needed, state, "Take a larger machine.")


def _disk(folder: Path, needed_mb: int, noun: str) -> Requirement:
    """Check the disk space below a folder, which need not exist, for images or environments to come."""
    existing = next(path for path in (folder, *folder.parents) if path.exists())
    free_mb = shutil.disk_usage(existing).free // 1_000_000
    state = Sentence(
        "envs.swe.disk-state", free_gb=free_mb / 1000, folder=existing, noun=noun, needed_gb=needed_mb / 1000
    )
    return Requirement.of("disk", free_mb >= needed_mb, state, "Make room there.")


def local_requirements(
    rows: Sequence[Row],
    repos: str,
    folder: Path,
    sandbox: str = "bubblewrap",
    spec: Callable[[Mapping[str, object]], EnvironmentSpec] = spec_of,
) -> WayToRun:
    """Check the requirements of running on local clones below `repos`; environments are below `folder`."""
    versions = {venvs.version_name(row): row for row in rows}
    specs = {name: spec(row) for name, row in versions.items()}
    to_build = {name: specs[name] for name in versions if not venvs.exists(folder / name)}
    try:
        probe(sandbox)
        parts = [Requirement("sandbox", "ok", f"a command ran under {sandbox}")]
    except UsageError as error:
        parts = [Requirement("sandbox", "missing", str(error))]
    parts += [_clones(rows, repos), _memory()]
    if rows:
        parts += _environments(to_build, len(versions))
        if guessed := sum(spec.source == GUESSED for spec in specs.values()):
            state = Sentence("envs.swe.versions-guessed", num_guessed=guessed, num_versions=len(specs))
            way_out = Sentence("envs.swe.install-swebench")
            parts.append(Requirement("specifications", "note", state, way_out))
        else:
            parts.append(Requirement("specifications", "ok", Sentence("envs.swe.versions-in-table")))
        parts.append(_disk(folder, ENVIRONMENT_MB * len(to_build), "environments"))
    return WayToRun("local", parts)


def _clones(rows: Sequence[Row], repos: str) -> Requirement:
    """Check whether there is a mirror for every repository, and in it every base commit."""
    names = sorted({row["repo"] for row in rows})
    mirrors = {name: find_mirror(Path(repos), name) for name in names} if repos else dict.fromkeys(names)
    missing = [name for name in names if mirrors[name] is None]
    if missing or not repos:
        way_out = Sentence("envs.swe.clone-mirrors", repo=(missing or ["OWNER/NAME"])[0], repos=repos)
        state = Sentence("envs.swe.mirrors-missing", num_repositories=len(names), missing=missing, repos=repos)
        return Requirement("clones", "missing", state, way_out)
    without_commit = [
        row["instance_id"] for row in rows if (at := mirrors[row["repo"]]) and not has_commit(at, row["base_commit"])
    ]
    state = Sentence("envs.swe.mirrors-state", num_repositories=len(names), repos=repos, without_commit=without_commit)
    return Requirement.of("clones", not without_commit, state, Sentence("envs.swe.fetch-mirrors"))


def _environments(to_build: Mapping[str, EnvironmentSpec], total: int) -> list[Requirement]:
    """Check interpreters and conda for the environments that are still to be built."""
    conda = sorted(name for name, spec in to_build.items() if spec.needs_conda)
    state = Sentence("envs.swe.environments-state", num_versions=total, num_to_build=len(to_build), conda=conda)
    if not to_build:
        return [Requirement("environments", "ok", state)]
    parts = [Requirement.of("environments", not conda, state, Sentence("envs.swe.build-environments"))]
    absent = defaultdict(list)
    for name, spec in to_build.items():
        try:
            venvs.find_interpreter(spec.python, name)
        except InfrastructureError:
            absent[spec.python].append(name)
    for version, names in sorted(absent.items()):
        pyenv = f"pyenv install {version}"
        parts.append(Requirement(f"Python {version}", "missing", f"for {len(names)} of them", pyenv))
    return parts


HUB_SPLITS: dict[Split, Sequence[str]] = {"train": ("dev", "train"), "eval": ("test",)}
"""The splits of a data set by ours: dev and test of SWE-bench share no repository, and SWE-Gym has train alone."""


class SweEnv(RepoEnvironment):
    """Implements Environment, ComparesOutcomes and HasSolutions.

    `path`: a file of instances (JSON, JSON Lines, Parquet), all of which are served for both splits; else `dataset` is
    fetched from the hub, its split dev, or else train, for train and test for eval. `instances`: only these ids.
    `repos`: a folder of git mirrors, `venvs`: a folder of virtual environments, made where they are missing; with them
    everything runs locally. `runs_in`: "auto" prefers containers unless `repos` is given. `max_chars`: of a longer
    output the agent sees head and tail.
    """

    name = "swe-lite"
    sampling_unit = REPOSITORY
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
        self.sandbox = sandbox if self._local else "container"

    def tasks(self, split: Split, count: int, seed: int) -> list[Task]:
        """Return the first `count` instances under a seed, of those that can be set up here."""
        # Without an engine the sentence comes before anything is fetched, but not before a file that may be missing.
        chosen = self._chosen(split) if self._path else []
        if not self._local:
            engine.require_engine()
        rows = order_rows(self._possible(chosen or self._chosen(split)), seed, "instance_id")
        return [task_of(row, self.name, split) for row in rows[:count]]

    def _chosen(self, split: Split) -> list[Row]:
        """Return the rows of a split, or the named ones among them."""
        rows = (
            instances.load(Path(self._path))
            if self._path
            else instances.load_from_hub(self._dataset, HUB_SPLITS[split])
        )
        return instances.select_instances(rows, self._only, self._path or self._dataset)

    def requirements(self, split: Split) -> RequirementsReport:
        """Report the requirements for the rows of a split that this machine meets and lacks."""
        try:
            rows = self._chosen(split)
            read = Requirement("rows", "ok", f"{len(rows)} of {self._path or self._dataset}")
        except ComposerError as error:
            rows = []
            read = Requirement("rows", "missing", str(error), Sentence("envs.swe.give-rows"))
        folder = Path(self._venvs) if self._venvs else instance_tasks.DEFAULT_VENVS
        ways = [
            container_requirements(rows, containers.find_engine()),
            local_requirements(rows, self._repos, folder, self._kind),
        ]
        return RequirementsReport(read, ways, "local" if self._local else "containers")

    def _possible(self, rows: list[Row]) -> list[Row]:
        """Return the rows whose repository has a mirror; all of them with containers.

        `UsageError` where a named instance has none, or no instance has one.
        """
        if not self._local:
            return rows
        mirrored = [row for row in rows if find_mirror(Path(self._repos), row["repo"])]
        if missing := [row for row in rows if row not in mirrored and (self._only or not mirrored)]:
            require_mirror(Path(self._repos), missing[0]["repo"])  # raises
        return mirrored

    def repo_task(self, task: Task) -> RepoTask:
        """Set up the repository of an instance at its base commit."""
        if self._local:
            return instance_tasks.local_task(task.data, self._kind, self._repos, self._venvs)
        return instance_tasks.container_task(task.data, engine.require_engine())
