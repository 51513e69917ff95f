"""A task with all that is needed to play it elsewhere: the files to start from, the tests that decide, the solution.

Environments whose tasks can leave implement `Packs`; stages/formats/harbor_tasks.py writes what they return.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from stages.envs.repo import trees
from stages.envs.repo.grading import TestLists


@dataclass(frozen=True)
class PackedTask:
    """The content of a task, all paths relative to its work folder.

    files: what the agent starts from. hidden: files that are written for grading alone. solution: its changes, None
    where there is none. command: a shell command whose exit code 0 passes; without one `lists` are the tests that must
    pass, and `arguments` what pytest is called with. tests: paths that count as tests though they do not look like it;
    source: paths that never do. timeout_s: of one run of the tests. requirements: distributions that the tests import.
    provenance: where the task is from.
    """

    files: trees.Changes
    hidden: trees.Changes
    solution: trees.Changes | None
    command: str = ""
    lists: TestLists = field(default_factory=lambda: TestLists((), ()))
    arguments: tuple[str, ...] = ()
    tests: Collection[str] = ()
    source: Collection[str] = ()
    timeout_s: float = 600.0
    requirements: tuple[str, ...] = ()
    provenance: Mapping[str, Any] = field(default_factory=dict)


@runtime_checkable
class Packs(Protocol):
    """An environment whose tasks can be played elsewhere."""

    def packed(self) -> PackedTask:
        """Return the content of the episode's task, after `reset`.

        Raises InfrastructureError for a task that cannot be played elsewhere.
        """
        ...


def contents(folder: Path) -> trees.Changes:
    """Return the regular files of a delivered tree, without caches and history."""
    return {path: trees.read(folder, path) for path in trees.walk(folder)}
