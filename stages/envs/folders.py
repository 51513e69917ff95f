"""Folders with arbitrary content of an agent: walk, copy, read, write and delete; and temporary folders.

Access is by descriptor and without recursion. No link is followed, no pipe is waited for, no depth is too deep to
delete. Sizes are apparent sizes, counted before anything is read: a sparse file is small on the disk of a sandbox and
large wherever it is copied or read.
"""

import atexit
import fcntl
import os
import secrets
import stat
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import NamedTuple

from composer_stages.errors import Refusal

FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
# O_NONBLOCK: to open a pipe without a writer would wait for ever.
FILE = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
DEEPEST = 100
"""Folders within folders; one descriptor is open for each."""
LONGEST_PATH = 2048
"""Bytes of a path below its root: half of what the kernel takes, so that it can be written below another root."""
MOST_ENTRIES = 1_000_000


PREFIX = "composer-of-"
_lock = threading.Lock()
_homes: dict[str, Path] = {}
"""This process's folder, by the temporary folder that contains it."""


class UnwieldyTree(Refusal):
    """A tree exceeds the limits of depth, path length or size: a property of the agent's files, no machine failure."""


class TreeEntry(NamedTuple):
    """A file, folder, link or anything else; `folder` is a descriptor, open until the next entry is requested.

    is_folder: a folder, and no link to one. is_file: a regular file.
    """

    path: str
    name: str
    folder: int
    status: os.stat_result
    is_folder: bool
    is_file: bool


@dataclass
class _Level:
    descriptor: int
    path: str
    folders: list[str] | None = None


def entries(root: Path, enter: Callable[[str], bool] = lambda path: True) -> Iterator[TreeEntry]:
    """Yield everything below a folder: entries by name, then those of each folder for which `enter(path)` is true.

    Folders that cannot be listed are left out. Raises UnwieldyTree beyond DEEPEST, LONGEST_PATH or MOST_ENTRIES.
    """
    open_up(root)
    # A stack and no recursion: an agent can nest folders deeper than Python's stack.
    levels = [_Level(os.open(root, FOLDER), "")]
    count = 0
    try:
        while levels:
            level = levels[-1]
            if level.folders is None:
                level.folders = []
                for entry in _list_folder(level):
                    count += 1
                    if count > MOST_ENTRIES:
                        raise UnwieldyTree("envs.too-many-files", most_files=MOST_ENTRIES)
                    yield entry
                    if entry.is_folder and enter(entry.path):
                        level.folders.append(entry.name)
                level.folders.reverse()
            elif level.folders:
                name = level.folders.pop()
                if len(levels) == DEEPEST:
                    raise UnwieldyTree("envs.too-deep", deepest=DEEPEST, start=level.path[:60])
                # Below an open descriptor: a folder that was exchanged for a link meanwhile is refused (O_NOFOLLOW).
                with suppress(OSError):
                    levels.append(_Level(os.open(name, FOLDER, dir_fd=level.descriptor), f"{level.path}{name}/"))
            else:
                os.close(levels.pop().descriptor)
    finally:
        for level in levels:
            os.close(level.descriptor)


def _list_folder(level: _Level) -> Iterator[TreeEntry]:
    try:
        names = sorted(os.listdir(level.descriptor))
    except OSError:
        return
    if level.path and names and len(os.fsencode(level.path)) + max(map(len, map(os.fsencode, names))) > LONGEST_PATH:
        raise UnwieldyTree("envs.path-too-long", most_bytes=LONGEST_PATH, start=level.path[:60])
    for name in names:
        with suppress(OSError):  # deleted since it was listed
            status = os.lstat(name, dir_fd=level.descriptor)
            is_folder, is_file = stat.S_ISDIR(status.st_mode), stat.S_ISREG(status.st_mode)
            yield TreeEntry(level.path + name, name, level.descriptor, status, is_folder, is_file)


