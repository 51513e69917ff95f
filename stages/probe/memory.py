"""The memory of a stage of the probe, estimated from the model's shape and the settings before anything is loaded.

Weights, basis and gradients are counted; the activations of a token follow Korthikanti et al. 2022 (arXiv 2205.05198)
in counting the activations that each layer stores for its backward pass, with the constant of
`composer_stages.training.memory`, measured on Qwen3. The sum is compared with the peak on a rehearsed GPU (`./dev gpu
rehearsed`).
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from types import MappingProxyType

from composer_stages.backends import resources
from composer_stages.errors import UsageError
from composer_stages.gradients.basis import SPECTRAL
from composer_stages.gradients.per_row import LOGITS
from composer_stages.policy.base import PolicyConfig
from composer_stages.policy.local import device
from composer_stages.probe.settings import AdapterName
from composer_stages.training.memory import GIB, KEPT
from composer_stages.training.model_shape import ModelShape, model_shape

VECTORS = 14
"""Vectors as long as theta: theta, its start, v four ways, a gradient, Adam's two, and copies while a step is taken."""
WIDE = 4
"""Bytes of a number in float32, in which gradients are taken, whatever the weights' type."""


@dataclass(frozen=True)
class MemoryInputs:
    """The inputs of the memory estimate.

    rows: gradients in memory at once. vectors: further vectors of theta's length. models: copies of all weights besides
    the probed model. tokens: padded tokens of a pass, 0 without a backward pass.
    """

    adapter: AdapterName
    rank: int
    tokens: int
    checkpointing: bool = False
    rows: int = 0
    vectors: int = VECTORS
    models: int = 0


@dataclass(frozen=True)
class ProbeMemory:
    """Bytes by content. basis: singular vectors or A halves; change: the weights with the adapter's change."""

    weights: float
    change: float
    basis: float
    gradients: float
    activations: float

    @property
    def total(self) -> float:
        """The sum, in bytes."""
        return self.weights + self.change + self.basis + self.gradients + self.activations

    def __str__(self) -> str:
        parts = ", ".join(f"{name} {value / GIB:.1f}" for name, value in asdict(self).items())
        return f"{self.total / GIB:.1f} GiB ({parts})"


def num_trained(shape: ModelShape, adapter: AdapterName, rank: int) -> int:
    """Compute N, the number of trained parameters of an adapter and of elements of a gradient."""
    if adapter in SPECTRAL:
        full_ranks = [min(side) for side in shape.linears]
        return sum(full_ranks if adapter == "antipasto_full" else (min(rank, full) for full in full_ranks))
    return sum(rank * (outputs + (inputs if adapter != "lora_frozenA" else 0)) for inputs, outputs in shape.linears)


def needed(shape: ModelShape, measuring: MemoryInputs) -> ProbeMemory:
    """Compute the memory of one stage."""
    adapted = sum(inputs * outputs for inputs, outputs in shape.linears)
    widened = WIDE * (shape.parameters - adapted) if shape.bytes < WIDE else 0  # embedding, norms and head
    if measuring.adapter in SPECTRAL:
        factors = sum(min(i, o) * (i + o) for i, o in shape.linears)
        basis = factors * (WIDE + (shape.bytes if shape.bytes < WIDE else 0))  # as they are read, and in the type used
    else:
        basis = WIDE * measuring.rank * sum(inputs for inputs, _ in shape.linears)
    trained = num_trained(shape, measuring.adapter, measuring.rank)
    # Numbers that autograd stores for a token: KEPT for each input and output of a Linear.
    per_token = KEPT * WIDE * sum(inputs + outputs for inputs, outputs in shape.linears)
    if measuring.checkpointing:
        # One activation a layer, and all activations of the layer that is recomputed.
        per_token = WIDE * shape.layers * shape.hidden + per_token / shape.layers
    logits = 3 * WIDE * min(LOGITS, measuring.tokens * shape.vocabulary)  # logits, exponentials, gradient
    return ProbeMemory(
        weights=shape.bytes * shape.parameters * (1 + measuring.models) + widened,
        change=WIDE * adapted,
        basis=basis,
        # Twice the rows: as they are measured, and as they are weighted or differenced.
        gradients=WIDE * trained * (2 * measuring.rows + measuring.vectors),
        activations=measuring.tokens * per_token + logits,
    )


def memory_notes(policy: PolicyConfig, measuring: MemoryInputs) -> tuple[str, ...]:
    """Return the estimate as a note of a stage's plan; none for an environment's models and unknown shapes."""
    shape = model_shape(policy)
    return () if shape is None else (f"about {needed(shape, measuring)} of memory",)


def check_memory(
    policy: PolicyConfig, measuring: MemoryInputs, more_ways: Mapping[str, MemoryInputs] = MappingProxyType({})
) -> None:
    """Raise `UsageError` if a stage needs more memory than is available, with settings that need less.

    These are checkpointing, an eighth of the tokens of a pass, and the stage's own (`more_ways`).
    """
    shape = model_shape(policy)
    if shape is None:  # a model that an environment builds, or a shape that is not known before loading
        return
    total, room = needed(shape, measuring), resources.available(device(policy.device))
    if total.total <= room:
        return
    fewer = max(measuring.tokens // 8, 1)
    ways = {
        "checkpointing=true": replace(measuring, checkpointing=True),
        f"max_tokens={fewer}": replace(measuring, tokens=fewer),
        **more_ways,
    }
    # Settings that save less than 1 % are left out of the message.
    sums = {words: needed(shape, way).total for words, way in ways.items()}
    savings = [f"{words} ({value / GIB:.1f} GiB)" for words, value in sums.items() if value < 0.99 * total.total]
    raise UsageError("probe.too-little-memory", memory=str(total), room=room / GIB, savings=savings)
