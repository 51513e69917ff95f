"""train: one arm, by GRPO on the environment's reward; channels with a weight add their losses to it.

Reads an environment, a model and, for channels on preference pairs, extracted pairs; writes a Hugging Face folder
(of an adapter alone, where one was trained), `checkpoint.json` (what `evaluate` needs to know of it), `metrics.jsonl`,
and as tables the rollouts that were played, their rewards, and the hints. Training resumes from its newest complete
checkpoint and then gives what an uninterrupted run gives. Under torchrun every process trains the same model on its
share of each step's rollouts, and the first one writes the run.
"""

import tempfile
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from stages.backends import resources
from stages.backends.ranks import Ranks, join, world_size
from stages.errors import UsageError
from stages.policy import adapters
from stages.policy.serving import Serving
from stages.runs import reporting, store
from stages.runs.artifact import Inputs, Interrupted, RunWriter, Slot
from stages.runs.records import CHECKPOINT, DIRECTION, HINT, PAIR, ROLLOUT, STEP, TRAINING_REWARD
from stages.runs.stage import Plan, Stage
from stages.training.config import Config
from stages.training.plan import available, check_memory, resolve

if TYPE_CHECKING:
    from stages.training.replicas import OuterSteps
    from stages.training.step import ComposedTrainer


def plan(inputs: Inputs, config: Config) -> Plan:
    """Plan the steps and their rollouts; refuses what the settings alone show to be impossible."""
    resolved = resolve(config, world_size(), inputs)
    if config.trl:
        from stages.training.setup import trl_arguments

        trl_arguments(resolved, Path(tempfile.gettempdir()))
    size = config.optimisation
    rollouts = size.steps * size.prompts_per_step * size.generations
    return Plan(
        units=size.steps,
        what="steps",
        max_completion_tokens=rollouts * resolved.episode,
        notes=(*resolved.notes(), *config.diloco.warnings(size.steps)),
    )


def run(inputs: Inputs, config: Config, out: RunWriter) -> None:
    """Train, or resume training, then save the model and the metrics; the first process alone writes to `out`."""
    ranks = join()
    resolved = resolve(config, ranks.count, inputs)
    from stages.policy.local import LocalPolicy, load_model
    from stages.training import replicas, served
    from stages.training.distributed import trainable
    from stages.training.report import save
    from stages.training.setup import seeded, trl_arguments
    from stages.training.trainer import build_trainer

    # Refuse what cannot be trained before a model is made or loaded.
    config = resolved.config
    if config.optimisation.beta and not config.adapter.rank and adapters.is_adapter(config.policy.model):
        # TRL would load the adapter's base as the reference of the KL penalty.
        raise UsageError(
            f"optimisation.beta needs a reference, and {config.policy.model} is an adapter, which lies in no folder of "
            "its own once merged. Set adapter.rank, or run `composer export merged` and start from the merged folder."
        )
    trl_arguments(resolved, out.path)
    check_memory(resolved, available(resolved.device))
    if resolved.device == "cpu" and not resolved.small:
        resources.set_mmap_threshold()
    served.check(config.policy, config.adapter, replicas=config.diloco.store is not None)
    sampled = served.address(config.policy, config.distribution, config.optimisation.max_staleness, ranks)
    tasks = config.draw(config.opener(), config.tasks)

    replica = replicas.join(config.diloco, out)
    if replica is not None:
        own_seed = {"seed": replica.seed(config.seed)}  # of prompts, pairs and rollouts
        resolved = replace(resolved, config=config.model_copy(update=own_seed))
    local = config.policy.in_process()
    with (
        Serving(out, [config.policy], rank=config.adapter.rank or 0) as serving,
        ranks.naming_lost_peers(),
        seeded(resolved.config.seed, config.optimisation.threads),
    ):
        server = served.shared_server(sampled, ranks)
        sampler = server.in_turn(lambda: serving.open(sampled)) if sampled.served else None
        model, tokenizer = load_model(local, cache=out.cache, listener=out.progress)
        mixed, sharded = trainable(model, resolved, ranks)
        policy = LocalPolicy(model.eval(), tokenizer, local)
        out.model("policy", **(sampler or policy).facts(), training={**resolved.facts(), "processes": ranks.count})
        folder = ranks.broadcast_from_rank0(lambda: out.scratch("trainer"))
        outer = None if replica is None else replicas.OuterSteps(replica, out, folder)
        with reporting.backend_folders(config.report_to, out.path / "logs"):
            trainer = build_trainer(
                resolved,
                inputs,
                out,
                policy=policy,
                sampler=sampler,
                tasks=tasks,
                folder=folder,
                server=server,
                mixed=mixed,
                sharded=sharded,
                outer=outer,
            )
            if sharded is None:
                ranks.broadcast_weights(policy.model.parameters())
            else:
                sharded.scatter()
            try:
                _fit(trainer, folder, ranks, outer)
            finally:
                if trainer.served is not None:
                    trainer.served.end()
        weights = None if sharded is None else sharded.weights()
        if ranks.first:
            save(trainer, policy, config, tasks, out, weights)
        if outer is not None:
            outer.report()


def _fit(trainer: "ComposedTrainer", folder: Path, ranks: Ranks, outer: "OuterSteps | None") -> None:
    """Train from the newest complete checkpoint; `Interrupted` when a stop was requested before the last step."""
    from stages.training.checkpoints import MARKER, newest
    from stages.training.replicas import Over

    start = ranks.broadcast_from_rank0(lambda: newest(folder))
    if start is not None:
        trainer.channels.load(store.read_json(start / MARKER)["channels"], start)
    with suppress(Over):
        trainer.train(resume_from_checkpoint=str(start) if start else None)
    if not (outer.finished if outer else trainer.state.global_step >= trainer.args.max_steps):
        raise Interrupted


STAGE = Stage(
    name="train",
    version=1,
    config=Config,
    inputs={"pairs": Slot(PAIR, optional=True), "direction": Slot(DIRECTION, optional=True)},
    outputs={
        "checkpoint": CHECKPOINT,
        "rollouts": ROLLOUT,
        "steps": STEP,
        "training_rewards": TRAINING_REWARD,
        "hints": HINT,
    },
    plan=plan,
    run=run,
    shows_progress=True,
    several_processes=True,
    preload=("stages.training.trainer",),
)
