"""Rollouts replayed to teachers behind a scripted server."""

from pathlib import Path
from typing import Any

from stages import replay_teachers
from stages.runs import runner
from stages.runs.artifact import Run


def endpoint(name: str, url: str, **more: Any) -> dict[str, Any]:
    """The settings of a teacher of this name behind a server."""
    prices = {"usd_per_mtok_in": 1.0, "usd_per_mtok_out": 1.0}
    return {"name": name, "model": name, "base_url": url, "max_tokens": 64, **prices, **more}


def replay(root: Path, rollouts: Run, teachers: list[dict[str, Any]], **options: Any) -> Run:
    """A run of replay-teachers."""
    config = replay_teachers.Config(teachers=teachers)
    return Run(runner.execute("replay-teachers", {"rollouts": rollouts}, config, root=root, **options).path)
