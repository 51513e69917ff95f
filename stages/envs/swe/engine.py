"""A sandbox in a container. The tree is on this machine and mounted at /testbed.

The image's own /testbed, with its history, is hidden by that mount. The container has no network, no capabilities,
bounded memory and processes, and the user of this process, so that its files have the same owner.
"""

import os
import subprocess
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from stages.envs import folders
from stages.envs.repo import trees
from stages.errors import InfrastructureError, UsageError
from stages.sandbox import CommandResult, Limits
from stages.sandbox.bubblewrap import TESTBED
from stages.sandbox.container_engine import GRACE_S, START_S, TIMEOUT_CODE, find_engine, run_bounded, run_engine

CONDA = "source /opt/miniconda3/bin/activate testbed 2>/dev/null || true\n"
WAITING = "trap exit TERM; while :; do sleep 3600 & wait $!; done"
"""The command of a container: as process 1 it survives `kill -9 -1` and reaps what that leaves."""
REGISTRY = "docker.io/swebench/sweb.eval.x86_64"


def require_engine() -> str:
    """Return the engine; `UsageError` tells what to install, or to set instead."""
    program = find_engine()
    if program is None:
        raise UsageError(
            "SWE-bench needs a container engine for its images (install Docker or Podman and start it), or local "
            "checkouts: --set env.repos=DIR with one git mirror a repository. `composer swe check` tells what "
            "else is lacking; `--env swe-mini` needs neither."
        )
    return program


def image_of(row: Mapping[str, Any]) -> str:
    """Return the row's own image, else the official one of its instance."""
    return str(row.get("image") or f"{REGISTRY}.{str(row['instance_id']).lower().replace('__', '_1776_')}:latest")


def start_arguments(
    engine: str, image: str, folder: Path, limits: Limits, readonly: Sequence[Path], name: str
) -> list[str]:
    """Return the command line that starts a container which only waits."""
    # Without keep-id files in the mount would belong to another user; podman refuses it as root, who needs none.
    podman = ["--userns", "keep-id"] if Path(engine).name == "podman" and os.getuid() else []
    # Read-only at their own paths, so that PYTHONPATH and command lines are those of a sandbox without container.
    mounts = [word for path in readonly for word in ("--volume", f"{path}:{path}:ro")]
    return [
        *(engine, "run", "--detach", "--rm", "--name", name),
        *("--network", "none", "--cap-drop", "ALL", "--security-opt", "no-new-privileges"),
        # --memory-swap is the sum of memory and swap, so this is no swap.
        *("--memory", f"{limits.memory_mb}m", "--memory-swap", f"{limits.memory_mb}m"),
        *("--pids-limit", str(limits.processes), "--ulimit", "core=0", "--ulimit", f"fsize={limits.file_mb << 20}"),
        *("--user", f"{os.getuid()}:{os.getgid()}", *podman, "--env", "HOME=/tmp"),
        *("--volume", f"{folder}:{TESTBED}", *mounts, "--workdir", TESTBED),
        # An image may have an entrypoint that ends, and the container with it.
        *("--entrypoint", "bash", image, "-c", WAITING),
    ]


def command_arguments(engine: str, name: str, command: str, env: Mapping[str, str], wall_s: float) -> list[str]:
    """Return the command line that runs one command in a container and ends what it left behind."""
    variables = [word for key, value in env.items() for word in ("--env", f"{key}={value}")]
    # `timeout` inside: killing the engine's client leaves the command running in the container.
    limited = ["timeout", "--kill-after", "2", f"{wall_s:g}", "bash", "-c", CONDA + command]
    return [engine, "exec", "--workdir", TESTBED, *variables, name, *limited]


class ContainerSandbox:
    """Implements `Sandbox`: a container that waits, and a fresh bash in it for every command."""

    kind = "container"

    def __init__(
        self, engine: str, image: str, folder: Path, limits: Limits, readonly: Sequence[Path], env: Mapping[str, str]
    ) -> None:
        self.engine, self.limits, self.env = engine, limits, dict(env)
        self.name = f"composer-{uuid.uuid4().hex[:12]}"
        run_engine(start_arguments(engine, image, folder, limits, readonly, self.name))

    def run(self, command: str, *, wall_s: float | None = None) -> CommandResult:
        """Run `command` in a fresh bash in /testbed for at most `wall_s` seconds."""
        timeout_s = wall_s or self.limits.wall_s
        arguments = command_arguments(self.engine, self.name, command, self.env, timeout_s)
        done = run_bounded(arguments, timeout_s + GRACE_S, self.limits.output_bytes)
        # kill(2) with -1 spares process 1, which keeps the container.
        end_leftovers = [self.engine, "exec", self.name, "bash", "-c", "kill -9 -1"]
        subprocess.run(end_leftovers, capture_output=True, timeout=START_S)
        # A command may exit with 124 by itself, so the time counts too.
        timed_out = done.returncode == TIMEOUT_CODE and done.duration_s >= timeout_s
        output = done.kept.decode(errors="replace")
        return CommandResult(output, done.returncode, done.duration_s, timed_out, done.num_bytes, None)

    def close(self) -> None:
        """Remove the container."""
        subprocess.run([self.engine, "rm", "--force", self.name], capture_output=True, timeout=START_S)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def copy_testbed(engine: str, image: str, target: Path) -> None:
    """Copy an image's /testbed to the folder `target`, without its history and caches.

    `InfrastructureError` where the image cannot be fetched, or has an empty /testbed.
    """
    name = f"composer-{uuid.uuid4().hex[:12]}"
    # A container that is created and never started is enough to copy from. An image may name no command.
    run_engine([engine, "create", "--name", name, image, "true"])
    try:
        with trees.scratch() as raw:
            run_engine([engine, "cp", f"{name}:{TESTBED}/.", str(raw)])
            folders.copy(
                raw, target, lambda path, is_folder: is_folder and Path(path).name in trees.CACHES | trees.HISTORY
            )
    finally:
        subprocess.run([engine, "rm", "--force", name], capture_output=True, timeout=START_S)
    if not any(target.iterdir()):
        raise InfrastructureError(f"The image {image} has nothing in /testbed.")
