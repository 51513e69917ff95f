"""The parts of one training in this process, in the order in which each needs the ones before.

`fit_plan` completes the plan, `TrainingSession.open` loads the student and starts the sampler, `trainer` adds rollouts,
channels and callbacks, and `fit` trains from the newest complete checkpoint.
"""

from collections.abc import Sequence
from contextlib import closing, suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Self, cast

from transformers import TrainerCallback, TrainerControl, TrainerState

from composer_stages.backends import resources
from composer_stages.backends.ranks import Ranks
from composer_stages.envs.base import Task
from composer_stages.errors import ComposerError, UsageError
from composer_stages.gradients.per_row import MAX_TOKENS
from composer_stages.messages import Message
from composer_stages.policy.base import NotFinite
from composer_stages.policy.local import checkpointed, load_model, open_tokenizer
from composer_stages.policy.serving import Serving
from composer_stages.policy.vllm import VllmPolicy
from composer_stages.rollouts.agent_loop import LiveRollout, Rules
from composer_stages.rollouts.history import FULL
from composer_stages.runs import store
from composer_stages.runs.activity import Checking, activity
from composer_stages.runs.kinds import VECTORS
from composer_stages.runs.run import Inputs, RunWriter
from composer_stages.stopping import Interrupted
from composer_stages.training import checkpoints, step, weights
from composer_stages.training.channels import row_sources
from composer_stages.training.channels.base import SourceInputs
from composer_stages.training.channels.rollouts import open_teacher
from composer_stages.training.collapse import Watch
from composer_stages.training.distributed import ShardedTrainer, Student, TrainerInStep
from composer_stages.training.memory import check_memory, choose_passes, estimate_memory, room, unused
from composer_stages.training.model_shape import Prompts, measure_rows
from composer_stages.training.plan import TrainPlan
from composer_stages.training.projection import PAIRS, Direction, ProjectionCallback, weight_direction
from composer_stages.training.replicas import AllRoundsDone, OuterSteps, Replica
from composer_stages.training.report import TrainingJournal
from composer_stages.training.rollout_gradients import RolloutGradients
from composer_stages.training.rollouts import LockStep, RolloutQueue, Rollouts, Schedule, prompt_order
from composer_stages.training.trl_arguments import lora, trl_arguments, trl_refusal


def fit_plan(plan: TrainPlan, inputs: Inputs, tasks: Sequence[Task], out: RunWriter, ranks: Ranks) -> TrainPlan:
    """Return the plan with passes that fit into memory; `UsageError` for a plan that TRL or the memory refuses."""
    if plan.shape is not None and not plan.small:
        policy = plan.config.policy.in_process()
        tokenizer = open_tokenizer(policy, listener=out.progress)
        with activity(Checking("measuring the prompts")):
            prompts = measure_rows(inputs, plan.config, plan.config.opener()(), tasks, tokenizer)
        plan = _agree_on_passes(plan, prompts, out, ranks)
    trl_arguments(plan, out.path)
    check_memory(plan, room(plan))
    if (abundant := _abundant(plan)) is not None:
        resources.choose_allocation(keep=abundant <= (unused(plan) or 0))
    return plan


def _abundant(plan: TrainPlan) -> int | None:
    """Return the bytes from which memory abounds, and beyond which none that is freed is kept; None where all may be.

    So may a small model's and one's of unknown size, and on a GPU torch keeps the memory.
    """
    has_room = plan.device != "cpu" or plan.small or plan.shape is None
    return None if has_room else round(resources.SPARE * estimate_memory(plan).total)


