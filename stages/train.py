"""train: one arm, by GRPO on the environment's reward; channels with a weight add their losses to it.

Reads an environment, a model (of the settings, or of a run of `composer probe start`), the tasks of a curriculum where
one is given, and, for channels on preference pairs, extracted pairs; writes a Hugging Face folder (of an adapter alone,
where one was trained), `checkpoint.json` (what `evaluate` needs to know of it), `metrics.jsonl`, and as tables the
rollouts that were played, their rewards, and the hints. Training resumes from its newest complete checkpoint and then
gives what an uninterrupted run gives. Under torchrun every process trains the same model on its share of each step's
rollouts, and the first one writes the run.
"""

import tempfile
from collections.abc import Iterator
from contextlib import closing, contextmanager, nullcontext, suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stages import envs
from stages.backends import resources
from stages.backends.ranks import Ranks, join, world_size
from stages.envs.base import Task
from stages.errors import ComposerError, UsageError
from stages.policy import available
from stages.policy.base import VLLM, NotFinite
from stages.policy.serving import Serving
from stages.runs import reporting, store
from stages.runs.activity import Checking, activity
from stages.runs.kinds import (
    CHECKPOINT,
    DIFFICULTY,
    DIRECTION,
    HINT,
    PAIR,
    ROLLOUT,
    ROLLOUT_GRADIENT,
    START,
    STEP,
    TRAINING_REWARD,
)
from stages.runs.run import Inputs, RunWriter, Slot
from stages.runs.stage import Plan, Stage
from stages.stopping import Interrupted
from stages.training.channels import row_sources
from stages.training.config import Config
from stages.training.memory import check_memory, choose_passes, describe_plan, estimate_memory, room, unused
from stages.training.model_facts import ASSUMED, Prompts, measure_prompts
from stages.training.plan import resolve

if TYPE_CHECKING:
    from stages.rollouts.agent_loop import LiveRollout
    from stages.training.collapse import Watch
    from stages.training.distributed import Student
    from stages.training.plan import TrainPlan
    from stages.training.replicas import OuterSteps
    from stages.training.report import TrainingJournal
    from stages.training.rollouts import Rollouts
    from stages.training.step import ComposedTrainer
    from stages.training.weights import SharedServer


def plan(inputs: Inputs, config: Config) -> Plan:
    """Plan the steps and their rollouts; refuses settings that contradict each other."""
    config = _with_runs(inputs, config)
    resolved = resolve(config, world_size(), inputs, _longest_row(inputs))
    if resolved.shape is not None and not resolved.small:
        resolved = choose_passes(resolved, _foreseen(config), unused(resolved))
    if config.trl:
        from stages.training.trl_arguments import trl_arguments

        trl_arguments(resolved, Path(tempfile.gettempdir()))
    size = config.optimisation
    rollouts = size.steps * size.prompts_per_step * size.generations
    if config.hints.source == "template":
        # Whether the environment's hints can be checked is known once it is made, which a plan does not.
        rollouts += 2 * config.answers_to_check_hints()
    return Plan(
        units=size.steps,
        what="steps",
        max_completion_tokens=rollouts * resolved.rollout_tokens,
        notes=(*describe_plan(resolved), *config.diloco.warnings(size.steps)),
    )


def _foreseen(config: Config) -> Prompts:
    """Return the lengths of the prompts, measured where no foreign code is executed and no tokenizer fetched for it."""
    policy, name = config.policy.in_process(), config.env.name
    if not envs.is_shipped(name) or config.env.curriculum or not available.tokenizer_is_here(policy):
        return ASSUMED
    from stages.policy.local import open_tokenizer

    tokenizer = open_tokenizer(policy, listener=lambda action, done, total: None)
    environment = envs.load(name, config.env_options())
    return measure_prompts(environment, config.draw(lambda: environment, config.tasks), tokenizer, policy.tool_calls)


