"""Tasks of one's own by their rows, and the grades of what is left in their folders."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from composer_stages.envs.base import Grade
from composer_stages.envs.tasks.env import TasksEnv
from support.transcripts import jsonl


class RowGrader:
    """The environment of rows by their ids; called with an id and files, it returns the grade of these files there."""

    def __init__(self, folder: Path, rows: Mapping[str, Mapping[str, Any]]) -> None:
        named = ({"id": name, "prompt": f"{name}: mend it.", "split": "train", **row} for name, row in rows.items())
        self.env = TasksEnv(path=str(jsonl(folder / "my.jsonl", *named)))
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