def open_up(root: Path) -> None:
    """Restore our permissions on a folder from which an agent may have removed them."""
    with suppress(OSError):
        if os.stat(root).st_mode & stat.S_IRWXU != stat.S_IRWXU:
            os.chmod(root, stat.S_IRWXU)


def read_open_file(name: str, folder: int | None = None, most_bytes: int = -1) -> tuple[bytes, os.stat_result] | None:
    """Return the bytes of a regular file, at most `most_bytes`, and its status; None where it cannot be read."""
    try:
        descriptor = os.open(name, FILE, dir_fd=folder)
    except OSError:
        return None
    # Of the opened file, not of the name: it may have been exchanged between the two calls.
    status = os.fstat(descriptor)
    if not stat.S_ISREG(status.st_mode):
        os.close(descriptor)
        return None
    with os.fdopen(descriptor, "rb") as file:
        return file.read(most_bytes), status


def copy(
    source: Path,
    target: Path,
    leave_out: Callable[[str, bool], bool] = lambda path, is_folder: False,
    most_bytes: int | None = None,
) -> None:
    """Copy files, folders and links (as links) into a folder of ours, empty or missing; no pipes and no devices.

    `leave_out` is called with the path below `source` and whether that is a folder. Unreadable files are missing in the
    copy. Holes stay holes. Raises UnwieldyTree, before anything is read, if the files exceed `most_bytes` in total.
    """
    if most_bytes is not None and (size := apparent_bytes(source)) > most_bytes:
        raise UnwieldyTree("envs.too-many-bytes", size_mb=size >> 20, most_mb=most_bytes >> 20)
    target.mkdir(parents=True, exist_ok=True)
    modes: list[tuple[Path, int]] = []
    for entry in entries(source, lambda path: not leave_out(path, True)):
        if leave_out(entry.path, entry.is_folder):
            continue
        destination, mode = target / entry.path, stat.S_IMODE(entry.status.st_mode) & 0o777
        if entry.is_folder:
            destination.mkdir(mode=0o700, exist_ok=True)
            modes.append((destination, mode))
        elif stat.S_ISLNK(entry.status.st_mode):
            destination.symlink_to(os.readlink(entry.name, dir_fd=entry.folder))
        elif entry.is_file:
            _copy_file(entry, destination, mode)
    for destination, mode in reversed(modes):  # a folder that may not be written to must be filled before it is closed
        destination.chmod(mode)


