"""Folders of files as an environment keeps them: copied, compared, patched.

An agent may leave anything in its folder: links to this machine, pipes, files that look like git's. Nothing here
follows a link, runs a program in such a folder, or writes through one.
"""

import os
import posixpath
import stat
import subprocess
import tarfile
import zipfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path, PurePosixPath

from stages.envs import folders
from stages.envs import folders as temporary
from stages.envs.folders import DEEPEST, LONGEST_PATH, Entry, UnwieldyTree, remove, unlink, write
from stages.errors import BadInput

CACHES = frozenset(
    {"__pycache__", ".pytest_cache", ".mypy_cache", ".ruff_cache", ".hypothesis", ".tox", ".nox", ".eggs", ".cache"}
)
HISTORY = frozenset({".git", ".hg", ".svn", ".bzr"})
COMPILED = (".pyc", ".pyo")
CHANGED_BYTES = 256 << 20
"""Of all files that an agent made, or made longer or shorter; they are held in memory."""
GIT_ENV = {"GIT_CONFIG_GLOBAL": "/dev/null", "GIT_CONFIG_SYSTEM": "/dev/null", "GIT_TERMINAL_PROMPT": "0"}
AUTHOR = {
    f"GIT_{role}_{field}": value
    for role in ("AUTHOR", "COMMITTER")
    for field, value in (("NAME", "composer"), ("EMAIL", "composer@localhost"), ("DATE", "2000-01-01T00:00:00Z"))
}


@dataclass(frozen=True)
class File:
    """A regular file: its bytes and whether it may be executed."""

    data: bytes
    executable: bool = False


Files = dict[str, File]
Changes = dict[str, File | None]
"""Path below the root -> the new file, None where it was deleted."""


@contextmanager
def scratch() -> Iterator[Path]:
    """A private temporary folder, deleted afterwards whatever it holds."""
    folder = make()
    try:
        yield folder
    finally:
        remove(folder)


def make() -> Path:
    """A private temporary folder."""
    return temporary.make("tree")


def walk(root: Path) -> Iterator[str]:
    """Paths of the regular files below a folder, but not of caches, history and bytecode."""
    for entry in _sources(root):
        yield entry.path


def _sources(root: Path) -> Iterator[Entry]:
    for entry in folders.entries(root, _is_source_folder):
        if entry.is_file and not entry.name.endswith(COMPILED):
            yield entry


def _is_source_folder(path: str) -> bool:
    return path.rpartition("/")[2] not in CACHES | HISTORY


def irregular(root: Path) -> set[str]:
    """Paths of everything else that may change what runs: links, bytecode, caches. What git keeps is left out."""
    return {
        entry.path
        for entry in folders.entries(root, lambda path: path.rpartition("/")[2] not in HISTORY)
        if not entry.is_folder
        and (not entry.is_file or entry.name.endswith(COMPILED) or bool(CACHES & set(entry.path.split("/")[:-1])))
    }


def read(root: Path, path: str) -> File | None:
    """One regular file, or None. No part of the path may be a link."""
    return _file(folders.read(root, path))


def _file(found: tuple[bytes, os.stat_result] | None) -> File | None:
    return None if found is None else File(found[0], bool(found[1].st_mode & stat.S_IXUSR))


def changes(before: Path, after: Path) -> Changes:
    """Regular files that `after` has new, with other content, or no more; caches and history apart.

    `UnwieldyTree` where those with another size have more than CHANGED_BYTES together; nothing is read then.
    """
    old = {entry.path: entry.status.st_size for entry in _sources(before)}
    new = {entry.path: entry.status.st_size for entry in _sources(after)}
    if (size := sum(size for path, size in new.items() if old.get(path) != size)) > CHANGED_BYTES:
        raise UnwieldyTree(f"The changed files have {size >> 20} MiB together; at most {CHANGED_BYTES >> 20} count.")
    changed: Changes = dict.fromkeys(sorted(old.keys() - new.keys()))
    found: Files = {}
    for entry in _sources(after):
        file = _file(folders.content(entry.name, entry.folder))
        if file is not None and (entry.path not in old or read(before, entry.path) != file):
            found[entry.path] = file
    return changed | {path: found[path] for path in sorted(found)}


def apply(changes_: Mapping[str, File | None], root: Path) -> None:
    """Write changes into a folder of our own, deletions first; a link, file or folder in the way of a file goes."""
    for path, file in sorted(changes_.items(), key=lambda change: change[1] is not None):
        if file is None:
            unlink(root, path)
        else:
            write(root, path, file.data, 0o755 if file.executable else 0o644)


def patch(before: Path, changed: Changes) -> str:
    """Changes as `git diff` writes them, text files only; it is taken in a folder that holds nothing else."""
    with scratch() as folder:
        for name, side in (("a", {path: read(before, path) for path in changed}), ("b", changed)):
            (folder / name).mkdir()
            apply({path: file for path, file in side.items() if file is not None}, folder / name)
        return git(folder, "diff", "--no-index", "--no-prefix", "--no-renames", "--no-color", "a", "b", codes=(0, 1))


def commit(root: Path) -> str:
    """Make a folder of our own a repository of one commit, without remotes or tags, and return the commit's id.

    The id depends on the files alone.
    """
    git(root, "init", "--quiet", "--initial-branch=main")
    git(root, "add", "--all", "--force", ".")
    git(root, "commit", "--quiet", "--allow-empty", "--no-verify", "--no-gpg-sign", "-m", "Start")
    return git(root, "rev-parse", "HEAD").strip()


def git(root: Path, *arguments: str, codes: tuple[int, ...] = (0,), env: Mapping[str, str] | None = None) -> str:
    """The output of a git command in a folder whose .git is ours, with no configuration but its own.

    `RuntimeError` holds what git wrote to stderr when it ends with none of `codes`.
    """
    done = subprocess.run(
        ["git", "-c", "core.hooksPath=/dev/null", "-c", "core.autocrlf=false", *arguments],
        cwd=root,
        env={"PATH": os.defpath, "LANG": "C.UTF-8", **GIT_ENV, **AUTHOR, **(env or {})},
        capture_output=True,
    )
    if done.returncode not in codes:
        raise RuntimeError(f"git {arguments[0]} failed: {done.stderr.decode(errors='replace').strip()}")
    return done.stdout.decode(errors="replace")


# ---- archives
# Archives of source code, unpacked without following what they name: no link, no path out of the folder.

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
                write(folder, _inside(name), content, mode)
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
