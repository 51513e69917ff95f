"""What training starts from: TRL's configuration, prompts, pairs, the teacher, the channels' rows, and seeds."""

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from datasets import Dataset
from trl.trainer.grpo_config import GRPOConfig

from stages.envs.base import Environment, Task
from stages.errors import UsageError
from stages.policy.base import PolicyConfig
from stages.policy.local import LocalPolicy, load_model
from stages.policy.vllm import VllmPolicy
from stages.rollouts.episode import Episode
from stages.rollouts.states import pairs_with_states
from stages.runs.artifact import Out, Run
from stages.runs.reporting import PROJECT
from stages.training import trl_fields
from stages.training.channels.active import Channels
from stages.training.defaults import SMALL_RATE
from stages.training.hints import Hint, Hinted, hinted_turns
from stages.training.pair_source import PairSource, tokenise
from stages.training.rows import ChannelBatch, own_episode
from stages.training.settings import Adapter, Hints, Optimisation, Pairs

if TYPE_CHECKING:
    from peft import LoraConfig

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
    return trl_fields.build(own, more or {})


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


def load_pairs(run: Run, settings: Pairs, tokenizer: Any, *, seed: int, out: Out) -> PairSource:
    """The pairs of a run in token ids; counts what is kept and dropped. `UsageError` when nothing is left."""
    kept, dropped = tokenise(pairs_with_states(run), tokenizer, settings.max_tokens)
    out.count(pairs=len(kept), **{f"pairs_dropped_{reason}": number for reason, number in dropped.items()})
    if not kept:
        raise UsageError(
            f"{run.path} holds no pair that is left after tokenisation ({dict(dropped)}). "
            "Extract more pairs, or raise pairs.max_tokens."
        )
    return PairSource(kept, per_step=settings.per_step, seed=seed)


def load_teacher(config: PolicyConfig, student: LocalPolicy, out: Out) -> Any:
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
    out: Out,
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
