"""Writes and deletes below folders that hold anything: no link on the way is followed, and no depth is too deep."""

import os
import secrets
import stat
from contextlib import suppress
from pathlib import Path, PurePosixPath

from stages.envs.folders import FOLDER, descend, open_up


def write(root: Path, path: str, data: bytes, mode: int) -> None:
    """Write a file into a folder of ours, whatever lies in the way: a link, a file or a folder there goes."""
    folder, name = descend(root, path, _make_folder), PurePosixPath(path).name
    try:
        _unlink(name, folder)
        descriptor = os.open(name, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600, dir_fd=folder)
        with os.fdopen(descriptor, "wb") as file:
            file.write(data)
            os.fchmod(descriptor, mode)
    finally:
        os.close(folder)


def unlink(root: Path, path: str) -> None:
    """Delete a file or folder below a folder of ours, if it is there; no link on the way is followed."""
    with suppress(FileNotFoundError, NotADirectoryError):
        folder = descend(root, path)
        try:
            _unlink(PurePosixPath(path).name, folder)
        finally:
            os.close(folder)


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
    os.chmod(name, stat.S_IRWXU, dir_fd=above)
    descriptor = os.open(name, FOLDER, dir_fd=above)
    try:
        empty(descriptor)
    finally:
        os.close(descriptor)
    os.rmdir(name, dir_fd=above)


def remove(folder: Path) -> None:
    """Delete a folder, however deep, and also where the agent took away the permission to; nothing if it is gone."""
    open_up(folder)
    with suppress(OSError):
        top = os.open(folder, FOLDER)
        try:
            empty(top)
        finally:
            os.close(top)
        os.rmdir(folder)


def empty(top: int) -> None:
    """Delete all that lies in a folder of ours, given its descriptor.

    Every folder is moved to the top before it is emptied, so that neither depth nor long paths matter.
    """
    token, waiting = secrets.token_hex(16), _cleared(top)
    number = 0
    while waiting:
        name = waiting.pop()
        with suppress(OSError):
            below = os.open(name, FOLDER, dir_fd=top)
            try:
                for child in _cleared(below):
                    number += 1
                    os.rename(child, f"{token}-{number}", src_dir_fd=below, dst_dir_fd=top)
                    waiting.append(f"{token}-{number}")
            finally:
                os.close(below)
            os.rmdir(name, dir_fd=top)


def _cleared(folder: int) -> list[str]:
    """Delete what is no folder; the names of the folders, which may be entered afterwards."""
    folders = []
    for name in os.listdir(folder):
        with suppress(OSError):
            if stat.S_ISDIR(os.lstat(name, dir_fd=folder).st_mode):
                os.chmod(name, stat.S_IRWXU, dir_fd=folder)
                folders.append(name)
            else:
                os.unlink(name, dir_fd=folder)
    return folders
