"""Open a sandbox on a tree in which `python3 -m pytest` runs, with only the test runner of this installation.

setuptools, pip and an installed copy of the package under test stay invisible, since they may hold the code that a task
removed or asks for; `copies_on_host` finds other copies on this machine, which must be hidden too.
"""

import os
import sys
from collections.abc import Collection, Sequence
from functools import cache
from importlib import metadata
from pathlib import Path

from composer_stages.envs.repo import grading
from composer_stages.envs.repo.guest.composer_rules import IMPORT_ROOTS, TEST_FOLDERS
from composer_stages.errors import UsageError
from composer_stages.sandbox import Limits, Sandbox, View, open_sandbox
from composer_stages.sandbox.bubblewrap import TESTBED, compiled, package_folders

RUNNER = ("pytest", "pluggy", "iniconfig", "packaging", "pygments")
COVERAGE = ("pytest-cov", "coverage")
INSTALL = "pip install 'composer-post-training[feature-deletion]'"


@cache
def distribution_paths(distributions: tuple[str, ...]) -> tuple[Path, ...]:
    """Return the top-level files and folders of installed distributions; `UsageError` if one is not installed."""
    paths: list[Path] = []
    for name in distributions:
        try:
            files = metadata.files(name) or []
        except metadata.PackageNotFoundError:
            raise UsageError("envs.repo.test-runner-missing", name=name, install=INSTALL) from None
        site = Path(str(metadata.distribution(name).locate_file(".")))
        first = {file.parts[0] for file in files} - {"..", "__pycache__"}
        # A .pth file would run its lines, or add its paths, in every Python of the sandbox.
        entries = (site / part for part in sorted(first) if not part.endswith(".pth"))
        paths += [compiled(path) for path in entries if path.exists()]
    return tuple(paths)


def open_package_sandbox(
    kind: str,
    tree: Path,
    limits: Limits,
    requirements: Path | None,
    *,
    coverage: bool = False,
    readonly: Sequence[Path] = (),
    hidden: Sequence[Path] = (),
    options: Sequence[str] = (),
    pinned: Path | None = None,
) -> Sandbox:
    """Open a sandbox on a package's tree, in which `python3 -m pytest` imports the runner, then the package.

    Visible are also `requirements` of the tests, coverage if requested, and the paths in `readonly`; files of this
    machine in `hidden` are not. Plugins of pytest among the requirements are loaded by name. `options` of pytest apply
    to every run. `pinned`: a folder with the runner, by default this installation's.
    """
    tools = (*RUNNER, *COVERAGE) if coverage else RUNNER
    runner_paths = distribution_paths(tools) if pinned is None else (compiled(pinned),)
    visible = (*readonly, compiled(grading.GUEST), *runner_paths, *([requirements] if requirements else ()))
    root = TESTBED if kind == "bubblewrap" else str(tree)
    site = pinned or Path(str(metadata.distribution("pytest").locate_file(".")))
    package, runner = [root, f"{root}/src"], [str(site), str(grading.GUEST)]
    # The runner first, so that no file of the tree shadows pytest. Without a sandbox its folder holds the whole
    # installation, maybe the package too, so the package comes first.
    search_path = [*runner, *package] if kind == "bubblewrap" else [*package, *runner]
    options = ["-p", "no:cacheprovider", *options]
    if requirements:
        search_path.append(str(requirements))
        # PYTEST_DISABLE_PLUGIN_AUTOLOAD disables all plugins that are not named.
        for distribution in metadata.distributions(path=[str(requirements)]):
            plugins = (entry for entry in distribution.entry_points if entry.group == "pytest11")
            options += (word for entry in plugins for word in ("-p", entry.value))
    env = {
        **grading.WITHOUT_PLUGINS,
        "PYTHONPATH": ":".join(search_path),
        "PYTEST_ADDOPTS": " ".join(options),
        # The core on sys.monitoring supports no dynamic contexts (coverage 7.17), so no record of lines per test.
        "COVERAGE_CORE": "ctrace",
    }
    return open_sandbox(kind, tree, limits=limits, view=View(visible, hidden, env=env))


PROGRAMS = Path("/usr")
"""The folder of programs that is visible in a sandbox."""
NOT_INSTALLED = TEST_FOLDERS | {"doc", "docs", "examples", "scripts", "benchmarks", "tools"}


def packages_of(delivered: Path) -> set[str]:
    """Return the names of the packages that a repository installs, guessed from its tree."""
    packages = {path.parent.name for root in IMPORT_ROOTS for path in (delivered / root).glob("*/__init__.py")}
    return packages - NOT_INSTALLED


def copies_on_host(packages: Collection[str], system: Path = PROGRAMS) -> tuple[Path, ...]:
    """Return folders of packages with these names below `system`, none inside another, and all wheels.

    A sandbox would show these copies, which other programs vendor: a later release of the package holds the answer.
    """
    by_name, wheels = _packages_on_host(system)
    # A package with the name of a standard one is not hidden, since Python needs its own.
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
