"""The contract of a sandbox: limits of a command, what it finds, its result, and the protocol."""

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Protocol

from composer_stages.errors import UsageError


@dataclass(frozen=True)
class Limits:
    """Limits of one command. All but `cpu_s` and `file_mb` hold for the sum over its processes."""

    wall_s: float = 10.0
    """Wall-clock seconds of one command."""
    cpu_s: int = 10
    """CPU seconds of one process."""
    memory_mb: int = 1024
    """MiB of memory of all processes, of their page tables, and of the private /tmp, /dev/shm and home."""
    processes: int = 64
    """Processes and threads."""
    file_mb: int = 64
    """MiB of one file."""
    disk_mb: int = 512
    """MiB of the whole work folder."""
    output_bytes: int = 65_536
    """Bytes kept of stdout and stderr together; the rest is counted, not kept."""

    def __post_init__(self) -> None:
        for limit in fields(self):
            if not getattr(self, limit.name) > 0:
                raise UsageError("sandbox.limit-not-positive", name=limit.name, number=getattr(self, limit.name))
        # The notice between head and tail takes 64 bytes of the head (guest/capture.py); a tiny limit would leave
        # nothing.
        if self.output_bytes < 1024:
            raise UsageError("sandbox.output-limit-too-low", number=self.output_bytes)


@dataclass(frozen=True)
class View:
    """Files and variables of a sandbox in addition to the work folder and this machine's programs."""

    readonly: Sequence[Path] = ()
    """Visible at their own paths."""
    hidden: Sequence[Path] = ()
    """Files and folders of this machine that would be visible and are empty inside; without isolation they can be read.
    No folder among them lies in another."""
    places: Mapping[str, Path] = field(default_factory=dict)
    """Under bubblewrap alone: path inside -> the folder in the work folder that is also found there, such as /app."""
    packages: Sequence[Path] = ()
    """Files and folders that every Python of the sandbox can import."""
    env: Mapping[str, str] = field(default_factory=dict)
    """Variables of commands."""
    writable: bool = True
    """Whether commands can write to the work folder."""


@dataclass(frozen=True)
class CommandResult:
    """One finished command."""

    output: str
    """stdout and stderr merged; head and tail when longer than `Limits.output_bytes`."""
    returncode: int
    """As bash reports it: 124 on time-out, 128 + signal when killed."""
    duration_s: float
    timed_out: bool
    output_bytes: int
    """Before anything was left out."""
    killed_for: str | None
    """"processes", "memory", "disk"; "sandbox" when the sandbox itself was lost and a fresh one takes over."""


class Sandbox(AbstractContextManager["Sandbox"], Protocol):
    """Runs commands, one at a time. Files in the work folder persist; cwd, environment and processes do not.

    As a context manager it closes itself.
    """

    kind: str

    def run(self, command: str, *, wall_s: float | None = None) -> CommandResult:
        """Run `command` by a fresh bash in the work folder and wait for it at most `wall_s` seconds."""
        ...

    def close(self) -> None:
        """End every process inside. The work folder stays."""
        ...
