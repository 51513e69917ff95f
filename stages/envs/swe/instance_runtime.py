"""An instance on this machine or in a container: its delivered tree, its tests, and sandboxes on copies of the tree."""

import atexit
import os
import sys
import threading
from collections.abc import Callable, Collection, Hashable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

from stages.envs import folders
from stages.envs.folders import remove
from stages.envs.repo import grading, session, trees
from stages.envs.repo.grading import IMPORT_ROOTS, TestLists, TestOutcomes, TestRuntime
from stages.envs.swe import commands, engine, venvs
from stages.envs.swe.commands import scripted, spec_of, tests_of
from stages.envs.swe.instances import is_newer
from stages.envs.swe.logs import lists_of
from stages.errors import InfrastructureError
from stages.sandbox import Limits, Sandbox, open_sandbox
from stages.sandbox.bubblewrap import package_folders

# ---- shared_trees
# Trees that several episodes read: made once, kept while anyone uses them, and a few longer.


@dataclass
class _Shared:
    folder: Path
    users: int = 0
    made: bool = False
    lock: threading.Lock = field(default_factory=threading.Lock)


class SharedTrees:
    """Folders by key. Of those that nobody uses the `idle` that were used last stay; the others are deleted."""

    def __init__(self, idle: int) -> None:
        self._idle = idle
        self._lock = threading.Lock()
        self._trees: dict[Hashable, _Shared] = {}

    def take(self, key: Hashable, make: Callable[[Path], None]) -> Path:
        """The folder of a key, filled by `make` where there is none; `give_back` has to follow.

        What `make` raises passes through, and nothing is kept then.
        """
        with self._lock:
            shared = self._trees.pop(key, None) or _Shared(folders.make("tree"))
            self._trees[key] = shared  # the last in order is the last used
            shared.users += 1
        try:
            with shared.lock:
                if not shared.made:
                    make(shared.folder)
                    shared.made = True
        except BaseException:
            self.give_back(key)
            raise
        return shared.folder

    def give_back(self, key: Hashable) -> None:
        """Say that one user of a key's folder is done with it."""
        with self._lock:
            self._trees[key].users -= 1
            unused = [name for name, shared in self._trees.items() if shared.users == 0]
            unmade = [name for name in unused if not self._trees[name].made]
            gone = {*unmade, *unused[: max(0, len(unused) - self._idle)]}
            folders = [self._trees.pop(name).folder for name in gone]
        for folder in folders:
            remove(folder)

    def close(self) -> None:
        """Delete everything, at the end of the process."""
        with self._lock:
            folders = [shared.folder for shared in self._trees.values()]
            self._trees.clear()
        for folder in folders:
            remove(folder)


# ---- host_copies
# Copies of a repository's packages that other programs of this machine bring along, and that a sandbox would show.
#
# Whoever vendors requests has a later release of it, and with it the answer.

SYSTEM = Path("/usr")
"""Where programs lie that a sandbox shows."""


def copies(packages: Collection[str], system: Path = SYSTEM) -> tuple[Path, ...]:
    """Folders of packages with these names below `system`, none inside another, and all wheels: they hold packages."""
    by_name, wheels = _index(system)
    names = set(packages) - sys.stdlib_module_names
    return (*_outermost(sorted(path for name in names for path in by_name.get(name, ()))), *wheels)


def _outermost(paths: list[Path]) -> Iterator[Path]:
    last: Path | None = None
    for path in paths:
        if last is None or not path.is_relative_to(last):
            last = path
            yield path


@cache
def _index(system: Path) -> tuple[dict[str, list[Path]], tuple[Path, ...]]:
    """The folders of packages by name, and wheels, except in folders that every sandbox shows empty."""
    packages: dict[str, list[Path]] = {}
    wheels: list[Path] = []
    shown_empty = set(map(str, package_folders(Path(sys.base_prefix))))
    for folder, subfolders, names in os.walk(system):
        subfolders[:] = sorted(name for name in subfolders if os.path.join(folder, name) not in shown_empty)
        wheels += [Path(folder, name) for name in names if name.endswith(".whl")]
        if "__init__.py" in names:
            packages.setdefault(os.path.basename(folder), []).append(_with_project(Path(folder)))
    return packages, tuple(wheels)


def _with_project(package: Path) -> Path:
    """The whole project where it lies around its package under the same name: name/name, name/src/name."""
    above = package.parent.parent if package.parent.name in IMPORT_ROOTS else package.parent
    return above if above.name == package.name else package


TEST_LIMITS = replace(grading.LIMITS, wall_s=1800, cpu_s=1800)
DEFAULT_VENVS = Path.home() / ".cache" / "composer" / "swe-venvs"
IDLE = 16
"""Delivered trees that stay although no episode uses them: the next samples of a task do."""
_delivered = SharedTrees(IDLE)
atexit.register(_delivered.close)


