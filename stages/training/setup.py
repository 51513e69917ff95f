"""What training starts from: TRL's configuration, prompts, pairs, the teacher, the channels' rows, and seeds."""

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from difflib import get_close_matches
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_type_hints

import torch
from datasets import Dataset
from pydantic import TypeAdapter, ValidationError
from trl.trainer.grpo_config import GRPOConfig

from stages.backends.ranks import world_size
from stages.envs.base import Environment, Task
from stages.errors import UsageError
from stages.policy import adapters
from stages.policy.base import PolicyConfig
from stages.policy.local import LocalPolicy, load_model
from stages.policy.vllm import VllmPolicy
from stages.rollouts.agent_loop import Episode
from stages.rollouts.trace import pairs_with_states
from stages.runs.artifact import Inputs, Run, RunWriter
from stages.runs.reporting import PROJECT
from stages.training.channels import CHANNELS
from stages.training.channels.active import Channels
from stages.training.config import Config
from stages.training.data import ChannelBatch, Hint, Hinted, PairSource, hinted_turns, own_episode, tokenise
from stages.training.plan import SMALL_RATE
from stages.training.settings import Adapter, Hints, Optimisation, Pairs

if TYPE_CHECKING:
    from peft import LoraConfig

    from stages.policy.local import LocalPolicy
    from stages.training.distributed import Sharded
    from stages.training.replicas import OuterSteps
    from stages.training.served import Place
    from stages.training.trainer import ComposedTrainer


# ---- trl_fields
# TRL's own fields, as `trl.KEY=VALUE`: checked before a model is loaded, by TRL and against its types.

OURS = {
    "output_dir": "--out",
    "resume_from_checkpoint": "--resume",
    "seed": "seed",
    "data_seed": "seed",
    "max_steps": "optimisation.steps",
    "num_train_epochs": "optimisation.steps",
    "per_device_train_batch_size": "optimisation.micro_batch",
    "gradient_accumulation_steps": "optimisation.micro_batch",
    "steps_per_generation": "optimisation.prompts_per_step",
    "generation_batch_size": "optimisation.prompts_per_step",
    "num_generations": "optimisation.generations",
    "learning_rate": "optimisation.learning_rate",
    "max_grad_norm": "optimisation.max_grad_norm",
    "beta": "optimisation.beta",
    "loss_type": "optimisation.loss_type",
    "gradient_checkpointing": "optimisation.gradient_checkpointing",
    "activation_checkpointing": "optimisation.gradient_checkpointing",
    "save_steps": "optimisation.save_every",
    "temperature": "policy.temperature",
    "top_p": "policy.temperature",
    "top_k": "policy.temperature",
    "min_p": "policy.temperature",
    "repetition_penalty": "policy.temperature",
    "max_completion_length": "policy.max_tokens",
    "use_cpu": "policy.device",
    "bf16": "policy.dtype",
    "fp16": "policy.dtype",
    "model_init_kwargs": "policy.dtype",
    "report_to": "report_to",
}
"""Fields of TRL's that a setting of ours stands for."""
KEPT = frozenset(
    (
        "shuffle_dataset",
        "remove_unused_columns",
        "dataloader_drop_last",
        "save_strategy",
        "save_total_limit",
        "save_only_model",
        "load_best_model_at_end",
        "logging_steps",
        "logging_strategy",
        "disable_tqdm",
        "log_completions",
        "do_train",
        "do_eval",
        "do_predict",
        "eval_strategy",
        "eval_on_start",
        "push_to_hub",
        "use_vllm",
        "use_transformers_continuous_batching",
        "use_transformers_paged",
        "generation_kwargs",
        "trust_remote_code",
        "auto_find_batch_size",
        "local_rank",
        "deepspeed",
        "fsdp",
        "fsdp_config",
        "parallelism_config",
        "dataloader_pin_memory",
        "log_level_replica",
    )
)
"""Fields that the rollouts, the records and resuming stand on."""
CHOICES = {
    "loss_type": ("grpo", "dapo", "dr_grpo", "bnpo", "cispo", "sapo", "luspo", "vespo"),
    "scale_rewards": ("group", "batch", "none"),
    "importance_sampling_level": ("token", "sequence"),
}
"""Words that TRL 1.16 looks at only in the first step (trainer/grpo_trainer.py)."""


