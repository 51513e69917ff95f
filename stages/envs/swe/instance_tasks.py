"""An instance as a `RepoTask`, on a checkout of this machine or in a container of its image."""

import atexit
import threading
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from composer_stages.envs import folders
from composer_stages.envs.base import Split, Task
from composer_stages.envs.folders import remove
from composer_stages.envs.repo import grading, runner, session, trees
from composer_stages.envs.repo.grading import TestRuntime
from composer_stages.envs.repo.task import RepoTask
from composer_stages.envs.swe import engine, venvs
from composer_stages.envs.swe.instances import check_out, is_newer, patched_files, require_mirror, touched_paths
from composer_stages.envs.swe.specs import EnvironmentSpec, instance_tests, run_eval_script, spec_of
from composer_stages.runs.kinds import Row
from composer_stages.sandbox import Limits, Sandbox, View, open_sandbox
from composer_stages.swebench.lists import lists_of

TEST_LIMITS = replace(grading.LIMITS, wall_s=1800, cpu_s=1800)
DEFAULT_VENVS = Path.home() / ".cache" / "composer" / "swe-venvs"
OpenLimited = Callable[[Path, Limits], Sandbox]
"""Opens a sandbox on a tree."""
IDLE = 16
"""Delivered trees kept without a user: the next samples of a task reuse them."""


@dataclass
class _SharedTree:
    folder: Path
    users: int = 0
    filled: bool = False
    lock: threading.Lock = field(default_factory=threading.Lock)


class SharedTrees:
    """A cache of trees by key, each made once and shared by rollouts; the last `idle` unused trees are kept."""

    def __init__(self, idle: int) -> None:
        self._idle = idle
        self._lock = threading.Lock()
        self._trees: dict[Hashable, _SharedTree] = {}

    def take(self, key: Hashable, make: Callable[[Path], None]) -> Path:
        """Return the folder of a key, filled by `make` where there is none; `give_back` has to follow.

        Exceptions of `make` pass through, and nothing is kept then.
        """
        with self._lock:
            shared = self._trees.pop(key, None) or _SharedTree(folders.make("tree"))
            self._trees[key] = shared  # dict order is order of use
            shared.users += 1
        # A lock for each tree, so that making one (minutes for an image) blocks only those who wait for the same.
        try:
            with shared.lock:
                if not shared.filled:
                    make(shared.folder)
                    shared.filled = True
        except BaseException:
            self.give_back(key)
            raise
        return shared.folder

    def give_back(self, key: Hashable) -> None:
        """Release the folder of a key."""
        with self._lock:
            self._trees[key].users -= 1
            unused = [name for name, shared in self._trees.items() if shared.users == 0]
            # A tree that could not be made is never kept: the next user makes it in a new folder.
            unfilled = [name for name in unused if not self._trees[name].filled]
            gone = {*unfilled, *unused[: max(0, len(unused) - self._idle)]}
            unwanted = [self._trees.pop(name).folder for name in gone]
        # Outside of the lock: deleting a large checkout would block every other rollout.
        for folder in unwanted:
            remove(folder)

    def close(self) -> None:
        """Delete everything, at the end of the process."""
        with self._lock:
            unwanted = [shared.folder for shared in self._trees.values()]
            self._trees.clear()
        for folder in unwanted:
            remove(folder)


DELIVERED = SharedTrees(IDLE)
atexit.register(DELIVERED.close)


