"""The agent's folder: made fresh, read back as something that may hold anything, removed whatever it holds."""

import os
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from stages.envs import folder_writes, folders, temporary

SOLUTION, TESTS = "solution.py", "test_solution.py"
MAX_FILE_BYTES = 16_384


class Snapshot(NamedTuple):
    """The two files, None where there is no small regular file of that name, and the names of all other entries."""

    solution: bytes | None
    tests: bytes | None
    others: frozenset[str]


def make(files: Mapping[str, bytes]) -> Path:
    """A private temporary folder that holds `files` (relative path -> content)."""
    folder = temporary.make("kata")
    for name, content in files.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_bytes(content)
    return folder


def look(folder: Path) -> Snapshot:
    """What the folder holds now. No link is followed and no pipe waited for."""
    folders.open_up(folder)
    others = frozenset(os.listdir(folder)) - {SOLUTION, TESTS}
    return Snapshot(_regular(folder / SOLUTION), _regular(folder / TESTS), others)


def copy(folder: Path, most_bytes: int) -> Path:
    """A private copy: links stay links, so that they lead nowhere on this side; pipes and devices are left out.

    `UnwieldyTree` where it is too deep, or its files have more than `most_bytes` together.
    """
    target = temporary.make("kata")
    try:
        folders.copy(folder, target, most_bytes=most_bytes)
    except BaseException:
        folder_writes.remove(target)
        raise
    return target


def replace_solution(folder: Path, source: bytes) -> None:
    """Put `source` where solution.py is, whatever it is."""
    folder_writes.write(folder, SOLUTION, source, 0o644)


def _regular(path: Path) -> bytes | None:
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError:
        return None
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            return None
        content = os.read(descriptor, MAX_FILE_BYTES + 1)
    finally:
        os.close(descriptor)
    return content if len(content) <= MAX_FILE_BYTES else None
