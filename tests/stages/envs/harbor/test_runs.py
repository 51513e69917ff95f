"""Runs of Harbor tasks: what they record."""

import json
from pathlib import Path

from support.harbor import KINDS, WITHOUT_ENGINE, for_training, write
from support.scripted_runs import nothing_done, played

from stages.runs.kinds import ROLLOUT, TASK


def test_a_run_records_solutions_and_that_nothing_was_built(tmp_path: Path) -> None:
    for number, kind in enumerate(WITHOUT_ENGINE):
        write(tmp_path / "tasks" / str(number), for_training(KINDS[kind]()))
    rewards, metrics = {}, {}
    env = {"name": "harbor", "path": str(tmp_path / "tasks"), "runs_in": "bubblewrap"}
    sizes = {"tasks": 4, "samples": 1}
    for run in (played(tmp_path, "reference", env, **sizes), nothing_done(tmp_path, env, **sizes)):
        rows = run.rows(ROLLOUT)
        policy = rows[0]["model"]
        rewards[policy] = [row["reward"] for row in rows]
        assert all("not built" in row["image"] and row["sandbox"] == "bubblewrap" for row in rows)
        data = [json.loads(row["data_json"]) for row in run.rows(TASK)]
        assert sorted(one["steps"] for one in data) == [1, 1, 1, 2]
        metrics[policy] = {row["task_id"]: json.loads(row["metrics_json"] or "null") for row in rows}
    assert rewards == {"reference": [1.0] * 4, "noop": [0.0] * 4}
    assert metrics["reference"] == {
        "own/sums-1": None,
        "own/words-1": {"lines": 1.0, "count": 3.0},
        "own/report-1": None,
        "own/ladder-1": {"first/reward": 1.0, "second/reward": 1.0},
    }
    assert metrics["noop"]["own/ladder-1"] == {"first/reward": 0.0}, "the second step was not reached"