def local_task(row: Mapping[str, Any], sandbox: str, repos: str, folder: str) -> RepoTask:
    """Set up a checkout of the user's mirror in `repos`, and the virtual environment of its version below `folder`.

    `UsageError` where there is no mirror; `InfrastructureError` where the environment cannot be built, where it holds a
    copy of the repository, or where the mirror lacks the commit.
    """
    mirror, spec = require_mirror(Path(repos), row["repo"]), spec_of(row)
    venv = venvs.prepare_venv(row, spec, mirror, Path(folder).absolute() if folder else DEFAULT_VENVS)

    def deliver(target: Path) -> None:
        check_out(mirror.resolve(), row["base_commit"], target)
        if venv.overlay is not None:
            generated = {path: trees.read(venv.overlay, path) for path in trees.walk(venv.overlay)}
            trees.apply(
                {path: file for path, file in generated.items() if file and not (target / path).exists()}, target
            )

    def opener(delivered: Path) -> OpenLimited:
        venvs.refuse_copies(venv, delivered, venvs.version_name(row))
        copies = runner.copies_on_host(runner.packages_of(delivered))

        def opened(target: Path, limits: Limits) -> Sandbox:
            path = f"{venv.folder}/bin:/usr/local/bin:/usr/bin:/bin"
            env = {"VIRTUAL_ENV": str(venv.folder), "PATH": path, "PYTHONPATH": str(grading.GUEST)}
            # Without a sandbox the tree is not at /testbed, where the environment says that the repository is
            # installed.
            if sandbox == "none":
                env["PYTHONPATH"] = ":".join([str(target), f"{target}/src", env["PYTHONPATH"]])
            readonly = (*venv.readonly(), grading.GUEST)
            return open_sandbox(sandbox, target, limits=limits, view=View(readonly, copies, env=env))

        return opened

    return instance_task(row, spec, (mirror.resolve(), row["base_commit"], venv.overlay), deliver, opener)


def instance_task(
    row: Mapping[str, Any],
    spec: EnvironmentSpec,
    key: Hashable,
    deliver: Callable[[Path], None],
    opener: Callable[[Path], OpenLimited],
    *,
    python: str = "python",
    image: str | None = None,
) -> RepoTask:
    """Set up an instance on the delivered tree of a key, which is released again where that fails.

    opener: returns, for the delivered tree, what opens a sandbox on a tree. python: the interpreter's command inside.
    image: of a container, in which the script of a row that has one runs the tests.
    """
    delivered = DELIVERED.take(key, deliver)
    try:
        opened, tests, lists = opener(delivered), instance_tests(row, spec), lists_of(row)
        runtime = TestRuntime(lambda target: opened(target, TEST_LIMITS), python)
        by_script = image is not None and is_newer(row)
        patch, hidden = row.get("patch") or "", patched_files(delivered, row["test_patch"])
        return RepoTask(
            delivered,
            replace(lists, skip_fails=True) if by_script else tests.filtered(lists),
            lambda target: opened(target, session.LIMITS),
            lambda target: run_eval_script(row, runtime, target) if by_script else tests.run(runtime, target),
            hidden=hidden,
            solution=(lambda: patched_files(delivered, patch)) if patch else None,
            tests=frozenset(hidden),
            # What the gold patch changes is source, even where its path looks like a test's: django/test/client.py.
            source=touched_paths(patch),
            test_files=hidden,
            package=row["repo"].partition("/")[2],
            image=image,
            release=lambda: DELIVERED.give_back(key),
        )
    except BaseException:
        DELIVERED.give_back(key)
        raise


def task_of(row: Row, env: str, split: Split) -> Task:
    """Return the task of a row; a family is a repository."""
    return Task(row["instance_id"], env, split, row["repo"], row["problem_statement"], row)


def container_task(row: Mapping[str, Any], program: str) -> RepoTask:
    """Set up a container of the instance's image, by the engine `program`, on a tree of this machine.

    `InfrastructureError` where the image cannot be fetched or holds no tree.
    """
    image = engine.image_name(row)

    def opened(target: Path, limits: Limits) -> Sandbox:
        env = {"PYTHONPATH": str(grading.GUEST), "PYTHONDONTWRITEBYTECODE": "1", "PAGER": "cat"}
        return engine.CondaContainer(program, image, target, limits, (grading.GUEST,), env)

    def deliver(target: Path) -> None:
        engine.copy_testbed(program, image, target)

    return instance_task(row, spec_of(row), (program, image), deliver, lambda _: opened, image=image)
