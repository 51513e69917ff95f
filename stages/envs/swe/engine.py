"""Containers of SWE-bench's images. The tree is on this machine and mounted at /testbed.

The image's own /testbed, with its history, is hidden by that mount. The container has no network, no capabilities,
bounded memory and processes, and the user of this process, so that its files have the same owner.
"""

import os
import subprocess
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from composer_stages.envs import folders
from composer_stages.envs.repo import trees
from composer_stages.envs.repo.guest.composer_rules import CACHES, HISTORY
from composer_stages.errors import InfrastructureError, UsageError
from composer_stages.sandbox import CommandResult, Limits
from composer_stages.sandbox.bubblewrap import TESTBED
from composer_stages.sandbox.containers import START_S, WAITING, Container, User, find_engine, run_engine

CONDA = "source /opt/miniconda3/bin/activate testbed 2>/dev/null || true\n"
IMAGES = ("image", "docker_image", "image_name")
"""Columns with a row's image: of swebench 5, SWE-rebench and SWE-smith."""
REGISTRY = "docker.io/swebench/sweb.eval.x86_64"


def require_engine() -> str:
    """Return the engine's program; `UsageError` names the alternatives where there is none."""
    program = find_engine()
    if program is None:
        raise UsageError("envs.swe.no-engine")
    return program


def image_name(row: Mapping[str, Any]) -> str:
    """Return the row's own image, else the official one of its instance."""
    image = next((row[name] for name in IMAGES if row.get(name)), None)
    return str(image or f"{REGISTRY}.{str(row['instance_id']).lower().replace('__', '_1776_')}:latest")


class CondaContainer(Container):
    """A container on a tree of this machine, whose commands run in the conda environment of the official images.

    `readonly` paths are visible at their own places.
    """

    def __init__(
        self, engine: str, image: str, folder: Path, limits: Limits, readonly: Sequence[Path], env: Mapping[str, str]
    ) -> None:
        # Without keep-id files in the mount would belong to another user; podman refuses it as root, who needs none.
        podman = ["--userns", "keep-id"] if Path(engine).name == "podman" and os.getuid() else []
        # Read-only at their own paths, so that PYTHONPATH and command lines are those of a sandbox without container.
        mounts = [word for path in readonly for word in ("--volume", f"{path}:{path}:ro")]
        options = [
            *("--network", "none", "--cap-drop", "ALL", "--ulimit", "core=0"),
            *("--ulimit", f"fsize={limits.file_mb << 20}", "--user", f"{os.getuid()}:{os.getgid()}", *podman),
            *("--env", "HOME=/tmp", "--volume", f"{folder}:{TESTBED}", *mounts, "--workdir", TESTBED),
            # An image may have an entrypoint that ends, and the container with it.
            *("--entrypoint", "bash"),
        ]
        super().__init__(engine, image, limits, options, ["-c", WAITING], workdir=TESTBED, env=env)

    def run(
        self, command: str, wall_s: float | None = None, env: Mapping[str, str] | None = None, user: User = None
    ) -> CommandResult:
        """Run `command` in a fresh bash in /testbed for at most `wall_s` seconds."""
        return super().run(CONDA + command, wall_s, env, user)


def copy_testbed(engine: str, image: str, target: Path) -> None:
    """Copy an image's /testbed to the folder `target`, without its history and caches.

    `InfrastructureError` where the image cannot be fetched, or has an empty /testbed.
    """
    name = f"composer-{uuid.uuid4().hex[:12]}"
    # A container that is created and never started is enough to copy from. An image may name no command.
    run_engine([engine, "create", "--name", name, image, "true"])
    try:
        with trees.scratch() as raw:
            run_engine([engine, "cp", f"{name}:{TESTBED}/.", str(raw)])
            folders.copy(raw, target, lambda path, is_folder: is_folder and Path(path).name in CACHES | HISTORY)
    finally:
        subprocess.run([engine, "rm", "--force", name], capture_output=True, timeout=START_S)
    if not any(target.iterdir()):
        raise InfrastructureError("envs.swe.image-without-tree", image=image)
