"""Rollouts that several files hold: predictions beside their trajectories, and one table stored twice.

The ids of such rollouts differ, since they come from their files. They are known by their place and what they say.
"""

from collections import defaultdict
from pathlib import Path

from stages.importers.reader import ReadTrajectory
from stages.importers.sidecars import stem
from stages.runs import store

PREDICTIONS = "swebench-preds"


class Seen:
    """The rollouts that were read so far; predictions are to be read last."""

    def __init__(self) -> None:
        self._by_task: dict[str, list[ReadTrajectory]] = defaultdict(list)
        self._tables: dict[tuple[Path, str, str], Path] = {}

    def before(self, item: ReadTrajectory) -> str | None:
        """What the rollout repeats, in words; None where it is new, and then it is remembered."""
        path, own = item.origin.path, item.trajectory
        said = store.digest([own.task_id, own.model, own.submission, [turn.action for turn in own.turns]])
        table = (path.parent, "" if item.importer == PREDICTIONS else stem(path), said)
        other = self._tables.setdefault(table, path)
        if other != path and (other.suffixes != path.suffixes or item.importer == PREDICTIONS):
            return f"{own.task_id} stands in {other.name} beside it too"
        if item.importer == PREDICTIONS and (taken := self._trajectory(item)) is not None:
            return f"{own.task_id} is what {taken.origin.file} handed in"
        if item.importer != PREDICTIONS:
            self._by_task[own.task_id].append(item)
        return None

    def _trajectory(self, prediction: ReadTrajectory) -> ReadTrajectory | None:
        """The trajectory at the end of which a prediction was made: in its folder or below, with the same patch.

        Where there is only one of the task and the models do not differ, the patch may.
        """
        folder, own = prediction.origin.path.parent, prediction.trajectory
        near = [one for one in self._by_task[own.task_id] if one.origin.path.is_relative_to(folder)]
        same = [one for one in near if _patch(one) == _patch(prediction) != ""]
        if not same and len(near) == 1 and near[0].trajectory.model in (None, own.model):
            same = near
        return same[0] if same else None


def _patch(item: ReadTrajectory) -> str:
    return (item.trajectory.submission or "").strip()