def build(own: Mapping[str, Any], given: Mapping[str, Any]) -> GRPOConfig:
    """TRL's configuration from what we set and what the user gave; `UsageError` for what it cannot be."""
    _check_names(given)
    try:
        made = GRPOConfig(**{**own, **given})
    except (ValueError, TypeError, AttributeError, ImportError, NotImplementedError) as error:
        if not given:
            raise
        raise UsageError(f"TRL refuses {_culprits(own, given)}: {str(error).strip().splitlines()[0]}") from None
    hints = get_type_hints(GRPOConfig)
    for key in given:
        try:
            TypeAdapter(hints[key]).validate_python(getattr(made, key), strict=True)
        except ValidationError as error:
            reason = error.errors(include_url=False)[0]["msg"]
            raise UsageError(f"TRL cannot take trl.{key} = {given[key]!r}: {reason}.") from None
    for key, words in CHOICES.items():
        if getattr(made, key) not in words:
            name = OURS.get(key, f"trl.{key}")
            raise UsageError(f"{name} is {getattr(made, key)!r}, which TRL does not know. Take {', '.join(words)}.")
    return made


def _check_names(given: Mapping[str, Any]) -> None:
    known = [field.name for field in fields(GRPOConfig) if field.init]
    for key in given:
        if key in OURS:
            raise UsageError(f"trl.{key} is what our own setting {OURS[key]} stands for. Set that.")
        if key in KEPT:
            raise UsageError(f"trl.{key} cannot be set: rollouts, records and resuming stand on it. Leave it out.")
        if key not in known:
            near = get_close_matches(key, known, n=1, cutoff=0.0)[0]
            raise UsageError(f"TRL's GRPOConfig has no field {key}. Did you mean trl.{near}?")


def _culprits(own: Mapping[str, Any], given: Mapping[str, Any]) -> str:
    """The given fields that TRL refuses by themselves, or all where only their combination is wrong."""
    alone = []
    for key, value in given.items():
        try:
            GRPOConfig(**{**own, key: value})
        except (ValueError, TypeError, AttributeError, ImportError, NotImplementedError):
            alone.append(key)
    return ", ".join(f"trl.{key} = {given[key]!r}" for key in alone or given)


ChannelRows = Callable[[list[Episode], int], ChannelBatch]
"""(episodes of this step, step) -> the rows of all channels."""


def prompt_order(num_tasks: int, settings: Optimisation, seed: int, *, as_given: bool = False) -> list[int]:
    """Indices of the tasks of all prompts: every task once before any comes again, each round in its own order.

    The whole course of training lies in one list, so that a resumed run finds its place by counting. as_given: every
    round in the order in which the tasks are, which is a curriculum's.
    """
    count = settings.steps * settings.prompts_per_step
    order: list[int] = []
    while len(order) < count:
        indices = list(range(num_tasks))
        if not as_given:
            random.Random(f"{seed}/{len(order)}").shuffle(indices)  # noqa: S311 (an order that repeats, not a secret)
        order += indices
    return order[:count]


def task_dataset(
    tasks: Sequence[Task],
    make: Callable[[], Environment],
    settings: Optimisation,
    seed: int,
    *,
    as_given: bool = False,
) -> Dataset:
    """One row a prompt of the whole training: the task's opening messages, and its id for the rollouts."""
    environment = make()
    try:
        openings = [environment.reset(task) for task in tasks]
    finally:
        environment.close()
    order = prompt_order(len(tasks), settings, seed, as_given=as_given)
    return Dataset.from_list([{"prompt": openings[i], "task_id": tasks[i].task_id} for i in order])


