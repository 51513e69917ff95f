"""Runs of `collect` with the policies that need no model."""

from pathlib import Path
from typing import Any

from composer_stages import collect
from composer_stages.runs import runner
from composer_stages.runs.kinds import ROLLOUT, STEP
from composer_stages.runs.run import Run


def played(root: Path, policy: str, env: dict[str, Any], **more: Any) -> Run:
    """Collect rollouts of `reference` or `noop`; six unless told otherwise."""
    config = collect.Config(env=env, policy={"model": policy}, **{"tasks": 3, "samples": 2, **more})
    return Run(runner.execute("collect", {}, config, root=root / policy).path)


def nothing_done(root: Path, env: dict[str, Any], **more: Any) -> Run:
    """Collect rollouts of `noop`: no reward, one step without an action each, and collection checks that pass."""
    run = played(root, "noop", env, **more)
    rows, steps = run.rows(ROLLOUT), run.rows(STEP)
    assert rows and {row["reward"] for row in rows} == {0.0} and {row["terminated_by"] for row in rows} == {"idle"}
    assert len(steps) == len(rows) and not any(step["action"] or step["commands"] for step in steps)
    assert run.manifest.summary["failed_checks"] == [] and run.manifest.outcome.ok
    return run
