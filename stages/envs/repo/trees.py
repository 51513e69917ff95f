"""File trees of an environment: list, compare, patch, commit, and unpack from archives.

An agent may leave anything in its folder: links to this machine, pipes, files that look like git's. Nothing here
follows a link, runs a program in such a folder, or writes through a link.
"""

import bz2
import gzip
import lzma
import os
import posixpath
import stat
import subprocess
import tarfile
import tempfile
import zipfile
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path, PurePosixPath
from typing import IO, Any

from stages.envs import folders
from stages.envs.folders import DEEPEST, LONGEST_PATH, TreeEntry, UnwieldyTree, remove, unlink, write
from stages.errors import BadInput

CACHES = frozenset(
    {"__pycache__", ".pytest_cache", ".mypy_cache", ".ruff_cache", ".hypothesis", ".tox", ".nox", ".eggs", ".cache"}
)
HISTORY = frozenset({".git", ".hg", ".svn", ".bzr"})
COMPILED = (".pyc", ".pyo")
CHANGED_BYTES = 256 << 20
"""Limit on all files that an agent made or resized; they are held in memory."""
GIT_ENV = {"GIT_CONFIG_GLOBAL": "/dev/null", "GIT_CONFIG_SYSTEM": "/dev/null", "GIT_TERMINAL_PROMPT": "0"}
AUTHOR = {
    f"GIT_{role}_{field}": value
    for role in ("AUTHOR", "COMMITTER")
    for field, value in (("NAME", "composer"), ("EMAIL", "composer@localhost"), ("DATE", "2000-01-01T00:00:00Z"))
}


@dataclass(frozen=True)
class TreeFile:
    """A regular file: its bytes and whether it is executable."""

    data: bytes
    executable: bool = False


Changes = dict[str, TreeFile | None]
"""Path below the root -> the new file, None where it was deleted."""


@contextmanager
def scratch() -> Iterator[Path]:
    """Create a private temporary folder, and delete it with its content afterwards."""
    folder = folders.make("tree")
    try:
        yield folder
    finally:
        remove(folder)


def walk(root: Path) -> Iterator[str]:
    """Yield the paths of the regular files below a folder, without caches, history and bytecode."""
    for entry in _sources(root):
        yield entry.path


def _sources(root: Path) -> Iterator[TreeEntry]:
    """Yield the entries of the regular files below a folder, without caches, history and bytecode."""
    for entry in folders.entries(root, lambda path: path.rpartition("/")[2] not in CACHES | HISTORY):
        if entry.is_file and not entry.name.endswith(COMPILED):
            yield entry


def irregular_paths(root: Path) -> set[str]:
    """Return the paths of everything else that may change what runs: links, bytecode, caches; no history."""
    return {
        entry.path
        for entry in folders.entries(root, lambda path: path.rpartition("/")[2] not in HISTORY)
        if not entry.is_folder
        and (not entry.is_file or entry.name.endswith(COMPILED) or bool(CACHES & set(entry.path.split("/")[:-1])))
    }


def read(root: Path, path: str) -> TreeFile | None:
    """Read one regular file; None where there is none. No part of the path may be a link."""
    content = folders.read(root, path)
    return None if content is None else TreeFile(content[0], bool(content[1].st_mode & stat.S_IXUSR))


def changes(before: Path, after: Path) -> Changes:
    """Return the regular files that were added, changed or deleted, without caches and history.

    `UnwieldyTree` where those with another size have more than CHANGED_BYTES together; nothing is read then.
    """
    # Sizes first: nothing is read of a tree whose new or resized files would not fit into memory.
    old = {entry.path: entry.status.st_size for entry in _sources(before)}
    new = {entry.path: entry.status.st_size for entry in _sources(after)}
    if (size := sum(size for path, size in new.items() if old.get(path) != size)) > CHANGED_BYTES:
        raise UnwieldyTree(f"The changed files have {size >> 20} MiB together; at most {CHANGED_BYTES >> 20} count.")
    changed: Changes = dict.fromkeys(sorted(old.keys() - new.keys()))
    new_files: dict[str, TreeFile] = {}
    for entry in _sources(after):
        # By the descriptor of its folder and not by path, so that no part of the path can become a link meanwhile.
        if (content := folders.content(entry.name, entry.folder)) is None:
            continue
        file = TreeFile(content[0], bool(content[1].st_mode & stat.S_IXUSR))
        if entry.path not in old or read(before, entry.path) != file:
            new_files[entry.path] = file
    return changed | {path: new_files[path] for path in sorted(new_files)}


