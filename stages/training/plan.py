"""A training's configuration, resolved once: `resolve` returns an immutable `TrainPlan`, or the first of `refusals`.

What the settings leave open is chosen by the size of the model, which is read from config.json alone. A model below
`SMALL` parameters, such as those that environments bring along, is trained whole in one pass. For others these are the
usual choices: LoRA at a rate by size (`ADAPTER_RATES`), each prompt computed once for its samples, where packing.py
can, activations recomputed, and one group a pass, or as much of it as `PASS_TOKENS` hold. The last two are then
replaced by the fastest that fit into the memory there is (`fitted`).

`estimate_memory` gives the memory that a plan takes before anything is loaded, and `check_memory` refuses what does not
fit. Prompts count with the length that `measure_prompts` found. Activations follow Korthikanti et al. 2022 (arXiv
2205.05198) in counting what each layer keeps for its backward pass; the constant is measured on Qwen3
(tests/stages/training/test_memory.py). Rows of the channels besides GRPO's rollouts are not counted.
"""

import math
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from stages.backends import resources
from stages.envs import boundary
from stages.envs.base import Environment, Task
from stages.errors import BadInput, UsageError
from stages.policy import adapters, available, base, gguf, require_source
from stages.policy.base import PolicyConfig, Turn
from stages.policy.server import cpu_cache_bytes, memory_utilisation
from stages.policy.serving import needs_exclusive_server
from stages.runs import hub, reporting
from stages.training.channels import CHANNELS
from stages.training.config import Config, Optimisation

PROMPT_TOKENS = 1024
"""Assumed length of a prompt where none is measured."""
QUESTIONS, SESSIONS = 32, 2
"""Tasks that are measured, those with the longest texts: of an environment of questions, and of one that sets up files
or a shell for each task."""


@dataclass(frozen=True)
class Prompts:
    """What is known of the rollouts of a training before it.

    tokens: of the longest prompt. measured, tasks: how many prompts were measured, of how many tasks; 0 where the
    length is assumed. answers: after which a rollout ends at the latest; None where max_steps alone ends it.
    """

    tokens: int = PROMPT_TOKENS
    measured: int = 0
    tasks: int = 0
    answers: int | None = None

    def __str__(self) -> str:
        if not self.measured:
            return f"prompts of {self.tokens:,} tokens, which are assumed"
        return f"prompts of at most {self.tokens:,} tokens, measured on {self.measured} of {self.tasks} tasks"


ASSUMED = Prompts()


def measure_prompts(environment: Environment, tasks: Sequence[Task], tokenizer: Any, tool_calls: str) -> Prompts:
    """Return the lengths of the openings of some tasks, and close the environment; tool_calls: as in `PolicyConfig`.

    Tasks in containers are not measured: an image may have to be fetched first.
    """
    from stages.policy.model_facts import prompt_ids

    answers = getattr(environment, "answers", None)
    most = QUESTIONS if answers else SESSIONS * (environment.sandbox != "container")
    try:
        tools = boundary.declared_tools(environment) if tool_calls != "none" else ()
        longest = sorted(tasks, key=lambda task: len(task.prompt), reverse=True)[:most]
        turns = [Turn(boundary.check_opening(environment.reset(task)), 0, tools=tools) for task in longest]
    finally:
        environment.close()
    lengths = [len(prompt_ids(tokenizer, turn)) for turn in turns]
    return Prompts(max(lengths, default=PROMPT_TOKENS), len(lengths), len(tasks), answers)


SMALL = 10_000_000
SMALL_RATE = 2e-4
ADAPTER_RATE = 1e-5
ADAPTER_RATES = ((300_000_000, 4e-4), (1_000_000_000, 1e-4))
"""Of LoRA below so many parameters: 4e-4 taught SmolLM2-135M in 20 steps of 2 x 8 rollouts; Qwen2.5-Coder-0.5B lost
its reward at 3e-4 in seven steps, and was stable at 1e-4 with 4 x 8. Of larger models nothing was tried here: they get
`ADAPTER_RATE`, ten times TRL's rate for whole models."""
WHOLE_RATE = 1e-6
"""TRL's default for GRPO."""
SINGULAR_VALUES_RATE = 2e-2
"""Of models of any size: the change of a singular value is measured in the units of the weights' norm."""
RANK = 16
"""Of adapters, where nothing else is set."""

PASS_TOKENS = 32_768
"""Tokens of a pass that is not given: with LoRA and activations recomputed, an 8 B model then takes 36 GiB."""
SCORED_TOKENS = 16_384
"""Of one pass through the layers in scoring.py, which takes several for more."""
KEPT = 1.65
"""Numbers that a layer keeps for each number that goes into or comes out of its Linears."""
KEPT_ON_GPU = 1.28
"""The same of layers whose activations are not recomputed, on a GPU, whose attention keeps fewer (1.06 for Qwen3-8B,
1.26 for 0.6B on a rehearsed one)."""
REDUCED = 4
"""Bytes of a gradient on its way into shares: FSDP2 copies a layer's, and last those of embeddings and output head,
into a float32 buffer. Gloo holds them once more."""
TAKEN, TAKEN_ON_GPU = 1 / 3, 0.85
"""Part of the free memory that a choice of this module may take: a CPU's memory is shared with other programs, and with
other trainings of a chain, which begin at the same moment. What a user sets may take all of it."""
VOCABULARY_CHUNK = 32_768
"""Logits of one token that are held at once, as in TRL; on a CPU `stages.training.scoring` holds fewer."""
TOKEN_CHUNK = 4096
"""Tokens whose logits are held at once, as in TRL (1.16, kernels/chunked_logprob.py TOKEN_CHUNK_SIZE)."""
EAGER = 8
"""Bytes that eager attention keeps for each score: its soft cap, its softmax in float32, and that as it is used."""
GIB = 2**30
PROGRAM = 0.7 * GIB
"""Bytes of a CPU's memory that Python, torch, transformers and TRL take (measured with SmolLM2: 0.5 to 0.7 GiB)."""


