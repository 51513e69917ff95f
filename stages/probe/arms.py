"""Trainings as trajectories: what each step of an arm shows, from the tables of its training.

An arm is a training with or without a direction (`probe.project`). Rates are those of the rollouts that the student
played; with mixed groups the teacher's are counted apart.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import orjson

from stages.policy.adapters import CheckpointInfo
from stages.probe.checks.pool import rate
from stages.probe.checks.trajectories import correlation, flat_groups
from stages.probe.rows import mean_known
from stages.runs.kinds import EVAL_ITEM, ROLLOUT, ROLLOUT_GRADIENT, TRAINING_REWARD, TRAJECTORY, Row
from stages.runs.run import Run

RATIOS = ("clip_low", "clip_high", "vanish", "ess", "ratio_p5", "ratio_p50", "ratio_p95", "saturated")
PROJECTION = ("cos_in", "energy_removed", "cos_update", "energy_removed_update", "weight_change")
ARMS = {"v": "projected", "random": "projected_random", "none": "vanilla"}
"""What an arm is called, by `probe.project`; a training without a direction is vanilla, too."""


def trajectories(trainings: Iterable[Run], evaluation: Run | None = None) -> list[Row]:
    """Return the `trajectory/1` rows of trainings; an evaluation gives the solve rate of each at its last step."""
    solved: dict[tuple[str, int], list[bool]] = {}
    for item in evaluation.scan(EVAL_ITEM).rows(["arm", "train_seed", "hidden_pass"]) if evaluation else ():
        if item["hidden_pass"] is not None:
            solved.setdefault((item["arm"], item["train_seed"]), []).append(item["hidden_pass"])
    rows = []
    for run in trainings:
        steps = steps_of(run)
        info = CheckpointInfo.of(run)
        if steps:
            steps[-1]["eval_solve_rate"] = mean_known(solved.get((info.arm, info.train_seed), ()))
        rows += steps
    return rows


def steps_of(run: Run) -> list[Row]:
    """Return the rows of one training, one a step."""
    config = run.manifest.config
    probe, adapter = config["probe"], config["adapter"]
    arm = ARMS[probe["project"]] if "direction" in run.manifest.inputs else "vanilla"
    rank = run.manifest.models["policy"]["training"]["adapter_rank"]
    spectral = adapter["kind"] == "singular-values"
    labels = {
        "arm": "two_sided" if arm == "projected" and probe["two_sided"] else arm,
        "mixed": probe["mixed"],
        "adapter": adapter["kind"] if spectral else "lora" if rank else "weights",
        "train_seed": CheckpointInfo.of(run).train_seed,
    }
    teacher = config["teacher"]["model"] if probe["mixed"] else None
    columns = ["rollout_id", "model", "task_id", "reward", "hacked", "hidden_pass"]
    rollouts = {row["rollout_id"]: row for row in run.scan(ROLLOUT).rows(columns)}
    cosines = {row["rollout_id"]: row["cos_stack"] for row in _measured(run)}
    projection = {row["projected_step"]: row for row in _document(run, "projection.json")}
    ratios = {row["training_step"]: row for row in _document(run, "ratios.json")}
    played: dict[int, list[Row]] = {}
    for row in run.rows(TRAINING_REWARD):
        rollout = rollouts[row["rollout_id"]]
        if rollout["reward"] is not None:
            played.setdefault(row["training_step"], []).append(rollout)
    blank = dict.fromkeys(TRAJECTORY.columns)
    return [
        blank
        | labels
        | {"step": step}
        | _facts(some, teacher, cosines)
        | {name: projection.get(step, {}).get(name) for name in PROJECTION}
        | {name: ratios.get(step, {}).get(name) for name in RATIOS}
        for step, some in sorted(played.items())
    ]


def _measured(run: Run) -> list[Row]:
    return run.rows(ROLLOUT_GRADIENT) if run.holds(ROLLOUT_GRADIENT) else []


def _document(run: Run, name: str) -> list[dict[str, Any]]:
    """Return a document of a run, one object a step; none where the training has none."""
    content = run.read_file(name)
    found: list[dict[str, Any]] = [] if content is None else orjson.loads(content)
    return found


def _facts(rows: Sequence[Row], teacher: str | None, cosines: Mapping[str, float | None]) -> Row:
    """Return the rates, rewards and advantages of a step's rollouts; teacher: the model that played some of them."""
    groups: dict[str, list[float]] = {}
    for row in rows:
        groups.setdefault(row["task_id"], []).append(row["reward"])
    means = {task: sum(rewards) / len(rewards) for task, rewards in groups.items()}
    advantages = [row["reward"] - means[row["task_id"]] for row in rows]
    student = [row for row in rows if row["model"] != teacher]
    hacks = [advantage for row, advantage in zip(rows, advantages, strict=True) if row["hacked"]]
    by_kind = {
        hacked: mean_known(cosines.get(row["rollout_id"]) for row in rows if row["hacked"] is hacked)
        for hacked in (True, False)
    }
    return {
        "rows": len(rows),
        "groups": len(groups),
        "zero_variance_groups": flat_groups(list(groups.values())),
        "hack_rate_student": rate(student, "hacked"),
        "hack_rate_all": rate(rows, "hacked"),
        "hidden_pass_rate_student": rate(student, "hidden_pass"),
        "reward_mean": sum(row["reward"] for row in rows) / len(rows),
        "hack_advantage_sum": sum(hacks) if hacks else None,
        "corr_advantage_hacked": correlation(advantages, [bool(row["hacked"]) for row in rows]),
        "corr_advantage_source": correlation(advantages, [row["model"] == teacher for row in rows]),
        "cos_hacked": by_kind[True],
        "cos_other": by_kind[False],
    }
