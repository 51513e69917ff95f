"""train: one arm, by GRPO on the environment's reward; channels with a weight add their losses to it.

Reads an environment, a model and, for channels on preference pairs, extracted pairs; writes a Hugging Face folder
(of an adapter alone, where one was trained), `checkpoint.json` (what `evaluate` needs to know of it), `metrics.jsonl`,
and as tables the rollouts that were played, their rewards, and the hints. Training resumes from its newest whole
checkpoint and then gives what an uninterrupted run gives. Under torchrun every process trains the same model on its
share of each step's rollouts, and the first one writes the run.
"""

import tempfile
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stages.backends import resources
from stages.backends.ranks import Ranks, join, world_size
from stages.errors import UsageError
from stages.policy import adapters
from stages.policy.serving import Serving
from stages.runs import reporting, store
from stages.runs.artifact import Inputs, Interrupted, RunWriter, Slot
from stages.runs.records import CHECKPOINT, DIRECTION, HINT, PAIR, ROLLOUT, STEP, TRAINING_REWARD
from stages.runs.stage import Plan, Stage
from stages.training import setup
from stages.training.channels import CHANNELS
from stages.training.config import Config
from stages.training.plan import Chosen, check_sharding, choose, processes_check
from stages.training.report import save

if TYPE_CHECKING:
    from stages.training.distributed import Sharded
    from stages.training.replicas import OuterSteps
    from stages.training.trainer import ComposedTrainer


def plan(inputs: Inputs, config: Config) -> Plan:
    """Steps and rollouts."""
    _check_pairs(inputs, config)
    processes_check(config.optimisation, config.trl, world_size())
    reporting.check(config.report_to)
    if config.trl:
        setup.arguments(config, Path(tempfile.gettempdir()))
    chosen = _chosen(config)
    check_sharding(config, chosen.adapter, world_size(), direction="direction" in inputs)
    size = config.optimisation
    rollouts = size.steps * size.prompts_per_step * size.generations
    return Plan(
        units=size.steps,
        what="steps",
        max_completion_tokens=rollouts * config.max_steps * config.policy.max_tokens,
        notes=(
            *chosen.notes(config.max_steps * config.policy.max_tokens),
            *config.diloco.oddities(size.steps),
        ),
    )


def _chosen(config: Config) -> Chosen:
    parts = (config.policy, config.optimisation, config.adapter, config.teacher, config.distribution)
    return choose(*parts, channels=bool(config.weights.active()))


def _check_pairs(inputs: Inputs, config: Config) -> None:
    """`UsageError` when pairs are needed and absent, or given and not needed."""
    on_pairs = [name for name, channel in CHANNELS.items() if channel.row_source == "pairs"]
    weights = config.weights.active()
    needing = [name for name in on_pairs if name in weights]
    if needing and "pairs" not in inputs:
        raise UsageError(
            f"weights.{needing[0]} is {weights[needing[0]]:g}, but no pairs were given. "
            "Add --from artifacts/extract-pairs/latest."
        )
    if "pairs" in inputs and not needing:
        *names, last = [f"weights.{name}" for name in on_pairs]
        raise UsageError(
            f"Pairs were given, but no channel uses them. Set {', '.join(names)} or {last}, or leave out --from."
        )


def run(inputs: Inputs, config: Config, out: RunWriter) -> None:
    """Train, or go on training, then save the model and the metrics; what `out` gets is the first process's to keep."""
    _check_pairs(inputs, config)
    ranks = join()
    processes_check(config.optimisation, config.trl, ranks.count)
    if ranks.count > 1 and config.diloco.store is not None:
        raise UsageError(
            f"diloco.store was given to {ranks.count} processes of one training, but a replica is one process. "
            "Leave out torchrun, or diloco.store."
        )
    reporting.check(config.report_to)
    from stages.policy.local import LocalPolicy, device, load_model
    from stages.training import replicas, served
    from stages.training import served as servers
    from stages.training.setup import seeded

    chosen = _chosen(config)
    config = config.model_copy(update={"optimisation": chosen.optimisation, "adapter": chosen.adapter})
    check_sharding(config, chosen.adapter, ranks.count, direction="direction" in inputs)
    if "direction" in inputs and chosen.adapter.rank:
        raise UsageError(
            "A direction is taken out of the training of all weights, but an adapter is trained here. "
            "Set adapter.rank=0."
        )
    if chosen.optimisation.beta and not chosen.adapter.rank:
        adapters.require_folder(config.policy)
    setup.arguments(config, out.path)
    on = device(config.policy.device)
    chosen.check(config.max_steps * config.policy.max_tokens, on)
    if on == "cpu" and not chosen.small:
        resources.set_mmap_threshold()
    served.check(config.policy, config.adapter, replicas=config.diloco.store is not None)
    sampled = servers.address(config.policy, config.distribution, chosen.optimisation.max_staleness, ranks)
    tasks = config.draw(config.opener(), config.tasks)  # refuses before a model is made or loaded
    replica = replicas.join(config.diloco, out)
    own = config if replica is None else config.model_copy(update={"seed": replica.seed(config.seed)})
    rank, here = config.adapter.rank or 0, config.policy.held_here()
    with (
        Serving(out, [config.policy], rank=rank) as serving,
        ranks.naming_lost_peers(),
        seeded(own.seed, config.optimisation.threads),
    ):
        place = servers.place(sampled, ranks)
        sampler = place.in_turn(lambda: serving.open(sampled)) if sampled.served else None
        model, tokenizer = load_model(here, cache=out.cache, listener=out.progress)
        mixed, sharded = _masters(model, config, ranks)
        policy = LocalPolicy(model.eval(), tokenizer, here)
        out.model("policy", **(sampler or policy).facts(), training={**chosen.facts(), "processes": ranks.count})
        folder = ranks.broadcast_from_rank0(lambda: out.scratch("trainer"))
        outer = None if replica is None else replicas.OuterSteps(replica, out, folder)
        with reporting.backend_folders(config.report_to, out.path / "logs"):
            trainer = setup.trainer(
                setup.Job(inputs, own, out, policy, sampler, tasks, folder, mixed, place, outer, sharded)
            )
            if sharded is None:
                ranks.broadcast_weights(policy.model.parameters())
            else:
                sharded.scatter()
            try:
                _fit(trainer, folder, ranks, outer)
            finally:
                trainer.end_rollouts()
        whole = None if sharded is None else sharded.weights()
        if ranks.first:
            save(trainer, policy, config, tasks, out, whole)
        if outer is not None:
            outer.report()


def _masters(model: Any, config: Config, ranks: Ranks) -> "tuple[bool, Sharded | None]":
    """Float32 weights for whatever learns: whether they compute under bfloat16, and the shares that they are cut in."""
    from stages.training import distributed

    if config.distribution.sharding == "none" or ranks.count == 1:
        return distributed.masters(model, adapter=bool(config.adapter.rank)), None
    from stages.training.distributed import Sharded

    mixed = model.dtype in distributed.HALF
    return mixed, Sharded(model, ranks, mixed=mixed)


def _fit(trainer: "ComposedTrainer", folder: Path, ranks: Ranks, outer: "OuterSteps | None") -> None:
    """Train from the newest whole checkpoint; `Interrupted` when somebody asked to stop before the last step."""
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
