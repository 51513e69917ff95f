"""The trainer of a training, put together: arguments, journal, pairs, channels, rollouts, callbacks."""

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stages.backends.ranks import launched
from stages.envs.base import Task
from stages.policy import adapters
from stages.runs.artifact import Out
from stages.runs.inputs import Inputs
from stages.training.channels import CHANNELS
from stages.training.config import Config

if TYPE_CHECKING:
    from trl.trainer.grpo_config import GRPOConfig

    from stages.policy.local import LocalPolicy
    from stages.training.composed import ComposedTrainer
    from stages.training.outer_steps import OuterSteps
    from stages.training.servers import Place
    from stages.training.sharding import Sharded

TRUNCATED = {"vllm_importance_sampling_mode": "token_truncate"}
"""How TRL corrects for the policy of a server unless asked otherwise: weights of tokens, cut off above."""


@dataclass(frozen=True)
class Job:
    """What a trainer is made of.

    sampler: the policy behind a server that plays instead of `policy`, None without one. folder: for checkpoints to
    resume from. mixed: whether float32 weights compute under bfloat16 autocast. place: this process among those of the
    training. outer: the meetings of replicas.
    sharded: the model cut into shares, None where every process trains all of it.
    """

    inputs: Inputs
    config: Config
    out: Out
    policy: "LocalPolicy"
    sampler: Any
    tasks: list[Task]
    folder: Path
    mixed: bool
    place: "Place"
    outer: "OuterSteps | None"
    sharded: "Sharded | None" = None


def arguments(config: Config, folder: Path, mixed: bool = False) -> "GRPOConfig":
    """TRL's configuration; `mixed`: float32 weights compute under bfloat16 autocast."""
    from stages.policy.local import device
    from stages.training.setup import trl_config

    return trl_config(
        str(folder),
        config.optimisation,
        seed=config.seed,
        temperature=config.policy.temperature,
        max_completion=config.max_steps * config.policy.max_tokens,
        device=device(config.policy.device),
        mixed=mixed,
        processes=launched(),
        report_to=config.report_to,
        run_name=config.label(),
        more=(TRUNCATED if config.policy.served else {}) | config.trl,
    )


def trainer(job: Job) -> "ComposedTrainer":
    """A trainer that has not begun; `BadInput` and `UsageError` where pairs, teacher or server do not fit the model."""
    from stages.training import precision, served, setup
    from stages.training.channels.active import Channels
    from stages.training.checkpoints import Supervision
    from stages.training.composed import ComposedTrainer
    from stages.training.journal import TrainingJournal
    from stages.training.kept import KeptCheckpoints
    from stages.training.projection import projection
    from stages.training.rollouts import Rollouts
    from stages.training.sharded_trainer import ShardedTrainer

    config, out, policy, ranks = job.config, job.out, job.policy, job.place.ranks
    make, size = config.opener(), config.optimisation
    environment = make()
    journal = TrainingJournal(out, job.sampler or policy, environment.sandbox)
    extracted = job.inputs.optional("pairs")
    source = None
    if extracted is not None:
        source = setup.load_pairs(extracted, config.pairs, policy.tokenizer, seed=config.seed, out=out)
    if job.sharded is not None:
        job.sharded.gather()  # for whoever looks at the weights before the first step
    if source is not None and any(CHANNELS[name].needs_reference for name in config.weights.active()):
        with precision.autocast(policy.model, job.mixed):
            source.cache_reference(policy.model, ranks=ranks)
    teacher = setup.load_teacher(config.teacher, policy, out) if config.teacher else None
    asked = teacher if config.teacher and config.teacher.served else None
    channels = Channels(
        config.weights,
        config.pairs,
        config.hints,
        source=source,
        teacher=None if asked else teacher,
        temperature=config.policy.temperature,
        num_steps=size.steps,
        taid=config.taid,
        eopd=config.eopd,
    )
    rollouts = Rollouts(
        make,
        {task.task_id: task for task in job.tasks},
        seed=config.seed,
        max_steps=config.max_steps,
        before_turn=lambda: None,
        record=journal.rollouts,
        ranks=ranks,
    )
    follows = None
    if job.sampler is not None:
        opening = environment.reset(job.tasks[0])
        follows = served.rollouts(rollouts, job.sampler, policy, opening, size, out, job.place)
    kind = ComposedTrainer if job.sharded is None else partial(ShardedTrainer, sharded=job.sharded)
    return kind(
        policy=policy,
        rollouts=rollouts,
        served=follows,
        channels=channels,
        channel_rows=setup.channel_rows(channels, config.hints, source, policy, environment, out, journal.hints, asked),
        gradient_cosine_every=size.gradient_cosine_every,
        shared_prompts=size.shared_prompts,
        max_tokens=size.max_tokens_per_micro_batch,
        ranks=ranks,
        args=arguments(config, job.folder, job.mixed),
        train_dataset=setup.task_dataset(job.tasks, make, size, config.seed, as_given=bool(config.env.curriculum)),
        callbacks=[
            *([] if job.outer is None else [job.outer]),
            Supervision(out, channels, job.folder, ranks),
            *(
                [KeptCheckpoints(out, policy, base(config, policy), size.keep_every, job.sharded)]
                if size.keep_every
                else []
            ),
            *(
                projection(config.probe.project, run, policy.model, config.seed, out)
                for run in job.inputs.many("direction")
            ),
        ],
        peft_config=setup.lora(config.adapter, policy.model),
    )


def base(config: Config, policy: "LocalPolicy") -> adapters.Base | None:
    """What an adapter's checkpoint says of its base; None where all weights are trained."""
    return adapters.describe(config.policy.held_here(), policy.model) if config.adapter.rank else None
