"""What training does where the settings leave it open, by the size of the model.

A model below `SMALL` parameters, such as those that environments bring along, is trained whole in one pass. For others
these are the usual choices: LoRA at ten times the rate that TRL takes for whole models, one group a pass, activations
recomputed.
"""

import os
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from stages.backends.ranks import world_size
from stages.errors import UsageError
from stages.policy import adapters, base
from stages.policy.base import PolicyConfig
from stages.runs import store
from stages.training.config import Config
from stages.training.settings import Adapter, Distribution, Optimisation

# ---- model_shape
# A model's size from its config.json alone: nothing of its weights is read or held.


@dataclass(frozen=True)
class ModelShape:
    """Sizes of a causal LM. parameters: tied weights counted once. linears: (inputs, outputs) of those in its layers.

    kv: width of the keys of one layer. bytes: of one weight as it is loaded, 2 or 4.
    """

    parameters: int
    linears: tuple[tuple[int, int], ...]
    layers: int
    hidden: int
    kv: int
    vocabulary: int
    bytes: int


def model_shape(policy: PolicyConfig) -> ModelShape | None:
    """The shape of a local model or of an adapter's base; None where no config.json can be had.

    None, too, for models that environments bring along: they are made in seconds, so they are small.
    """
    if base.is_embedded(policy.model):
        return None
    import torch
    from accelerate import init_empty_weights
    from transformers import AutoConfig, AutoModelForCausalLM

    source = str(Path(policy.model).expanduser())
    if adapters.is_adapter(source):
        return model_shape(adapters.base_of(Path(source), policy)[0])
    try:
        config: Any = AutoConfig.from_pretrained(source if Path(source).is_dir() else policy.model)
        with init_empty_weights():
            model: Any = AutoModelForCausalLM.from_config(config)
    except (OSError, ValueError):
        return None
    model.tie_weights()  # which a model without weights does not do by itself
    head, text = model.get_output_embeddings(), config.get_text_config()
    linears = [m for m in model.modules() if isinstance(m, torch.nn.Linear) and m is not head]
    heads = getattr(text, "num_key_value_heads", None) or text.num_attention_heads
    width = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    loaded = getattr(config, "dtype", None) if policy.dtype == "auto" else getattr(torch, policy.dtype)
    return ModelShape(
        parameters=sum(p.numel() for p in model.parameters()),
        linears=tuple((m.in_features, m.out_features) for m in linears),
        layers=text.num_hidden_layers,
        hidden=text.hidden_size,
        kv=heads * width,
        vocabulary=text.vocab_size,
        bytes=2 if loaded in (torch.bfloat16, torch.float16) else 4,
    )


# ---- memory
# How much memory a training takes, before anything is loaded: from the model's shape, the settings and the lengths.
#
# Activations follow Korthikanti et al. 2022 (arXiv 2205.05198) in counting what each layer keeps for its backward
# pass;
# the constant is measured on Qwen3 (tests/stages/training/test_memory.py). Rows of the channels beside GRPO's rollouts
# are not counted.

PROMPT_TOKENS = 1024
"""Assumed length of a prompt, which is known only when it is played."""
KEPT = 1.65
"""Numbers that a layer keeps for each number that goes into or comes out of its Linears."""
REDUCED = 4
"""Bytes a gradient of the largest unit in shares on its way to them: FSDP2 copies a unit's into one float32 buffer.
Gloo holds them once more (measured: benchmarks/sharding.py)."""
VOCABULARY_CHUNK = 32_768
"""Logits of one token that are held at once, as in TRL; `stages.training.scoring` holds fewer."""
RANK = 16
"""Of adapters, where nothing else is said."""
GIB = 2**30


@dataclass(frozen=True)
class Needed:
    """Bytes, by what they hold."""

    weights: float
    gradients: float
    optimiser: float
    activations: float
    teacher: float = 0.0

    @property
    def total(self) -> float:
        """All of it."""
        return self.weights + self.gradients + self.optimiser + self.activations + self.teacher

    def __str__(self) -> str:
        held = {name: value for name, value in asdict(self).items() if value or name != "teacher"}
        parts = ", ".join(f"{name} {value / GIB:.1f}" for name, value in held.items())
        return f"{self.total / GIB:.1f} GiB ({parts})"


