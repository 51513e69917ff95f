"""Container engines (which one is here, its properties, one command of it), and commands run in a container."""

import json
import os
import select
import shutil
import subprocess
import time
import uuid
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

from composer_stages.errors import InfrastructureError
from composer_stages.sandbox.contract import CommandResult, Limits
from composer_stages.sandbox.guest.capture import Capture

ENGINES = ("docker", "podman")
START_S, GRACE_S = 600, 15
"""Seconds for the engine to start or end a container (it may fetch an image), and to answer after a timeout."""
MANIFEST_S = 30
"""Seconds for a registry to answer whether it has an image."""
TIMEOUT_CODE = 124
WAITING = "trap exit TERM; while :; do sleep 3600 & wait $!; done"
"""The command of a container: as process 1 it survives `kill -9 -1` and reaps what that leaves."""
User = str | int | None


@cache
def find_engine(path: str | None = None) -> str | None:
    """Return the first engine, docker or podman, that is installed on `path` and answers, or None."""
    for name in ENGINES:
        if engine_failure(name, path) is None:
            return shutil.which(name, path=path)
    return None


def engine_failure(name: str, path: str | None = None) -> str | None:
    """Return why an engine cannot be used; None where it answers."""
    program = shutil.which(name, path=path)
    if program is None:
        return "is not installed"
    # `info` asks the daemon; `--version` would succeed where only the client of docker is installed.
    try:
        process = subprocess.run([program, "info"], capture_output=True, text=True, timeout=20)
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"does not answer ({error})"
    return f"does not answer ({last_line(process.stderr)})" if process.returncode else None


@dataclass(frozen=True)
class EngineInfo:
    """Properties of an engine. `storage`: the folder of its images, where it names one."""

    rootless: bool
    storage: Path | None


def engine_info(program: str) -> EngineInfo:
    """Return the properties of an engine, from docker's JSON or podman's."""
    command = [program, "info", "--format", "{{json .}}"]
    try:
        info = json.loads(subprocess.run(command, capture_output=True, text=True, timeout=START_S).stdout)
    except json.JSONDecodeError:
        info = {}
    rootless = info.get("host", {}).get("security", {}).get("rootless") or any(
        "rootless" in str(option) for option in info.get("SecurityOptions") or ()
    )
    storage = info.get("store", {}).get("graphRoot") or info.get("DockerRootDir")
    return EngineInfo(bool(rootless), Path(storage) if storage else None)


def manifest_failure(program: str, image: str) -> str | None:
    """Return why an image that is not here cannot be fetched, without fetching it; None where it can."""
    try:
        words = [program, "manifest", "inspect", image]
        process = subprocess.run(words, capture_output=True, text=True, timeout=MANIFEST_S)
    except (OSError, subprocess.TimeoutExpired):
        return f"no answer within {MANIFEST_S} s"
    return last_line(process.stderr) if process.returncode else None


def last_line(text: str) -> str:
    """Return the last line of an engine's error, which is its reason: lines before it are warnings and progress."""
    return (text.strip().splitlines() or ["no reason given"])[-1]


def run_engine(arguments: list[str]) -> None:
    """Run a command of the engine; `InfrastructureError` with its reason where it fails or does not end."""
    engine = Path(arguments[0]).name
    try:
        process = subprocess.run(arguments, capture_output=True, timeout=START_S)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise InfrastructureError(
            "sandbox.engine-hangs", engine=engine, subcommand=arguments[1], error=str(error)
        ) from None
    if process.returncode:
        reason = last_line(process.stderr.decode(errors="replace"))
        raise InfrastructureError("sandbox.engine-fails", engine=engine, subcommand=arguments[1], reason=reason)


