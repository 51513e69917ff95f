"""Tasks from the table of a run, in its order, instead of those that an environment draws."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import orjson

from stages.envs.base import Split, Task
from stages.errors import UsageError
from stages.runs import store
from stages.runs.artifact import Run
from stages.runs.records import TASK

COLUMNS = ("task_id", "env", "split", "family", "prompt")


def task(row: Mapping[str, Any]) -> Task:
    """The task of a `task/1` row."""
    return Task(**{name: row[name] for name in COLUMNS}, data=orjson.loads(row["data_json"]))


def tasks(folder: str, env: str, split: Split, count: int) -> list[Task]:
    """At most `count` tasks of a split from a run, in its order; `UsageError` where they are another environment's."""
    run = _run(folder)
    chosen = [task(row) for row in run.scan(TASK).rows() if row["split"] == split][:count]
    if not chosen:
        raise UsageError(f"{folder} holds no task of the split {split!r}. Set env.split, or make another curriculum.")
    if others := sorted({one.env for one in chosen} - {env}):
        raise UsageError(f"{folder} holds tasks of {others[0]}, and {env} is to be played. Set env.name={others[0]}.")
    return chosen


def identity(folder: str) -> str:
    """A digest of a run's tasks, wherever it lies."""
    run = _run(folder)
    return store.digest([output["content_sha256"] for name, output in run.manifest.outputs.items() if name == "tasks"])


def _run(folder: str) -> Run:
    return Run(Path(folder).expanduser())
