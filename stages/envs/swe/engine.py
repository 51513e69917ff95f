"""Containers: which engine there is, and a sandbox in one. The tree lies on this machine and is mounted at /testbed.

The image's own /testbed, with its history, is hidden by that mount. The container has no network, no capabilities,
bounded memory and processes, and the user of this process, so that files stay ours.
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
"""Seconds for the engine to start or end something (it may fetch an image), and to answer after a command timed out."""
TIME_OUT = 124
CONDA = "source /opt/miniconda3/bin/activate testbed 2>/dev/null || true\n"
WAITING = "trap exit TERM; while :; do sleep 3600 & wait $!; done"
"""What a container does: as process 1 it outlives the end of everything else, and collects what that leaves."""
REGISTRY = "docker.io/swebench/sweb.eval.x86_64"


@cache
def find(path: str | None = None) -> str | None:
    """The path of the first engine, docker or podman, that is installed and answers, or None. Looked for on `path`."""
    for name in ENGINES:
        program = shutil.which(name, path=path)
        if program and _why_silent(program) is None:
            return program
    return None


def refusals() -> dict[str, str]:
    """Why each engine cannot be used, by its name."""
    found = {name: shutil.which(name) for name in ENGINES}
    return {name: (_why_silent(path) or "answers") if path else "is not installed" for name, path in found.items()}


def _why_silent(program: str) -> str | None:
    """Why an engine does not answer; None where it does."""
    try:
        done = subprocess.run([program, "info"], capture_output=True, text=True, timeout=20)
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"does not answer ({error})"
    return f"does not answer ({_last_line(done.stderr)})" if done.returncode else None


@dataclass(frozen=True)
class Info:
    """What an engine says of itself. `storage`: the folder of its images, where it names one."""

    rootless: bool
    storage: Path | None


def info(program: str) -> Info:
    """What an engine that answers says of itself, in docker's words or podman's."""
    told = _told(program, "info", "--format", "{{json .}}")
    try:
        said = json.loads(told)
    except json.JSONDecodeError:
        said = {}
    rootless = said.get("host", {}).get("security", {}).get("rootless") or any(
        "rootless" in str(option) for option in said.get("SecurityOptions") or ()
    )
    storage = said.get("store", {}).get("graphRoot") or said.get("DockerRootDir")
    return Info(bool(rootless), Path(storage) if storage else None)


def images(program: str) -> set[str]:
    """The images that an engine holds, docker's under the registry that its names leave out."""
    names = _told(program, "images", "--format", "{{.Repository}}:{{.Tag}}").split()
    return {*names, *(f"docker.io/{name}" for name in names)}


def refused_manifest(program: str, image: str, timeout_s: float) -> str | None:
    """Why an image that is not here cannot be fetched, asked without fetching it; None where it can."""
    try:
        words = [program, "manifest", "inspect", image]
        done = subprocess.run(words, capture_output=True, text=True, timeout=timeout_s)
    except (OSError, subprocess.TimeoutExpired):
        return f"no answer within {timeout_s:g} s"
    return _last_line(done.stderr) if done.returncode else None


def _told(*command: str) -> str:
    return subprocess.run(command, capture_output=True, text=True, timeout=START_S).stdout


def _last_line(text: str) -> str:
    return (text.strip().splitlines() or ["no reason given"])[-1]


def image_of(row: Mapping[str, Any]) -> str:
    """The row's own image, else the official one of its instance."""
    return str(row.get("image") or f"{REGISTRY}.{str(row['instance_id']).lower().replace('__', '_1776_')}:latest")