@dataclass(frozen=True)
class Training:
    """What the sum depends on. `size` and `adapter` have nothing left open; episode: tokens after the prompt.

    processes: each holds the whole model, and its share of a step's rollouts. teacher: bytes of a model to distil from
    that is held here, too. sharded: of masters, gradients and moments each process holds its share alone. several: a
    backward pass goes through each layer more than once, as with channels; gradients are cut into shares at its end.
    """

    size: Optimisation
    adapter: Adapter
    episode: int
    processes: int = 1
    teacher: int = 0
    sharded: bool = False
    several: bool = False


def _sized(training: Training, **changes: Any) -> Training:
    return replace(training, size=training.size.model_copy(update=changes))


def _adapted(training: Training) -> Training:
    if training.adapter.rank:
        return training
    return replace(training, adapter=training.adapter.model_copy(update={"rank": RANK}), sharded=False)


def _in_shares(training: Training) -> Training:
    return replace(training, sharded=training.processes > 1 and not training.adapter.rank)


WAYS: dict[str, Callable[[Training], Training]] = {
    "optimisation.gradient_checkpointing=true": lambda training: _sized(training, gradient_checkpointing=True),
    "optimisation.micro_batch=1": lambda training: _sized(training, micro_batch=1),
    "distribution.sharding=fsdp2": _in_shares,
    f"adapter.rank={RANK}": _adapted,
    "optimisation.prompts_per_step=1": lambda training: _sized(training, prompts_per_step=1),
    "half of max_steps or policy.max_tokens": lambda training: replace(training, episode=training.episode // 2),
}
"""Settings that need less memory; those that cost least in what is learnt first."""


def needed(shape: ModelShape, training: Training) -> Needed:
    """Weights, gradients and AdamW's two moments in the types of `stages.training.distributed`, and activations."""
    size, rank = training.size, training.adapter.rank
    inputs, outputs = (sum(side) for side in zip(*shape.linears, strict=True))
    trained = rank * (inputs + outputs) if rank else shape.parameters
    if rank:
        weights: float = shape.bytes * shape.parameters + 4 * trained
    else:
        copies = 1 + (size.beta > 0)  # GRPO's reference
        weights = shape.parameters * (4 * copies + (2 if shape.bytes == 2 else 0))  # autocast's bfloat16 copies
    gradients, optimiser = 4.0 * trained, 8.0 * trained
    if training.sharded:
        computing, masters = min(shape.bytes, 4) * shape.parameters, 4 * shape.parameters / training.processes
        weights = computing + masters + (4 * shape.parameters if size.beta else 0)
        layers = sum(width * height for width, height in shape.linears)
        uncut = shape.parameters if training.several else shape.parameters - layers * (1 - 1 / shape.layers)
        unit = max(layers / shape.layers, shape.parameters - layers)  # a layer, or embeddings and output head
        gradients = masters + min(shape.bytes, 4) * uncut + REDUCED * unit
        optimiser = 2 * masters
    length = PROMPT_TOKENS + training.episode
    kept = KEPT * shape.bytes * (inputs + outputs) + (4 * inputs if rank and shape.bytes == 2 else 0)
    if size.gradient_checkpointing:
        kept = shape.bytes * shape.layers * shape.hidden + kept / shape.layers
    head = 8 * min(shape.vocabulary, VOCABULARY_CHUNK)
    learning = (size.micro_batch or 1) * length * (kept + head)
    cache = 2 * shape.bytes * shape.layers * shape.kv
    rollouts = -(-size.prompts_per_step // training.processes) * size.generations
    sampling = rollouts * (length * cache + 4 * shape.vocabulary)
    return Needed(weights, gradients, optimiser, max(learning, sampling), training.teacher)


def available(device: str, root: Path = Path("/")) -> int:
    """Bytes: what is free on the GPU, or for training on the CPU this process' share of all that limits allow."""
    import torch

    if device.startswith("cuda"):
        return torch.cuda.mem_get_info(device)[0]
    machine = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    here = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))  # processes that torchrun started on this machine
    return min([machine, *cgroup_limits(root)]) // here


