"""An instance on this machine or in a container: its delivered tree, its tests, and sandboxes on copies of the tree."""

import atexit
from collections.abc import Callable, Hashable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from stages.envs.repo import outcomes, session, trees
from stages.envs.repo.grading import Lists
from stages.envs.repo.outcomes import Outcomes, TestRuntime
from stages.envs.swe import engine, host_copies, mirrors, venvs
from stages.envs.swe.commands import scripted, spec_of, tests_of
from stages.envs.swe.instances import is_newer
from stages.envs.swe.report import lists_of
from stages.envs.swe.shared_trees import SharedTrees
from stages.errors import InfrastructureError
from stages.sandbox import Limits, Sandbox, open_sandbox

TEST_LIMITS = replace(outcomes.LIMITS, wall_s=1800, cpu_s=1800)
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
    lists: Lists
    tests: trees.Changes
    open_for_agent: Callable[[Path], Sandbox]
    run_tests: Callable[[Path], Outcomes]
    close: Callable[[], None]
    """Says that the episode is over; once."""
    image: str | None = None


def has_mirror(repos: str, row: Mapping[str, Any]) -> bool:
    """Whether there is a mirror of the row's repository."""
    return mirrors.find(Path(repos), row["repo"]) is not None


def mirror_of(repos: str, row: Mapping[str, Any]) -> Path:
    """The mirror of a row's repository; `UsageError` says how to make one."""
    return mirrors.required(Path(repos), row["repo"])


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
        env = {**venv.environment(), "PYTHONPATH": str(outcomes.GUEST)}
        if sandbox == "none":
            env["PYTHONPATH"] = ":".join([str(target), f"{target}/src", env["PYTHONPATH"]])
        readonly = (*venv.readonly(), outcomes.GUEST)
        return open_sandbox(sandbox, target, limits=limits, readonly=readonly, env=env, hidden=hidden)

    with _given_back_on_failure(key):
        venvs.refuse_copies(venv, delivered, venvs.name_of(row))
        hidden = host_copies.copies(venvs.packages_of(delivered))
        tests = tests_of(row, spec)
        runtime = TestRuntime(lambda target: opened(target, TEST_LIMITS), python="python")
        return InstanceRuntime(
            delivered,
            tests.counting(lists_of(row)),
            mirrors.patched(delivered, row["test_patch"]),
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
    mirrors.extract(mirror.resolve(), commit, target)
    if overlay is not None:
        generated = {path: trees.read(overlay, path) for path in trees.walk(overlay)}
        missing = {path: file for path, file in generated.items() if file and not (target / path).exists()}
        trees.apply(missing, target)


def container(row: Mapping[str, Any], program: str) -> InstanceRuntime:
    """A container of the instance's image, by the engine `program`, on a tree of this machine."""
    image = engine.image_of(row)
    delivered = _delivered.take((program, image), lambda target: _copy_testbed(program, image, target))

    def opened(target: Path, limits: Limits) -> Sandbox:
        env = {"PYTHONPATH": str(outcomes.GUEST), "PYTHONDONTWRITEBYTECODE": "1", "PAGER": "cat"}
        return engine.ContainerSandbox(program, image, target, limits, (outcomes.GUEST,), env)

    with _given_back_on_failure((program, image)):
        runtime = TestRuntime(lambda target: opened(target, TEST_LIMITS), python="python")
        tests = tests_of(row, spec_of(row))
        run = scripted(row) if is_newer(row) else tests.run
        return InstanceRuntime(
            delivered,
            lists_of(row) if is_newer(row) else tests.counting(lists_of(row)),
            mirrors.patched(delivered, row["test_patch"]),
            lambda target: opened(target, session.LIMITS),
            lambda target: run(runtime, target),
            lambda: _delivered.give_back((program, image)),
            image,
        )


def _copy_testbed(program: str, image: str, target: Path) -> None:
    engine.testbed_of(program, image, target)
    if not any(target.iterdir()):
        raise InfrastructureError(f"The image {image} has nothing in /testbed.")
