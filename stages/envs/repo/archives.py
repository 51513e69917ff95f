"""Archives of source code, unpacked without following what they name: no link, no path out of the folder."""

import os
import posixpath
import tarfile
import zipfile
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path, PurePosixPath

from stages.envs import folder_writes
from stages.envs.folders import DEEPEST, LONGEST_PATH
from stages.errors import BadInput

KINDS = (".tar.gz", ".tgz", ".tar.bz2", ".tar.xz", ".tar", ".zip", ".whl")
LARGEST = 1 << 30
"""Bytes of an unpacked archive, all files together."""
MOST_LINKS = 8
Member = tuple[str, int, int, Callable[[], bytes | None]]
"""Name, size as stated, mode, and what reads a file of an archive."""


def extract(archive: Path, folder: Path) -> Path:
    """Unpack; returns the only folder at the top, or the top.

    Files alone are written, one by one below the folder: a link becomes a copy of what it names inside the archive, or
    is left out, so that no path leads anywhere else, whatever `tarfile` makes of it (CVE-2025-4517).
    """
    try:
        members = _of_zip(archive) if zipfile.is_zipfile(archive) else _of_tar(archive)
        written = 0
        for name, size, mode, data in members:
            written += size
            if written > LARGEST:
                raise BadInput(f"The archive {str(archive)!r} holds more than {LARGEST >> 20} MiB. Give a smaller one.")
            if (content := data()) is not None:
                folder_writes.write(folder, _inside(name), content, mode)
    except (tarfile.TarError, zipfile.BadZipFile, OSError, EOFError, ValueError) as error:
        raise BadInput(f"The archive {str(archive)!r} cannot be unpacked ({error}). Fetch it again.") from None
    inside = list(folder.iterdir())
    return inside[0] if len(inside) == 1 and inside[0].is_dir() else folder


def _of_zip(archive: Path) -> Iterator[Member]:
    with zipfile.ZipFile(archive) as file:
        for info in file.infolist():
            if not info.is_dir():
                yield info.filename, info.file_size, 0o644, partial(file.read, info)


def _of_tar(archive: Path) -> Iterator[Member]:
    with tarfile.open(archive) as file:
        for info in file.getmembers():
            if info.isfile() or info.islnk() or info.issym():
                yield info.name, info.size, 0o755 if info.mode & 0o100 else 0o644, partial(_content, file, info)


def _content(file: tarfile.TarFile, info: tarfile.TarInfo) -> bytes | None:
    """The bytes of a member, or of the member that a link names; None where that is no file of the archive."""
    try:
        for _ in range(MOST_LINKS):
            if info.isfile():
                opened = file.extractfile(info)
                return opened.read() if opened else None
            above = posixpath.dirname(info.name) if info.issym() else ""
            info = file.getmember(posixpath.normpath(posixpath.join(above, info.linkname)))
    except KeyError:
        pass
    return None


def _inside(name: str) -> str:
    """A member's path below the folder; `ValueError` where it leads out."""
    path = PurePosixPath(name)
    if path.is_absolute() or ".." in path.parts or not path.parts:
        raise ValueError(f"{name[:80]!r} leads out of it")
    if len(path.parts) > DEEPEST or len(os.fsencode(name)) > LONGEST_PATH:
        raise ValueError(f"{name[:80]!r} is too deep or too long")
    return str(path)