def start_arguments(
    engine: str, image: str, folder: Path, limits: Limits, readonly: Sequence[Path], name: str
) -> list[str]:
    """The command line that starts a container which only waits."""
    # Without it files in the mount would belong to another user; as root podman refuses it, and none is needed.
    podman = ["--userns", "keep-id"] if Path(engine).name == "podman" and os.getuid() else []
    mounts = [word for path in readonly for word in ("--volume", f"{path}:{path}:ro")]
    return [
        *(engine, "run", "--detach", "--rm", "--name", name),
        *("--network", "none", "--cap-drop", "ALL", "--security-opt", "no-new-privileges"),
        *("--memory", f"{limits.memory_mb}m", "--memory-swap", f"{limits.memory_mb}m"),
        *("--pids-limit", str(limits.processes), "--ulimit", "core=0", "--ulimit", f"fsize={limits.file_mb << 20}"),
        *("--user", f"{os.getuid()}:{os.getgid()}", *podman, "--env", "HOME=/tmp"),
        *("--volume", f"{folder}:{TESTBED}", *mounts, "--workdir", TESTBED),
        *("--entrypoint", "bash", image, "-c", WAITING),
    ]


def command_arguments(engine: str, name: str, command: str, env: Mapping[str, str], wall_s: float) -> list[str]:
    """The command line that runs one command in a container and ends everything it left behind."""
    variables = [word for key, value in env.items() for word in ("--env", f"{key}={value}")]
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
        _checked(start_arguments(engine, image, folder, limits, readonly, self.name), START_S)

    def run(self, command: str, *, wall_s: float | None = None) -> CommandResult:
        """Run `command` by a fresh bash in /testbed and wait for it at most `wall_s` seconds."""
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
            output, code = error.stdout or b"", TIME_OUT
        self._end_leftovers()
        spent = time.monotonic() - started
        return CommandResult(
            self._kept(output), code, spent, code == TIME_OUT and spent >= timeout_s, len(output), None
        )

    def _end_leftovers(self) -> None:
        subprocess.run(
            [self.engine, "exec", self.name, "bash", "-c", "kill -9 -1"], capture_output=True, timeout=START_S
        )

    def _kept(self, output: bytes) -> str:
        limit = self.limits.output_bytes
        if len(output) > limit:
            left_out = len(output) - limit
            output = output[: limit // 2] + f"\n[... {left_out} bytes left out ...]\n".encode() + output[-limit // 2 :]
        return output.decode(errors="replace")

    def close(self) -> None:
        """End the container."""
        subprocess.run([self.engine, "rm", "--force", self.name], capture_output=True, timeout=START_S)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def testbed_of(engine: str, image: str, target: Path) -> None:
    """Copy an image's /testbed to the folder `target`, without its history and caches.

    `InfrastructureError` where the image cannot be had.
    """
    name = f"composer-{uuid.uuid4().hex[:12]}"
    _checked([engine, "create", "--name", name, image, "true"], START_S)  # an image may name no command
    try:
        with trees.scratch() as raw:
            _checked([engine, "cp", f"{name}:{TESTBED}/.", str(raw)], START_S)
            folders.copy(
                raw, target, lambda path, is_folder: is_folder and Path(path).name in trees.CACHES | trees.HISTORY
            )
    finally:
        subprocess.run([engine, "rm", "--force", name], capture_output=True, timeout=START_S)


def _checked(arguments: list[str], timeout_s: float) -> str:
    try:
        done = subprocess.run(arguments, capture_output=True, timeout=timeout_s)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise InfrastructureError(f"{Path(arguments[0]).name} {arguments[1]} did not finish: {error}.") from None
    if done.returncode:
        reason = _last_line(done.stderr.decode(errors="replace"))
        raise InfrastructureError(f"{Path(arguments[0]).name} {arguments[1]} failed: {reason}")
    return done.stdout.decode(errors="replace")


def refusal() -> UsageError:
    """What to install where there is neither an engine nor a folder of mirrors."""
    return UsageError(
        "SWE-bench needs a container engine for its images (install Docker or Podman and start it), or local "
        "checkouts: --set env.repos=DIR with one git mirror a repository. `composer swe check` tells what "
        "else is lacking; `--env swe-mini` needs neither."
    )
