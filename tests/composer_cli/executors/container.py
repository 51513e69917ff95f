"""A container for the fakes of services that run commands: bubblewrap, with folders mounted where they ask."""

import os
import sys
from collections.abc import Mapping
from pathlib import Path

from composer_stages.sandbox.bubblewrap import find_bwrap

PROGRAM = {Path(__file__).resolve().parents[3], Path(sys.prefix)}
"""The checkout and its virtual environment: an image would hold both, also where they are below /tmp."""


def container(mounts: Mapping[str, Path]) -> list[str]:
    """What to put before a command. It sees programs, this checkout, a /tmp of its own, and the mounts."""
    words = [find_bwrap(), "--die-with-parent", "--chdir", "/"]
    for name in sorted(os.listdir("/")):
        path = f"/{name}"
        if os.path.islink(path):
            words += ["--symlink", os.readlink(path), path]
        elif name not in ("tmp", "proc", "dev"):
            words += ["--bind", path, path]
    words += ["--dev-bind", "/dev", "/dev", "--proc", "/proc", "--tmpfs", "/tmp"]
    shown = {**{str(path): path for path in sorted(PROGRAM) if path.is_relative_to("/tmp")}, **mounts}
    return [*words, *(word for place, folder in shown.items() for word in ("--bind", str(folder), place)), "--"]