@dataclass(frozen=True)
class ModelShape:
    """Sizes of a causal LM. parameters: tied weights counted once. linears: (inputs, outputs) of those in its layers.

    kv: width of the keys of one layer. bytes: of one weight as it is loaded, 2 or 4. packs: whether packing.py can have
    each prompt computed once for its samples. eager_heads: of queries, where attention is eager and holds the scores of
    all pairs of tokens; else 0.
    """

    parameters: int
    linears: tuple[tuple[int, int], ...]
    layers: int
    hidden: int
    kv: int
    vocabulary: int
    bytes: int
    packs: bool = False
    eager_heads: int = 0


def model_shape(policy: PolicyConfig) -> ModelShape | None:
    """Return the shape of a local model or of an adapter's base; None where nothing that tells it is available.

    Read from the config.json, or from the header of a GGUF file. None, too, for models that environments bring along,
    which are small.
    """
    if base.is_built_in(policy.model):
        return None
    require_source(policy)
    real = base.real_models(policy.model)
    if real and (header := real.header(policy.model)):
        return _shape_of_file(header, policy)
    import torch
    from accelerate import init_empty_weights
    from transformers import AutoModelForCausalLM
    from transformers.initialization import no_init_weights

    from stages.policy import model_checks, sampling

    source = str(Path(policy.model).expanduser())
    if adapters.is_adapter(source):
        return model_shape(adapters.base_of(Path(source), policy)[0])
    try:
        repo, commit = base.hub_id(policy.model)
        path = source if Path(source).is_dir() else hub.source(repo, commit)
        config = model_checks.read_shape(path, policy, commit)
        # Drawing weights that have no memory takes most of the time.
        with init_empty_weights(), no_init_weights(), model_checks.reading(policy):
            model: Any = AutoModelForCausalLM.from_config(config)
    except (OSError, BadInput):
        return None  # opening the model will name what is wrong with it
    model.tie_weights()  # which a model without weights does not do by itself
    head, text = model.get_output_embeddings(), config.get_text_config()
    linears = [m for m in model.modules() if isinstance(m, torch.nn.Linear) and m is not head]
    loaded = getattr(config, "dtype", None) if policy.dtype == "auto" else getattr(torch, policy.dtype)
    return ModelShape(
        parameters=sum(p.numel() for p in model.parameters()),
        linears=tuple((m.in_features, m.out_features) for m in linears),
        layers=text.num_hidden_layers,
        hidden=text.hidden_size,
        kv=sampling.kv_width(text),
        vocabulary=text.vocab_size,
        bytes=2 if loaded in (torch.bfloat16, torch.float16) else 4,
        packs=text._attn_implementation in sampling.SCALED_DOT_PRODUCT and sampling.sees_all(model, PROMPT_TOKENS),
        eager_heads=text.num_attention_heads if text._attn_implementation == "eager" else 0,
    )


def _shape_of_file(header: gguf.Header, policy: PolicyConfig) -> ModelShape:
    """Return the shape of a GGUF file's model, which is loaded in float32 where nothing else is set."""
    tensors = {tensor.name: tensor.shape for tensor in header.tensors}
    linears = [shape for name, shape in tensors.items() if name.startswith("blk.") and len(shape) == 2]
    return ModelShape(
        parameters=sum(map(math.prod, tensors.values())),
        linears=tuple((inputs, outputs) for outputs, inputs in linears),
        layers=header.number("block_count"),
        hidden=header.number("embedding_length"),
        kv=next((shape[0] for name, shape in tensors.items() if name.endswith(".attn_k.weight")), 0),
        vocabulary=tensors.get("token_embd.weight", (0,))[0],
        bytes=2 if policy.dtype in ("bfloat16", "float16") else 4,
        packs=header.architecture in gguf.WHOLE_ROWS,
    )


