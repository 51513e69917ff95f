"""A way to carry out one sub-stage in a folder, and settings on the planted world."""

import signal
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

from probe_faults.loophole_world import HINT, PAIR_SOURCE, PlantedEnv

from composer_stages import train
from composer_stages.envs.base import Grade
from composer_stages.envs.config import EnvConfig
from composer_stages.policy.base import PolicyConfig
from composer_stages.probe import extract_vhack, replay, teacher_pool
from composer_stages.probe.extract_vhack import HackPairsConfig
from composer_stages.probe.settings import Contract
from composer_stages.runs import runner
from composer_stages.runs.catalog import assign_inputs
from composer_stages.runs.kinds import Kind
from composer_stages.runs.run import Run
from composer_stages.stopping import Interrupted

PLANTED = EnvConfig(name="probe_faults.loophole_world:PlantedEnv")
Models = dict[str, PolicyConfig]
HINTED, PLAIN = {"hint": True}, {"hint": False}
ARMS = {"vanilla": "none", "projected": "v", "projected_random": "random"}
"""What each arm of a training takes out."""
RATE, WATCHED_STEPS = 1e-3, 3
"""The learning rate of a training, and the steps of the one that is watched."""


def carry_out(
    stage: ModuleType, runs: list[Run], config: Any, folder: Path, stop_at: tuple[str, int] | None = None
) -> Run | None:
    """Carry out a sub-stage in this folder, or go on with it; None when stopped, as by Ctrl-C, at (what, done)."""

    def listen(what: str, done: int, total: int) -> None:
        if (what, done) == stop_at:
            signal.raise_signal(signal.SIGINT)

    inputs = assign_inputs(stage.STAGE, runs)
    try:
        done = runner.execute(
            stage.STAGE.name, inputs, config, root=folder.parent / "artifacts", out=folder, resume=True, listener=listen
        )
    except Interrupted:
        return None
    return Run(done.path)


def extracted(student: PolicyConfig, runs: list[Run], folder: Path, count: int = 24, **settings: Any) -> Run:
    """A direction of the planted pairs."""
    config = extract_vhack.Config(student=student, pairs=HackPairsConfig(source=PAIR_SOURCE, count=count), **settings)
    return carry_out(extract_vhack, runs, config, folder)


class FlatEnv(PlantedEnv):
    """Every answer earns the same."""

    def grade(self) -> Grade:
        return replace(super().grade(), reward=1.0)


def pool_config(teacher: PolicyConfig, base: PolicyConfig, problems: int = 60, **changes: Any) -> teacher_pool.Config:
    """Four hinted answers of the teacher, two without the hint, two of the base."""
    source = teacher_pool.SourceConfig
    sources = [
        source(name="teacher", policy=teacher, options=HINTED, samples=4),
        source(name="teacher_nohint", policy=teacher, options=PLAIN, samples=2, role="plain"),
        source(name="base", policy=base, options=HINTED, samples=2),
    ]
    settings = {"env": PLANTED, "contract": Contract(hint=HINT), "problems": problems, "max_problems": problems}
    return teacher_pool.Config(sources=sources, **{**settings, **changes})


def pooled(models: Models, folder: Path, stop_at: tuple[str, int] | None = None, **changes: Any) -> Run:
    """A pool of the loophole model beside the honest one."""
    return carry_out(teacher_pool, [], pool_config(models["loophole"], models["honest"], **changes), folder, stop_at)


def replayed(models: Models, runs: list[Run], folder: Path, stop_at: tuple[str, int] | None = None, **more: Any) -> Run:
    """A replay by the honest model."""
    return carry_out(replay, runs, replay.Config(student=models["honest"], **more), folder, stop_at)


def settings(start: PolicyConfig, steps: int = 1, rate: float = RATE, **more: Any) -> train.Config:
    """A short training by Dr.GRPO on the singular values of the policy."""
    size = {"steps": steps, "prompts_per_step": 4, "generations": 4, "learning_rate": rate, "threads": 1}
    size |= {"loss_type": "dr_grpo", "max_grad_norm": 1e9, "save_every": 1, **more.pop("optimisation", {})}
    options = {"adapter": {"kind": "singular-values"}, "trl": {"scale_rewards": "none"}, **more}
    return train.Config(
        policy=start,
        max_steps=1,
        optimisation=size,
        **{"env": PLANTED.model_copy(update={"options": HINTED}), "tasks": 20, **options},
    )


def dead_columns(kind: Kind, rows: list[dict[str, Any]]) -> list[str]:
    """The columns of a record kind that have one value in all rows."""
    assert rows
    return [column for column in kind.columns if len({repr(row[column]) for row in rows}) < 2]
