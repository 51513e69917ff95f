"""The agent's folder: made fresh, read back as something that may hold anything, removed whatever it holds."""

import os
import shutil
import stat
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from stages.envs.bash import remove

SOLUTION, TESTS = "solution.py", "test_solution.py"
MAX_FILE_BYTES = 16_384


class Snapshot(NamedTuple):
    """The two files, None where there is no small regular file of that name, and the names of all other entries."""

    solution: bytes | None
    tests: bytes | None
    others: frozenset[str]


def make(files: Mapping[str, bytes]) -> Path:
    """A private temporary folder that holds `files` (relative path -> content)."""
    folder = Path(tempfile.mkdtemp(prefix="composer-kata-"))
    for name, content in files.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_bytes(content)
    return folder


def look(folder: Path) -> Snapshot:
    """What the folder holds now. No link is followed and no pipe waited for."""
    others = frozenset(os.listdir(folder)) - {SOLUTION, TESTS}
    return Snapshot(_regular(folder / SOLUTION), _regular(folder / TESTS), others)


def copy(folder: Path) -> Path:
    """A private copy: links stay links, so that they lead nowhere on this side; pipes and devices are left out."""
    target = Path(tempfile.mkdtemp(prefix="composer-kata-"))
    with suppress(shutil.Error):  # What cannot be read here is missing from the copy.
        shutil.copytree(folder, target, symlinks=True, ignore=_special, dirs_exist_ok=True)
    return target


def replace_solution(folder: Path, source: bytes) -> None:
    """Put `source` where solution.py is, whatever it is."""
    path = folder / SOLUTION
    if path.is_dir() and not path.is_symlink():
        remove(path)
    path.unlink(missing_ok=True)
    path.write_bytes(source)


def _special(folder: str, names: list[str]) -> list[str]:
    ordinary = (stat.S_IFREG, stat.S_IFDIR, stat.S_IFLNK)
    return [name for name in names if stat.S_IFMT(os.lstat(os.path.join(folder, name)).st_mode) not in ordinary]


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