def cgroup_limits(root: Path = Path("/")) -> list[int]:
    """Bytes that control groups of this process and those above it allow: containers, Slurm's and systemd's jobs.

    root: where proc and sys lie. Version 2 keeps a limit in memory.max ("max" for none) below /sys/fs/cgroup, version 1
    in memory.limit_in_bytes below /sys/fs/cgroup/memory, a number beyond all memory for none. Source: Linux
    Documentation/admin-guide/cgroup-v2.rst and cgroup-v1/memory.rst.
    """
    limits = []
    for line in (store.read_bytes(root / "proc/self/cgroup") or b"").decode().splitlines():
        number, controllers, path = line.split(":", 2)
        if number == "0" and not controllers:
            mount, name = root / "sys/fs/cgroup", "memory.max"
        elif "memory" in controllers.split(","):
            mount, name = root / "sys/fs/cgroup/memory", "memory.limit_in_bytes"
        else:
            continue
        inside = Path(path.lstrip("/"))
        # In a container the path may be the host's; its own group is then what is mounted.
        for place in (inside, *inside.parents):
            said = (store.read_bytes(mount / place / name) or b"").decode().strip()
            limits += [int(said)] if said.isdigit() else []
    return limits


def check(shape: ModelShape, training: Training, room: int) -> None:
    """`UsageError` with the sum and three settings that lessen it, where it is more than `room` bytes."""
    total = needed(shape, training)
    if total.total <= room:
        return
    ways: list[str] = []
    left = total
    for words, change in WAYS.items():
        changed = change(training)
        less = needed(shape, changed)
        if less.total < 0.99 * left.total and len(ways) < 3 and left.total > room:
            ways.append(f"{words} ({less.total / GIB:.1f} GiB)")
            left, training = less, changed
    fits = "fits" if left.total <= room else "still does not fit: take a smaller model or more memory"
    raise UsageError(
        f"This training takes about {total}, and there are {room / GIB:.1f} GiB. "
        f"One after the other: {', '.join(ways) or 'nothing helps'}; that {fits}."
    )


SMALL = 10_000_000
SMALL_RATE = 2e-4
ADAPTER_RATE = 1e-5
WHOLE_RATE = 1e-6
"""TRL's default for GRPO."""


@dataclass(frozen=True)
class Chosen:
    """Settings with nothing left open. shape: None for a small embedded model, or where it is not known yet.

    teacher: bytes of the model to distil from, 0 where a server has it or its size is not known yet. sharded: whether
    masters, gradients and moments are spread over the processes. several: whether a backward pass goes through each
    layer more than once.
    """

    optimisation: Optimisation
    adapter: Adapter
    shape: ModelShape | None
    small: bool
    teacher: int = 0
    sharded: bool = False
    several: bool = False

    def facts(self) -> dict[str, Any]:
        """What was chosen, for the manifest."""
        size = self.optimisation
        return {
            "adapter_rank": self.adapter.rank,
            "learning_rate": size.learning_rate,
            "micro_batch": size.micro_batch,
            "gradient_checkpointing": size.gradient_checkpointing,
        }

    def notes(self, episode: int) -> tuple[str, ...]:
        """What was chosen and why, and the memory it takes, for people; nothing for small models."""
        if self.small:
            return ()
        takes = () if self.shape is None else (f"about {needed(self.shape, self._training(episode))} of memory",)
        return (self._note(), *takes)

    def check(self, episode: int, device: str) -> None:
        """`UsageError` where the memory does not suffice; episode: its longest, in tokens after the prompt."""
        if self.shape is not None:
            check(self.shape, self._training(episode), available(device))

    def _training(self, episode: int) -> Training:
        processes = world_size()
        return Training(self.optimisation, self.adapter, episode, processes, self.teacher, self.sharded, self.several)

    def _note(self) -> str:
        size = self.optimisation
        what = f"LoRA of rank {self.adapter.rank}" if self.adapter.rank else "all weights"
        known = f"of {self.shape.parameters / 1e9:.2g} B parameters" if self.shape else "whose size is not known yet"
        again = "activations recomputed" if size.gradient_checkpointing else "activations kept"
        return (
            f"{what} at learning rate {size.learning_rate:g}, {size.micro_batch} rollouts a pass, {again} "
            f"(what you left open is chosen for a model {known})"
        )


