"""Container engines: which one is here, its properties, and one command of it."""

import json
import os
import select
import shutil
import subprocess
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from stages.errors import InfrastructureError

ENGINES = ("docker", "podman")
START_S, GRACE_S = 600, 15
"""Seconds for the engine to start or end a container (it may fetch an image), and to answer after a timeout."""
TIMEOUT_CODE = 124


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
        done = subprocess.run([program, "info"], capture_output=True, text=True, timeout=20)
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"does not answer ({error})"
    return f"does not answer ({last_line(done.stderr)})" if done.returncode else None


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
    return last_line(done.stderr) if done.returncode else None


def last_line(text: str) -> str:
    """Return the last line of an engine's error, which is its reason: lines before it are warnings and progress."""
    return (text.strip().splitlines() or ["no reason given"])[-1]


def run_engine(arguments: list[str]) -> None:
    """Run a command of the engine; `InfrastructureError` with its reason where it fails or does not end."""
    try:
        done = subprocess.run(arguments, capture_output=True, timeout=START_S)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise InfrastructureError(f"{Path(arguments[0]).name} {arguments[1]} did not finish: {error}.") from None
    if done.returncode:
        reason = last_line(done.stderr.decode(errors="replace"))
        raise InfrastructureError(f"{Path(arguments[0]).name} {arguments[1]} failed: {reason}")


@dataclass(frozen=True)
class BoundedOutput:
    """A finished command: head and tail of its output, the number of all bytes, the exit code, and its duration."""

    kept: bytes
    num_bytes: int
    returncode: int
    duration_s: float


def run_bounded(arguments: Sequence[str], timeout_s: float, most_bytes: int) -> BoundedOutput:
    """Run a command of the engine and keep at most `most_bytes` of its output; TIMEOUT_CODE where it does not end."""
    # Read as it comes: the output of `yes` for five minutes does not fit this machine's memory.
    started, total, head, tail, ended = time.monotonic(), 0, bytearray(), bytearray(), False
    source, sink = os.pipe()
    try:
        process = subprocess.Popen(arguments, stdin=subprocess.DEVNULL, stdout=sink, stderr=subprocess.STDOUT)
        os.close(sink)
        waiting = select.poll()  # unlike select(), it takes descriptors above 1,023
        waiting.register(source, select.POLLIN)
        while not ended and (left := started + timeout_s - time.monotonic()) > 0:
            if waiting.poll(left * 1000):
                chunk = os.read(source, 1 << 16)
                ended, total = not chunk, total + len(chunk)
                room = most_bytes // 2 - len(head)
                head += chunk[:room]
                tail += chunk[room:]
                del tail[: -(most_bytes // 2)]
        if not ended:
            process.kill()
        code = process.wait()
    finally:
        os.close(source)
    left_out = total - len(head) - len(tail)
    cut = f"\n[... {left_out} bytes left out ...]\n".encode() if left_out else b""
    return BoundedOutput(bytes(head + cut + tail), total, code if ended else TIMEOUT_CODE, time.monotonic() - started)
