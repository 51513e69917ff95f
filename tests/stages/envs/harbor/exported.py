"""Harbor task folders, played as Harbor does in a container, but in bubblewrap: solution, then verifier."""

import json
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from composer_stages.envs.base import Task
from composer_stages.envs.harbor import task_folder
from composer_stages.envs.repo import trees
from composer_stages.envs.repo.task import Export, RepoTask, read_files
from composer_stages.sandbox.bubblewrap import find_bwrap


def differing(folder: Path, task: Task, packed: RepoTask) -> list[str]:
    """The parts of a task that its exported folder, read again, does not have as they were; none where it is equal."""
    read = task_folder.read(folder)
    (step,), (tests,) = read.steps, read.steps[0].tests
    hidden, work = folder / tests / "hidden", folder / "environment" / "testbed"
    rules = json.loads((folder / tests / "task.json").read_text())
    lists = (tuple(rules["fail_to_pass"]), tuple(rules["pass_to_pass"]), rules["skips_fail"])
    export, files = packed.export or Export(), read_files(packed.delivered)
    changed = None if packed.solution is None else without_deleted({**files, **packed.solution()})
    pairs: dict[str, tuple[Any, Any]] = {
        "id": (read.config.metadata["task_id"], task.task_id),
        "prompt": (step.instruction, task.prompt),
        "split": (read.split, task.split),
        "family": (read.family("family"), task.family),
        "files": (read_files(work) if work.exists() else {}, files),
        "hidden tests": (read_files(hidden) if hidden.exists() else {}, packed.hidden),
        "tests that decide": (lists, (packed.lists.fail_to_pass, packed.lists.pass_to_pass, packed.lists.skip_fails)),
        "test command": ((rules["command"], tuple(rules["arguments"])), (export.command, export.arguments)),
        "verifier": ((len(read.steps), step.separate), (1, None)),
        "solution": (solved(folder) if step.solution else None, changed),
    }
    return [name for name, (again, made) in pairs.items() if again != made]


def without_deleted(files: trees.Changes) -> trees.Changes:
    """The files that are there after changes."""
    return {path: file for path, file in files.items() if file is not None}


def solved(task: Path) -> trees.Changes:
    """The files after the solution of a folder."""
    with tempfile.TemporaryDirectory() as scratch:
        work = Path(scratch, "work")
        shutil.copytree(task / "environment" / "testbed", work)
        shown = ("/solution", task / "solution")
        assert container([("/testbed", work)], shown, "bash /solution/solve.sh") == 0
        return read_files(work)


def play(task: Path, *, solve: bool, agent: str = "") -> dict[str, Any] | None:
    """The verifier's rewards after the solution, or after the commands of an agent; None where it wrote none."""
    with tempfile.TemporaryDirectory() as scratch:
        work, logs = Path(scratch, "work"), Path(scratch, "logs")
        logs.mkdir()
        start = task / "environment" / "testbed"
        if start.exists():
            shutil.copytree(start, work)
        else:
            work.mkdir()
        binds = [("/testbed", work), ("/logs", logs)]
        if solve:
            assert container(binds, ("/solution", task / "solution"), "bash /solution/solve.sh") == 0
        if agent:
            container(binds, None, agent)
        container(binds, ("/tests", task / "tests"), "bash /tests/test.sh")
        reward = logs / "verifier" / "reward.json"
        return json.loads(reward.read_text()) if reward.exists() else None


def container(binds: list[tuple[str, Path]], shown: tuple[str, Path] | None, command: str) -> int:
    """The exit code of a command in a root of its own, with this Python and its pytest."""
    words = [find_bwrap(), "--unshare-pid", "--die-with-parent", "--tmpfs", "/", "--proc", "/proc", "--dev", "/dev"]
    # As in a container: the verifier's tests run as another user, who needs both.
    for place in ("/tmp", "/dev/shm"):
        words += ["--perms", "1777", "--tmpfs", place]
    words += ["--clearenv", "--setenv", "PATH", f"{Path(sys.executable).parent}:/usr/bin:/bin"]
    # Open to other users than root, as a container's interpreter is.
    above = {folder for prefix in (sys.prefix, sys.base_prefix) for folder in Path(prefix).parents if folder.name}
    for folder in sorted(above):
        words += ["--perms", "0755", "--dir", str(folder)]
    for place in {"/usr", "/etc", "/lib", "/lib64", "/bin", sys.prefix, sys.base_prefix}:
        words += ["--ro-bind-try", place, place]
    for target, source in binds:
        words += ["--bind", str(source), target]
    if shown:
        words += ["--ro-bind", str(shown[1]), shown[0]]
    words += ["--chdir", "/testbed", "bash", "-c", command]
    return subprocess.run(words, capture_output=True, timeout=900, check=False).returncode