def choose(
    policy: PolicyConfig,
    size: Optimisation,
    adapter: Adapter,
    teacher: PolicyConfig | None = None,
    distribution: Distribution = Distribution(),  # noqa: B008 (frozen)
    *,
    channels: bool = False,
) -> Chosen:
    """Fill in what the settings leave open; reads the models' config.json, and asks the hub for it where need be.

    channels: whether there are any beside GRPO.
    """
    shape = model_shape(policy.held_here())
    small = base.is_embedded(policy.source) or (shape is not None and shape.parameters < SMALL)
    whole = small and not policy.served  # a server follows the training by its adapter
    rank = adapter.rank if adapter.rank is not None else 0 if whole else RANK
    usual = ADAPTER_RATE if rank else WHOLE_RATE
    rate = (base.learning_rate(policy.source) or SMALL_RATE) if small else usual
    rollouts = size.prompts_per_step * size.generations
    filled = {
        "learning_rate": rate if size.learning_rate is None else size.learning_rate,
        "micro_batch": size.micro_batch or (rollouts if small else size.generations),
        "gradient_checkpointing": not small if size.gradient_checkpointing is None else size.gradient_checkpointing,
    }
    other = None if teacher is None or teacher.served else model_shape(teacher)
    held = 0 if other is None else other.parameters * other.bytes
    sharded = distribution.sharding == "fsdp2" and world_size() > 1
    size, adapter = size.model_copy(update=filled), adapter.model_copy(update={"rank": rank})
    return Chosen(size, adapter, shape, small, held, sharded, several=channels or size.shared_prompts)


# ---- processes
# What several processes cannot do in one training, refused before anything is loaded.

PER_PASS = ("entropy_coef", "use_adaptive_entropy")
"""Fields of TRL's that add a mean over the tokens of each pass (TRL 1.16, trainer/grpo_trainer.py `_compute_loss`)."""


def processes_check(size: Optimisation, trl: Mapping[str, Any], count: int) -> None:
    """`UsageError` where a step of `count` processes would not be the step of one, or its rollouts cannot be shared."""
    if count == 1:
        return
    if size.loss_type == "bnpo":
        raise UsageError(
            f'optimisation.loss_type is "bnpo", a mean over the tokens of each pass: {count} processes would take '
            'another step than one. Take "dapo", whose mean is over the tokens of the whole step.'
        )
    if per_pass := [name for name in PER_PASS if trl.get(name)]:
        raise UsageError(
            f"trl.{per_pass[0]} adds a mean over the tokens of each pass: {count} processes would take another step "
            "than one. Leave it out, or train in one process."
        )
    if size.prompts_per_step % count:
        raise UsageError(
            f"optimisation.prompts_per_step is {size.prompts_per_step}, and {count} processes cannot share that "
            f"without splitting a group. Take a multiple of {count}."
        )
    rollouts = size.prompts_per_step // count * size.generations
    if size.micro_batch and rollouts % min(size.micro_batch, rollouts):
        raise UsageError(
            f"optimisation.micro_batch is {size.micro_batch}, but each of {count} processes has {rollouts} rollouts a "
            f"step. Take a divisor of {rollouts}."
        )


STEPPED_BY_SHARES = ("adamw_torch", "adamw_torch_fused", "sgd")
"""Optimisers that were seen to take the same step from shares (tests/stages/training/test_sharding.py)."""


def check_sharding(config: Config, adapter: Adapter, count: int, *, direction: bool) -> None:
    """`UsageError` for what needs all weights or all gradients in one place, where `count` processes share them.

    adapter: with nothing left open. direction: whether one is taken out of the training.
    """
    if count == 1 or config.distribution.sharding == "none":
        return
    copied = "sdpo" in config.weights.active() and config.hints.teacher != "current"
    optimiser = config.trl.get("optim", STEPPED_BY_SHARES[0])
    needing = {
        f"adapter.rank={adapter.rank}: an adapter is small, and its base is not cut; take 0": bool(adapter.rank),
        f"hints.teacher={config.hints.teacher}, which copies all weights; take current": copied,
        "optimisation.gradient_cosine_every, which compares whole gradients; take 0": bool(
            config.optimisation.gradient_cosine_every
        ),
        "a direction, which is taken out of whole gradients; leave out its run": direction,
        f"trl.optim={optimiser}; take {', '.join(STEPPED_BY_SHARES)}": optimiser not in STEPPED_BY_SHARES,
    }
    for what, asked in needing.items():
        if asked:
            raise UsageError(f"distribution.sharding=fsdp2 does not go with {what}.")
