"""The real command line in a process, and the words of small runs with a scripted model behind a loopback server."""

import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from support.server import Reply, answer

COMMANDS = ("cat solution.py", "sed -i 's|return .*|return u + v|' solution.py", "python3 test_solution.py", "submit")
TEACHERS = {"first": "scripted", "second": "other", "third": "other"}
"""Names and models: a majority disagrees with the student at every step but the first."""
OTHER = ("cat solution.py", "sed -i 's|return .*|return u * v|' solution.py", "cat test_solution.py", "ls")


def repair(asked: dict[str, Any], earlier: int) -> Reply:
    """Look, replace the expression, run the tests, submit; the model `slow` takes its time, `other` does otherwise."""
    del earlier
    turn = sum(message["role"] == "assistant" for message in asked["messages"])
    commands = OTHER if asked["model"] == "other" else COMMANDS
    delay_s = 0.3 if asked["model"] == "slow" else 0.0
    return Reply(body=answer(f"```bash\n{commands[min(turn, 3)]}\n```"), delay_s=delay_s)


def environment(artifacts: Path, **more: str) -> dict[str, str]:
    """The variables of a command: its own artifacts folder, one thread."""
    return {**os.environ, "COMPOSER_ARTIFACTS": str(artifacts), "OMP_NUM_THREADS": "1", **more}


def command(*words: object) -> list[str]:
    """What to execute for `composer WORDS`."""
    return [sys.executable, "-m", "composer_cli", *map(str, words)]


def call(artifacts: Path, *words: object, **more: str) -> subprocess.CompletedProcess[str]:
    """Run one command to its end."""
    return subprocess.run(
        command(*words), capture_output=True, text=True, timeout=300, env=environment(artifacts, **more)
    )


def model(url: str, name: str = "scripted") -> list[str]:
    """The words that choose a model of the server."""
    return ["--policy", name, "--set", f"policy.base_url={url}"]


def collect(url: str, *more: object) -> list[object]:
    """The words of a small collection: two tasks, two rollouts each."""
    return ["collect", *model(url), "-s", "tasks=2", "-s", "samples=2", *more]


def teachers(folder: Path, url: str) -> Path:
    """A file with a teacher table."""
    tables = [
        f'[[teachers]]\nname = "{n}"\nmodel = "{m}"\nbase_url = "{url}"\nmax_tokens = 64\n' for n, m in TEACHERS.items()
    ]
    path = folder / "teachers.toml"
    path.write_text("\n".join(tables))
    return path


def until(condition: Callable[[], object], seconds: float = 60.0) -> None:
    """Wait for a condition, and fail when it does not come."""
    ends = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < ends, "waited in vain"
        time.sleep(0.05)