def run_bounded(arguments: Sequence[str], timeout_s: float, most_bytes: int) -> CommandResult:
    """Run a command of the engine and keep at most `most_bytes` of its output; TIMEOUT_CODE where it does not end."""
    # Read as it comes: the output of `yes` for five minutes does not fit this machine's memory.
    started, output, is_finished = time.monotonic(), Capture(most_bytes), False
    source, sink = os.pipe()
    try:
        process = subprocess.Popen(arguments, stdin=subprocess.DEVNULL, stdout=sink, stderr=subprocess.STDOUT)
        os.close(sink)
        poll = select.poll()  # unlike select(), it takes descriptors above 1,023
        poll.register(source, select.POLLIN)
        while not is_finished and (remaining_s := started + timeout_s - time.monotonic()) > 0:
            is_finished = bool(poll.poll(remaining_s * 1000)) and not output.take(source)
        if not is_finished:
            process.kill()
        code = process.wait()
    finally:
        os.close(source)
    text, duration_s = output.kept().decode(errors="replace"), time.monotonic() - started
    return CommandResult(text, code if is_finished else TIMEOUT_CODE, duration_s, not is_finished, output.total, None)


class Container(AbstractContextManager["Container"]):
    """Implements `Sandbox`: a container that waits, and a fresh bash in it for every command.

    `options` of `run` are added to the limits. `command` starts the container: WAITING, by a shell or as arguments of
    the image's entrypoint. `workdir`: where commands start, by default the image's. `env` is that of every command.
    `keeps_processes`: what a command leaves behind goes on running, as a service does; else it is ended.
    """

    kind = "container"

    def __init__(
        self,
        engine: str,
        image: str,
        limits: Limits,
        options: Sequence[str],
        command: Sequence[str],
        *,
        workdir: str | None = None,
        env: Mapping[str, str] | None = None,
        keeps_processes: bool = False,
    ) -> None:
        self.engine, self.image, self.limits, self.workdir = engine, image, limits, workdir
        self.env, self.keeps_processes = dict(env or {}), keeps_processes
        self.name = f"composer-{uuid.uuid4().hex[:12]}"
        words = [engine, "run", "--detach", "--rm", "--name", self.name, "--security-opt", "no-new-privileges"]
        # --memory-swap is the sum of memory and swap, so this is no swap.
        words += ["--memory", f"{limits.memory_mb}m", "--memory-swap", f"{limits.memory_mb}m"]
        run_engine([*words, "--pids-limit", str(limits.processes), *options, image, *command])

    def run(
        self, command: str, wall_s: float | None = None, env: Mapping[str, str] | None = None, user: User = None
    ) -> CommandResult:
        """Run `command` in a fresh bash for at most `wall_s` seconds."""
        limit_s = self.limits.wall_s if wall_s is None else wall_s
        words = [self.engine, "exec", *([] if user is None else ["--user", str(user)])]
        words += [word for key, value in {**self.env, **(env or {})}.items() for word in ("--env", f"{key}={value}")]
        words += ["--workdir", self.workdir] if self.workdir else []
        # `timeout` inside: killing the engine's client leaves the command running in the container.
        words += [self.name, "timeout", "-k", "2", str(whole_seconds(limit_s)), "bash", "-c", command]
        result = run_bounded(words, limit_s + GRACE_S, self.limits.output_bytes)
        if result.returncode in (125, 255) and not self._runs():
            raise InfrastructureError("sandbox.container-ended", image=self.image, reason=last_line(result.output))
        if not self.keeps_processes:
            # kill(2) with -1 spares process 1, which keeps the container.
            end_leftovers = [self.engine, "exec", self.name, "bash", "-c", "kill -9 -1"]
            subprocess.run(end_leftovers, capture_output=True, timeout=START_S)
        # A command may exit with 124 by itself, so the time counts too.
        timed_out = result.returncode == TIMEOUT_CODE and result.duration_s >= min(limit_s, whole_seconds(limit_s))
        return replace(result, timed_out=timed_out)

    def _runs(self) -> bool:
        words = [self.engine, "inspect", "--format", "{{.State.Running}}", self.name]
        return subprocess.run(words, capture_output=True, text=True, timeout=START_S).stdout.strip() == "true"

    def close(self) -> None:
        """Remove the container."""
        subprocess.run([self.engine, "rm", "--force", self.name], capture_output=True, timeout=START_S)

    def __exit__(self, *error: object) -> None:
        self.close()


def whole_seconds(wall_s: float) -> int:
    """Return a limit as `timeout` of BusyBox takes it."""
    return max(1, round(wall_s))
