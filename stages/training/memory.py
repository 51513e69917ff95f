"""The memory of a training before it starts: the estimate, the passes that fit, and the refusal where nothing fits.

`estimate_memory` gives the memory that a plan takes, `choose_passes` replaces passes that the settings leave open by
the fastest that fit, and `check_memory` refuses a plan that does not fit. Activations follow Korthikanti et al. 2022
(arXiv 2205.05198) in counting the numbers that each layer keeps for its backward pass; the constant is measured on
Qwen3 (tests/stages/training/test_memory.py). Rows of the channels besides GRPO's rollouts are not counted.
"""

import math
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace

from composer_stages.backends import resources
from composer_stages.errors import UsageError
from composer_stages.policy.server import cpu_cache_bytes, memory_utilisation
from composer_stages.training.config import SCORED_TOKENS, VOCABULARY_CHUNK
from composer_stages.training.model_shape import ModelShape, Prompts
from composer_stages.training.plan import PASS_TOKENS, RANK, TrainPlan, divisors, longest_rollout, rows_per_pass
from composer_stages.words import Sentence

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
TOKEN_CHUNK = 4096
"""Tokens whose logits are held at once, as in TRL (1.16, kernels/chunked_logprob.py TOKEN_CHUNK_SIZE)."""
EAGER = 8
"""Bytes that eager attention keeps for each score: its soft cap, its softmax in float32, and that as it is used."""
GIB = 2**30
PROGRAM = 0.7 * GIB
"""Bytes of a CPU's memory that Python, torch, transformers and TRL take (measured with SmolLM2: 0.5 to 0.7 GiB)."""
SERVER_RESERVE = 3 * GIB
"""What a vLLM server needs besides weights to start at all: activations of a batch, CUDA graphs, some KV cache."""
ASLEEP = 2 * GIB
"""What a vLLM server that sleeps keeps of a GPU at most: CUDA's context, its graphs, NCCL's buffers."""


def choose_passes(plan: TrainPlan, prompts: Prompts, free: int | None) -> TrainPlan:
    """Return the plan for these prompts, with the passes that compute least of those that fit into memory.

    Chosen are the rollouts of a pass, and whether activations are recomputed, where the user left them open. free:
    bytes, of which a part is left for other programs; None where unknown, for the passes of `resolve`. Results stay
    equal up to rounding: a pass is a part of a step's sum.
    """
    if plan.small or plan.shape is None:
        return plan
    size, settings = plan.config.optimisation, plan.requested
    process_prompts = size.prompts_per_step // plan.processes
    answers = min(prompts.answers or plan.config.max_steps, plan.config.max_steps)
    plan = replace(plan, prompts=prompts, rollout_tokens=longest_rollout(plan.config, answers))
    length = prompts.tokens + plan.rollout_tokens
    plan = plan.changed(optimisation={"micro_batch": settings.micro_batch or rows_per_pass(size.generations, length)})
    if free is None or (settings.micro_batch and settings.gradient_checkpointing is not None):
        return plan
    # A part of a group, a group, or several.
    counts = {*divisors(size.generations), *(size.generations * n for n in divisors(process_prompts))}
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
        return replace(least, memory_gib=room / GIB, smallest=True)
    chosen = min(fitting, key=lambda way: (_computed(way), -(way.config.optimisation.micro_batch or 1)))
    return replace(chosen, memory_gib=room / GIB)


def _computed(plan: TrainPlan) -> float:
    """Return the tokens of a step's passes, each as often as its layers' products are computed."""
    size, rollouts = plan.config.optimisation, _rollouts(plan)
    # Forward and to the layers' inputs; of all weights, also to the weights; and forward again.
    times = 2 + (not plan.config.adapter.rank and not plan.spectral) + bool(size.gradient_checkpointing)
    return times * rollouts / (size.micro_batch or rollouts) * _tokens_a_pass(plan)


def _rollouts(plan: TrainPlan) -> int:
    """Return the rollouts of a step in one process."""
    size = plan.config.optimisation
    return size.prompts_per_step // plan.processes * size.generations


def _tokens_a_pass(plan: TrainPlan) -> int:
    """Return the most tokens of a pass."""
    size = plan.config.optimisation
    rows = min(size.micro_batch or 1, _rollouts(plan))
    if not size.shared_prompts:
        return rows * (plan.prompts.tokens + plan.rollout_tokens)
    # Rows of all groups of a step may meet in a pass, so that it may hold as many prompts as the step has.
    prompts = min(rows, -(-size.prompts_per_step // plan.processes))
    return prompts * plan.prompts.tokens + rows * plan.rollout_tokens


def _pair_tokens_a_pass(plan: TrainPlan) -> int:
    """Return the tokens of pairs that are in memory beside a pass's rollouts: one of the longest, the others alike."""
    size, prompts = plan.config.optimisation, plan.prompts
    if not prompts.pair:
        return 0
    parts = max(_rollouts(plan) // size.micro_batch, 1) if size.micro_batch else 1
    pairs = -(-plan.config.pairs.per_step // (plan.processes * parts))
    tokens = round(prompts.longest_pair + (pairs - 1) * prompts.pair)
    return min(tokens, size.max_tokens_per_micro_batch or tokens)


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
    inputs, outputs = (sum(sizes[side] for sizes in shape.linears) for side in (0, 1))
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
    tokens = _tokens_a_pass(plan) + _pair_tokens_a_pass(plan)
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
    largest = max((width * height for width, height in shape.linears), default=0)
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
            "training.server-leaves-too-little", held=total.held / GIB, between=max(between, 0) / GIB, smaller=smaller
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
    fits = reduced.total <= room.bytes
    raise UsageError(
        "training.too-little-memory", total=str(total), room=str(room), server=server, savings=ways, fits=fits
    )


def describe_plan(plan: TrainPlan) -> tuple[str, ...]:
    """Return the choices and their reason, and the memory that training takes, for people; none if small."""
    if plan.small:
        return ()
    rank, shape = plan.config.adapter.rank, plan.shape
    choices = Sentence("training.plan-choices", plan=plan, size=plan.config.optimisation, rank=rank)
    if shape is None:
        return (choices, Sentence("training.no-estimate"))
    unpacked = Sentence("training.prompts-not-packed", alone=not shape.pads)
    # Of shares, first the whole masters, then the optimiser's two moments (`ShardedTrainer`).
    gathered = 8 * shape.parameters / GIB if plan.sharded and not rank else 0
    needed = Sentence(
        "training.plan-memory", estimate=str(estimate_memory(plan)), prompts=str(plan.prompts), gathered_gib=gathered
    )
    return (choices, needed) if shape.packs else (choices, unpacked, needed)
