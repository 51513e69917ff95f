"""A finished training's outputs: checkpoint, what `evaluate` needs to know of it, metrics, tables, and report.txt."""

import os
from collections.abc import Mapping, Sequence
from functools import partial
from shutil import copytree, ignore_patterns

from torch import Tensor

from stages.envs.base import Task
from stages.policy.adapters import CheckpointInfo
from stages.policy.local import LocalPolicy
from stages.runs import store
from stages.runs.kinds import Row
from stages.runs.run import RunWriter
from stages.training.channels import CHANNELS
from stages.training.checkpoints import KEPT, adapter_base, save_model
from stages.training.config import Config
from stages.training.projection import accounts
from stages.training.rollouts import course, write_tables
from stages.training.setup import prompt_order
from stages.training.step import ComposedTrainer

TAKEN_OUT = {
    "v": "Taken out of gradients and updates: v, the hack direction. Train once with probe.project=random and once "
    "without a direction, as arms of other names, and `composer evaluate` shows all three.",
    "random": "Taken out of gradients and updates: a random direction, the control of v.",
}
NO_GRPO = "weights.grpo is 0: rollouts were played and recorded, and nothing was learned from their rewards."
NOTHING_LEARNED = "No group had two different rewards: nothing was learned from rewards."


def save(
    trainer: ComposedTrainer,
    policy: LocalPolicy,
    config: Config,
    tasks: list[Task],
    out: RunWriter,
    weights: Mapping[str, Tensor] | None = None,
) -> None:
    """Write the checkpoint with what evaluating it needs to know, metrics, tables and the report.

    weights: all of them, where the model in this process is one share.
    """
    projected = accounts(out)
    out.checkpoint(lambda folder: save_model(trainer.model, policy, adapter_base(config, policy), folder, weights))
    if config.optimisation.keep_every:
        # By hard links: a checkpoint is gigabytes, and the scratch folder goes when the run is complete. A killed
        # attempt may have left .tmp, a model that was written in part.
        link = partial(copytree, copy_function=os.link, dirs_exist_ok=True, ignore=ignore_patterns(".tmp"))
        out.checkpoint(partial(link, out.scratch(KEPT)), KEPT)
    replicas = config.diloco.store is not None  # which draw from the same tasks, each in an order of its own
    order: Sequence[int] = range(len(tasks))
    # `evaluate` refuses tasks that were trained on; of those drawn, a short training may have played only a part.
    if not replicas:
        order = prompt_order(len(tasks), config.optimisation, config.seed, as_given=bool(config.env.curriculum))
    info = CheckpointInfo(
        arm=config.arm,
        train_seed=config.seed,
        start=config.policy,
        start_identity=store.digest(out.manifest.identity["policy"]),
        env=config.env.name,
        split=config.env.split,
        projected=config.probe.project if projected else None,
        task_ids=tuple(dict.fromkeys(tasks[index].task_id for index in order)),
    )
    out.document("checkpoint", info.model_dump(mode="json"))
    write_tables(out, trainer.state.global_step)
    logged = [row for row in trainer.state.log_history if "loss" in row]  # without transformers' totals at the end
    out.metrics(logged)
    rewards = [row["reward"] for row in logged if "reward" in row]
    out.count(planned=config.optimisation.steps, done=trainer.state.global_step, failed=0)
    out.set_summary(
        arm=config.arm, first_reward=rewards[0] if rewards else None, last_reward=rewards[-1] if rewards else None
    )
    # TRL's share of groups whose rewards have no spread: their advantages are 0, and so is their gradient.
    equal = bool(logged) and all(row.get("frac_reward_zero_std") == 1 for row in logged)
    out.set_summary(all_rewards_equal=equal)
    if projected:
        out.document("projection", projected)
        out.set_summary(projected=config.probe.project)
    rates, course_text = course(out, trainer.state.global_step)
    out.set_summary(**rates)
    nothing_learned = equal and config.weights.grpo > 0
    remarks = [
        *([NOTHING_LEARNED] if nothing_learned else []),
        *([NO_GRPO] if not config.weights.grpo else []),
        *config.diloco.warnings(config.optimisation.steps),
    ]
    if projected:
        remarks.append(TAKEN_OUT[config.probe.project])
    lines = "".join(f"\n{line}\n" for line in remarks)
    out.write_file("report.txt", training_table(config.arm, logged) + course_text + lines)


GRPO_COLUMNS = {"reward": "reward", "reward_std": "std", "loss": "loss", "grad_norm": "|grad|", "entropy": "entropy"}
"""Metric -> title."""


def training_table(arm: str, history: Sequence[Row], rows: int = 12) -> str:
    """Return a table of at most `rows` + 1 steps, evenly spaced, the last one included; only logged columns.

    history: what TRL logged, one object of metrics a step. The channels' columns come from the registry.
    """
    titles = dict(GRPO_COLUMNS)
    for name, channel in CHANNELS.items():
        titles[f"{name}/loss"] = name
        titles |= {f"{name}/{metric}": title for metric, title in channel.columns.items()}
    columns = [(metric, title) for metric, title in titles.items() if any(metric in row for row in history)]
    stride, last = max(len(history) / rows, 1.0), len(history) - 1
    picked = sorted({min(int(i * stride), last) for i in range(rows)} | {last}) if history else []
    widths = [max(10, len(title) + 1) for _, title in columns]
    header = "".join(f"{title:>{width}}" for (_, title), width in zip(columns, widths, strict=True))
    lines = [f"arm {arm}", f"{'step':>6}{header}"]
    for index in picked:
        line = f"{history[index].get('step', index + 1):>6}"
        for (metric, _), width in zip(columns, widths, strict=True):
            value = history[index].get(metric)
            line += f"{value:>{width}.4f}" if isinstance(value, (int, float)) else f"{'-':>{width}}"
        lines.append(line)
    return "\n".join(lines) + "\n"
