"""Harbor task folders, played as Harbor does in a container, but in bubblewrap: solution, then verifier."""

import json
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from stages.sandbox.bubblewrap import find_bwrap


def play(task: Path, *, solve: bool, agent: str = "") -> dict[str, Any] | None:
    """The verifier's rewards after the solution, or after the commands of an agent; None where it wrote none."""
    with tempfile.TemporaryDirectory() as scratch:
        work, logs = Path(scratch, "work"), Path(scratch, "logs")
        logs.mkdir()
        start = task / "environment" / "testbed"
        if start.exists():
            shutil.copytree(start, work)
        else:
            work.mkdir()
        binds = [("/testbed", work), ("/logs", logs)]
        if solve:
            assert container(binds, ("/solution", task / "solution"), "bash /solution/solve.sh") == 0
        if agent:
            container(binds, None, agent)
        container(binds, ("/tests", task / "tests"), "bash /tests/test.sh")
        reward = logs / "verifier" / "reward.json"
        return json.loads(reward.read_text()) if reward.exists() else None


def container(binds: list[tuple[str, Path]], shown: tuple[str, Path] | None, command: str) -> int:
    """The exit code of a command in a root of its own, with this Python and its pytest."""
    words = [find_bwrap(), "--unshare-pid", "--die-with-parent", "--tmpfs", "/", "--proc", "/proc", "--dev", "/dev"]
    words += ["--tmpfs", "/tmp", "--clearenv", "--setenv", "PATH", f"{Path(sys.executable).parent}:/usr/bin:/bin"]
    # Open to other users than root, as a container's interpreter is.
    above = {folder for prefix in (sys.prefix, sys.base_prefix) for folder in Path(prefix).parents if folder.name}
    for folder in sorted(above):
        words += ["--perms", "0755", "--dir", str(folder)]
    for place in {"/usr", "/etc", "/lib", "/lib64", "/bin", sys.prefix, sys.base_prefix}:
        words += ["--ro-bind-try", place, place]
    for target, source in binds:
        words += ["--bind", str(source), target]
    if shown:
        words += ["--ro-bind", str(shown[1]), shown[0]]
    words += ["--chdir", "/testbed", "bash", "-c", command]
    return subprocess.run(words, capture_output=True, timeout=900, check=False).returncode
