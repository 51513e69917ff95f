"""Find rollouts of several files that repeat earlier ones, by their ids or as one table under two endings.

`import` and `compare` count a rollout once by these rules. A rollout has the id that its source gave it, else one of
its file's content and its line, so that a copied file repeats the first. Data sets and logs are also stored twice in
two kinds of files, `x.jsonl` and `x.parquet`, `x.eval` and `x.json`.
"""

from dataclasses import dataclass, field
from pathlib import Path

from composer_stages.formats.base import Trajectory
from composer_stages.formats.reading import ReadTrajectory
from composer_stages.formats.reports import stem
from composer_stages.runs import store


def rollout_id(item: ReadTrajectory) -> str:
    """Return the source's own id, else a digest of the file's content and model, and the record's line and index."""
    model = item.trajectory.model or item.origin.sidecars.model
    location = f"{store.digest([item.origin.sha256, model])[:12]}:{item.origin.line}"
    return item.trajectory.own_id or (f"{location}.{item.index}" if item.index else location)


def acted(trajectory: Trajectory) -> str:
    """Return a digest of task, model, submission and actions."""
    return store.digest(
        [trajectory.task_id, trajectory.model, trajectory.submission, [turn.action for turn in trajectory.turns]]
    )


@dataclass
class StoredTables:
    """The first file of each rollout, by folder, name and digest of its actions."""

    first: dict[tuple[Path, str, str], Path] = field(default_factory=dict)

    def find_copy(self, path: Path, acted: str, *, predicted: bool = False) -> Path | None:
        """Return the earlier file of the same table that holds this rollout; None if it is new.

        predicted: it is a prediction, which all files of a folder may hold under any name.
        """
        first = self.first.setdefault((path.parent, "" if predicted else stem(path), acted), path)
        return first if first != path and (first.suffixes != path.suffixes or predicted) else None