def _copy_file(entry: TreeEntry, destination: Path, mode: int) -> None:
    try:
        source = os.open(entry.name, FILE, dir_fd=entry.folder)
    except PermissionError:
        return
    target = os.open(destination, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        size, at = os.fstat(source).st_size, 0
        sparse = entry.status.st_blocks * 512 < size
        os.ftruncate(target, size)
        while at < size:
            start, end = at, size
            if sparse:
                try:
                    start = os.lseek(source, at, os.SEEK_DATA)
                    end = os.lseek(source, start, os.SEEK_HOLE)
                except OSError:  # no data after `at`
                    start = end = size
            # sendfile copies within the kernel, and reports 0 at the end of a file that has become shorter meanwhile.
            os.lseek(target, start, os.SEEK_SET)
            while start < end and (sent := os.sendfile(target, source, start, end - start)):
                start += sent
            at = max(end, at + 1)  # forwards in any case, whatever a file system reports
        os.fchmod(target, mode)
        os.utime(target, ns=(entry.status.st_atime_ns, entry.status.st_mtime_ns))
    finally:
        os.close(source)
        os.close(target)


def apparent_bytes(root: Path) -> int:
    """Return the sum of the apparent sizes of all files below a folder."""
    return sum(entry.status.st_size for entry in entries(root) if entry.is_file)


@contextmanager
def opened(name: str | Path, above: int | None = None, flags: int = FOLDER) -> Iterator[int]:
    """Open a folder for a while, one below the descriptor `above` where that is given."""
    descriptor = os.open(name, flags, dir_fd=above)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


@contextmanager
def parent_of(root: Path, path: str, before: Callable[[str, int], None] = lambda name, above: None) -> Iterator[int]:
    """Open the parent folder of a path for a while; `before` is called with each folder's name and what is above it.

    Raises OSError where there is none; a link is none.
    """
    descriptor = os.open(root, FOLDER)
    try:
        for part in PurePosixPath(path).parts[:-1]:
            before(part, descriptor)
            below = os.open(part, FOLDER, dir_fd=descriptor)
            os.close(descriptor)
            descriptor = below
        yield descriptor
    finally:
        os.close(descriptor)


@contextmanager
def parent_if_any(root: Path, path: str) -> Iterator[int | None]:
    """Open the parent folder of a path for a while, None where there is none; a link is none."""
    with ExitStack() as stack:
        try:
            folder = stack.enter_context(parent_of(root, path))
        except OSError:
            folder = None
        yield folder


def read(root: Path, path: str) -> tuple[bytes, os.stat_result] | None:
    """Return the bytes and the status of a regular file, or None; no link on the path is followed."""
    with parent_if_any(root, path) as folder:
        return None if folder is None else read_open_file(PurePosixPath(path).name, folder)


def write(root: Path, path: str, data: bytes, mode: int) -> None:
    """Write a file, or with the mode of a link a link to `data`; a link, file or folder in its place is deleted."""
    name = PurePosixPath(path).name
    with parent_of(root, path, _make_folder) as folder:
        # Deleted and created anew (O_EXCL): to write into an existing file would write through a hard link.
        _unlink(name, folder)
        if stat.S_ISLNK(mode):
            os.symlink(data, os.fsencode(name), dir_fd=folder)
            return
        descriptor = os.open(name, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600, dir_fd=folder)
        with os.fdopen(descriptor, "wb") as file:
            file.write(data)
            os.fchmod(descriptor, mode & 0o777)


def unlink(root: Path, path: str, *, keep_full: bool = False) -> None:
    """Delete a file or folder below a folder of ours, if it exists; no link on the path is followed.

    keep_full: whether a folder with something in it stays.
    """
    name = PurePosixPath(path).name
    with suppress(FileNotFoundError, NotADirectoryError), parent_of(root, path) as folder:
        if keep_full and stat.S_ISDIR(os.lstat(name, dir_fd=folder).st_mode):
            with suppress(OSError):
                os.rmdir(name, dir_fd=folder)
        else:
            _unlink(name, folder)


def make_folder(root: Path, path: str) -> None:
    """Make a folder below a folder of ours and those above it; a link or file in their place is deleted."""
    with parent_of(root, str(PurePosixPath(path, "_")), _make_folder):
        pass


def set_mode(root: Path, path: str, mode: int) -> None:
    """Set the mode of a folder that `make_folder` has made."""
    with parent_of(root, f"{path}/_") as folder:
        os.fchmod(folder, mode)


def _make_folder(name: str, above: int) -> None:
    with suppress(FileNotFoundError):
        mode = os.lstat(name, dir_fd=above).st_mode
        if stat.S_ISDIR(mode):
            if mode & stat.S_IRWXU != stat.S_IRWXU:
                os.chmod(name, stat.S_IRWXU, dir_fd=above)
            return
        os.unlink(name, dir_fd=above)
    os.mkdir(name, dir_fd=above)


def _unlink(name: str, above: int) -> None:
    try:
        is_folder = stat.S_ISDIR(os.lstat(name, dir_fd=above).st_mode)
    except FileNotFoundError:
        return
    if not is_folder:
        os.unlink(name, dir_fd=above)
        return
    os.chmod(name, stat.S_IRWXU, dir_fd=above)  # an agent may have removed our permission to list or to empty it
    with opened(name, above) as folder:
        empty(folder)
    os.rmdir(name, dir_fd=above)


def remove(folder: Path) -> None:
    """Delete a folder of any depth and restore permissions for it; do nothing if it does not exist."""
    open_up(folder)
    with suppress(OSError):
        with opened(folder) as top:
            empty(top)
        os.rmdir(folder)


def empty(top: int) -> None:
    """Delete the content of a folder of ours, given its descriptor.

    Every folder is moved to the top before it is emptied, so that neither depth nor long paths matter.
    """
    # A random token, so that the new names at the top collide with none that the agent chose.
    token, waiting = secrets.token_hex(16), _delete_files(top)
    number = 0
    while waiting:
        name = waiting.pop()
        with suppress(OSError):
            with opened(name, top) as below:
                for child in _delete_files(below):
                    number += 1
                    os.rename(child, f"{token}-{number}", src_dir_fd=below, dst_dir_fd=top)
                    waiting.append(f"{token}-{number}")
            os.rmdir(name, dir_fd=top)


def _delete_files(folder: int) -> list[str]:
    """Delete all but the folders; make these accessible and return their names."""
    folders = []
    for name in os.listdir(folder):
        with suppress(OSError):
            if stat.S_ISDIR(os.lstat(name, dir_fd=folder).st_mode):
                os.chmod(name, stat.S_IRWXU, dir_fd=folder)
                folders.append(name)
            else:
                os.unlink(name, dir_fd=folder)
    return folders


# Temporary folders are all below one folder of this process, whose lock shows other processes that this one is alive.
#
# The kernel releases the lock however a process ends, kill -9 included, so the next process deletes what a dead one
# left. The lock is on the folder itself and works across containers that share the temporary folder, where a process
# number has no meaning. A folder is deleted only if it belongs to this user, is no link, and its lock was free.


def make(kind: str) -> Path:
    """Make a private, empty folder, its name beginning with `kind`. FileNotFoundError: there is no temporary folder."""
    with suppress(FileNotFoundError):
        return Path(tempfile.mkdtemp(prefix=f"{kind}-", dir=home()))
    return Path(tempfile.mkdtemp(prefix=f"{kind}-", dir=home()))  # the home was deleted meanwhile


def home() -> Path:
    """Return the folder of this process; the first call makes and locks it and deletes those of dead processes."""
    parent = tempfile.gettempdir()
    with _lock:
        if parent not in _homes or not _homes[parent].is_dir():
            sweep(Path(parent))
            _homes[parent] = _make_home(parent)
        return _homes[parent]


def _make_home(parent: str) -> Path:
    while True:
        path = Path(tempfile.mkdtemp(prefix=PREFIX, dir=parent))
        with suppress(FileNotFoundError):
            descriptor = os.open(path, FOLDER)  # open, and so locked, until this process and its forks end
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:  # a sweep was faster, and is deleting it
                os.close(descriptor)
                continue
            except OSError:  # no locks on this file system, so no sweeps either
                pass
            if path.is_dir():
                atexit.register(_leave, path)
                return path
            os.close(descriptor)


def _leave(path: Path) -> None:
    with suppress(OSError):  # something of a fork is still in it, or it is gone
        path.rmdir()


def sweep(parent: Path) -> None:
    """Delete the folders of dead processes of this user below a temporary folder."""
    with opened(parent, flags=FOLDER & ~os.O_NOFOLLOW) as above:  # the temporary folder itself may be a link
        for name in sorted(os.listdir(above)):
            if name.startswith(PREFIX):
                with suppress(OSError):  # a link, another user's, alive, or swept by another process
                    _sweep(name, above)


def _sweep(name: str, above: int) -> None:
    with opened(name, above) as folder:
        if os.fstat(folder).st_uid == os.geteuid():
            fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.fchmod(folder, stat.S_IRWXU)
            empty(folder)
            os.rmdir(name, dir_fd=above)
