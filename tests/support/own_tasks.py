"""Rows of tasks of one's own as a file, and the grades of what is left in the folders of their tasks."""

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from stages.envs.base import Grade
from stages.envs.tasks.env import TasksEnv


def write_rows(path: Path, rows: Iterable[Mapping[str, Any]]) -> str:
    """Write rows as JSON lines and return the path as an option takes it."""
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


class RowGrader:
    """The environment of rows by their ids; called with an id and files, it returns the grade of these files there."""

    def __init__(self, folder: Path, rows: Mapping[str, Mapping[str, Any]]) -> None:
        named = ({"id": name, "prompt": f"{name}: mend it.", "split": "train", **row} for name, row in rows.items())
        self.env = TasksEnv(path=write_rows(folder / "my.jsonl", named))
        self.tasks = {task.task_id: task for task in self.env.tasks("train", len(rows), seed=0)}

    def __call__(self, row: str, files: Mapping[str, str]) -> Grade:
        """Grade these files in the folder of a row's task."""
        self.env.reset(self.tasks[row])
        for path, text in files.items():
            file = self.env._open_session().folder / path
            file.parent.mkdir(exist_ok=True)
            file.write_text(text)
        return self.env.grade()

    def close(self) -> None:
        """Close the environment."""
        self.env.close()