def apply(changes_: Mapping[str, TreeFile | None], root: Path) -> None:
    """Write changes into a private folder, deletions first; what is at a file's path is replaced."""
    for path, file in sorted(changes_.items(), key=lambda change: change[1] is not None):
        if file is None:
            unlink(root, path)
        else:
            write(root, path, file.data, 0o755 if file.executable else 0o644)


def patch(before: Path, changed: Changes) -> str:
    """Return changes as `git diff` writes them, text files only; it runs in a folder that holds nothing else."""
    with scratch() as folder:
        for name, side in (("a", {path: read(before, path) for path in changed}), ("b", changed)):
            (folder / name).mkdir()
            apply({path: file for path, file in side.items() if file is not None}, folder / name)
        return git(folder, "diff", "--no-index", "--no-prefix", "--no-renames", "--no-color", "a", "b", codes=(0, 1))


def commit(root: Path) -> str:
    """Make a private folder a repository of one commit, without remotes or tags; return the commit's id.

    The id depends only on the files.
    """
    git(root, "init", "--quiet", "--initial-branch=main")
    git(root, "add", "--all", "--force", ".")
    git(root, "commit", "--quiet", "--allow-empty", "--no-verify", "--no-gpg-sign", "-m", "Start")
    return git(root, "rev-parse", "HEAD").strip()


def git(root: Path, *arguments: str, codes: tuple[int, ...] = (0,), env: Mapping[str, str] | None = None) -> str:
    """Return the output of a git command in a folder whose .git no agent wrote, without user or system configuration.

    `RuntimeError` holds git's stderr when it exits with none of `codes`.
    """
    # No hooks, which a mirror of the user's may have, and no conversion of line ends, which would change the files and
    # with them the id of a commit.
    done = subprocess.run(
        ["git", "-c", "core.hooksPath=/dev/null", "-c", "core.autocrlf=false", *arguments],
        cwd=root,
        env={"PATH": os.defpath, "LANG": "C.UTF-8", **GIT_ENV, **AUTHOR, **(env or {})},
        capture_output=True,
    )
    if done.returncode not in codes:
        raise RuntimeError(f"git {arguments[0]} failed: {done.stderr.decode(errors='replace').strip()}")
    return done.stdout.decode(errors="replace")


ARCHIVE_ENDINGS = (".tar.gz", ".tgz", ".tar.bz2", ".tar.xz", ".tar", ".zip", ".whl")
MOST_LINKS = 8
COMPRESSED: dict[bytes, Callable[[Path], Any]] = {
    b"\x1f\x8b": gzip.GzipFile,
    b"BZh": bz2.BZ2File,
    b"\xfd7zXZ\0": lzma.LZMAFile,
}
"""The first bytes of a compressed tar archive, and what opens it."""
Member = tuple[str, int, int, Callable[[], bytes | None]]
"""Name, stated size, mode and reader of a file in an archive."""


@dataclass(frozen=True)
class ArchiveLimits:
    """How much an archive may hold. A megabyte can unpack to terabytes of zeros, or to millions of empty files."""

    num_bytes: int = 1 << 30
    """Unpacked bytes, and bytes of all files that are written, copies by links included."""
    num_members: int = 100_000
    """Entries, folders included."""

    def too_large(self, archive: Path) -> BadInput:
        """Return the error for an archive of more bytes."""
        return BadInput(f"The archive {str(archive)!r} holds more than {self.num_bytes >> 20} MiB. Give a smaller one.")

    def too_many(self, archive: Path) -> BadInput:
        """Return the error for an archive of more entries."""
        return BadInput(f"The archive {str(archive)!r} holds more than {self.num_members} files. Give a smaller one.")


ARCHIVE_LIMITS = ArchiveLimits()


