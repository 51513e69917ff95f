"""A sandbox with low limits on a fresh folder, and eyes on the host that count what it left running."""

import time
import tomllib
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest

from composer_stages.sandbox import KINDS, Limits, Sandbox, open_sandbox

PROGRAMS: dict[str, Any] = tomllib.loads(Path(__file__).with_name("programs.toml").read_text())
LOW = Limits(wall_s=6.0, cpu_s=6, memory_mb=256, processes=32, file_mb=8, disk_mb=24, output_bytes=8192)


@pytest.fixture
def work(tmp_path: Path) -> Path:
    folder = tmp_path / "work"
    folder.mkdir()
    return folder


@pytest.fixture
def box(work: Path) -> Iterator[Sandbox]:
    with open_sandbox("bubblewrap", work, limits=LOW) as sandbox:
        yield sandbox


@pytest.fixture(params=KINDS)
def either(request: pytest.FixtureRequest, work: Path) -> Iterator[Sandbox]:
    with open_sandbox(request.param, work, limits=LOW) as sandbox:
        yield sandbox


def python(script: str) -> str:
    """The command that runs a script."""
    return f"python3 - <<'END'\n{script}\nEND"


def count_processes(mark: str) -> int:
    """How many processes of the host have a mark in their command line, once that is zero or a second is over."""
    deadline = time.monotonic() + 1.0
    while True:
        found = 0
        for path in Path("/proc").glob("[0-9]*/cmdline"):
            with suppress(OSError):
                found += mark.encode() in path.read_bytes()
        if not found or time.monotonic() > deadline:
            return found
        time.sleep(0.02)


@pytest.fixture
def mark() -> str:
    """Seconds to sleep that no other process of this machine sleeps."""
    return f"7{uuid4().int % 10**9:09}"
