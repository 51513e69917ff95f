"""What a channel is: a loss on rows of one source, with a weight, metrics and columns of its own.

Kernels are imported inside `loss`, so that the names, descriptions and needs of channels can be read without torch.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, ClassVar, Generic, TypeVar

from stages.training.settings import Hints, Pairs, RowSource

if TYPE_CHECKING:
    from jaxtyping import Float
    from torch import Tensor

Rows = TypeVar("Rows")
State = dict[str, float | None]
"""A channel's state as JSON; None stands for infinity."""


@dataclass(frozen=True)
class ChannelLoss:
    """A channel's loss: the mean over its own denominator (pairs or tokens), and the metrics to log beside it."""

    loss: "Float[Tensor, '']"
    denominator: int
    metrics: Mapping[str, float]


@dataclass(frozen=True)
class ChannelSettings:
    """The settings that channels are made from; temperature is that of sampling, num_steps counts optimiser steps."""

    pairs: Pairs
    hints: Hints
    temperature: float
    num_steps: int


class Channel(ABC, Generic[Rows]):
    """One loss beside GRPO. `Rows` is `PairRows`, `HintedRows` or `EpisodeRows` of stages/training/rows.py.

    Logged are `NAME/loss`, `NAME/denominator` and `NAME/KEY` for each key of `ChannelLoss.metrics`.
    """

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
    """Columns of the training table beside the loss: metric -> title."""

    def __init__(self, settings: ChannelSettings) -> None:
        self.settings = settings

    @abstractmethod
    def loss(self, rows: Rows) -> ChannelLoss:
        """The loss on a step's rows, of which there is at least one; differentiable through the student alone."""

    def state(self) -> State:
        """What a resumed run needs of this channel."""
        return {}

    def load(self, state: State) -> None:
        """Continue from `state`."""
        del state
