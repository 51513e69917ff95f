"""The test packages of a checkout that the probe uses at run time: `probe selftest` and the pairs named `planted`."""

import sys
from pathlib import Path

import stages
from stages.errors import UsageError


def add_tests_to_path(package: str) -> None:
    """Make the packages in the checkout's tests folder importable.

    Raises `UsageError` when that folder does not hold `package`, as in an installation without the repository.
    """
    tests = Path(stages.__file__).parents[1] / "tests"
    if not (tests / package).is_dir():
        raise UsageError(f"There is no folder tests/{package} in {tests.parent}. Run this in a checkout.")
    if str(tests) not in sys.path:
        sys.path.append(str(tests))