@dataclass(frozen=True)
class InstanceRuntime:
    """What an episode needs of an instance.

    `delivered` is the tree that the agent finds, which nobody changes, and which is there until `close`; `tests` are
    the files of the test patch. `open_for_agent` and `run_tests` take a folder with a copy of the tree. `image`: that
    of the container, None without one.
    """

    delivered: Path
    lists: TestLists
    tests: trees.Changes
    open_for_agent: Callable[[Path], Sandbox]
    run_tests: Callable[[Path], TestOutcomes]
    close: Callable[[], None]
    """Says that the episode is over; once."""
    image: str | None = None


def has_mirror(repos: str, row: Mapping[str, Any]) -> bool:
    """Whether there is a mirror of the row's repository."""
    return commands.find(Path(repos), row["repo"]) is not None


def mirror_of(repos: str, row: Mapping[str, Any]) -> Path:
    """The mirror of a row's repository; `UsageError` says how to make one."""
    return commands.required(Path(repos), row["repo"])


def local(row: Mapping[str, Any], sandbox: str, repos: str, folder: str) -> InstanceRuntime:
    """A checkout of the user's mirror in `repos` and a virtual environment of the repository's version, below `folder`.

    `InfrastructureError` where the environment cannot be built, where it holds a copy of the repository, or where the
    mirror lacks the commit.
    """
    mirror, spec = mirror_of(repos, row), spec_of(row)
    venv = venvs.ready(row, spec, mirror, Path(folder).absolute() if folder else DEFAULT_VENVS)
    key = (mirror.resolve(), row["base_commit"], venv.overlay)
    delivered = _delivered.take(key, lambda target: _check_out(mirror, row["base_commit"], venv.overlay, target))

    def opened(target: Path, limits: Limits) -> Sandbox:
        env = {**venv.environment(), "PYTHONPATH": str(grading.GUEST)}
        if sandbox == "none":
            env["PYTHONPATH"] = ":".join([str(target), f"{target}/src", env["PYTHONPATH"]])
        readonly = (*venv.readonly(), grading.GUEST)
        return open_sandbox(sandbox, target, limits=limits, readonly=readonly, env=env, hidden=hidden)

    with _given_back_on_failure(key):
        venvs.refuse_copies(venv, delivered, venvs.name_of(row))
        hidden = copies(venvs.packages_of(delivered))
        tests = tests_of(row, spec)
        runtime = TestRuntime(lambda target: opened(target, TEST_LIMITS), python="python")
        return InstanceRuntime(
            delivered,
            tests.counting(lists_of(row)),
            commands.patched(delivered, row["test_patch"]),
            lambda target: opened(target, session.LIMITS),
            lambda target: tests.run(runtime, target),
            lambda: _delivered.give_back(key),
        )


@contextmanager
def _given_back_on_failure(key: Hashable) -> Iterator[None]:
    try:
        yield
    except BaseException:
        _delivered.give_back(key)
        raise


def _check_out(mirror: Path, commit: str, overlay: Path | None, target: Path) -> None:
    """The base commit with what the installation generates."""
    commands.extract(mirror.resolve(), commit, target)
    if overlay is not None:
        generated = {path: trees.read(overlay, path) for path in trees.walk(overlay)}
        missing = {path: file for path, file in generated.items() if file and not (target / path).exists()}
        trees.apply(missing, target)


def container(row: Mapping[str, Any], program: str) -> InstanceRuntime:
    """A container of the instance's image, by the engine `program`, on a tree of this machine."""
    image = engine.image_of(row)
    delivered = _delivered.take((program, image), lambda target: _copy_testbed(program, image, target))

    def opened(target: Path, limits: Limits) -> Sandbox:
        env = {"PYTHONPATH": str(grading.GUEST), "PYTHONDONTWRITEBYTECODE": "1", "PAGER": "cat"}
        return engine.ContainerSandbox(program, image, target, limits, (grading.GUEST,), env)

    with _given_back_on_failure((program, image)):
        runtime = TestRuntime(lambda target: opened(target, TEST_LIMITS), python="python")
        tests = tests_of(row, spec_of(row))
        run = scripted(row) if is_newer(row) else tests.run
        return InstanceRuntime(
            delivered,
            lists_of(row) if is_newer(row) else tests.counting(lists_of(row)),
            commands.patched(delivered, row["test_patch"]),
            lambda target: opened(target, session.LIMITS),
            lambda target: run(runtime, target),
            lambda: _delivered.give_back((program, image)),
            image,
        )


def _copy_testbed(program: str, image: str, target: Path) -> None:
    engine.testbed_of(program, image, target)
    if not any(target.iterdir()):
        raise InfrastructureError(f"The image {image} has nothing in /testbed.")