class FreedMemory(TrainerCallback):
    """Returns freed memory to the system once the process holds more than was planned with."""

    def __init__(self, beyond: int) -> None:
        self._beyond = beyond

    def on_step_begin(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Look before a step; args: `GRPOConfig`."""
        if self._beyond and resources.return_freed(self._beyond):
            self._beyond = 0

    on_substep_end = on_step_begin


def _agree_on_passes(plan: TrainPlan, prompts: Prompts, out: RunWriter, ranks: Ranks) -> TrainPlan:
    """Return the plan with the same passes in every process, which fit into the memory of each.

    A resumed run keeps the passes of its earlier attempt while they fit, so that it rounds as that one did.
    """
    free = min((size for size in ranks.gather(unused(plan)) if size is not None), default=None)
    chosen = choose_passes(plan, prompts, free)

    def agree() -> dict[str, Any]:
        path = out.scratch("passes") / "chosen.json"
        if path.is_file():
            earlier = chosen.changed(optimisation=store.read_json(path))
            if free is None or estimate_memory(earlier).total <= free:
                return earlier.passes()
        store.write_json(path, chosen.passes())
        return chosen.passes()

    return chosen.changed(optimisation=ranks.broadcast_from_rank0(agree))


@dataclass
class TrainingSession:
    """The parts of a training in this process.

    prompts: tasks of all prompts, in order. server: how this process shares the server of `sampler`, which is None
    where the student samples itself. direction: what is taken out of gradients and updates. folder: of checkpoints.
    outer: DiLoCo's rounds. watch: notices a collapse.
    """

    plan: TrainPlan
    inputs: Inputs
    out: RunWriter
    student: Student
    prompts: list[Task]
    sampler: VllmPolicy | None
    server: weights.SharedServer
    direction: Direction | None
    folder: Path
    outer: OuterSteps | None
    watch: Watch

    @classmethod
    def open(
        cls,
        plan: TrainPlan,
        inputs: Inputs,
        out: RunWriter,
        ranks: Ranks,
        tasks: list[Task],
        serving: Serving,
        replica: Replica | None,
    ) -> Self:
        """Start the server that is sampled from, if any, and load the student; records both."""
        config, size, policy = plan.config, plan.config.optimisation, plan.sampled_by(ranks.rank)
        server = weights.shared_server(policy, ranks)
        sampler: Any = server.in_turn(lambda: serving.open(policy)) if policy.served else None
        if policy.served and policy.base_url is None:
            check_memory(plan, room(plan, started=True))  # the server's share was an estimate until it started
        run, local = inputs.optional("direction"), config.policy.in_process()
        # With a direction all weights are loaded in every process, to find it from them.
        spread = plan.sharded and run is None
        model, tokenizer = load_model(
            local.model_copy(update={"device": "cpu"}) if spread else local,
            listener=out.progress,
            empty=spread and not ranks.first,
        )
        direction = None
        if run is not None:
            model.eval()
            with checkpointed(model, bool(size.gradient_checkpointing)):
                direction = weight_direction(model, store.read_json(run.folder(VECTORS) / PAIRS))
        student = Student.prepare(model, tokenizer, plan, ranks)
        out.model("policy", **(sampler or student.policy).facts(), training={**plan.facts(), "processes": ranks.count})
        folder = ranks.broadcast_from_rank0(lambda: out.scratch("trainer"))
        outer = None if replica is None else OuterSteps(replica, out, folder)
        ordered = bool(config.env.curriculum)
        order = prompt_order(len(tasks), size, config.seed, as_given=ordered)
        rollouts = size.prompts_per_step * size.generations
        watch = Watch(out, rollouts, ranks, stop=size.stop_on_collapse, ordered=ordered)
        prompts = [tasks[index] for index in order]
        return cls(plan, inputs, out, student, prompts, sampler, server, direction, folder, outer, watch)

    @cached_property
    def rollouts(self) -> Rollouts:
        """The rollouts of the steps, by the student or by a server that follows it; `UsageError` where none can."""
        config, size = self.plan.config, self.plan.config.optimisation
        make, student = config.opener(), self.student
        reuse = trl_arguments(self.plan, self.out.path).num_iterations
        schedule = Schedule(
            self.prompts, size.prompts_per_step, size.generations, config.seed, self.server.ranks, reuse
        )
        if self.sampler is None:
            return LockStep(
                make, student.policy, schedule, config.max_steps, config.limits, config.in_flight, self.teacher
            )
        _, opening = self._environment_start
        sync = weights.weight_sync(self.sampler, student, opening, config, self.out, self.server)
        alone = self.server.ranks.count == 1
        return RolloutQueue(
            make,
            self.sampler,
            schedule,
            sync,
            rules=Rules.of(self.sampler, config.max_steps, config.limits, FULL),
            in_flight=config.in_flight,
            max_staleness=size.max_staleness,
            journal=self.journal if alone else None,
            # A signal reaches the processes at different times: several agree on a stop at the end of a step.
            check=self.out.raise_if_stopped if alone else lambda: None,
        )

    @cached_property
    def _environment_start(self) -> tuple[str, list[Message]]:
        """The environment's sandbox, and the opening of the first prompt where a server samples."""
        with closing(self.plan.config.opener()()) as environment:
            return environment.sandbox, [] if self.sampler is None else environment.reset(self.prompts[0])

    @cached_property
    def teacher(self) -> Any:
        """The model that plays half of each mixed group; None without mixed groups."""
        config = self.plan.config
        if not config.probe.mixed or config.teacher is None:  # mixed groups without a teacher are refused
            return None
        return open_teacher(config.teacher, "teacher", self.student, self.out)

    @cached_property
    def journal(self) -> TrainingJournal:
        """The records of rollouts and hints."""
        sandbox, _ = self._environment_start
        policy: Any = self.sampler or self.student.policy
        return TrainingJournal(self.out, policy, sandbox, self.teacher, self.plan.config.optimisation.generations)

    def trainer(self) -> step.ComposedTrainer:
        """Return a trainer before its first step; `BadInput` and `UsageError` where pairs or teacher do not fit."""
        plan, config, student, out = self.plan, self.plan.config, self.student, self.out
        size, rollouts, measured = config.optimisation, self.rollouts, None
        if config.probe.mixed or (self.direction is not None and config.probe.measure):
            toward = self.direction if self.direction is not None and config.probe.measure else {}
            max_tokens = size.max_tokens_per_micro_batch or MAX_TOKENS
            measured = RolloutGradients(student, toward, size.generations, max_tokens, out)

        def record(number: int, rollouts: list[LiveRollout]) -> None:
            self.journal.rollouts(number, rollouts)
            if measured is not None:
                measured.record(number, rollouts)

        # Reads the model that training starts from, without an adapter.
        environment = config.opener()()
        source_inputs = SourceInputs(config, self.inputs, student, environment, self.prompts, out, self.journal.hints)
        active = config.weights.active()
        channels = step.Channels(config, [kind.open(source_inputs) for kind in row_sources(active)])
        # DiLoCo's callback precedes Supervision, which seals a checkpoint once all other callbacks have written.
        callbacks: list[Any] = [self.watch] if self.outer is None else [self.watch, self.outer]
        callbacks.append(checkpoints.Supervision(out, channels, rollouts, self.folder, student.ranks))
        if (abundant := _abundant(plan)) is not None:
            callbacks.append(FreedMemory(abundant))
        if size.keep_every:
            callbacks.append(checkpoints.KeptCheckpoints(out, student, size.keep_every))
        if self.direction is not None:
            callbacks.append(ProjectionCallback(self.direction, config.probe, config.seed, out))
        parts: dict[str, Any] = {
            "policy": student.policy,
            "rollouts": rollouts,
            "record": record,
            "true_ratios": config.probe.mixed == "ratio",
            "channels": channels,
            "rows": channels.rows,
            "gradient_cosine_every": size.gradient_cosine_every,
            "shared_prompts": bool(size.shared_prompts),
            "max_tokens": size.max_tokens_per_micro_batch,
            "ranks": student.ranks,
            "args": trl_arguments(plan, self.folder, student.mixed),
            "callbacks": callbacks,
            "peft_config": lora(config.adapter, student.policy.model),
        }
        kind: Any = step.ComposedTrainer
        if student.sharded is not None:
            kind = TrainerInStep if config.adapter.rank else ShardedTrainer
            parts["sharded"] = student.sharded
        try:
            return cast(step.ComposedTrainer, kind(**parts))
        except (ValueError, ImportError) as error:
            if not config.trl:
                raise
            raise trl_refusal(config.trl, error) from error

    def fit(self) -> tuple[step.ComposedTrainer, int]:
        """Train from the newest complete checkpoint; return the trainer, and the steps that the model was trained by.

        `Interrupted` when a stop was requested before the last step. A training that `watch` stopped has the model of
        the newest checkpoint before its departure. `ComposerError` where loss, gradient or weights stop being finite.
        """
        rollouts = self.rollouts
        with activity("preparing the trainer"):
            trainer = self.trainer()
            self.student.model = trainer.model
            self.student.distribute()
        try:
            return trainer, self._fit(trainer)
        finally:
            rollouts.close()

    def _fit(self, trainer: step.ComposedTrainer) -> int:
        ranks, watch = self.student.ranks, self.watch
        start = ranks.broadcast_from_rank0(lambda: checkpoints.newest(self.folder, self.out))
        if start is not None:
            self._restore(trainer, start)
        try:
            with suppress(AllRoundsDone):
                trainer.train(resume_from_checkpoint=str(start) if start else None)
        except NotFinite as error:
            good = checkpoints.newest(self.folder, self.out) if ranks.first else None
            raise ComposerError(
                "training.training-not-finite", step=watch.step, error=str(error), checkpoint=good
            ) from error
        if watch.stopped:
            good = ranks.broadcast_from_rank0(lambda: checkpoints.newest(self.folder, self.out, watch.good))
            if good is None:
                raise RuntimeError("a checkpoint was made after the first steps, and there is none")
            trainer._load_from_checkpoint(str(good))
            return checkpoints.steps_of(good)
        if not (self.outer.finished if self.outer else trainer.state.global_step >= trainer.args.max_steps):
            raise Interrupted
        return trainer.state.global_step

    def _restore(self, trainer: step.ComposedTrainer, start: Path) -> None:
        """Restore channels and rollouts from a checkpoint; the model and the optimiser are the trainer's to load."""
        ranks, seal = self.student.ranks, store.read_json(start / store.SEAL)
        trainer.channels.load(seal["channels"], start)
        if (count := len(seal["rollouts"])) != ranks.count and any(seal["rollouts"]):
            raise UsageError(
                "training.other-number-of-processes", checkpoint=start.name, count=count, present=ranks.count
            )
        self.rollouts.load(seal["rollouts"][ranks.rank] if count == ranks.count else None)
