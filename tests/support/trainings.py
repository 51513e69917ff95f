"""Small trainings on a scripted environment."""

from pathlib import Path
from typing import Any

import orjson

from composer_stages import train
from composer_stages.runs import runner
from composer_stages.runs.kinds import CHECKPOINT
from composer_stages.runs.run import Run

ENV = "support.environments:GuessEnv"
SMALL = {"steps": 2, "prompts_per_step": 2, "generations": 4}
"""Optimisation of two steps."""
LORA = {"rank": 4, "alpha": 8.0}


def settings(model: Path | str, **more: Any) -> train.Config:
    """Settings of a small training; `policy` and `optimisation` change theirs one by one."""
    policy = {"model": str(model), "max_tokens": 20} | more.pop("policy", {})
    size = SMALL | more.pop("optimisation", {})
    return train.Config(**{"env": {"name": ENV}, "tasks": 4, "policy": policy, "optimisation": size, **more})


def trained(root: Path, model: Path | str, arm: str = "A", pairs: Run | None = None, **more: Any) -> Run:
    """A run of train of one arm; equal settings below one root are trained once."""
    given = {"pairs": pairs} if pairs else {}
    return Run(runner.execute("train", given, settings(model, arm=arm, **more), root=root).path)


def metrics_of(run: Run) -> list[dict[str, Any]]:
    """What it logged, step by step."""
    return [orjson.loads(line) for line in (run.path / "metrics.jsonl").read_bytes().splitlines()]


def checkpoint_bytes(run: Run) -> bytes:
    """The weights of a training with one file of them."""
    (file,) = run.folder(CHECKPOINT).glob("*.safetensors")
    return file.read_bytes()


def words_of(model: Path, *given: str) -> list[str]:
    """The words of a training on the command line with these settings."""
    words = [word for setting in ("policy.max_tokens=10", *given) for word in ("--set", setting)]
    return ["train", "--env", ENV, "--policy", str(model), *words]
