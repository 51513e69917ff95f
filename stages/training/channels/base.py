"""The interfaces of a channel, which is a loss on the rows of a source with its metrics, and of a row source.

In a step a `RowSource` gives the rows, which are scored as `ScoredRows`, and each `Channel` on that source returns its
`ChannelLoss` with `Metric`s.

Shapes: N completion tokens of all rows. Log-probs are natural, in nats.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Generic, Literal, Self, TypeVar

import torch
from jaxtyping import Float
from torch import Tensor

from composer_stages.envs.base import Environment, Task
from composer_stages.losses.tokens import Predictors
from composer_stages.rollouts.agent_loop import LiveRollout
from composer_stages.runs.run import Inputs, RunWriter
from composer_stages.training.config import Config
from composer_stages.training.scoring import Scored, Tree, predictors, token_log_probs

if TYPE_CHECKING:
    from composer_stages.training.distributed import Student

Row = TypeVar("Row")
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
    total: float | Tensor
    count: float | Tensor = 1

    def __add__(self, metric: "Metric") -> "Metric":
        """Return the metric of two parts of a step."""
        if self.kind == "max":
            if isinstance(self.total, Tensor) and isinstance(metric.total, Tensor):  # without waiting for the device
                return Metric("max", self.total.maximum(metric.total))
            return Metric("max", max(self.total, metric.total))
        count = self.count + metric.count if self.kind == "mean" else 1
        return Metric(self.kind, self.total + metric.total, count)

    def value(self) -> float | Tensor:
        """Return the value, on the device where the totals are: `floats` brings all of a step's to the host at once."""
        if self.kind != "mean":
            return self.total
        if isinstance(self.count, float | int):
            return self.total / self.count if self.count else 0.0
        return (self.total / self.count).masked_fill(self.count == 0, 0.0)


def floats(values: Sequence[float | Tensor]) -> list[float]:
    """Return numbers and scalar tensors as numbers, and wait for the device once for all tensors of a type."""
    numbers = [value if isinstance(value, float | int) else 0.0 for value in values]
    tensors: dict[object, dict[int, Tensor]] = {}
    for index, value in enumerate(values):
        if not isinstance(value, float | int):
            tensors.setdefault((value.dtype, value.device), {})[index] = value
    for by_index in tensors.values():
        for index, number in zip(by_index, torch.stack(list(by_index.values())).tolist(), strict=True):
            numbers[index] = number
    return [float(number) for number in numbers]


@dataclass(frozen=True)
class ChannelLoss:
    """One part's share of a channel's loss in a step, which is a mean over the whole step, and of its metrics.

    loss: a sum over this part's rows / `denominator`, so that the parts' losses add up to the step's, however it is
    cut. denominator: pairs or tokens of the whole step, the same in every part.
    """

    loss: Float[Tensor, ""]
    denominator: int
    metrics: Mapping[str, Metric]

    def __add__(self, loss: "ChannelLoss") -> "ChannelLoss":
        """Return the loss of two parts of a step; both have the step's denominator, so it is not added."""
        metrics = {name: value + loss.metrics[name] for name, value in self.metrics.items()}
        return ChannelLoss(self.loss + loss.loss, self.denominator, metrics)


@dataclass(eq=False)
class ScoredRows:
    """Rows of one source, a part of a step's or all of them, with the student's hidden states for them.

    Subclasses compute values that every channel reads in their constructor, and others when a channel first reads them.
    step_rows: all rows of the step, from which the denominators come. source: the row source, which holds the frozen
    models that give the targets.
    """

    rows: Sequence[Any]
    step_rows: Sequence[Any]
    model: Any
    scored: Scored
    source: Any

    @property
    def student(self) -> Predictors:
        """Hidden states of all completion tokens, with gradient, and the head behind them."""
        return predictors(self.model, self.scored)

    def student_logps(self, temperature: float) -> Float[Tensor, " N"]:
        """Return the log-probs (nats) of the completion tokens under the student, with gradient."""
        # Not cached: each channel asks at most once, and the autograd graph would live as long as the rows.
        return token_log_probs(self.model, self.scored, temperature)

    def tensor(self, values: Iterable[Any]) -> Tensor:
        """Return a tensor of numbers on the model's device."""
        return torch.tensor(list(values), device=self.scored.targets.device)


@dataclass(frozen=True)
class SourceInputs:
    """The arguments of `RowSource.open`, which is called before an adapter is added to the model.

    tasks: of all prompts. record_hints: records the hints of a step, each with its rollout.
    """

    config: Config
    inputs: Inputs
    student: "Student"
    environment: Environment
    tasks: Sequence[Task]
    out: RunWriter
    record_hints: Callable[[int, list[tuple[LiveRollout, Any]]], None]


class RowSource(ABC, Generic[Row]):
    """Gives the rows of each step to the channels of one kind, and holds the models that give the targets.

    A training has one of each kind that a channel with a weight uses.
    """

    name: ClassVar[str]
    """The name of its rows in a batch."""
    scored_rows: ClassVar[type[ScoredRows]]
    """The class of the scored rows that its channels read."""
    whole_rollouts: ClassVar[bool] = False
    """Whether each row is one of the step's rollouts, which is scored together with GRPO's row of the same tokens."""
    follower: Any = None
    """An object that is updated after each step, such as a teacher that averages the weights; mostly None. It has
    `begin` and `after_step`, called with the model (with its adapter if it has one) before the first step of an
    attempt and after each step, and `save` and `load`, called with the folder of a checkpoint."""

    @classmethod
    @abstractmethod
    def open(cls, inputs: SourceInputs) -> Self:
        """Return the source of a training; `UsageError` where it can give no rows."""

    @abstractmethod
    def rows(self, rollouts: Sequence[LiveRollout], step: int) -> list[Row]:
        """Return the rows of a step from its rollouts; called once a step, in the first process."""

    def trees(self, row: Any) -> tuple[Tree, ...]:
        """Return the token ids of a row: first those that the student is trained on, then the teacher's input."""
        return (row.tree,)


class Channel(ABC, Generic[Rows]):
    """One loss besides GRPO, on the rows of one source: `PairRows`, `HintedRows` or `RolloutRows`.

    Logged are `NAME/loss`, `NAME/denominator` and `NAME/KEY` for each key of `ChannelLoss.metrics`.
    """

    source: ClassVar[type[RowSource[Any]]]

    def __init__(self, config: Config) -> None:
        self.config = config

    @property
    def temperature(self) -> float:
        """Return the temperature of sampling."""
        return self.config.policy.temperature

    @abstractmethod
    def loss(self, rows: Rows) -> ChannelLoss:
        """Return the loss on one part's rows, at least one; differentiable through the student alone.

        Denominators are the whole step's: `rows.num_pairs`, `rows.chosen_tokens`, `rows.tokens`. Called under
        accelerate's autocast, so half-precision kernels must widen what they reduce.
        """

    def end_step(self, loss: Float[Tensor, ""], step: int) -> None:
        """Called once in each training step in which the channel had rows, with the loss of the whole step."""
        del loss, step

    def state(self) -> State:
        """Return the state that a resumed run restores."""
        return {}

    def load(self, state: State) -> None:
        """Restore `state`."""
        del state
