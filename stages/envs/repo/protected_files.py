"""Which files a solution may not bring: tests, test configuration, and what Python or pytest load by themselves.

The strict grade drops changes to them before it runs the original tests. The loose grade keeps them.
"""

import sys
from collections.abc import Collection
from pathlib import PurePosixPath

CONFIGURATION = frozenset(
    {
        *("conftest.py", "pytest.ini", ".pytest.ini", "pytest.toml", ".pytest.toml", "tox.ini", "setup.cfg"),
        *("pyproject.toml", ".coveragerc", "noxfile.py", "runtests.py"),
    }
)
LOADED_BY_PYTHON = frozenset({"sitecustomize.py", "usercustomize.py", "pyvenv.cfg"})
METADATA = (".egg-info", ".dist-info", ".egg-link")
NATIVE = (".pth", ".so", ".pyd", ".pyc", ".pyo", ".egg", ".whl")
TEST_FOLDERS = frozenset({"tests", "test", "testing", "__tests__"})
IMPORT_ROOTS = ("", "src", "lib")
RUNNERS = frozenset(
    {
        "pytest",
        "_pytest",
        "pluggy",
        "iniconfig",
        "packaging",
        "pygments",
        "coverage",
        "pytest_cov",
        "composer_outcomes",
        "composer_supervisor",
    }
)


def protected(path: str, existing: Collection[str] = (), also: Collection[str] = ()) -> bool:
    """Whether this path may not come from a solution.

    `existing` are the paths before the solution, `also` further paths that count as tests.
    """
    parts = PurePosixPath(path).parts
    return (
        path in also
        or is_test(path)
        or parts[-1] in CONFIGURATION | LOADED_BY_PYTHON
        or path.endswith(NATIVE)
        or any(part.endswith(METADATA) for part in parts)
        or (path not in existing and shadows(path))
    )


def is_test(path: str) -> bool:
    """Whether the path looks like a test, or like something that only tests use."""
    parts = PurePosixPath(path).parts
    name = parts[-1]
    return (
        bool(TEST_FOLDERS & set(parts[:-1]))
        or name == "conftest.py"
        or name in ("tests.py", "test.py")
        or (name.endswith(".py") and (name.startswith("test_") or name.endswith("_test.py")))
    )


def shadows(path: str) -> bool:
    """Whether a new file here would be imported in place of the standard library or of the test runner."""
    for root in IMPORT_ROOTS:
        try:
            first = PurePosixPath(path).relative_to(root).parts[0]
        except ValueError:
            continue
        if first.partition(".")[0] in sys.stdlib_module_names | RUNNERS:
            return True
    return False
