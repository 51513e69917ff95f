"""Copies of a repository's packages that other programs of this machine bring along, and that a sandbox would show.

Whoever vendors requests has a later release of it, and with it the answer.
"""

import os
import sys
from collections.abc import Collection, Iterator
from functools import cache
from pathlib import Path

from stages.envs.repo.protected_files import IMPORT_ROOTS
from stages.sandbox.interpreter import package_folders

SYSTEM = Path("/usr")
"""Where programs lie that a sandbox shows."""


def copies(packages: Collection[str], system: Path = SYSTEM) -> tuple[Path, ...]:
    """Folders of packages with these names below `system`, none inside another, and all wheels: they hold packages."""
    by_name, wheels = _index(system)
    names = set(packages) - sys.stdlib_module_names
    return (*_outermost(sorted(path for name in names for path in by_name.get(name, ()))), *wheels)


def _outermost(paths: list[Path]) -> Iterator[Path]:
    last: Path | None = None
    for path in paths:
        if last is None or not path.is_relative_to(last):
            last = path
            yield path


@cache
def _index(system: Path) -> tuple[dict[str, list[Path]], tuple[Path, ...]]:
    """The folders of packages by name, and wheels, except in folders that every sandbox shows empty."""
    packages: dict[str, list[Path]] = {}
    wheels: list[Path] = []
    shown_empty = set(map(str, package_folders(Path(sys.base_prefix))))
    for folder, folders, names in os.walk(system):
        folders[:] = sorted(name for name in folders if os.path.join(folder, name) not in shown_empty)
        wheels += [Path(folder, name) for name in names if name.endswith(".whl")]
        if "__init__.py" in names:
            packages.setdefault(os.path.basename(folder), []).append(_with_project(Path(folder)))
    return packages, tuple(wheels)


def _with_project(package: Path) -> Path:
    """The whole project where it lies around its package under the same name: name/name, name/src/name."""
    above = package.parent.parent if package.parent.name in IMPORT_ROOTS else package.parent
    return above if above.name == package.name else package
