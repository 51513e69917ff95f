"""A training's trainer, put together from its plan: journal, pairs, teacher, channels, rollouts, callbacks."""

from pathlib import Path
from typing import Any

from stages.envs.base import Task
from stages.policy.local import LocalPolicy
from stages.runs.artifact import Inputs, RunWriter
from stages.training import distributed, served
from stages.training.channels import CHANNELS
from stages.training.checkpoints import KeptCheckpoints, Supervision, adapter_base
from stages.training.distributed import Sharded, ShardedTrainer
from stages.training.plan import TrainPlan
from stages.training.projection import projection
from stages.training.replicas import OuterSteps
from stages.training.rollouts import Rollouts, TrainingJournal
from stages.training.served import SharedServer
from stages.training.setup import load_pairs, load_teacher, lora, task_dataset, trl_arguments
from stages.training.step import Channels, ComposedTrainer, channel_rows


def build_trainer(
    plan: TrainPlan,
    inputs: Inputs,
    out: RunWriter,
    *,
    policy: LocalPolicy,
    sampler: Any,
    tasks: list[Task],
    folder: Path,
    server: SharedServer,
    mixed: bool,
    sharded: Sharded | None,
    outer: OuterSteps | None,
) -> ComposedTrainer:
    """Return a trainer that has not begun; `BadInput` and `UsageError` where pairs, teacher or server do not fit.

    sampler: the policy behind a server that samples instead of `policy`, None without one. folder: of checkpoints to
    resume from. server: how this process shares it. mixed: whether float32 weights compute under bfloat16
    autocast. sharded: the model cut into shares, None where every process trains all of it. outer: DiLoCo's rounds.
    """
    config, ranks = plan.config, server.ranks
    make, size = config.opener(), config.optimisation
    environment = make()
    journal = TrainingJournal(out, sampler or policy, environment.sandbox)
    source = None
    if (pairs := inputs.optional("pairs")) is not None:
        source = load_pairs(pairs, config.pairs, policy.tokenizer, seed=config.seed, out=out)
    if sharded is not None:
        sharded.gather()  # for all that reads weights before the first step
    if source is not None and any(CHANNELS[name].needs_reference for name in config.weights.active()):
        with distributed.autocast(policy.model, mixed):
            source.cache_reference(policy.model, ranks=ranks)
    teacher = load_teacher(config.teacher, policy, out) if config.teacher else None
    served_teacher = teacher if config.teacher and config.teacher.served else None
    channels = Channels(
        config.weights,
        config.pairs,
        config.hints,
        source=source,
        teacher=None if served_teacher else teacher,
        temperature=config.policy.temperature,
        num_steps=size.steps,
        taid=config.taid,
        eopd=config.eopd,
    )
    rollouts = Rollouts(
        make,
        {task.task_id: task for task in tasks},
        seed=config.seed,
        max_steps=config.max_steps,
        before_turn=lambda: None,
        record=journal.rollouts,
        ranks=ranks,
    )
    from_server = None
    if sampler is not None:
        opening = environment.reset(tasks[0])
        from_server = served.rollouts(rollouts, sampler, policy, opening, size, out, server)
    callbacks: list[Any] = [] if outer is None else [outer]  # before Supervision, which marks a checkpoint as whole
    callbacks.append(Supervision(out, channels, folder, ranks))
    if size.keep_every:
        callbacks.append(KeptCheckpoints(out, policy, adapter_base(config, policy), size.keep_every, sharded))
    callbacks += [
        projection(config.probe.project, run, policy.model, config.seed, out) for run in inputs.many("direction")
    ]
    parts: dict[str, Any] = {
        "policy": policy,
        "rollouts": rollouts,
        "served": from_server,
        "channels": channels,
        "channel_rows": channel_rows(
            channels, config.hints, source, policy, environment, out, journal.hints, served_teacher
        ),
        "gradient_cosine_every": size.gradient_cosine_every,
        "shared_prompts": size.shared_prompts,
        "max_tokens": size.max_tokens_per_micro_batch,
        "ranks": ranks,
        "args": trl_arguments(plan, folder, mixed),
        "train_dataset": task_dataset(tasks, make, size, config.seed, as_given=bool(config.env.curriculum)),
        "callbacks": callbacks,
        "peft_config": lora(config.adapter, policy.model),
    }
    return ComposedTrainer(**parts) if sharded is None else ShardedTrainer(sharded=sharded, **parts)