def _with_runs(inputs: Inputs, config: Config) -> Config:
    """Return the settings with the model of the run that training starts from and a curriculum, where they are given.

    `UsageError` for two curricula.
    """
    if (start := inputs.optional("start")) is not None:
        model = f"{VLLM if config.policy.served else ''}{start.folder(START)}"
        config = config.model_copy(update={"policy": config.policy.model_copy(update={"model": model})})
    if (start := inputs.optional("curriculum")) is not None:
        if config.env.curriculum:
            raise UsageError(
                f"env.curriculum is {config.env.curriculum}, and --from gives {start.path}. Give one of them."
            )
        config = config.model_copy(update={"env": config.env.model_copy(update={"curriculum": str(start.path)})})
    return config


def _longest_row(inputs: Inputs) -> int:
    """Return the tokens of the longest row of the direction's pairs; 0 where no direction is given."""
    if (direction := inputs.optional("direction")) is None:
        return 0
    from stages.training.projection import PAIRS

    pairs = store.read_json(direction.folder() / PAIRS)
    return max(len(row["prompt_ids"]) + len(row["completion_ids"]) for pair in pairs for row in pair)


def run(inputs: Inputs, config: Config, out: RunWriter) -> None:
    """Train, or resume training, then save the model and the metrics; the first process alone writes to `out`."""
    ranks, config = join(), _with_runs(inputs, config)
    resolved = resolve(config, ranks.count, inputs, _longest_row(inputs))
    make = config.opener()
    tasks = config.draw(make, config.tasks, out)
    with activity(Checking("importing the libraries of training")):
        from stages.arms.hint_check import check_hints
        from stages.policy.local import checkpointed, load_model, open_tokenizer
        from stages.training import collapse, projection, replicas, report, scoring, trl_arguments, weights
        from stages.training.distributed import Student
        from stages.training.rollouts import prompt_order

    # Refuse what cannot be trained before a model is loaded.
    if resolved.shape is not None and not resolved.small:
        sampled = config.policy.in_process()
        tokenizer = open_tokenizer(sampled, listener=out.progress)
        with activity(Checking("measuring the prompts")):
            measured = measure_prompts(make(), tasks, tokenizer, sampled.tool_calls)
        resolved = _agree_on_passes(resolved, measured, out, ranks)
    config = resolved.config
    trl_arguments.trl_arguments(resolved, out.path)
    check_memory(resolved, room(resolved))
    if resolved.device == "cpu" and not resolved.small:
        resources.choose_allocation(keep=resources.SPARE * estimate_memory(resolved).total <= (unused(resolved) or 0))
    sampled = resolved.sampled_by(ranks.rank)

    replica = replicas.join(config.diloco, out)
    if replica is not None:
        own_seed = {"seed": config.seed + replicas.SEEDS_APART * replica.number}
        resolved = replace(resolved, config=config.model_copy(update=own_seed))
    with (
        Serving(out, [config.policy], rank=config.adapter.rank, loras=1 + config.optimisation.max_staleness) as serving,
        ranks.naming_lost_peers(),
        _seeded(resolved.config.seed, config.optimisation.threads),
    ):
        server = weights.shared_server(sampled, ranks)
        sampler = server.in_turn(lambda: serving.open(sampled)) if sampled.served else None
        if sampled.served and sampled.base_url is None:
            check_memory(resolved, room(resolved, started=True))  # the server's share was an estimate until it started
        opened, run = config.policy.in_process(), inputs.optional("direction")
        spread = resolved.sharded and run is None  # else all weights are in one place, to find the direction from
        model, tokenizer = load_model(
            opened.model_copy(update={"device": "cpu"}) if spread else opened,
            listener=out.progress,
            empty=spread and not ranks.first,
        )
        direction = None
        if run is not None:
            model.eval()
            with checkpointed(model) if config.optimisation.gradient_checkpointing else nullcontext():
                direction = projection.weight_direction(model, store.read_json(run.folder() / projection.PAIRS))
        student = Student.prepare(model, tokenizer, resolved, ranks)
        if config.weights.active() or config.optimisation.shared_prompts:  # before the model gets an adapter
            student.score(lambda: scoring.require_head(model, config.policy.model))
        out.model(
            "policy", **(sampler or student.policy).facts(), training={**resolved.facts(), "processes": ranks.count}
        )
        folder = ranks.broadcast_from_rank0(lambda: out.scratch("trainer"))
        outer = None if replica is None else replicas.OuterSteps(replica, out, folder)
        curriculum = bool(config.env.curriculum)
        order = prompt_order(len(tasks), config.optimisation, resolved.config.seed, as_given=curriculum)
        prompts = [tasks[index] for index in order]
        # What follows, up to `distribute`, reads the weights that training starts from, without an adapter.
        hints = check_hints(resolved.config, student, tasks, out)
        with reporting.backend_folders(config.report_to, out.path / "logs"):
            rollouts, journal = _rollouts(resolved, out, student, prompts, sampler, server)
            size = config.optimisation
            num_rollouts = size.prompts_per_step * size.generations
            watch = collapse.Watch(out, num_rollouts, ranks, stop=size.stop_on_collapse, ordered=curriculum)
            with activity("preparing the trainer"):
                trainer = _assemble(
                    resolved, inputs, out, student, prompts, rollouts, journal, folder, outer, direction, watch
                )
                student.model = trainer.model
                student.distribute()
            try:
                steps = _fit(trainer, folder, out, ranks, outer, watch)
            finally:
                rollouts.close()
        out.checkpoint(student.save)  # in all processes, each of which may hold a share
        if ranks.first:
            # Replicas draw from the same tasks, each in an order of its own.
            report.save(trainer, config, prompts if replica is None else tasks, out, watch.collapsed(steps), hints)
        if outer is not None:
            outer.report()


