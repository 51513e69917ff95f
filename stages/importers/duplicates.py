"""Rollouts that several files hold: predictions beside their trajectories, and one table stored twice.

The ids of such rollouts differ, since they come from their files. They are known by their place and what they say.
"""

from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path

from stages.importers import rows
from stages.importers.reader import ReadTrajectory
from stages.importers.sidecars import stem
from stages.runs import store

PREDICTIONS = "swebench-preds"


@dataclass(frozen=True)
class Known:
    """By what a rollout is recognised. said: digest of task, model, submission and actions; file: its name in rows."""

    rollout_id: str
    path: Path
    file: str
    line: int
    importer: str
    task_id: str
    model: str | None
    patch: str
    said: str
    effective: bool

    @classmethod
    def of(cls, item: ReadTrajectory) -> "Known":
        """Of a rollout that was read."""
        own = item.trajectory
        return cls(
            rows.rollout_id(item),
            item.origin.path,
            item.origin.file,
            item.origin.line,
            item.importer,
            own.task_id,
            own.model,
            (own.submission or "").strip(),
            store.digest([own.task_id, own.model, own.submission, [turn.action for turn in own.turns]]),
            bool(own.effective),
        )


class Seen:
    """The rollouts that were read so far; predictions are to be read last."""

    def __init__(self) -> None:
        self._by_task: dict[str, list[Known]] = defaultdict(list)
        self._tables: dict[tuple[Path, str, str], Path] = {}

    def before(self, item: Known) -> str | None:
        """What the rollout repeats, in words; None where it is new, and then it is remembered."""
        path, predicted = item.path, item.importer == PREDICTIONS
        other = self._tables.setdefault((path.parent, "" if predicted else stem(path), item.said), path)
        if other != path and (other.suffixes != path.suffixes or predicted):
            return f"{item.task_id} stands in {other.name} beside it too"
        if predicted and (taken := self._trajectory(item)) is not None:
            return f"{item.task_id} is what {taken.file} handed in"
        if not predicted:
            self._by_task[item.task_id].append(item)
        return None

    def _trajectory(self, prediction: Known) -> Known | None:
        """The trajectory at the end of which a prediction was made: in its folder or below, with the same patch.

        Where there is only one of the task and the models do not differ, the patch may.
        """
        near = [one for one in self._by_task[prediction.task_id] if one.path.is_relative_to(prediction.path.parent)]
        same = [one for one in near if one.patch == prediction.patch != ""]
        if not same and len(near) == 1 and near[0].model in (None, prediction.model):
            same = near
        return same[0] if same else None