def trl_config(
    folder: str,
    settings: Optimisation,
    *,
    seed: int,
    temperature: float,
    max_completion: int,
    device: str,
    mixed: bool = False,
    processes: int = 1,
    report_to: Sequence[str] = (),
    run_name: str | None = None,
    more: Mapping[str, Any] | None = None,
) -> GRPOConfig:
    """TRL's configuration for our settings: constant learning rate, checkpoints to resume from.

    max_completion: tokens of a whole episode after its prompt. mixed: whether float32 weights compute under bfloat16
    autocast. processes: among which the rollouts of a step are shared. report_to, run_name: backends that it is logged
    to, and under which name. more: further fields of TRL's; `UsageError` for those that do not exist, are ours, or hold
    what TRL refuses.
    """
    rollouts = settings.prompts_per_step * settings.generations // processes
    micro = min(settings.micro_batch or rollouts, rollouts)
    own: dict[str, Any] = {
        "output_dir": folder,
        "max_steps": settings.steps,
        "per_device_train_batch_size": micro,
        "gradient_accumulation_steps": rollouts // micro,
        "num_generations": settings.generations,
        "learning_rate": SMALL_RATE if settings.learning_rate is None else settings.learning_rate,
        "lr_scheduler_type": "constant",
        "max_grad_norm": settings.max_grad_norm,
        "beta": settings.beta,
        "loss_type": settings.loss_type,
        "temperature": temperature,
        "max_completion_length": max_completion,
        "gradient_checkpointing": bool(settings.gradient_checkpointing),
        "use_cpu": device == "cpu",
        "bf16": mixed,
        "seed": seed,
        "shuffle_dataset": False,
        "save_steps": settings.save_every,
        "save_total_limit": 2,
        "logging_steps": 1,
        "report_to": list(report_to),
        "run_name": run_name,
        "project": PROJECT,
        "disable_tqdm": True,
        "remove_unused_columns": False,
        "dataloader_pin_memory": device != "cpu",
        "log_completions": False,
        "log_level_replica": "error",
    }
    return build(own, more or {})


def lora(settings: Adapter, model: Any) -> "LoraConfig | None":
    """Peft's configuration for our settings; None where all weights are trained.

    `UsageError` for a target that the model has no Linear of.
    """
    from peft import LoraConfig

    if not settings.rank:
        return None
    head = model.get_output_embeddings()
    linears = {name for name, module in model.named_modules() if isinstance(module, torch.nn.Linear) and module != head}
    for target in settings.targets:
        if not any(name == target or name.endswith(f".{target}") for name in linears):
            there = ", ".join(sorted({name.rpartition(".")[2] for name in linears}))
            raise UsageError(f"adapter.targets: the model has no Linear {target}. It has: {there}.")
    return LoraConfig(
        task_type="CAUSAL_LM",
        r=settings.rank,
        lora_alpha=settings.alpha,
        target_modules=list(settings.targets) or "all-linear",
        lora_dropout=settings.dropout,
        use_rslora=settings.rslora,
        use_dora=settings.dora,
    )


def load_pairs(run: Run, settings: Pairs, tokenizer: Any, *, seed: int, out: RunWriter) -> PairSource:
    """The pairs of a run in token ids; counts what is kept and dropped. `UsageError` when nothing is left."""
    kept, dropped = tokenise(pairs_with_states(run), tokenizer, settings.max_tokens)
    out.count(pairs=len(kept), **{f"pairs_dropped_{reason}": number for reason, number in dropped.items()})
    if not kept:
        raise UsageError(
            f"{run.path} holds no pair that is left after tokenisation ({dict(dropped)}). "
            "Extract more pairs, or raise pairs.max_tokens."
        )
    return PairSource(kept, per_step=settings.per_step, seed=seed)


def load_teacher(config: PolicyConfig, student: LocalPolicy, out: RunWriter) -> Any:
    """A Hugging Face model, never trained, or a policy behind vLLM; `UsageError` where its tokens are others."""
    if config.served:
        policy = VllmPolicy.open(config, cache=out.cache, budget=out.budget, listener=out.progress)
        check_vocabulary(student.tokenizer, policy.tokenizer, config.model)
        out.model("teacher", **policy.facts())
        return policy
    model, tokenizer = load_model(config, cache=out.cache, listener=out.progress)
    check_vocabulary(student.tokenizer, tokenizer, config.model)
    return model.eval().requires_grad_(False)


def check_vocabulary(student: Any, teacher: Any, name: str) -> None:
    """Raise `UsageError` unless both tokenizers know the same tokens by the same ids; a head may be padded."""
    own, other = ({i: token for token, i in tokenizer.get_vocab().items()} for tokenizer in (student, teacher))
    differing = sorted(i for i in own.keys() | other.keys() if own.get(i) != other.get(i))
    if differing:
        first = differing[0]
        raise UsageError(
            f"The teacher {name!r} has another vocabulary than the student: token {first} is {other.get(first)!r} "
            f"there and {own.get(first)!r} here, and {len(differing)} tokens differ in all. "
            "Distil from a model with the student's tokenizer."
        )


