"""List, compare, patch, commit and unpack the file trees of an environment.

An agent may leave anything in its folder: links to this machine, pipes, files with the names of git's. No function here
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
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path, PurePosixPath
from typing import IO, Any, NamedTuple

from composer_stages.envs import folders
from composer_stages.envs.folders import DEEPEST, LONGEST_PATH, TreeEntry, UnwieldyTree, remove, unlink, write
from composer_stages.envs.repo.guest.composer_rules import CACHES, COMPILED, HISTORY
from composer_stages.errors import BadInput
from composer_stages.words import Sentence

CHANGED_BYTES = 256 << 20
"""Limit on all files that an agent made or resized; they are held in memory."""
MOST_BINARY = 512 << 10
"""Bytes of the binary files of a patch, on both sides; of more it has the names alone."""
GIT_ENV = {"GIT_CONFIG_GLOBAL": "/dev/null", "GIT_CONFIG_SYSTEM": "/dev/null", "GIT_TERMINAL_PROMPT": "0"}
AUTHOR = {
    f"GIT_{role}_{field}": value
    for role in ("AUTHOR", "COMMITTER")
    for field, value in (("NAME", "composer"), ("EMAIL", "composer@localhost"), ("DATE", "2000-01-01T00:00:00Z"))
}


REGULAR, EXECUTABLE = stat.S_IFREG | 0o644, stat.S_IFREG | 0o755


@dataclass(frozen=True)
class TreeFile:
    """A regular file, a link, or a folder that is empty or has another mode: bytes, and `st_mode`.

    data: of a link the path that it names, of a folder nothing.
    """

    data: bytes
    mode: int = REGULAR


Changes = dict[str, TreeFile | None]
"""Path below the root -> what is there now, None if it was deleted."""


@contextmanager
def scratch() -> Iterator[Path]:
    """Create a private temporary folder, and delete it with its content afterwards."""
    folder = folders.make("tree")
    try:
        yield folder
    finally:
        remove(folder)


def walk(root: Path, *, links: bool = False) -> Iterator[str]:
    """Yield the paths of the regular files, and links, below a folder, without caches, history and bytecode."""
    for entry in _sources(root):
        if entry.is_file or (links and not entry.is_folder):
            yield entry.path


def _sources(root: Path) -> Iterator[TreeEntry]:
    """Yield the regular files, links and folders below a folder, without caches, history and bytecode."""
    for entry in folders.entries(root, lambda path: path.rpartition("/")[2] not in CACHES | HISTORY):
        is_source = not entry.name.endswith(COMPILED) if entry.is_file else entry.name not in CACHES | HISTORY
        if is_source and (entry.is_file or entry.is_folder or stat.S_ISLNK(entry.status.st_mode)):
            yield entry


def irregular_paths(root: Path) -> set[str]:
    """Return the paths of all other files that may change a run: bytecode, caches, pipes; no history."""
    sources = {entry.path for entry in _sources(root)}
    return {
        entry.path
        for entry in folders.entries(root, lambda path: path.rpartition("/")[2] not in HISTORY)
        if not entry.is_folder and entry.path not in sources
    }


def read(root: Path, path: str) -> TreeFile | None:
    """Read one regular file or link, None if there is none; no part of the path above it may be a link."""
    with folders.parent_if_any(root, path) as folder:
        return None if folder is None else _read_open(PurePosixPath(path).name, folder)


def _read_open(name: str, folder: int) -> TreeFile | None:
    """Read one regular file or link of an open folder, None if there is none."""
    if (content := folders.read_open_file(name, folder)) is not None:
        return TreeFile(content[0], stat.S_IFREG | content[1].st_mode & 0o777)
    with suppress(OSError):
        return TreeFile(os.fsencode(os.readlink(name, dir_fd=folder)), stat.S_IFLNK)
    return None


def changes(before: Path, after: Path) -> Changes:
    """Return the files, links and folders that were added, changed or deleted, without caches and history.

    Of folders only those that are new and empty, have another mode, or are gone. `UnwieldyTree` if the files of another
    size have more than CHANGED_BYTES together.
    """
    # Sizes first: new or resized files that do not fit into memory are not read.
    old = {entry.path: entry for entry in _sources(before)}
    new = {entry.path: entry for entry in _sources(after)}
    resized = [
        entry.status.st_size
        for path, entry in new.items()
        if entry.is_file and (path not in old or old[path].status.st_size != entry.status.st_size)
    ]
    if (size := sum(resized)) > CHANGED_BYTES:
        raise UnwieldyTree("envs.repo.changes-too-large", mib=size >> 20, limit_mib=CHANGED_BYTES >> 20)
    changed: Changes = dict.fromkeys(sorted(old.keys() - new.keys()))
    above = {path.rpartition("/")[0] for path in new}
    present: dict[str, TreeFile] = {}
    for entry in _sources(after):
        mode, same = stat.S_IFMT(entry.status.st_mode) | entry.status.st_mode & 0o777, old.get(entry.path)
        if entry.is_folder:
            was_folder = same is not None and same.is_folder
            if same and was_folder and same.status.st_mode & 0o777 == mode & 0o777:
                continue
            if was_folder or entry.path not in above or mode & 0o777 != 0o755:
                present[entry.path] = TreeFile(b"", mode)
            continue
        # By the descriptor of its folder, not by path: no part of the path can become a link meanwhile.
        file = _read_open(entry.name, entry.folder)
        if file is not None and (same is None or read(before, entry.path) != file):
            present[entry.path] = file
    return changed | {path: present[path] for path in sorted(present)}


def apply(changes_: Mapping[str, TreeFile | None], root: Path) -> None:
    """Write changes into a private folder, deletions first; existing entries are replaced, full folders are kept."""
    for path in sorted((path for path, file in changes_.items() if file is None), reverse=True):
        unlink(root, path, keep_full=True)
    modes: list[tuple[str, int]] = []
    for path, file in changes_.items():
        if file is None:
            continue
        if stat.S_ISDIR(file.mode):
            folders.make_folder(root, path)
            modes.append((path, file.mode & 0o777))
        else:
            write(root, path, file.data, file.mode)
    for path, mode in sorted(modes, reverse=True):  # a folder must be filled before it is closed
        folders.set_mode(root, path, mode)


def patch(before: Path, changed: Changes) -> str:
    """Return changes to files in the format of `git diff`, which runs in empty folders of its own.

    Files that are no UTF-8 are in it as binary ones: `git apply` refuses a whole patch with a file that is not in it.
    """
    sides = {"a": {path: read(before, path) for path in changed}, "b": changed}
    binary = {path for side in sides.values() for path, file in side.items() if file and not _is_text(file.data)}
    return "".join(
        _patch(
            {name: {path: side[path] for path in side if (path in binary) == apart} for name, side in sides.items()},
            is_binary=apart,
        )
        for apart in ((False, True) if binary else (False,))
    )


def _is_text(data: bytes) -> bool:
    with suppress(UnicodeDecodeError):
        return "\0" not in data.decode()
    return False


def _patch(sides: Mapping[str, Changes], *, is_binary: bool) -> str:
    """Return the difference of two sides, whose files are all binary, or all text."""
    with scratch() as folder:
        for name, side in sides.items():
            (folder / name).mkdir()
            files = {path: file for path, file in side.items() if file is not None and not stat.S_ISDIR(file.mode)}
            # git, which runs as an ordinary user, has to read them.
            apply({path: TreeFile(file.data, file.mode | 0o600) for path, file in files.items()}, folder / name)
        num_bytes = sum(len(file.data) for side in sides.values() for file in side.values() if file)
        options = ["--no-index", "--no-prefix", "--no-renames", "--no-color"]
        options += ["--binary"] if is_binary and num_bytes <= MOST_BINARY else []
        (folder / "attributes").write_text("* -diff\n" if is_binary else "")
        attributes = {"GIT_CONFIG_COUNT": "1", "GIT_CONFIG_KEY_0": "core.attributesFile"}
        attributes["GIT_CONFIG_VALUE_0"] = str(folder / "attributes")
        return git(folder, "diff", *options, *sides, codes=(0, 1), env=attributes)


def commit(root: Path) -> str:
    """Make a private folder a repository of one commit, without remotes or tags; return its id, a hash of the files."""
    git(root, "init", "--quiet", "--initial-branch=main", "--template=")  # of hooks that nobody runs
    git(root, "add", "--all", "--force", ".")
    git(root, "commit", "--quiet", "--allow-empty", "--no-verify", "--no-gpg-sign", "-m", "Start")
    return git(root, "rev-parse", "HEAD").strip()


def git(root: Path, *arguments: str, codes: tuple[int, ...] = (0,), env: Mapping[str, str] | None = None) -> str:
    """Return the output of a git command in a folder whose .git no agent wrote, without user or system configuration.

    `RuntimeError` with git's stderr for an exit code that is not one of `codes`.
    """
    # No hooks, which a user's mirror may have, and no conversion of line ends, which would change the commit's id.
    completed = subprocess.run(
        ["git", "-c", "core.hooksPath=/dev/null", "-c", "core.autocrlf=false", *arguments],
        cwd=root,
        # No repository around a temporary folder: `git apply` would skip what lies outside of its part of that.
        env={
            "PATH": os.defpath,
            "LANG": "C.UTF-8",
            "GIT_CEILING_DIRECTORIES": str(root.resolve().parent),
            **GIT_ENV,
            **AUTHOR,
            **(env or {}),
        },
        capture_output=True,
    )
    if completed.returncode not in codes:
        raise RuntimeError(f"git {arguments[0]} failed: {completed.stderr.decode(errors='replace').strip()}")
    return os.fsdecode(completed.stdout)


ARCHIVE_ENDINGS = (".tar.gz", ".tgz", ".tar.bz2", ".tar.xz", ".tar", ".zip", ".whl")
MOST_LINKS = 8
COMPRESSED: dict[bytes, Callable[[Path], Any]] = {
    b"\x1f\x8b": gzip.GzipFile,
    b"BZh": bz2.BZ2File,
    b"\xfd7zXZ\0": lzma.LZMAFile,
}
"""First bytes of a compressed tar archive -> opener."""


class Member(NamedTuple):
    """A file or a link in an archive: its name, stated size, mode and content.

    target: of a link what it names, from the top of the archive; empty for a file.
    """

    name: str
    size: int
    mode: int
    read: Callable[[], bytes]
    target: str = ""


@dataclass(frozen=True)
class ArchiveLimits:
    """Limits on an archive: a megabyte can unpack to terabytes of zeros, or to millions of empty files."""

    num_bytes: int = 1 << 30
    """Limit on unpacked bytes, and on written bytes with the copies that links name."""
    num_members: int = 100_000
    """Entries, folders included."""

    def too_large(self, archive: Path) -> BadInput:
        """Return the error for an archive of more bytes."""
        limit = self.num_bytes >> 20
        return BadInput("envs.repo.archive-too-large", archive=str(archive), limit=limit, unit="MiB")

    def too_many(self, archive: Path) -> BadInput:
        """Return the error for an archive of more entries."""
        return BadInput("envs.repo.archive-too-large", archive=str(archive), limit=self.num_members, unit="files")


ARCHIVE_LIMITS = ArchiveLimits()


def extract_archive(archive: Path, folder: Path, limits: ArchiveLimits = ARCHIVE_LIMITS) -> Path:
    """Unpack an archive; return the only folder at its top, or `folder`. `BadInput` if it is damaged or too large.

    Only files are written, one by one below the folder. A link becomes a copy of the file or folder of the archive that
    it names, or is skipped, so that no path leads elsewhere, however `tarfile` treats it (CVE-2025-4517).
    """
    try:
        num_bytes, num_members, links = 0, 0, dict[str, str]()
        for member in _members(archive, limits):
            num_members += 1
            if member.target:  # a link to nothing may have any name
                links[str(PurePosixPath(member.name))] = member.target
                continue
            links.pop(path := _checked_path(member.name), None)  # the later one of a name counts
            # The stated size, before anything is unpacked: a small archive can hold terabytes of zeros.
            if num_bytes + member.size > limits.num_bytes:
                raise limits.too_large(archive)
            content = member.read()
            num_bytes += max(member.size, len(content))
            if num_bytes > limits.num_bytes:
                raise limits.too_large(archive)
            write(folder, path, content, member.mode)
        for path, source in _linked_files(folder, links):
            num_members, num_bytes = num_members + 1, num_bytes + source.stat().st_size
            if num_bytes > limits.num_bytes:
                raise limits.too_large(archive)
            if num_members > limits.num_members:
                raise limits.too_many(archive)
            write(folder, _checked_path(path), source.read_bytes(), source.stat().st_mode & 0o777)
    except (tarfile.TarError, zipfile.BadZipFile, zlib.error, lzma.LZMAError, OSError, EOFError, ValueError) as error:
        raise BadInput("envs.repo.archive-damaged", archive=str(archive), error=str(error)) from None
    except (NotImplementedError, RuntimeError) as error:  # zipfile: a method that it lacks, or a password
        raise BadInput("envs.repo.archive-unsupported", archive=str(archive), error=str(error)) from None
    inside = list(folder.iterdir())
    return inside[0] if len(inside) == 1 and inside[0].is_dir() else folder


def _linked_files(folder: Path, links: Mapping[str, str]) -> Iterator[tuple[str, Path]]:
    """Yield the path of each file to be written for links, and the file in the folder, which has no link itself.

    A link to nothing, out of the folder or to a folder around it gives none.
    """
    for _ in range(MOST_LINKS):  # they may name each other, also in a circle
        later = {}
        for path, target in links.items():
            if target.startswith(("/", "../")) or target == ".." or PurePosixPath(path).is_relative_to(target):
                continue
            source = folder / target
            if source.is_file():
                yield path, source
            elif source.is_dir():
                inside = [entry.path for entry in folders.entries(source) if entry.is_file]
                yield from ((f"{path}/{name}", source / name) for name in inside)
            else:
                later[path] = target
        links = later


def _members(archive: Path, limits: ArchiveLimits) -> Iterator[Member]:
    """Yield the files and links of an archive in order, each of which is unpacked when it is read."""
    if zipfile.is_zipfile(archive):
        with zipfile.ZipFile(archive) as zip_file:
            if len(zip_file.infolist()) > limits.num_members:
                raise limits.too_many(archive)
            for entry in zip_file.infolist():
                mode, name, read = entry.external_attr >> 16, entry.filename, partial(zip_file.read, entry)
                if stat.S_ISLNK(mode) and entry.file_size <= LONGEST_PATH:  # a link's content is what it names
                    yield Member(name, 0, 0, bytes, _target(posixpath.dirname(name), os.fsdecode(read())))
                elif not entry.is_dir():
                    yield Member(name, entry.file_size, _mode(mode), read)
        return
    with _plain_tar(archive, limits) as plain, tarfile.open(fileobj=plain, mode="r:") as tar_file:
        for number, info in enumerate(tar_file):
            if number == limits.num_members:
                raise limits.too_many(archive)
            if info.isfile():
                yield Member(info.name, info.size, _mode(info.mode), partial(_content, tar_file, info))
            elif info.issym() or info.islnk():
                # A symbolic link is relative to its own folder, a hard link to the top of the archive.
                above = posixpath.dirname(info.name) if info.issym() else ""
                yield Member(info.name, 0, 0, bytes, _target(above, info.linkname))


def _mode(mode: int) -> int:
    return 0o755 if mode & 0o100 else 0o644


def _target(above: str, link: str) -> str:
    """Return the path that a link in the folder `above` names, from the top of the archive."""
    return posixpath.normpath(posixpath.join(above, link))


def _content(file: tarfile.TarFile, info: tarfile.TarInfo) -> bytes:
    opened = file.extractfile(info)
    return opened.read() if opened else b""


@contextmanager
def _plain_tar(archive: Path, limits: ArchiveLimits) -> Iterator[IO[bytes]]:
    """Open a tar archive, a compressed one decompressed into a temporary file; `BadInput` if it is too large.

    Decompressed first: a header may be as large as a file and is read into memory, and following links seeks backwards,
    which would decompress the file from its start each time.
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
            # Headers and padding are included: twice the limit on files is never needed.
            if plain.tell() > 2 * limits.num_bytes:
                raise limits.too_large(archive)
        plain.seek(0)
        yield plain


def _checked_path(name: str) -> str:
    """Return a member's path below the folder; `ValueError` if it leads out of the folder or is too long."""
    path = PurePosixPath(name)
    if path.is_absolute() or ".." in path.parts or not path.parts:
        raise ValueError(Sentence("envs.repo.member-leads-out", name=name[:80]))
    if len(path.parts) > DEEPEST or len(os.fsencode(name)) > LONGEST_PATH:
        raise ValueError(Sentence("envs.repo.member-too-deep", name=name[:80]))
    return str(path)