def _agree_on_passes(resolved: "TrainPlan", prompts: Prompts, out: RunWriter, ranks: Ranks) -> "TrainPlan":
    """Return the plan with passes that fit into the memory of every process, the same in all.

    Where they still fit they are those of the attempt before: a resumed run then rounds as it did.
    """
    free = min(
        (unused_bytes for unused_bytes in ranks.gather(unused(resolved)) if unused_bytes is not None), default=None
    )
    chosen = choose_passes(resolved, prompts, free)

    def agreed() -> dict[str, Any]:
        path = out.scratch("passes") / "chosen.json"
        if path.is_file():
            before = chosen.changed(optimisation=store.read_json(path))
            if free is None or estimate_memory(before).total <= free:
                return before.passes()
        store.write_json(path, chosen.passes())
        return chosen.passes()

    return chosen.changed(optimisation=ranks.broadcast_from_rank0(agreed))


@contextmanager
def _seeded(seed: int, threads: int | None) -> Iterator[None]:
    """Seed torch and set the number of CPU threads (None: those of `resources.use_own_cores`), by which sums round.

    Unlike `benchmarks.kata_models.reproducible`, which is for models of seconds on one CPU thread, it forbids no
    kernel without a deterministic form: models of any size are trained here, on GPUs too, where some have none.
    """
    import torch

    before = torch.get_num_threads()
    torch.manual_seed(seed)
    resources.use_own_cores() if threads is None else torch.set_num_threads(threads)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _rollouts(
    resolved: "TrainPlan",
    out: RunWriter,
    student: "Student",
    prompts: list[Task],
    sampler: Any,
    server: "SharedServer",
) -> "tuple[Rollouts, TrainingJournal]":
    """Return what plays the rollouts, the model under training or a server that follows it, and what records them.

    prompts: tasks of all prompts of the training, in order. sampler: the policy behind a server that samples instead of
    the student, None without one. server: how this process shares it. `UsageError` where the server cannot follow.
    """
    from stages.rollouts.agent_loop import Rules
    from stages.rollouts.history import FULL
    from stages.training import trl_arguments, weights
    from stages.training.channels.rollouts import open_teacher
    from stages.training.report import TrainingJournal
    from stages.training.rollouts import LockStep, RolloutQueue, Schedule

    config = resolved.config
    make, size = config.opener(), config.optimisation
    with closing(make()) as environment:
        sandbox, opening = environment.sandbox, [] if sampler is None else environment.reset(prompts[0])
    reuse = trl_arguments.trl_arguments(resolved, out.path).num_iterations
    schedule = Schedule(prompts, size.prompts_per_step, size.generations, config.seed, server.ranks, reuse)
    if sampler is None:
        teacher = None
        if config.probe.mixed and config.teacher is not None:  # without one the settings are refused
            teacher = open_teacher(config.teacher, "teacher", student, out)
        rollouts = LockStep(make, student.policy, schedule, config.max_steps, config.limits, config.in_flight, teacher)
        return rollouts, TrainingJournal(out, student.policy, sandbox, teacher, size.generations)
    sync = weights.weight_sync(sampler, student, opening, config, out, server)
    journal, alone = TrainingJournal(out, sampler, sandbox), server.ranks.count == 1
    queue = RolloutQueue(
        make,
        sampler,
        schedule,
        sync,
        rules=Rules.of(sampler, config.max_steps, config.limits, FULL),
        in_flight=config.in_flight,
        max_staleness=size.max_staleness,
        journal=journal if alone else None,
        # A signal reaches the processes at different times: several agree on a stop at the end of a step.
        check=out.raise_if_stopped if alone else lambda: None,
    )
    return queue, journal


