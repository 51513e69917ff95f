"""Small trainings on a scripted environment."""

from pathlib import Path
from typing import Any

import orjson

from stages import train
from stages.runs import runner
from stages.runs.run import Run

ENV = "support.environments:GuessEnv"
SMALL = {"steps": 2, "prompts_per_step": 2, "generations": 4}
"""Optimisation of two steps."""


def trained(root: Path, model: Path, arm: str, pairs: Run | None = None, **more: Any) -> Run:
    """A run of train of one arm."""
    config = train.Config(
        env={"name": ENV}, policy={"model": str(model), "max_tokens": 20}, tasks=4, arm=arm, optimisation=SMALL, **more
    )
    return Run(runner.execute("train", {"pairs": pairs} if pairs else {}, config, root=root).path)


def metrics_of(run: Run) -> list[dict[str, Any]]:
    """What it logged, step by step."""
    return [orjson.loads(line) for line in (run.path / "metrics.jsonl").read_bytes().splitlines()]
