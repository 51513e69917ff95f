"""The templates of harbor's wheel, filled in: harbor accepts them, their solutions get 1, and nothing gets 0."""

import json
from pathlib import Path

import pytest
from needs import needs
from support import harbor_templates, real_harbor

from stages import collect
from stages.runs import runner
from stages.runs.kinds import ROLLOUT
from stages.runs.run import Run


@needs("harbor")
@pytest.mark.slow
def test_the_templates_of_harbors_wheel_are_played(tmp_path: Path) -> None:
    names = harbor_templates.write_all(tmp_path / "tasks")
    assert len(names) == 8
    assert len(real_harbor.judged([tmp_path / "tasks" / name for name in names])) == 8
    for policy, reward in (("reference", 1.0), ("noop", 0.0)):
        config = collect.Config(
            env={"name": "harbor", "path": str(tmp_path / "tasks"), "runs_in": "bubblewrap"},
            policy={"model": policy},
            tasks=8,
            samples=1,
            max_steps=8,
        )
        rows = Run(runner.execute("collect", {}, config, root=tmp_path / policy).path).rows(ROLLOUT)
        assert {row["task_id"]: row["reward"] for row in rows} == dict.fromkeys(
            (row["task_id"] for row in rows), reward
        )
        metrics = {row["task_id"]: json.loads(row["metrics_json"]) for row in rows if row["metrics_json"]}
        assert metrics["compiled"] == {"speed": 0.5} if reward else "compiled" not in metrics
