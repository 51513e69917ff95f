"""Finds the base Python behind the running interpreter's venv, and what a sandbox must show of it."""

import compileall
import os
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

LINKS = Path("/opt/composer/bin")
BUNDLED = "lib*/python3*/ensurepip/_bundled"
NAMES = ("python3", "python", f"python3.{sys.version_info.minor}")


@cache
def guest_folder() -> Path:
    """The code that runs inside, compiled: else a sandbox of a fresh checkout would spend half its start on that."""
    folder = Path(__file__).parent / "guest"
    compileall.compile_dir(folder, quiet=2)
    return folder


def base_python() -> Path:
    """The real executable of the base interpreter."""
    return Path(os.path.realpath(Path(sys.base_prefix) / "bin" / f"python3.{sys.version_info.minor}"))


def interpreter_arguments() -> Iterator[str]:
    """Arguments of bwrap for the interpreter: executable and standard library, links on PATH, and no site-packages."""
    prefix = Path(sys.base_prefix)
    if not prefix.is_relative_to("/usr"):
        yield from _visible(prefix)
    for name in NAMES:
        yield from ("--symlink", str(base_python()), str(LINKS / name))
    for folder in package_folders(prefix):
        yield from ("--tmpfs", str(folder), "--remount-ro", str(folder))


def _visible(prefix: Path) -> Iterator[str]:
    real = prefix.resolve()
    for part in ("bin", "lib", "lib64"):
        if (real / part).is_dir() and not (real / part).is_symlink():
            yield from ("--ro-bind", str(real / part), str(real / part))
    if real != prefix:
        yield from ("--symlink", str(real), str(prefix))


def package_folders(prefix: Path) -> Iterator[Path]:
    """Folders of installed packages, and of those that Python brings to be installed, below a prefix and /usr.

    A package may hold the answer to a task, or start-up code of the host.
    """
    roots = {prefix.resolve(), Path("/usr"), Path("/usr/local")}
    for root in sorted(roots):
        for pattern in ("lib*/python3*/site-packages", "lib*/python3*/dist-packages", BUNDLED):
            yield from (path for path in sorted(root.glob(pattern)) if path.is_dir() and not path.is_symlink())