@dataclass(frozen=True)
class TrainPlan:
    """A training's configuration with nothing left open, and what its memory depends on.

    config: its optimisation and adapter are filled in. shape: of the model; None for a small built-in model, or where
    it is not known yet. small: whether the model is trained whole in one pass by default. rollout_tokens: of the
    longest rollout after the prompt. processes: each holds the whole model, and its share of a step's rollouts.
    teacher_bytes: of the models to distil from in this process, without those whose size is not known yet.
    direction: tokens of the longest row that a direction is found from, which is taken out of the training; 0 without
    one. pairs: whether a run of them is given. prompts: how long they are. because: what `fitted` chose by, for people.
    """

    config: Config
    shape: ModelShape | None
    small: bool
    rollout_tokens: int
    processes: int = 1
    teacher_bytes: int = 0
    direction: int = 0
    pairs: bool = False
    prompts: Prompts = ASSUMED
    because: str = ""

    @cached_property
    def device(self) -> str:
        """Return the device that the model is trained on, by the hardware of this process."""
        from stages.policy.local import device

        return device(self.config.policy.device)

    @property
    def sharded(self) -> bool:
        """Whether weights are spread over the processes, with masters, gradients and moments where all are trained."""
        return self.config.distribution.sharding == "fsdp2" and self.processes > 1

    @property
    def max_completion(self) -> int:
        """Return the tokens of TRL's longest completion, by the settings alone: a loss divides by them."""
        return _rollout_tokens(self.config, self.config.max_steps)

    @property
    def spectral(self) -> bool:
        """Whether a change of the singular values is trained beside frozen weights."""
        return self.config.adapter.kind == "singular-values"

    def sampled_by(self, rank: int) -> PolicyConfig:
        """Return the policy that a process samples from, with the address of its server: servers are taken in turn."""
        policy = self.config.policy
        if policy.base_url is None:
            return policy
        urls = (policy.base_url, *self.config.distribution.servers)
        return policy.model_copy(update={"base_url": urls[rank % len(urls)]})

    def changed(self, **settings: Mapping[str, Any]) -> "TrainPlan":
        """Return the plan with other values in some tables of the configuration: `changed(adapter={"rank": 8})`."""
        tables = {name: getattr(self.config, name).model_copy(update=dict(new)) for name, new in settings.items()}
        return replace(self, config=self.config.model_copy(update=tables))

    def passes(self) -> dict[str, Any]:
        """Return the settings that `fitted` chooses, by name."""
        size = self.config.optimisation
        return {"micro_batch": size.micro_batch, "gradient_checkpointing": size.gradient_checkpointing}

    def facts(self) -> dict[str, Any]:
        """Return the settings that were chosen, by name, as the run's manifest keeps them."""
        size = self.config.optimisation
        return {
            "adapter_rank": self.config.adapter.rank,
            "learning_rate": size.learning_rate,
            **self.passes(),
            "shared_prompts": size.shared_prompts,
        }

    def notes(self) -> tuple[str, ...]:
        """Return the choices and their reason, and the memory that training takes, for people; none if small."""
        if self.small:
            return ()
        size, rank = self.config.optimisation, self.config.adapter.rank
        trained = f"LoRA of rank {rank}" if rank else "singular values" if self.spectral else "all weights"
        size_words = (
            f"of {self.shape.parameters / 1e9:.2g} B parameters" if self.shape else "whose size is not known yet"
        )
        again = "activations recomputed" if size.gradient_checkpointing else "activations kept"
        rows = f"{size.micro_batch} rollout{'s' * (size.micro_batch != 1)} a pass"
        shared = ", prompts computed once for their rollouts" * bool(size.shared_prompts)
        choices = (
            f"{trained} at learning rate {size.learning_rate:g}, {rows}, {again}{shared} "
            f"(what you did not set was chosen for a model {size_words}{self.because})"
        )
        if self.shape is None:
            return (choices,)
        unpacked = "each prompt computed again for each rollout, since not all layers attend by sdpa to all tokens"
        needed = f"about {estimate_memory(self)} of memory for {self.prompts}"
        if self.sharded and not rank:
            # First the masters whole, then the optimiser's two moments (`ShardedTrainer`).
            gathered = 8 * self.shape.parameters / GIB
            needed += f", and up to {gathered:.1f} GiB of the first process' main memory for a checkpoint"
        return (choices, needed) if self.shape.packs else (choices, unpacked, needed)


def resolve(config: Config, processes: int, inputs: Container[str] = (), direction: int = 0) -> TrainPlan:
    """Fill in what the settings leave open and check them; `UsageError` for what cannot be trained.

    Reads the models' config.json, and asks the hub for it where need be. processes: that share the training. inputs:
    "pairs" where a run of them is given. direction: tokens of the longest row of the direction that is taken out.
    """
    reporting.check(config.report_to)
    policy, size, rank = config.policy, config.optimisation, config.adapter.rank
    shape = model_shape(policy.in_process())
    small = base.is_built_in(policy.source) or (shape is not None and shape.parameters < SMALL)
    spectral = config.adapter.kind == "singular-values"
    if rank is None:
        # A server gets an adapter sooner than all weights.
        rank = 0 if spectral or (small and not policy.served) else RANK
    # Of LoRA by the model's size, and as for large models where that is not known yet.
    of_size = (rate for below, rate in ADAPTER_RATES if shape and shape.parameters < below)
    usual_rate = next(of_size, ADAPTER_RATE) if rank else WHOLE_RATE
    rate = SINGULAR_VALUES_RATE if spectral else SMALL_RATE if small else usual_rate
    rollouts = size.prompts_per_step * size.generations
    loaded = {teacher.loaded: teacher for teacher in config.teachers() if not teacher.served}
    teachers = [model_shape(teacher) for teacher in loaded.values()]
    teacher_bytes = sum(teacher.parameters * teacher.bytes for teacher in teachers if teacher is not None)
    rollout_tokens = _rollout_tokens(config, config.max_steps)
    length = PROMPT_TOKENS + rollout_tokens
    plan = TrainPlan(
        config, shape, small, rollout_tokens, processes, teacher_bytes, direction, pairs="pairs" in inputs
    ).changed(
        optimisation={
            "learning_rate": rate if size.learning_rate is None else size.learning_rate,
            "micro_batch": size.micro_batch or (rollouts if small else _rows_a_pass(size.generations, length)),
            "gradient_checkpointing": not small if size.gradient_checkpointing is None else size.gradient_checkpointing,
        },
        adapter={"rank": rank},
    )
    if size.shared_prompts is None:
        # Of shares, gradients stay whole in a pass that goes through a layer more than once (`estimate_memory`).
        packs = shape is not None and shape.packs and not small and not (plan.sharded and not rank)
        plan = plan.changed(optimisation={"shared_prompts": packs})
    if (refusal := next(refusals(plan), None)) is not None:
        raise UsageError(refusal)
    return plan


