"""Folders of files as an environment keeps them: copied, compared, patched.

An agent may leave anything in its folder: links to this machine, pipes, files that look like git's. Nothing here
follows a link, runs a program in such a folder, or writes through one.
"""

import os
import shutil
import stat
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from stages.envs.bash import remove

CACHES = frozenset(
    {"__pycache__", ".pytest_cache", ".mypy_cache", ".ruff_cache", ".hypothesis", ".tox", ".nox", ".eggs", ".cache"}
)
HISTORY = frozenset({".git", ".hg", ".svn", ".bzr"})
COMPILED = (".pyc", ".pyo")
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
    return Path(tempfile.mkdtemp(prefix="composer-tree-"))


def copy(source: Path, target: Path, leave_out: Callable[[str, bool], bool] = lambda path, is_folder: False) -> None:
    """Copy files, folders and links (as links), but no pipes, no devices, and nothing that `leave_out` says.

    It is called with the path below `source` and whether that is a folder. What cannot be read is missing in the copy.
    """

    def ignored(folder: str, names: list[str]) -> list[str]:
        below = os.path.relpath(folder, source)
        return [name for name in names if _is_special(folder, name) or leave_out(*_below(folder, below, name))]

    with suppress(shutil.Error):
        shutil.copytree(source, target, symlinks=True, ignore=ignored, dirs_exist_ok=True)


def _below(folder: str, below: str, name: str) -> tuple[str, bool]:
    path = os.path.join(folder, name)
    return os.path.normpath(os.path.join(below, name)), os.path.isdir(path) and not os.path.islink(path)


def _is_special(folder: str, name: str) -> bool:
    ordinary = (stat.S_IFREG, stat.S_IFDIR, stat.S_IFLNK)
    return stat.S_IFMT(os.lstat(os.path.join(folder, name)).st_mode) not in ordinary


def walk(root: Path) -> Iterator[str]:
    """Paths of the regular files below a folder, but not of caches, history and bytecode."""
    for folder, folders, names in os.walk(root):
        folders[:] = sorted(set(folders) - CACHES - HISTORY)
        for name in sorted(names):
            path = os.path.join(folder, name)
            if not name.endswith(COMPILED) and stat.S_ISREG(os.lstat(path).st_mode):
                yield os.path.relpath(path, root)


def irregular(root: Path) -> set[str]:
    """Paths of everything else that may change what runs: links, bytecode, caches. What git keeps is left out."""
    paths: set[str] = set()
    for folder, folders, names in os.walk(root):
        folders[:] = [name for name in folders if name not in HISTORY]
        links = {name for name in folders if os.path.islink(os.path.join(folder, name))}
        regular = {name for name in names if not name.endswith(COMPILED) and not _in_cache_or_special(folder, name)}
        paths |= {os.path.relpath(os.path.join(folder, name), root) for name in links | (set(names) - regular)}
    return paths


def _in_cache_or_special(folder: str, name: str) -> bool:
    in_cache = bool(CACHES & set(Path(folder).parts))
    return in_cache or not stat.S_ISREG(os.lstat(os.path.join(folder, name)).st_mode)


def read(root: Path, path: str) -> File | None:
    """One regular file, or None. The last part of the path may not be a link."""
    try:
        descriptor = os.open(root / path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError:
        return None
    with os.fdopen(descriptor, "rb") as file:
        status = os.fstat(descriptor)
        return File(file.read(), bool(status.st_mode & stat.S_IXUSR)) if stat.S_ISREG(status.st_mode) else None


def changes(before: Path, after: Path) -> Changes:
    """Regular files that `after` has new, with other content, or no more; caches and history apart."""
    old, new = set(walk(before)), set(walk(after))
    changed: Changes = dict.fromkeys(sorted(old - new))
    for path in sorted(new):
        file = read(after, path)
        if file is not None and (path not in old or read(before, path) != file):
            changed[path] = file
    return changed


def apply(changes_: Mapping[str, File | None], root: Path) -> None:
    """Write changes into a folder of our own, which holds no link that leads out of it."""
    for path, file in changes_.items():
        target = root / path
        if file is None:
            target.unlink(missing_ok=True)
            continue
        if target.is_symlink():
            target.unlink()
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(file.data)
        target.chmod(0o755 if file.executable else 0o644)


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
