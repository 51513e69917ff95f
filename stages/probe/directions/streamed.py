"""Rows measured without keeping their gradients: metrics of each, and one weighted sum of all.

A row of a LoRA of rank 32 at Qwen3-4B takes 264 MB, a step of sixteen 4 GB; what a step needs of them is six numbers a
row and one vector. The sums are those of `metrics.MetricSums` and `per_sample.TotalSink`, without approximation.

Shapes: B rows, N numbers, own: a row's own tokens.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from stages.probe.directions.extraction import Direction
from stages.probe.directions.metrics import MetricSums
from stages.probe.gradients.per_sample import Sink, TotalSink
from stages.probe.gradients.student import Student
from stages.probe.pool.tokens import TokenRow


@dataclass(frozen=True)
class Streamed:
    """What is kept of rows: `metrics` by name [B] of their token-sum gradients, `total` [N], `logps` [nats]."""

    metrics: dict[str, Float[Tensor, " B"]]
    total: Float[Tensor, " N"]
    logps: list[Float[Tensor, " own"]]


def stream(
    student: Student, rows: Sequence[TokenRow], direction: Direction, weights: Sequence[float] | Float[Tensor, " B"]
) -> Streamed:
    """Measure rows against a direction, and sum their token-sum gradients with these weights, in one backward pass."""
    total = TotalSink(student.adapter.layout, torch.as_tensor(weights, dtype=torch.float32), student.device)
    measured: list[tuple[list[int], MetricSums]] = []

    def sink_of(indices: list[int]) -> Sink:
        metrics, add = MetricSums(direction), total.of(indices)
        measured.append((indices, metrics))

        def both(name: str, contribution: Float[Tensor, "B n"]) -> None:
            metrics(name, contribution)
            add(name, contribution)

        return both

    logps = student.stream(rows, sink_of)
    order = torch.tensor([index for indices, _ in measured for index in indices]).argsort()
    found = [metrics.metrics() for _, metrics in measured]
    metrics = {name: torch.cat([part[name] for part in found])[order] for name in found[0]}
    return Streamed(metrics, total.total.cpu(), logps)
