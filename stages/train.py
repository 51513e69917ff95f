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
from typing import TYPE_CHECKING, Any, Literal

from pydantic import Field, field_validator, model_validator

from stages.backends.ranks import Ranks, join, launched
from stages.diloco.settings import Diloco
from stages.envs.base import Task
from stages.envs.config import EnvStageConfig
from stages.errors import UsageError
from stages.policy import adapters
from stages.policy.base import PolicyConfig
from stages.policy.checkpoint import CheckpointInfo
from stages.policy.serving import Serving
from stages.runs import store
from stages.runs.artifact import Interrupted, Out, Slot
from stages.runs.inputs import Inputs
from stages.runs.plan import Plan
from stages.runs.probe_records import DIRECTION
from stages.runs.records import CHECKPOINT, HINT, PAIR, ROLLOUT, STEP, TRAINING_REWARD
from stages.training import processes, reporting
from stages.training.channels import CHANNELS
from stages.training.defaults import choose
from stages.training.settings import Adapter, Eopd, Hints, Optimisation, Pairs, Probe, Taid
from stages.training.table import training_table
from stages.training.weights import Weights

if TYPE_CHECKING:
    from trl.trainer.grpo_config import GRPOConfig

    from stages.policy.local import LocalPolicy
    from stages.training.composed import ComposedTrainer
    from stages.training.outer_steps import OuterSteps

VERSION = 1
INPUTS = {"pairs": Slot(PAIR, optional=True), "direction": Slot(DIRECTION, optional=True)}
OUTPUTS = {
    "checkpoint": CHECKPOINT,
    "rollouts": ROLLOUT,
    "steps": STEP,
    "training_rewards": TRAINING_REWARD,
    "hints": HINT,
}
SEVERAL_PROCESSES = True
TRUNCATED = {"vllm_importance_sampling_mode": "token_truncate"}
"""How TRL corrects for the policy of a server unless asked otherwise: weights of tokens, cut off above."""
NOTHING_LEARNED = "No group had two different rewards: nothing was learned from rewards."


class Config(EnvStageConfig):
    """One arm."""

    arm: str = Field("A", min_length=1, pattern=r"^[\w.+-]+$")
    """The arm's name in the evaluation."""
    policy: PolicyConfig = PolicyConfig()
    """The model to start from, and how rollouts are sampled from it."""
    tasks: int = Field(200, gt=0, le=100_000)
    """Training tasks to draw prompts from."""
    max_steps: int = Field(8, gt=0)
    """Actions after which a rollout ends."""
    optimisation: Optimisation = Optimisation()
    adapter: Adapter = Adapter()
    trl: dict[str, Any] = Field(default_factory=dict)
    """Further fields of TRL's GRPOConfig, such as trl.warmup_steps, trl.epsilon_high or trl.scale_rewards."""
    weights: Weights = Weights()
    pairs: Pairs = Pairs()
    hints: Hints = Hints()
    taid: Taid = Taid()
    eopd: Eopd = Eopd()
    diloco: Diloco = Diloco()
    probe: Probe = Probe()
    report_to: tuple[Literal["tensorboard", "trackio", "wandb"], ...] = Field(
        (), json_schema_extra={"affects_results": False}
    )
    """Where training is logged besides metrics.jsonl: tensorboard, trackio, wandb, one or several."""
    teacher: PolicyConfig | None = None
    """The model to distil from, for taid and eopd; it must share the student's tokenizer."""

    @field_validator("report_to", mode="before")
    @classmethod
    def _one_is_enough(cls, given: Any) -> Any:
        return (given,) if isinstance(given, str) else given

    @model_validator(mode="after")
    def _consistent(self) -> "Config":
        if self.teacher is None and any(CHANNELS[name].needs_teacher for name in self.weights.active()):
            needing = [f"weights.{name}" for name, channel in CHANNELS.items() if channel.needs_teacher]
            raise ValueError(f"{' and '.join(needing)} need a teacher: set teacher.model")
        if self.hints.source == "llm" and self.hints.llm is None:
            raise ValueError('hints.source = "llm" needs hints.llm: set hints.llm.model and its base_url')
        if self.policy.base_url is not None and not self.policy.served:
            raise ValueError(
                "policy.base_url: a model behind a server cannot be trained; give a local folder or a hub id"
            )
        if self.optimisation.max_staleness and not self.policy.served:
            raise ValueError(
                "optimisation.max_staleness needs rollouts from a server; write vllm: before policy.model, or take 0"
            )
        if self.policy.temperature == 0:
            raise ValueError(
                "policy.temperature is 0: a group of equal rollouts has no advantage to learn from; take 1"
            )
        if self.diloco.store is not None and self.optimisation.steps % self.diloco.inner_steps:
            raise ValueError(
                f"optimisation.steps is {self.optimisation.steps}, no multiple of diloco.inner_steps, which is "
                f"{self.diloco.inner_steps}: the last steps would be no part of the result"
            )
        return self

    def label(self) -> str:
        """Environment, arm and seed, and a replica's number."""
        replica = "" if self.diloco.replica is None else f"-r{self.diloco.replica}"
        return f"{self.env.label()}-{self.arm}-s{self.seed}{replica}"


