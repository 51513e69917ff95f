"""Container engines, and a sandbox in a container. The tree is on this machine and mounted at /testbed.

The image's own /testbed, with its history, is hidden by that mount. The container has no network, no capabilities,
bounded memory and processes, and the user of this process, so that its files have the same owner.
"""

import json
import os
import shutil
import subprocess
import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from stages.envs import folders
from stages.envs.repo import trees
from stages.errors import InfrastructureError, UsageError
from stages.sandbox import CommandResult, Limits
from stages.sandbox.bubblewrap import TESTBED

ENGINES = ("docker", "podman")
START_S, GRACE_S = 600, 15
"""Seconds for the engine to start or end a container (it may fetch an image), and to answer after a timeout."""
TIMEOUT_CODE = 124
CONDA = "source /opt/miniconda3/bin/activate testbed 2>/dev/null || true\n"
WAITING = "trap exit TERM; while :; do sleep 3600 & wait $!; done"
"""The command of a container: as process 1 it survives `kill -9 -1` and reaps what that leaves."""
REGISTRY = "docker.io/swebench/sweb.eval.x86_64"


@cache
def find_engine(path: str | None = None) -> str | None:
    """Return the first engine, docker or podman, that is installed on `path` and answers, or None."""
    for name in ENGINES:
        if engine_failure(name, path) is None:
            return shutil.which(name, path=path)
    return None


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


def engine_failure(name: str, path: str | None = None) -> str | None:
    """Return why an engine cannot be used; None where it answers."""
    program = shutil.which(name, path=path)
    if program is None:
        return "is not installed"
    # `info` asks the daemon; `--version` would succeed where only the client of docker is installed.
    try:
        done = subprocess.run([program, "info"], capture_output=True, text=True, timeout=20)
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"does not answer ({error})"
    return f"does not answer ({_last_line(done.stderr)})" if done.returncode else None


@dataclass(frozen=True)
class EngineInfo:
    """Properties of an engine. `storage`: the folder of its images, where it names one."""

    rootless: bool
    storage: Path | None


def engine_info(program: str) -> EngineInfo:
    """Return the properties of an engine, from docker's JSON or podman's."""
    command = [program, "info", "--format", "{{json .}}"]
    try:
        found = json.loads(subprocess.run(command, capture_output=True, text=True, timeout=START_S).stdout)
    except json.JSONDecodeError:
        found = {}
    rootless = found.get("host", {}).get("security", {}).get("rootless") or any(
        "rootless" in str(option) for option in found.get("SecurityOptions") or ()
    )
    storage = found.get("store", {}).get("graphRoot") or found.get("DockerRootDir")
    return EngineInfo(bool(rootless), Path(storage) if storage else None)


def manifest_failure(program: str, image: str, timeout_s: float) -> str | None:
    """Return why an image that is not here cannot be fetched, without fetching it; None where it can."""
    try:
        words = [program, "manifest", "inspect", image]
        done = subprocess.run(words, capture_output=True, text=True, timeout=timeout_s)
    except (OSError, subprocess.TimeoutExpired):
        return f"no answer within {timeout_s:g} s"
    return _last_line(done.stderr) if done.returncode else None


def _last_line(text: str) -> str:
    """Return the last line of an engine's error, which is its reason: lines before it are warnings and progress."""
    return (text.strip().splitlines() or ["no reason given"])[-1]


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
        _run_engine(start_arguments(engine, image, folder, limits, readonly, self.name))

    def run(self, command: str, *, wall_s: float | None = None) -> CommandResult:
        """Run `command` in a fresh bash in /testbed for at most `wall_s` seconds."""
        timeout_s, started = wall_s or self.limits.wall_s, time.monotonic()
        arguments = command_arguments(self.engine, self.name, command, self.env, timeout_s)
        try:
            done = subprocess.run(
                arguments,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
                timeout=timeout_s + GRACE_S,
            )
            output, code = done.stdout, done.returncode
        except subprocess.TimeoutExpired as error:
            output, code = error.stdout or b"", TIMEOUT_CODE
        # kill(2) with -1 spares process 1, which keeps the container.
        end_leftovers = [self.engine, "exec", self.name, "bash", "-c", "kill -9 -1"]
        subprocess.run(end_leftovers, capture_output=True, timeout=START_S)
        spent, limit, num_bytes = time.monotonic() - started, self.limits.output_bytes, len(output)
        if num_bytes > limit:
            cut = f"\n[... {num_bytes - limit} bytes left out ...]\n".encode()
            output = output[: limit // 2] + cut + output[-limit // 2 :]
        # A command may exit with 124 by itself, so the time counts too.
        timed_out = code == TIMEOUT_CODE and spent >= timeout_s
        return CommandResult(output.decode(errors="replace"), code, spent, timed_out, num_bytes, None)

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
    _run_engine([engine, "create", "--name", name, image, "true"])
    try:
        with trees.scratch() as raw:
            _run_engine([engine, "cp", f"{name}:{TESTBED}/.", str(raw)])
            folders.copy(
                raw, target, lambda path, is_folder: is_folder and Path(path).name in trees.CACHES | trees.HISTORY
            )
    finally:
        subprocess.run([engine, "rm", "--force", name], capture_output=True, timeout=START_S)
    if not any(target.iterdir()):
        raise InfrastructureError(f"The image {image} has nothing in /testbed.")


def _run_engine(arguments: list[str]) -> None:
    """Run a command of the engine; `InfrastructureError` with its reason where it fails or does not end."""
    try:
        done = subprocess.run(arguments, capture_output=True, timeout=START_S)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise InfrastructureError(f"{Path(arguments[0]).name} {arguments[1]} did not finish: {error}.") from None
    if done.returncode:
        reason = _last_line(done.stderr.decode(errors="replace"))
        raise InfrastructureError(f"{Path(arguments[0]).name} {arguments[1]} failed: {reason}")
