"""The tests of the files that differ from the last commit: `./dev test --changed`."""

import subprocess
from collections.abc import Iterable
from pathlib import Path, PurePosixPath

ROOT = Path(__file__).parents[2]
ALWAYS = ("tests/test_source.py", "tests/test_imports.py", "tests/stages/test_words.py")
"""Tests of the tree as a whole, which take seconds."""


def changed_files() -> list[str]:
    """The files that are changed, added or new, as git names them."""
    listed = subprocess.run(
        ["git", "status", "--porcelain", "--untracked-files=all", "--no-renames"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    return [line[3:] for line in listed.stdout.splitlines() if not line.startswith(" D")]


def own_tests(changed: Iterable[str], tests: Iterable[str]) -> set[str]:
    """The changed tests, and of a changed `x.py` the `test_x*.py` of its mirrored folder, or else those that name it.

    tests: all test files. A file of a package without tests of its name has those in which its import path stands.
    """
    tests, found = list(tests), set(ALWAYS)
    for path in map(PurePosixPath, changed):
        if path.parts[0] == "tests":
            found |= {str(path)} & {*tests}
        elif path.suffix == ".py":
            folder, stem = PurePosixPath("tests") / path.parent, path.stem
            mirrored = {test for test in tests if test.startswith(f"{folder}/test_{stem}")}
            dotted = ".".join(path.with_suffix("").parts)
            found |= mirrored or {test for test in tests if dotted in (ROOT / test).read_text()}
    return found
