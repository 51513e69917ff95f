"""How much memory a training takes, before anything is loaded: from the model's shape, the settings and the lengths.

Activations follow Korthikanti et al. 2022 (arXiv 2205.05198) in counting what each layer keeps for its backward pass;
the constant is measured on Qwen3 (tests/stages/training/test_memory.py). Rows of the channels beside GRPO's rollouts
are not counted.
"""

import os
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from stages.errors import UsageError
from stages.runs import store
from stages.training.model_shape import ModelShape
from stages.training.settings import Adapter, Optimisation

PROMPT_TOKENS = 1024
"""Assumed length of a prompt, which is known only when it is played."""
KEPT = 1.65
"""Numbers that a layer keeps for each number that goes into or comes out of its Linears."""
REDUCED = 4
"""Bytes a gradient of the largest unit in shares on its way to them: FSDP2 copies a unit's into one float32 buffer.
Gloo holds them once more (measured: benchmarks/sharding.py)."""
VOCABULARY_CHUNK = 32_768
"""Logits of one token that are held at once, as in TRL; `stages.training.trees` holds fewer."""
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
    """Weights, gradients and AdamW's two moments in the types of `stages.training.precision`, and activations."""
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
