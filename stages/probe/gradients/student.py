"""The student, the model that gradients are taken of: loaded, adapted, and measured in batches.

Gradients are those of `per_sample`, with their derivation there.

Shapes: B rows, N trained numbers, own: a row's own tokens.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from jaxtyping import Float
from torch import Tensor

from stages.policy.base import PolicyConfig
from stages.probe.adapters.attach import Adapter, Folded, in_float32
from stages.probe.adapters.choose import Start, check_spectrum, open_adapter
from stages.probe.adapters.names import SPECTRAL, AdapterName
from stages.probe.adapters.spectrum import load_spectrum
from stages.probe.adapters.targets import target_linears
from stages.probe.gradients.per_sample import RowLoss, RowSink, Sink, own_log_probs, per_sample_gradients, token_sum
from stages.probe.pool.tokens import Batch, TokenRow, by_length, collate
from stages.runs.artifact import Out, Run

if TYPE_CHECKING:
    from transformers import PreTrainedModel

T = TypeVar("T")
LossOf = Callable[[list[int], Batch], RowLoss]
"""The loss of a batch that holds the rows with these indices."""
MAX_TOKENS = 8192
"""Padded tokens of one backward pass."""


@dataclass
class Student:
    """A model with an adapter folded into its weights."""

    model: "PreTrainedModel"
    tokenizer: Any
    adapter: Adapter
    folded: Folded
    max_tokens: int = MAX_TOKENS
    """Padded tokens of one pass, where nothing else is asked for."""

    @property
    def device(self) -> torch.device:
        """Where the model computes."""
        return next(self.model.parameters()).device

    def move_to(self, theta: Float[Tensor, " N"]) -> None:
        """Give the adapter these values, and the weights their change."""
        self.adapter.theta = theta.detach().clone().to(self.device)
        self.folded.refold()

    def gradients(
        self,
        rows: Sequence[TokenRow],
        loss_of: LossOf = lambda indices, batch: token_sum,
        max_tokens: int | None = None,
    ) -> tuple[Float[Tensor, "B N"], list[Float[Tensor, " own"]]]:
        """Each row's gradient of its loss, and its own tokens' log-probs in nats, in the order given, on the CPU.

        A batch holds at most `max_tokens` padded tokens (None: the student's), but at least one row.
        """

        def measure(indices: list[int], batch: Batch) -> Iterable[tuple[Tensor, Tensor]]:
            sink = RowSink(self.adapter.layout)
            logps = per_sample_gradients(self.model, self.adapter, batch, sink, loss_of(indices, batch))
            return zip(sink.flat.cpu(), _own_values(logps, batch), strict=True)

        measured = self._in_batches(rows, measure, max_tokens)
        return torch.stack([gradient for gradient, _ in measured]), [logps for _, logps in measured]

    def stream(
        self,
        rows: Sequence[TokenRow],
        sink_of: Callable[[list[int]], Sink],
        loss_of: LossOf = lambda indices, batch: token_sum,
    ) -> list[Float[Tensor, " own"]]:
        """Hand each batch's gradients, module by module, to the sink that `sink_of` gives for its rows' indices.

        Returns own tokens' log-probs in nats, in the order given, on the CPU. No row's whole gradient is ever held: for
        gradients of which sums alone are needed, and those that are too large to keep.
        """

        def measure(indices: list[int], batch: Batch) -> Iterable[Tensor]:
            return _own_values(
                per_sample_gradients(self.model, self.adapter, batch, sink_of(indices), loss_of(indices, batch)), batch
            )

        return self._in_batches(rows, measure)

    @torch.no_grad()
    def log_probs(self, rows: Sequence[TokenRow]) -> list[Float[Tensor, " own"]]:
        """The log-probs of each row's own tokens in nats, in the order given, on the CPU."""
        return self._in_batches(rows, lambda _, batch: _own_values(own_log_probs(self.model, batch), batch))

    def _in_batches(
        self,
        rows: Sequence[TokenRow],
        measure: Callable[[list[int], Batch], Iterable[T]],
        max_tokens: int | None = None,
    ) -> list[T]:
        """What `measure` gives for each row of a batch, for all rows in the order given.

        Computed in float32 at least, whatever the weights' type: in bfloat16 single rows' cosines are off by up to .04.
        """
        values: dict[int, T] = {}
        with in_float32(self.model):
            for indices in by_length([len(row) for row in rows], max_tokens or self.max_tokens):
                batch = collate([rows[i] for i in indices]).to(self.device)
                values.update(zip(indices, measure(indices, batch), strict=True))
        return [values[index] for index in range(len(rows))]

    def mean_losses(self, rows: Sequence[TokenRow]) -> Float[Tensor, " B"]:
        """Each row's mean NLL over its own tokens, in nats a token."""
        return torch.stack([-logps.mean() for logps in self.log_probs(rows)])

    def weight_scale(self) -> float:
        """The root mean square singular value of the adapted weights: what a small change of theta is small against."""
        linears = target_linears(self.model).values()
        return sum(float(m.weight.detach().float().norm()) / min(m.weight.shape) ** 0.5 for m in linears) / len(linears)


def _own_values(values: Float[Tensor, "B T"], batch: Batch) -> list[Float[Tensor, " own"]]:
    return [row[own].cpu() for row, own in zip(values, batch.own, strict=True)]


def adapt(model: "PreTrainedModel", tokenizer: Any, adapter: Adapter) -> Student:
    """A student of a model that is already loaded; its weights are frozen."""
    model.requires_grad_(False)
    return Student(model, tokenizer, adapter, Folded(model, adapter))


def open_student(
    config: PolicyConfig,
    adapter: AdapterName,
    rank: int,
    seed: int,
    svd: Run | None,
    out: Out,
    start: Start | None = None,
) -> Student:
    """Load the configured model and adapt it, and note it in the manifest.

    `svd` is the run of `composer probe svd` that spectral adapters need, `start` where a direction's adapter starts.
    `BadInput` when the decomposition is of other weights; otherwise the errors of `load_model` and `open_adapter`.
    """
    from stages.policy.local import LocalPolicy, load_model

    model, tokenizer = load_model(config, cache=out.cache, listener=out.progress)
    out.model("student", **LocalPolicy(model, tokenizer, config).facts())
    spectrum = load_spectrum(svd.folder()) if svd is not None and adapter in SPECTRAL else None
    if spectrum is not None:
        check_spectrum(model, spectrum)
    return adapt(model.eval(), tokenizer, open_adapter(adapter, model, spectrum, rank, seed, start))
