"""Runs of collect with given outcomes, and the curriculum made of them."""

from pathlib import Path
from typing import Any

from stages import curriculum
from stages.runs import runner
from stages.runs.artifact import Run
from stages.runs.records import ROLLOUT, TASK
from support.runs import written


def measured(root: Path, passed: dict[str, list[bool | None]], prompt: str = "do it", model: str = "m") -> Run:
    """A run of collect with these rollouts."""
    tasks = [
        {"task_id": t, "env": "e", "split": "train", "family": t, "prompt": prompt, "data_json": "{}"} for t in passed
    ]
    rollouts = [
        {"rollout_id": f"{t}#{i}", "task_id": t, "gt_pass": solved, "model": model}
        for t, all_ in passed.items()
        for i, solved in enumerate(all_)
    ]
    return Run(written(root, f"collect/{model}-{len(rollouts)}", [(TASK, tasks), (ROLLOUT, rollouts)]))


def make(root: Path, *runs: Run, **settings: Any) -> Run:
    """A run of curriculum over these runs."""
    given = {"tasks": list(runs), "rollouts": list(runs)}
    return Run(runner.execute("curriculum", given, curriculum.Config(**settings), root=root / "artifacts").path)


def ids(run: Run) -> list[str]:
    """Its tasks, in their order."""
    return [row["task_id"] for row in run.rows(TASK)]
