"""A sandbox on a tree in which `python3 -m pytest` runs: the test runner of this installation, and nothing else of it.

setuptools, pip and an installed copy of the package under test stay invisible, since they may hold the code that a task
removed or asks for.
"""

from collections.abc import Sequence
from functools import cache
from importlib import metadata
from pathlib import Path

from stages.envs.repo import grading
from stages.errors import UsageError
from stages.sandbox import Limits, Sandbox, View, open_sandbox
from stages.sandbox.bubblewrap import TESTBED, compiled

RUNNER = ("pytest", "pluggy", "iniconfig", "packaging", "pygments")
COVERAGE = ("pytest-cov", "coverage")
INSTALL = "pip install 'composer-post-training[feature-deletion]'"


@cache
def distribution_paths(distributions: tuple[str, ...]) -> tuple[Path, ...]:
    """Return the top-level files and folders of installed distributions; `UsageError` where one is not installed."""
    paths: list[Path] = []
    for name in distributions:
        try:
            files = metadata.files(name) or []
        except metadata.PackageNotFoundError:
            raise UsageError(f"Tests are run with {name}, which is not installed: {INSTALL}.") from None
        site = Path(str(metadata.distribution(name).locate_file(".")))
        first = {file.parts[0] for file in files} - {"..", "__pycache__"}
        # A .pth file would run its lines, or add its paths, in every Python of the sandbox.
        shown = (site / part for part in sorted(first) if not part.endswith(".pth"))
        paths += [compiled(path) for path in shown if path.exists()]
    return tuple(paths)


def readonly_paths(requirements: Path | None = None, *, coverage: bool = False) -> tuple[Path, ...]:
    """Return the paths to bind: the reporting plugin, the runner, coverage if asked for, and further requirements."""
    further = (requirements,) if requirements else ()
    tools = (*RUNNER, *COVERAGE) if coverage else RUNNER
    return (compiled(grading.GUEST), *distribution_paths(tools), *further)


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
    """Open a sandbox on a package's tree, in which `python3 -m pytest` finds the runner, then the package.

    Visible are also the further requirements of the tests, coverage if asked for, and the paths in `readonly`; `hidden`
    are files of this machine that are not visible. Plugins of pytest among the requirements are loaded by name.
    `options` of pytest are used in every run. `pinned`: a folder with the runner, by default this installation's.
    """
    own = (
        readonly_paths(requirements, coverage=coverage)
        if pinned is None
        else (compiled(grading.GUEST), compiled(pinned))
    )
    shown = (*readonly, *own)
    root = TESTBED if kind == "bubblewrap" else str(tree)
    site = pinned or Path(str(metadata.distribution("pytest").locate_file(".")))
    package, runner = [root, f"{root}/src"], [str(site), str(grading.GUEST)]
    # The runner first, so that no file of the tree shadows pytest. Without a sandbox its folder holds all that is
    # installed here, maybe the package too, so there the package comes first.
    search_path = [*runner, *package] if kind == "bubblewrap" else [*package, *runner]
    options = ["-p", "no:cacheprovider", *options]
    if requirements:
        search_path.append(str(requirements))
        # PYTEST_DISABLE_PLUGIN_AUTOLOAD keeps plugins of this machine out, and these as well unless they are named.
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
    return open_sandbox(kind, tree, limits=limits, view=View(shown, hidden, env=env))
