"""Code of a checkout that an installed package lacks: recorded numbers, injected faults, and one benchmark."""

import sys
from pathlib import Path

from stages.errors import UsageError

ROOT = Path(__file__).parents[1]


def add_to_path(package: str) -> None:
    """Make a folder of the checkout importable as a package: `tests/parity` as `parity`, `benchmarks` as `benchmarks`.

    Raises `UsageError` when there is no such folder, as in an installation without the repository.
    """
    folder = ROOT / package
    if not folder.is_dir():
        raise UsageError(f"There is no folder {package} in {ROOT}. Run this in a checkout.")
    if sys.path[:1] != [str(folder.parent)]:
        sys.path.insert(0, str(folder.parent))  # opacus, for one, installs a package that is called benchmarks