def _rollout_tokens(config: Config, answers: int) -> int:
    """Return the tokens of the longest rollout of so many answers, without its prompt."""
    policy = config.policy
    # Without a limit of its own, prompt, answers and observations together stay within the context.
    return answers * policy.max_tokens if policy.max_tokens else available.longest_answer(policy)


def _rows_a_pass(rollouts: int, length: int) -> int:
    """Return the most of so many rollouts, a divisor of their number, that make up a pass if each has this length."""
    return max(n for n in _divisors(rollouts) if n == 1 or n * length <= PASS_TOKENS)


def _divisors(number: int) -> list[int]:
    return [n for n in range(1, number + 1) if number % n == 0]


def fitted(plan: TrainPlan, settings: Optimisation, prompts: Prompts, free: int | None) -> TrainPlan:
    """Return the plan for these prompts, with the passes that compute least of those that fit into memory.

    Chosen are the rollouts of a pass, and whether activations are recomputed, where `settings` leaves them open. free:
    bytes, of which a part is left for other programs; None where unknown, for the passes of `resolve`. Results stay
    equal up to rounding: a pass is a part of a step's sum.
    """
    if plan.small or plan.shape is None:
        return plan
    size, process_prompts = plan.config.optimisation, plan.config.optimisation.prompts_per_step // plan.processes
    answers = min(prompts.answers or plan.config.max_steps, plan.config.max_steps)
    plan = replace(plan, prompts=prompts, rollout_tokens=_rollout_tokens(plan.config, answers))
    length = prompts.tokens + plan.rollout_tokens
    plan = plan.changed(optimisation={"micro_batch": settings.micro_batch or _rows_a_pass(size.generations, length)})
    if free is None or (settings.micro_batch and settings.gradient_checkpointing is not None):
        return plan
    # A part of a group, a group, or several.
    counts = {*_divisors(size.generations), *(size.generations * n for n in _divisors(process_prompts))}
    passes = (
        [settings.micro_batch] if settings.micro_batch else [n for n in counts if n == 1 or n * length <= PASS_TOKENS]
    )
    ways = [
        plan.changed(optimisation={"micro_batch": rows, "gradient_checkpointing": again})
        for rows in passes
        for again in (False, True)
        if settings.gradient_checkpointing in (None, again)
    ]
    room = (TAKEN_ON_GPU if plan.device.startswith("cuda") else TAKEN) * free
    fitting = [way for way in ways if estimate_memory(way).total <= room]
    if not fitting:
        least = min(ways, key=lambda way: estimate_memory(way).total)
        return replace(least, because=f" and {room / GIB:.1f} GiB of memory, with the smallest passes")
    chosen = min(fitting, key=lambda way: (_computed(way), -(way.config.optimisation.micro_batch or 1)))
    return replace(chosen, because=f" and {room / GIB:.1f} GiB of memory")


def _computed(plan: TrainPlan) -> float:
    """Return the tokens of a step's passes, each as often as its layers' products are computed."""
    size = plan.config.optimisation
    rollouts = plan.config.optimisation.prompts_per_step // plan.processes * size.generations
    # Forward and to the layers' inputs; of all weights, also to the weights; and forward again.
    times = 2 + (not plan.config.adapter.rank and not plan.spectral) + bool(size.gradient_checkpointing)
    return times * rollouts / (size.micro_batch or rollouts) * _tokens_a_pass(plan)


