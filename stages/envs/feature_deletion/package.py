"""A package to make tasks from: a folder or an sdist, copied without its history and caches, never built or run."""

import email.parser
import os
import posixpath
import re
import tarfile
import tomllib
import zipfile
from collections.abc import Callable, Iterator
from configparser import ConfigParser
from configparser import Error as ConfigError
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path, PurePosixPath

from stages.envs import folder_writes
from stages.envs.folders import DEEPEST, LONGEST_PATH
from stages.envs.repo import trees
from stages.errors import BadInput
from stages.runs import store

ARCHIVES = (".tar.gz", ".tgz", ".tar.bz2", ".tar.xz", ".tar", ".zip", ".whl")
PRIVATE = frozenset({"venv", ".venv", "env", ".env", "node_modules", ".idea", ".vscode", ".claude"})
BUILT_AT_TOP = frozenset({"build", "dist", "wheelhouse"})
LEFTOVERS = (
    *trees.COMPILED,
    ".egg-info",
    ".dist-info",
    ".whl",
    ".egg",
    ".tar.gz",
    ".orig",
    ".rej",
    ".swp",
    ".coverage",
)
LARGEST = 1 << 30
"""Bytes of an unpacked archive, all files together."""
MOST_LINKS = 8
Member = tuple[str, int, int, Callable[[], bytes | None]]
"""Name, size as stated, mode, and what reads a file of an archive."""


@dataclass(frozen=True)
class Package:
    """A clean copy below `root`, which nobody writes to."""

    name: str
    version: str
    root: Path

    @property
    def label(self) -> str:
        """Name and version, fit for an identifier."""
        return re.sub(r"[^A-Za-z0-9.]+", "_", f"{self.name}-{self.version}")

    @cached_property
    def sha256(self) -> str:
        """The digest of all files."""
        return store.folder_sha256(self.root)


def unpack(source: Path, root: Path) -> Package:
    """Copy a folder, or unpack an archive, into the empty folder `root`; `BadInput` where it is neither or damaged."""
    if source.is_dir():
        top = source
        _copy(source, root)
    elif source.name.endswith(ARCHIVES) and source.is_file():
        with trees.scratch() as raw:
            top = _extract(source, raw)
            _copy(top, root)
    else:
        raise BadInput(
            f"The package {str(source)!r} is neither a folder nor an archive ({', '.join(ARCHIVES)}). Give one of them."
        )
    return _described(root, _bare(source.name))


def _bare(name: str) -> str:
    """A file's name without what says that it is an archive."""
    return next((name.removesuffix(ending) for ending in ARCHIVES if name.endswith(ending)), name)


def _copy(top: Path, root: Path) -> None:
    """Into `root`; a folder that is itself an importable package goes one level deeper, so that it can be imported."""
    target = root / top.name if (top / "__init__.py").exists() else root
    trees.copy(top, target, _left_behind)


def _left_behind(path: str, is_folder: bool) -> bool:
    name = PurePosixPath(path).name
    if is_folder:
        at_top = path == name and name in BUILT_AT_TOP
        return at_top or name in trees.CACHES | trees.HISTORY | PRIVATE or name.endswith((".egg-info", ".dist-info"))
    return name.endswith(LEFTOVERS)


def _extract(archive: Path, folder: Path) -> Path:
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


def _described(root: Path, fallback: str) -> Package:
    """Name and version as the package states them; its metadata without its code is left for `importlib.metadata`."""
    name, version = (_safe(part) for part in _stated(root) or _guessed(fallback))
    metadata = f"{re.sub('[-_.]+', '_', name)}-{version}.dist-info/METADATA"
    text = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
    folder_writes.write(root, metadata, text.encode(), 0o644)
    return Package(name, version, root)


def _safe(stated: str) -> str:
    """A name or version in the characters that packaging allows, others as one dash: it becomes part of a path."""
    return re.sub(r"[^A-Za-z0-9._+!-]+", "-", stated).strip("-.") or "0"


def _stated(root: Path) -> tuple[str, str] | None:
    if (root / "PKG-INFO").is_file():
        fields = email.parser.HeaderParser().parsestr((root / "PKG-INFO").read_text(errors="replace"))
        if fields["Name"] and fields["Version"]:
            return fields["Name"], fields["Version"]
    for read in (_from_pyproject, _from_setup_cfg):
        if (found := read(root)) and found[0]:
            return found[0], found[1] or "0"
    return None


def _from_pyproject(root: Path) -> tuple[str, str]:
    try:
        project = tomllib.loads((root / "pyproject.toml").read_text()).get("project", {})
    except (OSError, ValueError):
        return "", ""
    return str(project.get("name", "")), str(project.get("version", ""))


def _from_setup_cfg(root: Path) -> tuple[str, str]:
    parser = ConfigParser(interpolation=None)
    try:
        parser.read(root / "setup.cfg")
    except (OSError, ConfigError, UnicodeDecodeError):
        return "", ""
    version = parser.get("metadata", "version", fallback="")
    return parser.get("metadata", "name", fallback=""), "" if ":" in version else version


def _guessed(fallback: str) -> tuple[str, str]:
    """From a name like toolz-1.2.0."""
    name, dash, version = fallback.rpartition("-")
    return (name, version) if dash and version[:1].isdigit() else (fallback, "0")