def _assemble(
    resolved: "TrainPlan",
    inputs: Inputs,
    out: RunWriter,
    student: "Student",
    prompts: list[Task],
    rollouts: "Rollouts",
    journal: "TrainingJournal",
    folder: Path,
    outer: "OuterSteps | None",
    direction: dict[str, Any] | None,
    watch: "Watch",
) -> "ComposedTrainer":
    """Return a trainer that has not begun; `BadInput` and `UsageError` where pairs or teacher do not fit.

    prompts: tasks of all prompts of the training, in order. folder: of checkpoints to resume from. outer: DiLoCo's
    rounds. direction: what is taken out of the training. watch: notices a collapse.
    """
    from stages.gradients.per_row import MAX_TOKENS
    from stages.training import checkpoints, distributed, projection, step, trl_arguments
    from stages.training.channels.base import SourceInputs
    from stages.training.rollout_gradients import RolloutGradients

    config, policy, ranks = resolved.config, student.policy, student.ranks
    size, environment = config.optimisation, config.opener()()
    measured = None
    if config.probe.mixed or (direction is not None and config.probe.measure):
        toward = direction if direction is not None and config.probe.measure else {}
        max_tokens = size.max_tokens_per_micro_batch or MAX_TOKENS
        measured = RolloutGradients(student, toward, size.generations, max_tokens, out)

    def record(step: int, rollouts: list["LiveRollout"]) -> None:
        journal.rollouts(step, rollouts)
        if measured is not None:
            measured.record(step, rollouts)

    # 1. The channels with their row sources, from the model that training starts from, without an adapter.
    source_inputs = SourceInputs(config, inputs, student, environment, prompts, out, journal.hints)
    channels = step.Channels(config, [kind.open(source_inputs) for kind in row_sources(config.weights.active())])
    # 2. Callbacks. DiLoCo's precedes Supervision, which marks a checkpoint as complete once the others have written.
    callbacks: list[Any] = [watch] if outer is None else [watch, outer]
    callbacks.append(checkpoints.Supervision(out, channels, rollouts, folder, ranks))
    if size.keep_every:
        callbacks.append(checkpoints.KeptCheckpoints(out, student, size.keep_every))
    if direction is not None:
        callbacks.append(projection.ProjectionCallback(direction, config.probe, config.seed, out))
    parts: dict[str, Any] = {
        "policy": policy,
        "rollouts": rollouts,
        "record": record,
        "true_ratios": config.probe.mixed == "ratio",
        "channels": channels,
        "rows": channels.rows,
        "gradient_cosine_every": size.gradient_cosine_every,
        "shared_prompts": bool(size.shared_prompts),
        "max_tokens": size.max_tokens_per_micro_batch,
        "ranks": ranks,
        "args": trl_arguments.trl_arguments(resolved, folder, student.mixed),
        "callbacks": callbacks,
        "peft_config": trl_arguments.lora(config.adapter, policy.model),
    }
    if student.sharded is None:
        return step.ComposedTrainer(**parts)
    in_shares = distributed.TrainerInStep if config.adapter.rank else distributed.ShardedTrainer
    return in_shares(sharded=student.sharded, **parts)