def plan(inputs: Inputs, config: Config) -> Plan:
    """Steps and rollouts."""
    _check_pairs(inputs, config)
    processes.check(config.optimisation, config.trl, launched())
    reporting.check(config.report_to)
    if config.trl:
        _arguments(config, Path(tempfile.gettempdir()))
    chosen = choose(config.policy, config.optimisation, config.adapter)
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


def run(inputs: Inputs, config: Config, out: Out) -> None:
    """Train, or go on training, then save the model and the metrics; what `out` gets is the first process's to keep."""
    _check_pairs(inputs, config)
    ranks = join()
    processes.check(config.optimisation, config.trl, ranks.count)
    if ranks.count > 1 and config.diloco.store is not None:
        raise UsageError(
            f"diloco.store was given to {ranks.count} processes of one training, but a replica is one process. "
            "Leave out torchrun, or diloco.store."
        )
    reporting.check(config.report_to)
    from stages.policy.local import LocalPolicy, device, load_model
    from stages.training import outer_steps, precision, served
    from stages.training.setup import seeded

    chosen = choose(config.policy, config.optimisation, config.adapter)
    config = config.model_copy(update={"optimisation": chosen.optimisation, "adapter": chosen.adapter})
    if "direction" in inputs and chosen.adapter.rank:
        raise UsageError(
            "A direction is taken out of the training of all weights, but an adapter is trained here. "
            "Set adapter.rank=0."
        )
    if chosen.optimisation.beta and not chosen.adapter.rank:
        adapters.require_folder(config.policy)
    _arguments(config, out.path)
    chosen.check(config.max_steps * config.policy.max_tokens, device(config.policy.device))
    served.check(config.policy, config.adapter, alone=ranks.count == 1 and config.diloco.store is None)
    tasks = config.draw(config.opener(), config.tasks)  # refuses before a model is made or loaded
    place = outer_steps.join(config.diloco, out)
    own = config if place is None else config.model_copy(update={"seed": place.seed(config.seed)})
    rank, here = config.adapter.rank or 0, config.policy.held_here()
    with (
        Serving(out, [config.policy], rank=rank) as serving,
        ranks.depending(),
        seeded(own.seed, config.optimisation.threads),
    ):
        sampler = serving.open(config.policy) if config.policy.served else None
        model, tokenizer = load_model(here, cache=out.cache, listener=out.progress)
        mixed = precision.masters(model, adapter=bool(rank))
        policy = LocalPolicy(model.eval(), tokenizer, here)
        out.model("policy", **(sampler or policy).facts(), training={**chosen.facts(), "processes": ranks.count})
        folder = ranks.of_first(lambda: out.scratch("trainer"))
        outer = None if place is None else outer_steps.OuterSteps(place, out, folder)
        with reporting.writing(config.report_to, out.path / "logs"):
            trainer = _trainer(inputs, own, out, policy, sampler, tasks, folder, mixed, ranks, outer)
            ranks.copy_first(policy.model.parameters())
            try:
                _fit(trainer, folder, ranks, outer)
            finally:
                trainer.end_rollouts()
        if ranks.first:
            _save(trainer, policy, config, tasks, out)
        if outer is not None:
            outer.report()


def _arguments(config: Config, folder: Path, mixed: bool = False) -> "GRPOConfig":
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


