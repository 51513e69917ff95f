"""Find copies of a repository's packages on this machine, so that a sandbox can hide them: they may hold the answer."""

import os
import sys
from collections.abc import Collection
from functools import cache
from pathlib import Path

from stages.envs.repo.guest.composer_rules import IMPORT_ROOTS, TEST_FOLDERS
from stages.sandbox.bubblewrap import package_folders

PROGRAMS = Path("/usr")
"""The folder of programs that a sandbox shows."""
NOT_INSTALLED = TEST_FOLDERS | {"doc", "docs", "examples", "scripts", "benchmarks", "tools"}


def packages_of(delivered: Path) -> set[str]:
    """Return the names of the packages that a repository installs, guessed from its tree."""
    packages = {path.parent.name for root in IMPORT_ROOTS for path in (delivered / root).glob("*/__init__.py")}
    return packages - NOT_INSTALLED


def copies_on_host(packages: Collection[str], system: Path = PROGRAMS) -> tuple[Path, ...]:
    """Return folders of packages with these names below `system`, none inside another, and all wheels.

    A sandbox would show these copies, which other programs of this machine bring along: a program that vendors requests
    has a later release of it, and with it the answer. Wheels hold packages too.
    """
    by_name, wheels = _packages_on_host(system)
    # A package with the name of a standard one is not hidden, since Python would lose its own.
    names = set(packages) - sys.stdlib_module_names
    outermost: list[Path] = []
    for path in sorted(path for name in names for path in by_name.get(name, ())):
        if not outermost or not path.is_relative_to(outermost[-1]):
            outermost.append(path)
    return (*outermost, *wheels)


@cache
def _packages_on_host(system: Path) -> tuple[dict[str, list[Path]], tuple[Path, ...]]:
    """Return the folders of packages by name, and wheels, except in folders that every sandbox shows empty.

    The folder is that of the project where it has the package's name: name/name, name/src/name.
    """
    packages: dict[str, list[Path]] = {}
    wheels: list[Path] = []
    # Cached, since all of /usr is walked; folders that every sandbox shows empty are not.
    shown_empty = set(map(str, package_folders(Path(sys.base_prefix))))
    for folder, subfolders, names in os.walk(system):
        subfolders[:] = sorted(name for name in subfolders if os.path.join(folder, name) not in shown_empty)
        wheels += [Path(folder, name) for name in names if name.endswith(".whl")]
        if "__init__.py" in names:
            package = Path(folder)
            above = package.parent.parent if package.parent.name in IMPORT_ROOTS else package.parent
            packages.setdefault(package.name, []).append(above if above.name == package.name else package)
    return packages, tuple(wheels)
