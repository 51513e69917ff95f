"""Temporary folders, all below one of this process, whose lock tells other processes that it is alive.

The kernel drops the lock however a process ends, kill -9 included, so whoever starts next deletes what it left. The
lock is on the folder itself and reaches other containers that share the temporary folder, where a process number
means nothing. A folder is deleted only where it is this user's own, no link, and its lock was free.
"""

import atexit
import fcntl
import os
import stat
import tempfile
import threading
from contextlib import suppress
from pathlib import Path

from stages.envs import folder_writes, folders

PREFIX = "composer-of-"
_lock = threading.Lock()
_homes: dict[str, Path] = {}
"""This process's folder, by the temporary folder that it lies in."""


def make(kind: str) -> Path:
    """A private, empty folder; `kind` begins its name. `FileNotFoundError` where there is no temporary folder."""
    with suppress(FileNotFoundError):
        return Path(tempfile.mkdtemp(prefix=f"{kind}-", dir=home()))
    return Path(tempfile.mkdtemp(prefix=f"{kind}-", dir=home()))  # somebody tidied up meanwhile: a new home


def home() -> Path:
    """The folder of this process, made and locked at the first call, which deletes those of processes that are gone."""
    place = tempfile.gettempdir()
    with _lock:
        if place not in _homes or not _homes[place].is_dir():
            sweep(Path(place))
            _homes[place] = _locked(place)
        return _homes[place]


def _locked(place: str) -> Path:
    while True:
        path = Path(tempfile.mkdtemp(prefix=PREFIX, dir=place))
        with suppress(FileNotFoundError):
            descriptor = os.open(path, folders.FOLDER)  # open, and so locked, until this process and its forks end
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


def sweep(place: Path) -> None:
    """Delete what processes of this user that are gone left below a temporary folder."""
    above = os.open(place, folders.FOLDER & ~os.O_NOFOLLOW)  # the temporary folder itself may be a link
    try:
        for name in sorted(os.listdir(above)):
            if name.startswith(PREFIX):
                with suppress(OSError):  # a link, another user's, alive, or swept by somebody else
                    _sweep(name, above)
    finally:
        os.close(above)


def _sweep(name: str, above: int) -> None:
    descriptor = os.open(name, folders.FOLDER, dir_fd=above)
    try:
        if os.fstat(descriptor).st_uid == os.geteuid():
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.fchmod(descriptor, stat.S_IRWXU)
            folder_writes.empty(descriptor)
            os.rmdir(name, dir_fd=above)
    finally:
        os.close(descriptor)
