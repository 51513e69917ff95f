"""The test runner that a sandbox sees: pytest and what it needs, bound from this environment, and nothing else.

setuptools, pip and an installed copy of the package stay invisible, since they may hold the code that a task removed.
"""

import subprocess
import sys
from collections.abc import Sequence
from functools import cache
from importlib import metadata
from pathlib import Path

from stages.envs.repo import outcomes
from stages.errors import UsageError
from stages.sandbox.bubblewrap import TESTBED

RUNNER = ("pytest", "pluggy", "iniconfig", "packaging", "pygments")
COVERAGE = ("pytest-cov", "coverage")
INSTALL = "pip install 'composer-post-training[feature-deletion]'"


@cache
def visible(distributions: tuple[str, ...]) -> tuple[Path, ...]:
    """The files and folders of installed distributions, where they lie."""
    return tuple(path for name in distributions for path in _top_level(name))


def _top_level(name: str) -> list[Path]:
    try:
        files = metadata.files(name) or []
    except metadata.PackageNotFoundError:
        raise UsageError(f"Feature deletion runs tests with {name}, which is not installed: {INSTALL}.") from None
    site = _site(name)
    first = {file.parts[0] for file in files} - {"..", "__pycache__"}
    return [site / part for part in sorted(first) if not part.endswith(".pth") and (site / part).exists()]


def _site(name: str) -> Path:
    return Path(str(metadata.distribution(name).locate_file(".")))


def readonly(requirements: Path | None = None, *, coverage: bool = False) -> tuple[Path, ...]:
    """What to bind: our plugin, the runner, coverage when asked for, and a folder of further requirements."""
    further = (requirements,) if requirements else ()
    return (outcomes.GUEST, *visible(RUNNER), *(visible(COVERAGE) if coverage else ()), *further)


def environment(sandbox: str, requirements: Path | None = None, tree: Path | None = None) -> dict[str, str]:
    """Variables under which `python3 -m pytest` finds the runner first, then the package, which is not installed.

    Without a sandbox everything that is installed here is visible, so the package comes first there.
    """
    root = TESTBED if sandbox == "bubblewrap" else str(tree)
    package, runner = [root, f"{root}/src"], [str(_site("pytest")), str(outcomes.GUEST)]
    folders = [*runner, *package] if sandbox == "bubblewrap" else [*package, *runner]
    return {
        **outcomes.WITHOUT_PLUGINS,
        "PYTHONPATH": ":".join([*folders, *([str(requirements)] if requirements else [])]),
        "PYTEST_ADDOPTS": " ".join(["-p", "no:cacheprovider", *plugins(requirements)]),
        "COVERAGE_CORE": "ctrace",
    }


def plugins(requirements: Path | None) -> list[str]:
    """Options that load the pytest plugins among the requirements, since none is loaded by itself."""
    if requirements is None:
        return []
    found = [entry for one in metadata.distributions(path=[str(requirements)]) for entry in one.entry_points]
    return [word for entry in found if entry.group == "pytest11" for word in ("-p", entry.value)]


def install(requirements: Sequence[str], folder: Path) -> Path:
    """Put wheels of requirements, and of theirs, into a folder; nothing of them is run."""
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--only-binary", ":all:", "--target", str(folder)]
    done = subprocess.run([*command, *requirements], capture_output=True, text=True)
    if done.returncode:
        reason = (done.stderr.strip().splitlines() or ["no reason given"])[-1]
        raise UsageError(f"The requirements {', '.join(requirements)} could not be installed: {reason}")
    return folder
