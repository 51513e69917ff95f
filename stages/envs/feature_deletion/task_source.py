"""Where tasks and packages come from: made on demand from a package, or read from a run of `composer tasks`."""

import tempfile
import threading
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

import orjson

from stages.envs import temporary
from stages.envs.base import Split
from stages.envs.feature_deletion import leaks, selection, tools
from stages.envs.feature_deletion.package import Package, unpack
from stages.envs.feature_deletion.selection import KEEP, WEIGHTS, Difficulty
from stages.envs.feature_deletion.task_generator import TaskGenerator
from stages.envs.repo import trees
from stages.errors import BadInput, InfrastructureError, UsageError
from stages.runs import parquet
from stages.runs.records import TASK, Row

_lock = threading.Lock()


class Source:
    """The tasks of one environment's options."""

    def __init__(self, sandbox: str, package: str, tasks: str, difficulty: str, requirements: tuple[str, ...]) -> None:
        self._sandbox, self._package, self._tasks = sandbox, package, tasks
        self._difficulties = difficulties(difficulty)
        self._requirements = requirements

    def rows(self, split: Split, count: int, seed: int) -> list[Row]:
        """At most `count` rows of a split; `UsageError` when there is none."""
        if not self._package and not self._tasks:
            raise UsageError(
                "Feature deletion needs a package: --set env.package=DIR_OR_SDIST, or a run of `composer tasks` with "
                "--set env.tasks=RUN, or one of `composer curriculum` with --set env.curriculum=RUN."
            )
        found = self._read(split) if self._tasks else self._make(split, count, seed)
        if not found:
            where = self._tasks or self._package
            raise UsageError(
                f"{where} gives no task for the split {split!r}. Choose another package, split or difficulty."
            )
        return found[:count]

    def _read(self, split: Split) -> list[Row]:
        table = list(parquet.scan_table(Path(self._tasks) / "tasks.parquet", TASK).rows())
        return [orjson.loads(row["data_json"]) for row in table if row["split"] == split]

    def _make(self, split: Split, count: int, seed: int) -> list[Row]:
        made: list[Row] = []
        package, needed = unpacked(Path(self._package)), requirements(self._requirements)
        with TaskGenerator(package, self._sandbox, needed) as generator:
            for result in generator.make(generator.candidates(seed, split, tuple(WEIGHTS), self._difficulties)):
                made += [prepared(result.row, self._package, self._requirements)] if result.row else []
                if len(made) >= count:
                    break
        return made

    def package(self, row: Mapping[str, Any]) -> Package:
        """The package that a row was made from; `BadInput` when it has changed since."""
        path = Path(self._package or row["source"])
        found = unpacked(path)
        if found.sha256 != row["package_sha256"]:
            raise BadInput(
                f"{path} is not the {row['package']} that the tasks were made from. Give that one, or make new tasks."
            )
        return found


def prepared(row: Row, source: str, needed: tuple[str, ...]) -> Row:
    """A row with where its package lies and what its tests import beside it."""
    return {**row, "source": str(Path(source).expanduser().absolute()), "requirements": list(needed)}


def difficulties(wanted: str) -> tuple[Difficulty, ...]:
    """One difficulty, or all of them for "mixed"; `UsageError` for another word."""
    chosen = tuple(difficulty for difficulty in KEEP if wanted in (difficulty, "mixed"))
    if not chosen:
        raise UsageError(f"There is no difficulty {wanted!r}; choose one of {', '.join(KEEP)} or mixed.")
    return chosen


def unpacked(path: Path) -> Package:
    """A package, unpacked once in this process for all episodes; `BadInput` when there is none at the path."""
    path = path.expanduser()
    if not path.exists():
        raise BadInput(
            f"There is no package at {str(path)!r}. Give a folder or an sdist; "
            "`pip download --no-deps --no-binary NAME NAME` fetches one."
        )
    with _lock:
        return _unpacked(path.absolute(), path.stat().st_mtime_ns)[0]


@lru_cache(maxsize=16)
def _unpacked(path: Path, changed_ns: int) -> tuple[Package, "tempfile.TemporaryDirectory[str]"]:
    del changed_ns
    folder = tempfile.TemporaryDirectory(prefix="package-", dir=temporary.home())
    return unpack(path, Path(folder.name)), folder


def hidden(sandbox: str, row: Mapping[str, Any], package: Package, needed: Path | None) -> tuple[Path, ...]:
    """Files of this machine that hold code of the package, for a sandbox to hide; searched for once in this process."""
    survey = leaks.survey(sandbox, _texts(package.root), needed)
    if places := [places for name, places in survey.places.items() if name.rpartition(":")[0] in row["removed"]]:
        raise InfrastructureError(
            f"The sandbox would show a copy of the code that {row['instance_id']} asks for: {places[0][0]}."
        )
    return survey.hidden


@lru_cache(maxsize=16)
def _texts(root: Path) -> dict[str, str]:
    return selection.sources({path: file for path in trees.walk(root) if (file := trees.read(root, path))})


def requirements(needed: tuple[str, ...]) -> Path | None:
    """A folder with what tests import, installed once in this process."""
    if not needed:
        return None
    with _lock:
        return Path(_installed(needed).name)


@lru_cache(maxsize=4)
def _installed(needed: tuple[str, ...]) -> "tempfile.TemporaryDirectory[str]":
    folder = tempfile.TemporaryDirectory(prefix="requirements-", dir=temporary.home())
    tools.install(needed, Path(folder.name))
    return folder
