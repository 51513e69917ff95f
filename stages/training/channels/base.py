"""The class of a channel: a loss on rows of one source, with its weight, metrics and columns.

Kernels are imported inside `loss`, so that the names, descriptions and needs of channels can be read without torch.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import TYPE_CHECKING, ClassVar, Generic, Literal, TypeVar

from stages.training.settings import EopdSettings, Hints, Pairs, RowSource, TaidSettings

if TYPE_CHECKING:
    from jaxtyping import Float
    from torch import Tensor

Rows = TypeVar("Rows")
State = dict[str, float | None]
"""A channel's state as JSON; None stands for infinity."""


@dataclass(frozen=True)
class Metric:
    """A metric of a step that may be cut into parts, each of which gives its share; `value` is what is logged.

    kind: "mean" divides the parts' totals by their counts, 0 over nothing; "sum" adds the totals, "max" takes the
    largest. Means are kept as total and count because parts differ in size: a mean of the parts' means would depend on
    how the step was cut.
    """

    kind: Literal["mean", "sum", "max"]
    total: "float | Tensor"
    count: "float | Tensor" = 1

    def __add__(self, other: "Metric") -> "Metric":
        """Return the metric of two parts of a step."""
        if self.kind == "max":
            return Metric("max", _larger(self.total, other.total))
        count = self.count + other.count if self.kind == "mean" else 1
        return Metric(self.kind, self.total + other.total, count)

    def value(self) -> "float | Tensor":
        """Return the value, on the device where the totals are: `floats` brings all of a step's to the host at once."""
        if self.kind != "mean":
            return self.total
        if isinstance(self.count, float | int):
            return self.total / self.count if self.count else 0.0
        return (self.total / self.count).masked_fill(self.count == 0, 0.0)


def _larger(one: "float | Tensor", other: "float | Tensor") -> "float | Tensor":
    """Return the larger value; of two tensors without waiting for the device."""
    if isinstance(one, float | int) or isinstance(other, float | int):
        return max(one, other)
    return one.maximum(other)


def floats(values: "Sequence[float | Tensor]") -> list[float]:
    """Return numbers and scalar tensors as numbers, and wait for the device once for all tensors of a type."""
    import torch

    found = [value if isinstance(value, float | int) else 0.0 for value in values]
    places: dict[object, list[int]] = {}
    for place, value in enumerate(values):
        if not isinstance(value, float | int):
            places.setdefault((value.dtype, value.device), []).append(place)
    for same in places.values():
        numbers = torch.stack([value for place in same if not isinstance(value := values[place], float | int)]).tolist()
        for place, number in zip(same, numbers, strict=True):
            found[place] = number
    return [float(value) for value in found]


@dataclass(frozen=True)
class ChannelLoss:
    """One part's share of a channel's loss in a step, which is a mean over the whole step, and of its metrics.

    loss: a sum over this part's rows / `denominator`, so that the parts' losses add up to the step's, however it is
    cut. denominator: pairs or tokens of the whole step, the same in every part.
    """

    loss: "Float[Tensor, '']"
    denominator: int
    metrics: Mapping[str, Metric]

    def __add__(self, other: "ChannelLoss") -> "ChannelLoss":
        """Return the loss of two parts of a step; both have the step's denominator, so it is not added."""
        metrics = {name: value + other.metrics[name] for name, value in self.metrics.items()}
        return ChannelLoss(self.loss + other.loss, self.denominator, metrics)


@dataclass(frozen=True)
class ChannelSettings:
    """The settings that channels are made from; temperature is that of sampling, num_steps counts optimiser steps."""

    pairs: Pairs
    hints: Hints
    temperature: float
    num_steps: int
    taid: TaidSettings = field(default_factory=TaidSettings)
    eopd: EopdSettings = field(default_factory=EopdSettings)


@dataclass(eq=False)
class Channel(ABC, Generic[Rows]):
    """One loss besides GRPO. `Rows` is `PairRows` or `EpisodeRows` of data.py, or `HintedRows` of hints.py.

    Logged are `NAME/loss`, `NAME/denominator` and `NAME/KEY` for each key of `ChannelLoss.metrics`.
    """

    settings: ChannelSettings

    name: ClassVar[str]
    """Of the setting `weights.NAME`, of the metrics, and title of the column of the loss."""
    description: ClassVar[str]
    """Help of the setting `weights.NAME`."""
    row_source: ClassVar[RowSource]
    needs_teacher: ClassVar[bool] = False
    """Whether a teacher model must be configured."""
    needs_reference: ClassVar[bool] = False
    """Whether the pairs' log-probs under the model that training starts from are needed."""
    columns: ClassVar[Mapping[str, str]] = MappingProxyType({})
    """Columns of the training table besides the loss: metric -> title."""

    @abstractmethod
    def loss(self, rows: Rows) -> ChannelLoss:
        """Return the loss on one part's rows, at least one; differentiable through the student alone.

        Denominators are the whole step's: `rows.num_pairs`, `rows.chosen_tokens`, `rows.tokens`. Called under
        accelerate's autocast, so half-precision kernels must widen what they reduce.
        """

    def end_step(self, loss: "Float[Tensor, '']", step: int) -> None:
        """Called in training once a step in which the channel had rows, with the step's whole loss."""
        del loss, step

    def state(self) -> State:
        """Return what a resumed run needs of this channel."""
        return {}

    def load(self, state: State) -> None:
        """Continue from `state`."""
        del state