def _trainer(
    inputs: Inputs,
    config: Config,
    out: Out,
    policy: "LocalPolicy",
    sampler: Any,
    tasks: list[Task],
    folder: Path,
    mixed: bool,
    ranks: Ranks,
    outer: "OuterSteps | None",
) -> "ComposedTrainer":
    from stages.training import precision, served, setup
    from stages.training.channels.active import Channels
    from stages.training.checkpoints import Supervision
    from stages.training.composed import ComposedTrainer
    from stages.training.journal import TrainingJournal
    from stages.training.kept import KeptCheckpoints
    from stages.training.projection import projection
    from stages.training.rollouts import Rollouts

    make, size = config.opener(), config.optimisation
    environment = make()
    journal = TrainingJournal(out, sampler or policy, environment.sandbox)
    extracted = inputs.optional("pairs")
    source = None
    if extracted is not None:
        source = setup.load_pairs(extracted, config.pairs, policy.tokenizer, seed=config.seed, out=out)
    if source is not None and any(CHANNELS[name].needs_reference for name in config.weights.active()):
        with precision.autocast(policy.model, mixed):
            source.cache_reference(policy.model, ranks=ranks)
    channels = Channels(
        config.weights,
        config.pairs,
        config.hints,
        source=source,
        teacher=setup.load_teacher(config.teacher, policy, out) if config.teacher else None,
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
    opening = environment.reset(tasks[0])
    return ComposedTrainer(
        policy=policy,
        rollouts=rollouts,
        served=served.rollouts(rollouts, sampler, policy, opening, size, out) if sampler else None,
        channels=channels,
        channel_rows=setup.channel_rows(channels, config.hints, source, policy, environment, out, journal.hints),
        gradient_cosine_every=size.gradient_cosine_every,
        shared_prompts=size.shared_prompts,
        max_tokens=size.max_tokens_per_micro_batch,
        ranks=ranks,
        args=_arguments(config, folder, mixed),
        train_dataset=setup.task_dataset(tasks, make, size, config.seed),
        callbacks=[
            *([] if outer is None else [outer]),
            Supervision(out, channels, folder, ranks),
            *([KeptCheckpoints(out, policy, _base(config, policy), size.keep_every)] if size.keep_every else []),
            *(
                projection(config.probe.project, run, policy.model, config.seed, out)
                for run in inputs.many("direction")
            ),
        ],
        peft_config=setup.lora(config.adapter, policy.model),
    )


def _fit(trainer: "ComposedTrainer", folder: Path, ranks: Ranks, outer: "OuterSteps | None") -> None:
    """Train from the newest whole checkpoint; `Interrupted` when somebody asked to stop before the last step."""
    from stages.training.checkpoints import MARKER, newest
    from stages.training.outer_steps import Over

    start = ranks.of_first(lambda: newest(folder))
    if start is not None:
        trainer.channels.load(store.read_json(start / MARKER)["channels"], start)
    with suppress(Over):
        trainer.train(resume_from_checkpoint=str(start) if start else None)
    if not (outer.finished if outer else trainer.state.global_step >= trainer.args.max_steps):
        raise Interrupted


def _base(config: Config, policy: "LocalPolicy") -> adapters.Base | None:
    return adapters.describe(config.policy.held_here(), policy.model) if config.adapter.rank else None


def _save(trainer: "ComposedTrainer", policy: "LocalPolicy", config: Config, tasks: list[Task], out: Out) -> None:
    from stages.training.journal import course, write_tables
    from stages.training.kept import save_model, write_kept
    from stages.training.projection import accounts
    from stages.training.setup import prompt_order

    out.checkpoint(lambda folder: save_model(trainer.model, policy, _base(config, policy), folder))
    if config.optimisation.keep_every:
        write_kept(out)
    replicas = config.diloco.store is not None  # which draw from the same tasks, each in an order of its own
    order = range(len(tasks)) if replicas else prompt_order(len(tasks), config.optimisation, config.seed)
    info = CheckpointInfo(
        arm=config.arm,
        train_seed=config.seed,
        start=config.policy,
        start_identity=store.digest(out.manifest.identity["policy"]),
        env=config.env.name,
        split=config.env.split,
        task_ids=tuple(dict.fromkeys(tasks[index].task_id for index in order)),
    )
    out.document("checkpoint", info.model_dump(mode="json"))
    write_tables(out, trainer.state.global_step)
    history = [row for row in trainer.state.log_history if "loss" in row]
    out.metrics(history)
    rewards = [row["reward"] for row in history if "reward" in row]
    out.count(planned=config.optimisation.steps, done=trainer.state.global_step, failed=0)
    out.conclude(
        arm=config.arm, first_reward=rewards[0] if rewards else None, last_reward=rewards[-1] if rewards else None
    )
    equal = bool(history) and all(row.get("frac_reward_zero_std") == 1 for row in history)
    out.conclude(all_rewards_equal=equal)
    projected = accounts(out)
    if projected:
        out.document("projection", projected)
        out.conclude(projected=config.probe.project)
    rates, course_text = course(out, trainer.state.global_step)
    out.conclude(**rates)
    said = [*([NOTHING_LEARNED] if equal else []), *config.diloco.oddities(config.optimisation.steps)]
    lines = "".join(f"\n{line}\n" for line in said)
    out.text("report.txt", training_table(config.arm, history) + course_text + lines)