def _tokens_a_pass(plan: TrainPlan) -> int:
    """Return the most tokens of a pass."""
    size, rows = plan.config.optimisation, plan.config.optimisation.micro_batch or 1
    if not size.shared_prompts:
        return rows * (plan.prompts.tokens + plan.rollout_tokens)
    # Rows of all groups of a step may meet in a pass, so that it may hold as many prompts as the step has.
    prompts = min(rows, -(-size.prompts_per_step // plan.processes))
    return prompts * plan.prompts.tokens + rows * plan.rollout_tokens


PER_PASS = ("entropy_coef", "use_adaptive_entropy")
"""Fields of TRL's that add a mean over the tokens of each pass (TRL 1.16, trainer/grpo_trainer.py `_compute_loss`)."""
STEPPED_BY_SHARES = ("adamw_torch", "adamw_torch_fused", "sgd")
"""Optimisers that were measured to take the same step from shares (tests/stages/training/test_processes.py)."""


def refusals(plan: TrainPlan) -> Iterator[str]:
    """Yield why a plan cannot be trained, and what to set, as far as the settings and config.json of the model show.

    The validators of `Config` refuse what one table of settings alone shows; `stages.training.weights` refuses what
    only a server shows.
    """
    yield from _input_refusals(plan)
    yield from _process_refusals(plan)
    yield from _shard_refusals(plan)
    yield from _server_refusals(plan)


def _input_refusals(plan: TrainPlan) -> Iterator[str]:
    """Yield what is wrong between the model, the runs that are given, and the losses that are to be learned from."""
    config, weights = plan.config, plan.config.weights.active()
    on_pairs = [name for name, channel in CHANNELS.items() if "pairs" in channel.needs]
    needing = [name for name in on_pairs if name in weights]
    if needing and not plan.pairs:
        yield (
            f"weights.{needing[0]} is {weights[needing[0]]:g}, but no pairs were given. "
            "Run `composer extract-pairs` first, then add `--from extract-pairs`."
        )
    if plan.pairs and not needing:
        *names, last = [f"weights.{name}" for name in on_pairs]
        yield f"Pairs were given, but no channel uses them. Set {', '.join(names)} or {last}, or leave the pairs out."
    if plan.direction and config.adapter.dora:
        yield (
            "A direction is taken out of W0 + BA, but adapter.dora also trains the magnitudes of its columns. "
            "Set adapter.dora=false."
        )
    if config.optimisation.stop_on_collapse and config.diloco.store is not None:
        yield "optimisation.stop_on_collapse would end one of several replicas. Leave it out, or diloco.store."
    if config.optimisation.beta and not config.adapter.rank and adapters.is_adapter(config.policy.model):
        # TRL would load the adapter's base as the reference of the KL penalty.
        yield (
            f"optimisation.beta needs a reference, and {config.policy.model} is an adapter, which lies in no folder of "
            "its own once merged. Set adapter.rank, or run `composer export model` and start from the merged folder."
        )


def _process_refusals(plan: TrainPlan) -> Iterator[str]:
    """Yield why several processes would take another step than one, or cannot share the rollouts of a step."""
    size, trl, count = plan.config.optimisation, plan.config.trl, plan.processes
    if count == 1:
        return
    if plan.config.diloco.store is not None:
        yield (
            f"diloco.store was given to {count} processes of one training, but a replica is one process. "
            "Leave out torchrun, or diloco.store."
        )
    if size.loss_type == "bnpo":
        yield (
            f'optimisation.loss_type is "bnpo", a mean over the tokens of each pass: {count} processes would take '
            'another step than one. Take "dapo", whose mean is over the tokens of the whole step.'
        )
    if per_pass := [name for name in PER_PASS if trl.get(name)]:
        yield (
            f"trl.{per_pass[0]} adds a mean over the tokens of each pass: {count} processes would take another step "
            "than one. Leave it out, or train in one process."
        )
    if size.prompts_per_step % count:
        yield (
            f"optimisation.prompts_per_step is {size.prompts_per_step}, and {count} processes cannot share that "
            f"without splitting a group. Take a multiple of {count}."
        )
    rollouts = max(size.prompts_per_step // count, 1) * size.generations
    if size.micro_batch and rollouts % min(size.micro_batch, rollouts):
        yield (
            f"optimisation.micro_batch is {size.micro_batch}, but each of {count} processes has {rollouts} rollouts a "
            f"step. Take a divisor of {rollouts}."
        )


def _shard_refusals(plan: TrainPlan) -> Iterator[str]:
    """Yield what needs all weights or all gradients in one place, where several processes share them."""
    config = plan.config
    if plan.processes == 1 or config.distribution.sharding == "none":
        return
    rank, optimiser = config.adapter.rank, config.trl.get("optim", STEPPED_BY_SHARES[0])
    copied = not rank and "sdpo" in config.weights.active() and config.hints.teacher != "current"
    needing = {
        "adapter.dora, which reads whole weights; take false": config.adapter.dora,
        "adapter.kind=singular-values, whose weights are frozen and not cut; take lora": plan.spectral,
        "probe.measure, which compares whole gradients; take false": bool(plan.direction) and config.probe.measure,
        f"hints.teacher={config.hints.teacher}, which copies all weights; take current": copied,
        "optimisation.gradient_cosine_every, which compares whole gradients; take 0": bool(
            config.optimisation.gradient_cosine_every
        ),
        f"trl.optim={optimiser}; take {', '.join(STEPPED_BY_SHARES)}": not rank and optimiser not in STEPPED_BY_SHARES,
    }
    for option, is_set in needing.items():
        if is_set:
            yield f"distribution.sharding=fsdp2 does not go with {option}."


def _server_refusals(plan: TrainPlan) -> Iterator[str]:
    """Yield why a policy behind servers cannot follow the training, or the processes cannot share these servers."""
    policy, staleness = plan.config.policy, plan.config.optimisation.max_staleness
    servers, count = 1 + len(plan.config.distribution.servers), plan.processes
    if not policy.served:
        return
    if plan.spectral:
        yield (
            f"{policy.model!r} is sampled from a server, which gets an adapter or all weights, and "
            "adapter.kind=singular-values trains neither. Leave out vllm:, or take adapter.kind=lora."
        )
    if plan.config.diloco.store is not None:
        yield (
            f"{policy.model!r} is sampled from a server, which follows one training, and replicas are several. "
            "Leave out diloco.store, or vllm:."
        )
    if policy.server.sleeps and policy.base_url is None and staleness:
        yield (
            f"optimisation.max_staleness is {staleness}, and policy.server.args.enable-sleep-mode has the server sleep "
            "while a step trains, when it would play the next rollouts. Set the first to 0, or leave the second out."
        )
    if adapters.is_adapter(policy.source):
        yield (
            f"{policy.source} is an adapter, and a server cannot hold another one on top of it. "
            "Run `composer export model` and start from the merged folder."
        )
    if count > 1 and policy.base_url is None:
        yield (
            f"{policy.model!r} has no address, and {count} processes would start a server each, on the same GPU or "
            "CPU. Start one or several with `composer serve`; give policy.base_url, and others in distribution.servers."
        )
    if servers > count:
        yield (
            f"{servers} servers were given to {count} processes, each of which samples from one. Leave "
            f"{servers - count} out of distribution.servers, or start more processes with torchrun."
        )
    if count > servers and staleness and needs_exclusive_server(policy):
        yield (
            f"optimisation.max_staleness is {staleness}, but {count} processes share {servers} vLLM on a CPU, "
            "which crashes when it scores for one process while it samples for another. Take 0, or give each a server "
            "in distribution.servers."
        )


@dataclass(frozen=True)
class MemoryEstimate:
    """Bytes, by what they hold. gathered: of shares, what is whole for a pass, and messages."""

    weights: float
    gradients: float
    optimiser: float
    activations: float
    gathered: float = 0.0
    teacher: float = 0.0
    direction: float = 0.0
    program: float = 0.0

    @property
    def total(self) -> float:
        """All of it."""
        return sum(asdict(self).values())

    @property
    def held(self) -> float:
        """Return the bytes that are held between steps, too."""
        return self.total - self.gradients - self.activations - self.gathered

    def __str__(self) -> str:
        seldom = ("gathered", "teacher", "direction", "program")
        parts = {name: value for name, value in asdict(self).items() if value or name not in seldom}
        words = ", ".join(f"{name} {value / GIB:.1f}" for name, value in parts.items())
        return f"{self.total / GIB:.1f} GiB ({words})"


def estimate_memory(plan: TrainPlan) -> MemoryEstimate:
    """Return the memory of weights, gradients, AdamW's two moments in the types of distributed.py, and activations.

    `plan.shape` must be known.
    """
    shape, size, rank = plan.shape, plan.config.optimisation, plan.config.adapter.rank
    if shape is None:
        raise ValueError("the model's shape is not known")
    inputs, outputs = (sum(side) for side in zip(*shape.linears, strict=True))
    trained = num_trained(plan, shape)
    if rank:
        weights: float = shape.bytes * shape.parameters + 4 * trained
    elif plan.spectral:
        factors = sum(min(shapes) * sum(shapes) for shapes in shape.linears)
        weights = shape.bytes * shape.parameters + 4 * (trained + factors)
    else:
        copies = 1 + (size.beta > 0)  # of the weights: GRPO's reference is a second model
        weights = shape.parameters * (4 * copies + (2 if shape.bytes == 2 else 0))  # autocast's bfloat16 copies
    gradients, optimiser = 4.0 * trained, 8.0 * trained
    if plan.sharded:
        weights = (shape.bytes if rank else 4) * shape.parameters / plan.processes + (4 * trained if rank else 0)
        weights += 4 * shape.parameters * bool(size.beta and not rank)
    if plan.sharded and not rank:
        gradients, optimiser = gradients / plan.processes, optimiser / plan.processes
    length = plan.prompts.tokens + plan.rollout_tokens
    # peft casts the input of each adapted Linear to the adapter's float32, and autograd keeps that copy.
    # Not of float32 masters under autocast, which keeps copies besides.
    fewer = plan.device.startswith("cuda") and rank and not size.gradient_checkpointing
    bytes_per_token = (KEPT_ON_GPU if fewer else KEPT) * shape.bytes * (inputs + outputs) + (
        4 * inputs if rank and shape.bytes == 2 else 0
    )
    stored = shape.bytes * shape.layers * shape.hidden if size.gradient_checkpointing else bytes_per_token
    if size.gradient_checkpointing:
        # The input of every layer, and all of one layer at a time while it is recomputed.
        bytes_per_token = stored + bytes_per_token / shape.layers
    # On its way back, besides: the gradients of a layer's output and of its input.
    bytes_per_token += 2 * shape.bytes * shape.hidden
    tokens = _tokens_a_pass(plan)
    # One tile of logits, whatever the tokens. On a GPU Triton's kernel writes the gradient over it; elsewhere it goes
    # through float32 logits and their gradients.
    number = shape.bytes if plan.device.startswith("cuda") else 8
    tile = number * min(tokens, TOKEN_CHUNK) * min(shape.vocabulary, VOCABULARY_CHUNK)
    if plan.teacher_bytes:  # the last hidden states of the teacher and of the student, of all rollouts at once
        bytes_per_token += 2 * shape.bytes * shape.hidden
    scores = EAGER * (size.micro_batch or 1) * shape.eager_heads * length**2
    if not size.gradient_checkpointing:
        scores *= shape.layers
    training = tokens * bytes_per_token + tile + scores
    generation = _generation(plan, shape, length)
    # Rollouts are generated before the step is trained on, so the larger of the two counts.
    activations = max(training, generation)
    gathered = 0.0
    if plan.sharded:
        gathered = _in_shares(plan, shape, training, tokens * stored + tile, generation) - activations
    subtotal = weights + gradients + optimiser + activations + gathered
    direction = (
        _direction(plan, shape, trained, plan.direction * bytes_per_token + tile, subtotal) if plan.direction else 0
    )
    program = PROGRAM if plan.device == "cpu" else 0.0
    return MemoryEstimate(weights, gradients, optimiser, activations, gathered, plan.teacher_bytes, direction, program)


def _in_shares(plan: TrainPlan, shape: ModelShape, training: float, scored: float, generation: float) -> float:
    """Return the bytes of activations in a step in shares, with what is gathered meanwhile and gradients not yet cut.

    training, scored, generation: activations of a backward pass, of what precedes it, and of sampling.
    """
    size, number, sampling = plan.config.optimisation, min(shape.bytes, 4), 0.0
    layers = sum(width * height for width, height in shape.linears)
    layer, unlayered = layers / shape.layers, shape.parameters - layers  # rest: embeddings and output head
    # The layer that is computed, and the message with the next one.
    moments = [training + number * (unlayered + 2 * layer)]
    if not plan.config.adapter.rank:
        # Where a backward pass goes through each layer more than once, gradients are cut into shares at its end.
        composed, most = bool(plan.config.weights.active()) or size.shared_prompts, size.max_tokens_per_micro_batch
        several = composed and not (shape.packs and most is not None and most <= SCORED_TOKENS)
        head = shape.hidden * shape.vocabulary
        moments[0] += number * (shape.parameters if several else head + layer) + REDUCED * layer
        # First the head's gradient, which is a sum in float32; last those of embeddings and head.
        moments += [scored + number * unlayered + (4 + number) * head, (number + REDUCED) * unlayered]
    if not plan.config.policy.served:
        sampling = number * shape.parameters + generation
    return max(*moments, sampling)


def num_trained(plan: TrainPlan, shape: ModelShape) -> int:
    """Return the number of trainable parameters."""
    if plan.spectral:
        return sum(min(shapes) for shapes in shape.linears)
    rank = plan.config.adapter.rank
    return rank * sum(map(sum, shape.linears)) if rank else shape.parameters


def _direction(plan: TrainPlan, shape: ModelShape, trained: int, row: float, training: float) -> float:
    """Return the bytes that a direction takes beside `training`, the bytes of all else. row: activations of one row."""
    area = sum(width * height for width, height in shape.linears)
    # v, and the random direction that is taken out in its place, beside what is trained as it was before a step.
    copies = 1 + (plan.config.probe.project == "random")
    shares = plan.processes if plan.sharded and not plan.config.adapter.rank else 1
    frozen = bool(plan.config.adapter.rank) or plan.spectral
    kept_bytes = (copies * shape.bytes * area + 4 * (trained if frozen else area)) / shares
    # v is found before anything is trained: float32 sums, and the gradient of one Linear of one row.
    largest = max(width * height for width, height in shape.linears)
    finding = shape.bytes * shape.parameters + 4 * area + shape.bytes * largest + row
    return max(kept_bytes, finding - training)


def _generation(plan: TrainPlan, shape: ModelShape, length: int) -> float:
    """Return the bytes of sampling: one row at least, as more are sampled at once only where they fit."""
    policy, size = plan.config.policy, plan.config.optimisation
    if policy.served:
        return 0  # the server's, and in its share
    # Keys and values, and the distribution of the next token (stages/policy/sampling.py row_bytes).
    row = 2 * shape.bytes * shape.layers * shape.kv * length + 32 * shape.vocabulary
    rollouts = -(-size.prompts_per_step // plan.processes) * size.generations
    # Float32 weights with the adapter added, beside those without it (stages/policy/local.py adapter_merged).
    merges = plan.config.adapter.rank and shape.bytes == 4
    merged = 4 * sum(width * height for width, height in shape.linears) if merges else 0
    return merged + max(row, min(rollouts * row, (policy.kv_cache_gib or 0) * GIB))


SAVINGS: dict[str, Callable[[TrainPlan], TrainPlan]] = {
    "optimisation.gradient_checkpointing=true": lambda plan: plan.changed(
        optimisation={"gradient_checkpointing": True}
    ),
    "optimisation.micro_batch=1": lambda plan: plan.changed(optimisation={"micro_batch": 1}),
    "distribution.sharding=fsdp2": lambda plan: plan.changed(distribution={"sharding": "fsdp2"}),
    f"adapter.rank={RANK}": lambda plan: plan.changed(adapter={"rank": plan.config.adapter.rank or RANK}),
    "optimisation.prompts_per_step=1": lambda plan: plan.changed(optimisation={"prompts_per_step": 1}),
    "half of max_steps or policy.max_tokens": lambda plan: replace(plan, rollout_tokens=plan.rollout_tokens // 2),
}
"""Settings that need less memory, in the order of what they cost in learning."""


@dataclass(frozen=True)
class Room:
    """Memory that a training may take: what is free, without what the vLLM server that it starts is about to take.

    free, server: bytes. total: bytes of the GPU that such a server shares with the training, of which it takes the part
    `utilisation`; 0 without one, and on a CPU. awake: bytes that a server takes besides while a step's rollouts are
    played, which sleeps while a step trains.
    """

    free: int
    server: int = 0
    total: int = 0
    utilisation: float = 0.0
    awake: int = 0

    @property
    def bytes(self) -> int:
        """All that is left."""
        return max(self.free - self.server, 0)

    def smaller_server(self, missing: float, weights: float) -> str:
        """Return the setting by which the server leaves so many bytes more; empty where it could not hold its model."""
        part = math.floor(100 * (self.utilisation - missing / max(self.total, 1))) / 100
        enough = part * self.total > SERVER_RESERVE + weights
        return f"policy.server.args.gpu-memory-utilization={part:g}" if self.total and enough else ""

    def __str__(self) -> str:
        state = " asleep" if self.awake else ""
        beside = f" beside its vLLM server, which takes {self.server / GIB:.1f}{state}" if self.server else ""
        return f"{self.bytes / GIB:.1f} GiB{beside}"


SERVER_RESERVE = 3 * GIB
"""What a vLLM server needs besides weights to start at all: activations of a batch, CUDA graphs, some KV cache."""

ASLEEP = 2 * GIB
"""What a vLLM server that sleeps keeps of a GPU at most: CUDA's context, its graphs, NCCL's buffers."""


def room(plan: TrainPlan, *, started: bool = False, gpu_memory: Callable[[str], tuple[int, int]] | None = None) -> Room:
    """Return the memory for a training on its device. started: whether the server that it starts has its memory.

    gpu_memory: returns the free and all bytes of a GPU, by default those that the driver reports.
    """
    if (limit := plan.config.optimisation.memory_limit) is not None:
        return Room(int(limit * GIB))
    return _room(plan, resources.available, started, gpu_memory)


def unused(plan: TrainPlan) -> int | None:
    """Return the bytes that passes are chosen by; None where this machine lacks the GPU that is to train.

    A memory limit above what is free allows the user's own settings alone.
    """
    import torch

    if plan.device.startswith("cuda") and not torch.cuda.is_available():
        return None
    limit = plan.config.optimisation.memory_limit
    free = _room(plan, resources.unused, started=False).bytes
    return free if limit is None else min(free, int(limit * GIB))


def _room(
    plan: TrainPlan,
    of_cpu: Callable[[str], int],
    started: bool,
    gpu_memory: Callable[[str], tuple[int, int]] | None = None,
) -> Room:
    policy, shape = plan.config.policy, plan.shape
    starts_server = policy.served and policy.base_url is None
    if not plan.device.startswith("cuda"):
        # Limits of a control group are no measure of what is free, so a server that has started counts as well.
        weights = shape.parameters * shape.bytes if shape else 0
        return Room(of_cpu(plan.device), int(weights + cpu_cache_bytes()) if starts_server else 0)
    import torch

    free, total = (gpu_memory or torch.cuda.mem_get_info)(plan.device)
    if not starts_server:
        return Room(free)
    part = memory_utilisation(policy.server)
    if policy.server.sleeps:
        server_bytes = int(part * total)
        return Room(free + (server_bytes if started else 0), ASLEEP, total, part, server_bytes - ASLEEP)
    return Room(free, 0 if started else int(part * total), total, part)


def check_memory(plan: TrainPlan, room: Room) -> None:
    """`UsageError` with the estimate and settings that make it fit, where it is more than the room."""
    if plan.shape is None:
        return
    total = reduced = estimate_memory(plan)
    model = plan.shape.parameters * plan.shape.bytes
    between = room.bytes - room.awake
    if room.awake and total.held > between:
        smaller = room.smaller_server(total.held - between, model)
        raise UsageError(
            f"Between its steps this training holds about {total.held / GIB:.1f} GiB, and its vLLM server, which is "
            f"awake then, leaves {max(between, 0) / GIB:.1f}. Take {smaller or 'a smaller model or more memory'}."
        )
    if total.total <= room.bytes:
        return
    server = "" if room.awake else room.smaller_server(total.total - room.bytes, model)
    ways: list[str] = []
    for words, change in SAVINGS.items():
        changed = change(plan)
        less = estimate_memory(changed)
        # Below 1 % a setting is no remedy, only noise of the estimate.
        if less.total < 0.99 * reduced.total and len(ways) < 3 and reduced.total > room.bytes:
            ways.append(f"{words} ({less.total / GIB:.1f} GiB)")
            reduced, plan = less, changed
    fits = "fits" if reduced.total <= room.bytes else "still does not fit: take a smaller model or more memory"
    raise UsageError(
        f"This training takes about {total}, and there are {room}. "
        f"{f'{server} alone makes it fit. ' if server else ''}"
        f"One after the other: {', '.join(ways) or 'nothing helps'}; that {fits}. "
        "The estimate is one of the longest rollouts: optimisation.memory_limit=GIB says how much it may be."
    )
