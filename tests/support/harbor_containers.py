"""Podman with the base image of Harbor tasks, which is made from this machine's files, without a registry."""

import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from stages.envs.repo import runner
from stages.sandbox import containers
from support import container_image
from support.harbor import BASE

PROGRAMS = ("base64", "dirname", "find", "head", "ln", "mkfifo", "seq", "sort", "tee", "tr", "truncate", "wc", "yes")
SETTINGS = """\
[containers]
netns = "none"
default_ulimits = ["nofile=20000:20000", "nproc=10000:10000"]
[engine]
runtime = "runc"
"""
"""Where the limits of this machine's processes are lower than podman's defaults; crun refuses to start then."""


@contextmanager
def podman(folder: Path) -> Iterator[str | None]:
    """Let podman run containers of the base image until the block ends; gives the reason where it cannot.

    folder: for the settings and for the files of the image, which is built once a machine.
    """
    if not shutil.which("podman"):
        yield "podman is not installed"
        return
    before = os.environ.get("CONTAINERS_CONF")
    if shutil.which("runc"):
        (folder / "containers.conf").write_text(SETTINGS)
        os.environ["CONTAINERS_CONF"] = str(folder / "containers.conf")
    containers.find_engine.cache_clear()
    try:
        if subprocess.run(["podman", "image", "inspect", BASE], capture_output=True).returncode:
            container_image.fill(folder / "root", runner.distribution_paths(runner.RUNNER), programs=PROGRAMS)
            (folder / "Containerfile").write_text(container_image.FILE)
            container_image.build(folder, BASE)
        started = subprocess.run(["podman", "run", "--rm", BASE, "true"], capture_output=True, text=True)
        why = started.stderr.strip()[-200:]
        yield f"podman cannot run a container here: {why}" if started.returncode else None
    finally:
        os.environ.pop("CONTAINERS_CONF", None)
        if before is not None:
            os.environ["CONTAINERS_CONF"] = before
        containers.find_engine.cache_clear()
