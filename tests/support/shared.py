"""What takes long to make is made once for all processes of pytest-xdist."""

from collections.abc import Callable
from pathlib import Path

import pytest
from filelock import FileLock


def made_once(factory: pytest.TempPathFactory, name: str, make: Callable[[Path], object]) -> Path:
    """Return a folder of the whole test run that `make` has filled, in whichever process asked first; only read it."""
    base = factory.getbasetemp()
    root = base.parent if base.name.startswith("popen-") else base
    folder, done = root / f"once-{name}", root / f"once-{name}.done"
    with FileLock(root / f"once-{name}.lock"):
        if not done.exists():
            folder.mkdir()
            make(folder)
            done.touch()
    return folder