def channel_rows(
    channels: Channels,
    hints: Hints,
    source: PairSource | None,
    policy: LocalPolicy,
    environment: Environment,
    out: RunWriter,
    record: Callable[[int, list[tuple[Episode, Hint]]], None],
    teacher: VllmPolicy | None = None,
) -> ChannelRows:
    """A function that collects the rows of a step from the sources that the channels use; `record` gets the hints.

    teacher: one behind a server, which is asked about all rollouts of a step at once.
    """
    used = channels.row_sources
    hint = hinted_turns(hints, policy, environment, out) if "hinted" in used else None

    def rows(episodes: list[Episode], step: int) -> ChannelBatch:
        own = [x for x in map(own_episode, episodes) if x is not None] if "episodes" in used else []
        if teacher is not None:
            told = teacher.score_all([(x.tree.prompt, x.tree.branches[0]) for x in own])
            own = [replace(x, teacher_logprobs=logps) for x, logps in zip(own, told, strict=True)]
        hinted = hint(episodes) if hint is not None else Hinted([], [])
        if hint is not None:
            record(step, hinted.hints)
        return ChannelBatch(
            pairs=source.batch(step) if source is not None else [],
            hinted=hinted.rows,
            episodes=own,
        )

    return rows


@contextmanager
def seeded(seed: int, threads: int | None) -> Iterator[None]:
    """Seed what training draws from, on so many CPU threads (None: as many as there are): sums round by their number.

    Unlike `stages.tiny_models.training.reproducible`, which is for models of seconds on one CPU thread, it forbids no
    kernel without a deterministic form: models of any size are trained here, on GPUs too, where some have none.
    """
    before = torch.get_num_threads()
    torch.manual_seed(seed)
    torch.set_num_threads(threads or before)
    try:
        yield
    finally:
        torch.set_num_threads(before)


# ---- assembly
# The trainer of a training, put together: arguments, journal, pairs, channels, rollouts, callbacks.

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
    out: RunWriter
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

    return trl_config(
        str(folder),
        config.optimisation,
        seed=config.seed,
        temperature=config.policy.temperature,
        max_completion=config.max_steps * config.policy.max_tokens,
        device=device(config.policy.device),
        mixed=mixed,
        processes=world_size(),
        report_to=config.report_to,
        run_name=config.label(),
        more=(TRUNCATED if config.policy.served else {}) | config.trl,
    )


def trainer(job: Job) -> "ComposedTrainer":
    """A trainer that has not begun; `BadInput` and `UsageError` where pairs, teacher or server do not fit the model."""
    from stages.training import distributed, served
    from stages.training.channels.active import Channels
    from stages.training.checkpoints import KeptCheckpoints, Supervision
    from stages.training.projection import projection
    from stages.training.rollouts import Rollouts, TrainingJournal
    from stages.training.trainer import ComposedTrainer, ShardedTrainer

    config, out, policy, ranks = job.config, job.out, job.policy, job.place.ranks
    make, size = config.opener(), config.optimisation
    environment = make()
    journal = TrainingJournal(out, job.sampler or policy, environment.sandbox)
    extracted = job.inputs.optional("pairs")
    source = None
    if extracted is not None:
        source = load_pairs(extracted, config.pairs, policy.tokenizer, seed=config.seed, out=out)
    if job.sharded is not None:
        job.sharded.gather()  # for whoever looks at the weights before the first step
    if source is not None and any(CHANNELS[name].needs_reference for name in config.weights.active()):
        with distributed.autocast(policy.model, job.mixed):
            source.cache_reference(policy.model, ranks=ranks)
    teacher = load_teacher(config.teacher, policy, out) if config.teacher else None
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
        channel_rows=channel_rows(channels, config.hints, source, policy, environment, out, journal.hints, asked),
        gradient_cosine_every=size.gradient_cosine_every,
        shared_prompts=size.shared_prompts,
        max_tokens=size.max_tokens_per_micro_batch,
        ranks=ranks,
        args=arguments(config, job.folder, job.mixed),
        train_dataset=task_dataset(job.tasks, make, size, config.seed, as_given=bool(config.env.curriculum)),
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
        peft_config=lora(config.adapter, policy.model),
    )


def base(config: Config, policy: "LocalPolicy") -> adapters.Base | None:
    """What an adapter's checkpoint says of its base; None where all weights are trained."""
    return adapters.describe(config.policy.held_here(), policy.model) if config.adapter.rank else None