def extract_archive(archive: Path, folder: Path, limits: ArchiveLimits = ARCHIVE_LIMITS) -> Path:
    """Unpack an archive; return the only folder at its top, or `folder`. `BadInput` where it is damaged or too large.

    Only files are written, one by one below the folder. A link becomes a copy of the member that it names, or is left
    out, so that no path leads anywhere else, whatever `tarfile` makes of it (CVE-2025-4517).
    """
    try:
        written = 0
        for name, size, mode, data in _members(archive, limits):
            # The stated size, before anything is unpacked: a small archive can hold terabytes of zeros.
            if written + size > limits.num_bytes:
                raise limits.too_large(archive)
            if (content := data()) is None:
                continue  # A link to nothing in the archive.
            # The size of a link is stated as zero, and its copy takes as much room as what it names.
            written += max(size, len(content))
            if written > limits.num_bytes:
                raise limits.too_large(archive)
            write(folder, _checked_path(name), content, mode)
    except (tarfile.TarError, zipfile.BadZipFile, zlib.error, lzma.LZMAError, OSError, EOFError, ValueError) as error:
        raise BadInput(f"The archive {str(archive)!r} cannot be unpacked ({error}). Fetch it again.") from None
    except (NotImplementedError, RuntimeError) as error:  # zipfile: a method that it lacks, or a password
        raise BadInput(f"The archive {str(archive)!r} cannot be unpacked ({error}). Pack it without.") from None
    inside = list(folder.iterdir())
    return inside[0] if len(inside) == 1 and inside[0].is_dir() else folder


def _members(archive: Path, limits: ArchiveLimits) -> Iterator[Member]:
    """Yield the files of an archive and the links of a tar archive, in their order; nothing is unpacked before."""
    if zipfile.is_zipfile(archive):
        with zipfile.ZipFile(archive) as zip_file:
            if len(zip_file.infolist()) > limits.num_members:
                raise limits.too_many(archive)
            for entry in zip_file.infolist():
                if not entry.is_dir():
                    yield entry.filename, entry.file_size, 0o644, partial(zip_file.read, entry)
        return
    with _plain_tar(archive, limits) as plain, tarfile.open(fileobj=plain, mode="r:") as tar_file:
        for number, info in enumerate(tar_file):
            if number == limits.num_members:
                raise limits.too_many(archive)
            if info.isfile() or info.islnk() or info.issym():
                mode = 0o755 if info.mode & 0o100 else 0o644
                yield info.name, info.size, mode, partial(_linked_content, tar_file, info)


@contextmanager
def _plain_tar(archive: Path, limits: ArchiveLimits) -> Iterator[IO[bytes]]:
    """Open a tar archive, a compressed one decompressed into a temporary file; `BadInput` where it is too large.

    Decompressed first: a header of tar may be as large as a file, and is read into memory; and following links goes
    back and forth, which in a compressed file would each time decompress all that is before.
    """
    with open(archive, "rb") as file:
        start = file.read(8)
        file.seek(0)
        opener = next((opener for magic, opener in COMPRESSED.items() if start.startswith(magic)), None)
        if opener is None:
            yield file
            return
    with opener(archive) as packed, tempfile.TemporaryFile(dir=folders.home()) as plain:
        while chunk := packed.read(1 << 20):
            plain.write(chunk)
            # Headers and padding take a part of it: twice the limit of the files is never needed.
            if plain.tell() > 2 * limits.num_bytes:
                raise limits.too_large(archive)
        plain.seek(0)
        yield plain


def _checked_path(name: str) -> str:
    """Return a member's path below the folder; `ValueError` where it leads out of the folder or is too long."""
    path = PurePosixPath(name)
    if path.is_absolute() or ".." in path.parts or not path.parts:
        raise ValueError(f"{name[:80]!r} leads out of it")
    if len(path.parts) > DEEPEST or len(os.fsencode(name)) > LONGEST_PATH:
        raise ValueError(f"{name[:80]!r} is too deep or too long")
    return str(path)


def _linked_content(file: tarfile.TarFile, info: tarfile.TarInfo) -> bytes | None:
    """Return the bytes of a member, or of the member that a link names; None where that is no file of the archive."""
    try:
        # A limit on links that name links: two may name each other.
        for _ in range(MOST_LINKS):
            if info.isfile():
                opened = file.extractfile(info)
                return opened.read() if opened else None
            # A symbolic link is relative to its own folder, a hard link to the top of the archive.
            above = posixpath.dirname(info.name) if info.issym() else ""
            info = file.getmember(posixpath.normpath(posixpath.join(above, info.linkname)))
    except KeyError:
        pass
    return None