def _fit(
    trainer: "ComposedTrainer", folder: Path, out: RunWriter, ranks: Ranks, outer: "OuterSteps | None", watch: "Watch"
) -> int:
    """Train from the newest complete checkpoint; return the steps that the model was trained by.

    `Interrupted` when a stop was requested before the last step. A training that `watch` stopped has the model of the
    newest checkpoint from before it left its course. `ComposerError` where loss, gradient or weights stop being finite.
    """
    from stages.training.checkpoints import newest, steps_of
    from stages.training.replicas import AllRoundsDone

    start = ranks.broadcast_from_rank0(lambda: newest(folder, out))
    if start is not None:
        seal = store.read_json(start / store.SEAL)
        trainer.channels.load(seal["channels"], start)
        if (count := len(seal["rollouts"])) != ranks.count and any(seal["rollouts"]):
            raise UsageError(
                f"{start.name} was made with {count} processes, each of which had rollouts under way "
                f"(optimisation.max_staleness), and {ranks.count} would go on. Resume with {count}."
            )
        trainer.rollouts.load(seal["rollouts"][ranks.rank] if count == ranks.count else None)
    try:
        with suppress(AllRoundsDone):
            trainer.train(resume_from_checkpoint=str(start) if start else None)
    except NotFinite as error:
        good = newest(folder, out) if ranks.first else None
        last_checkpoint = f"The last good checkpoint is {good}" if good else "No checkpoint was made before"
        raise ComposerError(
            f"The training ended in step {watch.step}: {error} {last_checkpoint}. "
            "Lower optimisation.learning_rate, or train another model; with the same settings --resume ends alike."
        ) from error
    if watch.stopped:
        good = ranks.broadcast_from_rank0(lambda: newest(folder, out, watch.good))
        if good is None:
            raise RuntimeError("a checkpoint was made after the first steps, and there is none")
        trainer._load_from_checkpoint(str(good))
        return steps_of(good)
    if not (outer.finished if outer else trainer.state.global_step >= trainer.args.max_steps):
        raise Interrupted
    return trainer.state.global_step


STAGE = Stage(
    name="train",
    version=3,
    example="""\
>>> plan = composer.train.plan(policy="Qwen/Qwen3-8B", optimisation={"steps": 10})
>>> plan.units, plan.what
(10, 'steps')""",
    config=Config,
    inputs={
        "pairs": Slot(PAIR, optional=True),
        "direction": Slot(DIRECTION, optional=True),
        "start": Slot(START, optional=True),
        "curriculum": Slot(DIFFICULTY, optional=True),
    },
    outputs={
        "checkpoint": CHECKPOINT,
        "rollouts": ROLLOUT,
        "steps": STEP,
        "training_rewards": TRAINING_REWARD,
        "hints": HINT,
        "rollout_gradients": ROLLOUT_GRADIENT,
    },
    plan=plan,
    run=run,
    shows_progress=True,
    several_processes=True,
    preload=("stages.training.report", "stages.training.replicas"),
)
