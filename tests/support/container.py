"""A container for the fakes of services that run commands: bubblewrap, with folders mounted where they ask."""

import os
from collections.abc import Mapping
from pathlib import Path

from stages.sandbox.bubblewrap import find_bwrap


def container(mounts: Mapping[str, Path]) -> list[str]:
    """What to put before a command. It sees this machine's programs, a /tmp of its own, and the mounts."""
    words = [find_bwrap(), "--die-with-parent", "--chdir", "/"]
    for name in sorted(os.listdir("/")):
        path = f"/{name}"
        if os.path.islink(path):
            words += ["--symlink", os.readlink(path), path]
        elif name not in ("tmp", "proc", "dev"):
            words += ["--bind", path, path]
    words += ["--dev-bind", "/dev", "/dev", "--proc", "/proc", "--tmpfs", "/tmp"]
    return [*words, *(word for place, folder in mounts.items() for word in ("--bind", str(folder), place)), "--"]
