"""A sandbox with low limits on a fresh folder, and eyes on the host that count what it left running."""

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from uuid import uuid4

import pytest

from stages.sandbox import KINDS, Limits, Sandbox, open_sandbox

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


@pytest.fixture
def python() -> Callable[[str], str]:
    """The command that runs a script."""
    return lambda script: f"python3 - <<'END'\n{script}\nEND"


@pytest.fixture
def mark() -> str:
    """Seconds to sleep that no other process of this machine sleeps."""
    return f"7{uuid4().int % 10**9:09}"


@pytest.fixture
def count_processes() -> Callable[[str], int]:
    """How many processes of the host have a mark in their command line, once that is zero or a second is over."""

    def count(mark: str) -> int:
        deadline = time.monotonic() + 1.0
        while (found := _now_with(mark)) and time.monotonic() < deadline:
            time.sleep(0.02)
        return found

    return count


def _now_with(mark: str) -> int:
    found = 0
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            found += mark.encode() in path.read_bytes()
        except OSError:
            continue
    return found
