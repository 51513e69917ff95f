"""Every row's own gradient from one backward pass over a batch.

The batch's loss is the sum of the rows' losses, and no row's loss depends on another row, so the gradient of a Linear's
outputs at (row, token) is that of the row's own loss. With the inputs, which autograd keeps anyway, it gives each row's
gradient of the adapter: no adapter path runs, forward or backward; the adapter's present change is folded into the
weights (`basis.FoldedModel`). That and the adapters' chain rules are the derivation; `reference_gradient`, one row
at a time by autograd alone, is the oracle that it is tested against.

Sums run over all positions, the prompt's too: keys and values of the prompt feed the completion. Holds for dense
models; not for losses that couple rows (mixture-of-experts balance).

In order: rows of token ids (`TokenRow`) and their padded batches, the gradients, and `MeasuredStudent`, the model that
gradients are taken of: adapted, and measured in batches.

Shapes: B rows, T tokens, I inputs, O outputs, n numbers of one module, N of all, P directions,
R rows of all batches, H width, V vocabulary, own: a batch's own tokens.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from composer_stages.errors import BadInput
from composer_stages.gradients.basis import (
    SPECTRAL,
    FoldedModel,
    ProbeAdapter,
    attached,
    check_spectrum,
    in_float32,
    load_spectrum,
    open_adapter,
    replaced_forwards,
    target_linears,
    wide_linear,
)
from composer_stages.gradients.tensors import Layout
from composer_stages.losses.tokens import token_log_probs
from composer_stages.policy.base import PolicyConfig
from composer_stages.runs.kinds import VECTORS
from composer_stages.runs.run import Run, RunWriter

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@dataclass(frozen=True)
class TokenRow:
    """One sequence. `own` marks the completion tokens that the policy wrote: all but observations between its turns.

    `BadInput` when the prompt is empty, a completion token has no mark, or no token is the policy's own.
    """

    prompt_ids: Sequence[int]
    completion_ids: Sequence[int]
    own: Sequence[bool]

    def __post_init__(self) -> None:
        if len(self.own) != len(self.completion_ids) or not any(self.own) or not self.prompt_ids:
            raise BadInput(
                "gradients.row-incomplete",
                prompt_tokens=len(self.prompt_ids),
                completion_tokens=len(self.completion_ids),
                own_tokens=sum(self.own),
            )

    @property
    def num_own(self) -> int:
        """Return the number of completion tokens that the policy wrote."""
        return sum(self.own)

    def __len__(self) -> int:
        return len(self.prompt_ids) + len(self.completion_ids)

    def first(self, count: int) -> "TokenRow":
        """Cut the row after `count` completion tokens."""
        return TokenRow(self.prompt_ids, self.completion_ids[:count], self.own[:count])


@dataclass(frozen=True)
class TokenBatch:
    """Padded rows; `mask` marks the tokens whose log-probs count, at their own positions."""

    ids: Int[Tensor, "B T"]
    attention: Int[Tensor, "B T"]
    mask: Bool[Tensor, "B T"]

    def to(self, device: torch.device | str) -> "TokenBatch":
        """Copy the batch to a device."""
        return TokenBatch(self.ids.to(device), self.attention.to(device), self.mask.to(device))

    def __len__(self) -> int:
        return len(self.ids)


def collate(rows: Sequence[TokenRow], pad_id: int = 0, extra_pads: int = 0) -> TokenBatch:
    """Pad rows on the right to the longest one, and by `extra_pads` more."""
    # The pad id does not matter: pads are masked, and no own token is one.
    width = max(map(len, rows)) + extra_pads
    ids = [[*row.prompt_ids, *row.completion_ids] for row in rows]
    mask = [[False] * len(row.prompt_ids) + list(row.own) for row in rows]
    return TokenBatch(
        torch.tensor([line + [pad_id] * (width - len(line)) for line in ids]),
        torch.tensor([[1] * len(line) + [0] * (width - len(line)) for line in ids]),
        torch.tensor([line + [False] * (width - len(line)) for line in mask]),
    )


def by_length(
    lengths: Sequence[int], most: int, cost: Callable[[int], int] = int, alike: float = math.inf
) -> list[list[int]]:
    """Group indices into batches of similar length, each of at most `most` padded tokens, at least one row.

    cost: of a row padded to a length, where that is not the length. alike: no row is padded to more than this times its
    length.
    """
    batches: list[list[int]] = []
    for index in sorted(range(len(lengths)), key=lambda i: (lengths[i], i)):
        # In order of length a row is the longest of its batch so far, which decides the batch's padded tokens.
        fits = bool(batches) and lengths[index] <= alike * lengths[batches[-1][0]]
        if fits and (len(batches[-1]) + 1) * cost(lengths[index]) <= most:
            batches[-1].append(index)
        else:
            batches.append([index])
    return batches


MAX_TOKENS = 8192
"""Padded tokens of one backward pass."""
FETCHED_AT_ONCE = 2**24
"""Numbers of gradients that are copied from an accelerator together, 67 MB: each copy is waited for."""
EPSILON = 0.2
"""The clip range of Dr.GRPO."""
Sink = Callable[[str, Float[Tensor, "B n"]], None]
"""Receives each row's gradient of one module, once a module."""
RowLoss = Callable[[Float[Tensor, "B T"]], Float[Tensor, " B"]]
"""From log-probs in nats (0 at positions without an own token) to each row's loss."""
LossOf = Callable[[list[int], TokenBatch], RowLoss]
"""The loss of a batch that holds the rows with these indices."""
Tap = Callable[[str, Float[Tensor, "B T I"], Float[Tensor, "B T O"]], Float[Tensor, "B T I"] | None]
"""Receives a module's name, its inputs, and the gradient of its outputs; may return the gradient of the inputs."""
LOGITS = 2**26
"""Logits that are held at once, 268 MB in float32; a token of Qwen3 has 151,936."""


def token_sum(logps: Float[Tensor, "B T"]) -> Float[Tensor, " B"]:
    """Return -sum over own tokens of log-prob, in nats: the loss whose gradient all others are recombined from."""
    return -logps.sum(-1)


def per_sample_gradients(
    model: "PreTrainedModel", adapter: ProbeAdapter, batch: TokenBatch, sink: Sink, loss: RowLoss = token_sum
) -> Float[Tensor, "B T"]:
    """Pass each row's gradient of its loss to the sink, module by module; returns own tokens' log-probs in nats.

    The model must hold the adapter folded in; all its weights are frozen afterwards.
    """
    # No gradient of a weight is computed; the embedded tokens alone require grad, so that every layer is reached.
    model.requires_grad_(False)

    def tap(module: str, x: Tensor, g: Tensor) -> Tensor | None:
        gradients, of_inputs = adapter.row_gradients(module, x, g)
        for name, gradient in gradients.items():
            sink(name, gradient)
        return of_inputs

    with torch.enable_grad(), tapped(model, tap):
        logps = own_log_probs(model, batch)
        # The sum, not the mean: the gradient of a Linear's outputs at (row, token) is then that of the row's own loss.
        loss(logps).sum().backward()
    return logps.detach()


def own_log_probs(model: "PreTrainedModel", batch: TokenBatch, max_logits: int = LOGITS) -> Float[Tensor, "B T"]:
    """Compute log-probs in nats of own tokens at their positions, 0 elsewhere, in float32 at least.

    Logits are computed only where they are needed, at most `max_logits` at a time; where that takes several chunks the
    backward pass computes them again. All weights may be frozen: the embedded tokens require grad, so that a backward
    pass runs through all layers.
    """
    embedded = model.get_input_embeddings()(batch.ids).requires_grad_(torch.is_grad_enabled())
    hidden = model.base_model(inputs_embeds=embedded, attention_mask=batch.attention, use_cache=False).last_hidden_state
    # Logits at t predict token t + 1, hence the shift. Of 8,192 tokens of Qwen3 all logits would take 5 GB in float32.
    rows, columns = batch.mask.nonzero(as_tuple=True)  # the host waits for their number, once a batch
    states, targets = hidden[rows, columns - 1], batch.ids[rows, columns]
    count = max(1, max_logits // model.get_output_embeddings().weight.shape[0])
    if len(targets) <= count:
        logps = _head_log_probs(model, states, targets)
    else:
        parts = zip(states.split(count), targets.split(count), strict=True)
        logps = torch.cat([checkpoint(_head_log_probs, model, *part, use_reentrant=False) for part in parts])
    return logps.new_zeros(batch.ids.shape).index_put((rows, columns), logps)


def _head_log_probs(
    model: "PreTrainedModel", states: Float[Tensor, "own H"], targets: Int[Tensor, " own"]
) -> Float[Tensor, " own"]:
    # In float32 before the softmax: bfloat16 has 8 bits, too few for a sum over 151,936 exponentials.
    logits = model.get_output_embeddings()(states)
    return token_log_probs(logits.to(torch.promote_types(logits.dtype, torch.float32)), targets)


@contextmanager
def tapped(model: "PreTrainedModel", tap: Tap) -> Iterator[None]:
    """While open, pass every adapted Linear's inputs and its outputs' gradient to the tap, once a backward pass.

    A custom autograd function rather than hooks: under (non-reentrant) gradient checkpointing its forward runs again,
    its backward once.
    """
    with replaced_forwards(model, lambda name, linear, x: _Tapped.apply(x, linear.weight, linear.bias, name, tap)):
        yield


class _Tapped(torch.autograd.Function):
    """`wide_linear` with a frozen weight, whose backward passes (x, g) to a tap."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, name: str, tap: Tap) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.name, ctx.tap = name, tap
        return wide_linear(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, None, None, None, None]:
        # The tap may know the gradient of x already, by fewer products than g W takes.
        x, weight = ctx.saved_tensors
        input_gradient = ctx.tap(ctx.name, x, g)
        return wide_linear(g, weight.T) if input_gradient is None else input_gradient, None, None, None, None


class TotalSink:
    """A sink that keeps a weighted sum of all rows' gradients, over batches.

    `total` [N] is the sum over rows of their weight times their gradient; `weights` [R] are those of all rows.
    """

    def __init__(self, layout: Layout, weights: Float[Tensor, " R"], device: torch.device | str = "cpu") -> None:
        self._weights = weights.to(device)
        self.total: Float[Tensor, " N"] = torch.zeros(layout.width, device=device)
        self._parts = layout.split(self.total)  # views, so that adding to a part adds to the total

    def batch_sink(self, indices: Sequence[int]) -> Sink:
        """Return the sink of the batch that holds these rows."""
        weights = self._weights[list(indices)]

        def add(name: str, contribution: Float[Tensor, "B n"]) -> None:
            self._parts[name].add_(weights.to(contribution) @ contribution)

        return add


def mean_weights(tokens: Sequence[TokenRow], indices: Sequence[int]) -> Float[Tensor, " B"]:
    """Return the weights of token-sum gradients whose sum is the gradient of the mean NLL a token, averaged over rows.

    The average is over the rows with these indices; zeros without any such row.
    """
    weights = torch.zeros(len(tokens))
    for index in indices:
        weights[index] = 1 / (tokens[index].num_own * len(indices))
    return weights


class DotSink:
    """A sink that keeps only inner products, for gradients that are too large to keep.

    LoRA of rank 32 at Qwen3-4B: 264 MB a row in float32. `dots` [B, P] are the products with the directions, `squares`
    [B] the squared norms; no more than one module's gradients exist at a time.
    """

    def __init__(self, layout: Layout, directions: Float[Tensor, "P N"]) -> None:
        self._layout, self._directions = layout, directions
        self._parts = layout.split(directions)
        self.dots: Float[Tensor, "B P"] = torch.zeros(())
        self.squares: Float[Tensor, " B"] = torch.zeros(())

    def __call__(self, name: str, contribution: Float[Tensor, "B n"]) -> None:
        """Add one module's inner products."""
        if (self._directions.device, self._directions.dtype) != (contribution.device, contribution.dtype):
            self._directions = self._directions.to(contribution)  # all modules' at once
            self._parts = self._layout.split(self._directions)
        self.dots = self.dots.to(contribution) + contribution @ self._parts[name].T
        self.squares = self.squares.to(contribution) + contribution.square().sum(-1)


def reference_gradient(model: "PreTrainedModel", adapter: ProbeAdapter, row: TokenRow) -> Float[Tensor, " N"]:
    """Compute the gradient of the row's token-sum NLL in nats, from a backward pass over this row alone.

    The slow oracle of per-sample gradients shares no formula with them: logits come from the whole model, the loss from
    torch's cross entropy, the gradient from torch's autograd, and the adapter's change is a product of its own. The
    model must hold its clean weights.
    """
    model.requires_grad_(False)
    with torch.enable_grad(), attached(model, adapter) as theta:
        F.cross_entropy(*_own_logits(model, row), reduction="sum").backward()
    return torch.zeros_like(theta) if theta.grad is None else theta.grad


@torch.no_grad()
def reference_log_probs(model: "PreTrainedModel", row: TokenRow) -> Float[Tensor, " own"]:
    """Compute the log-probs of the row's own tokens in nats, from a pass over this row alone, unpadded; on the CPU."""
    return -F.cross_entropy(*_own_logits(model, row), reduction="none").cpu()


def _own_logits(model: "PreTrainedModel", row: TokenRow) -> tuple[Float[Tensor, "own V"], Int[Tensor, " own"]]:
    """Compute logits that predict the row's own tokens, in float32 at least, and those tokens."""
    device = next(model.parameters()).device
    ids = torch.tensor([[*row.prompt_ids, *row.completion_ids]], device=device)
    start, mask = len(row.prompt_ids), torch.tensor(row.own, device=device)
    logits = model(input_ids=ids, use_cache=False).logits[0, start - 1 : -1][mask]
    return logits.to(torch.promote_types(logits.dtype, torch.float32)), ids[0, start:][mask]


@dataclass
class MeasuredStudent:
    """A model with an adapter folded into its weights."""

    model: "PreTrainedModel"
    tokenizer: Any
    adapter: ProbeAdapter
    folded: FoldedModel
    max_tokens: int = MAX_TOKENS
    """Padded tokens of one pass, unless a call sets another number."""

    @property
    def device(self) -> torch.device:
        """The device of the model's weights."""
        return next(self.model.parameters()).device

    def move_to(self, theta: Float[Tensor, " N"]) -> None:
        """Set the adapter to these values, and fold their change into the weights."""
        self.adapter.theta = theta.detach().clone().to(self.device)
        self.folded.refold()

    def gradients(
        self,
        rows: Sequence[TokenRow],
        loss_of: LossOf = lambda indices, batch: token_sum,
        max_tokens: int | None = None,
    ) -> tuple[Float[Tensor, "B N"], list[Float[Tensor, " own"]]]:
        """Measure each row's gradient of its loss and its own tokens' log-probs [nats], in the order given, on the CPU.

        A batch holds at most `max_tokens` padded tokens (None: the student's), but at least one row.
        """
        # Filled module by module: a step's gradients exist once, and few modules' of them are on the accelerator.
        wide = torch.promote_types(next(self.model.parameters()).dtype, torch.float32)
        flat = torch.zeros(len(rows), self.adapter.layout.width, dtype=wide)
        parts = self.adapter.layout.split(flat)
        pending: list[tuple[list[int], str, Tensor]] = []

        def fetch() -> None:
            if pending:
                pieces = (
                    torch.cat([part.flatten() for _, _, part in pending])
                    .cpu()
                    .split([p.numel() for _, _, p in pending])
                )
                for (indices, name, part), piece in zip(pending, pieces, strict=True):
                    parts[name][indices] = piece.view(part.shape)
                pending.clear()

        def sink_of(indices: list[int]) -> Sink:
            def put(name: str, contribution: Float[Tensor, "B n"]) -> None:
                if contribution.device.type == "cpu":
                    parts[name][indices] = contribution
                    return
                pending.append((indices, name, contribution))
                if sum(part.numel() for _, _, part in pending) >= FETCHED_AT_ONCE:
                    fetch()

            return put

        logps = self.stream(rows, sink_of, loss_of, max_tokens)
        fetch()
        return flat, logps

    def stream(
        self,
        rows: Sequence[TokenRow],
        sink_of: Callable[[list[int]], Sink] | None,
        loss_of: LossOf = lambda indices, batch: token_sum,
        max_tokens: int | None = None,
    ) -> list[Float[Tensor, " own"]]:
        """Pass each batch's gradients, module by module, to the sink that `sink_of` returns for its rows' indices.

        Returns own tokens' log-probs in nats, in the order given, on the CPU; without `sink_of` there is no backward
        pass. No row's whole gradient is ever held: for gradients of which sums alone are needed, and those that are too
        large to keep.
        """
        logps: dict[int, Float[Tensor, " own"]] = {}
        # In float32 at least, whatever the weights' type: in bfloat16 single rows' cosines are off by up to .04.
        with in_float32(self.model):
            # Batches of similar length: at 256 tokens 8 rows at once are 1.44 times as fast as single rows, 1.13 times
            # with 20 % of pads.
            for indices in by_length([len(row) for row in rows], max_tokens or self.max_tokens):
                cpu_batch = collate([rows[i] for i in indices])
                batch = cpu_batch.to(self.device)
                if sink_of is None:
                    batch_logps = own_log_probs(self.model, batch)
                else:
                    sink, loss = sink_of(indices), loss_of(indices, batch)
                    batch_logps = per_sample_gradients(self.model, self.adapter, batch, sink, loss)
                of_rows = zip(indices, batch_logps.cpu(), cpu_batch.mask, strict=True)
                logps.update((i, values[mask]) for i, values, mask in of_rows)
        return [logps[index] for index in range(len(rows))]

    @torch.no_grad()
    def log_probs(self, rows: Sequence[TokenRow]) -> list[Float[Tensor, " own"]]:
        """Compute the log-probs of each row's own tokens in nats, in the order given, on the CPU."""
        return self.stream(rows, None)

    def weight_scale(self) -> float:
        """Return the root mean square singular value of the adapted weights, the unit of a small change of theta."""
        linears = target_linears(self.model).values()
        return sum(float(m.weight.detach().float().norm()) / min(m.weight.shape) ** 0.5 for m in linears) / len(linears)


def adapt(model: "PreTrainedModel", tokenizer: Any, adapter: ProbeAdapter) -> MeasuredStudent:
    """Adapt a model that is already loaded; its weights are frozen."""
    model.requires_grad_(False)
    return MeasuredStudent(model, tokenizer, adapter, FoldedModel(model, adapter))


def open_student(
    config: PolicyConfig, adapter: str, rank: int, seed: int, svd: Run | None, out: RunWriter
) -> MeasuredStudent:
    """Load the configured model and adapt it, and note it in the manifest.

    `svd` is the run of `composer probe svd` that spectral adapters need.
    `BadInput` when the decomposition is of other weights; otherwise the errors of `load_model` and `open_adapter`.
    """
    from composer_stages.policy.local import LocalPolicy, load_model

    model, tokenizer = load_model(config, listener=out.progress)
    out.model("student", **LocalPolicy(model, tokenizer, config).facts())
    spectrum = load_spectrum(svd.folder(VECTORS)) if svd is not None and adapter in SPECTRAL else None
    if spectrum is not None:
        check_spectrum(model, spectrum)
    return adapt(model.eval(), tokenizer, open_adapter(adapter, model, spectrum, rank, seed))


def dr_grpo(
    advantages: Sequence[float], behaviour: Sequence[Float[Tensor, " own"]] | None, l_max: int, num_rows: int
) -> LossOf:
    """Return Dr.GRPO's loss (arXiv 2503.20783) of `num_rows` rows with these advantages.

    L = -1 / (N Lmax) sum_i sum_t min(rho A_i, clip(rho, 1 - eps, 1 + eps) A_i) over own tokens, rho = pi / behaviour,
    A = R - mean R of the group, not divided by its spread. Without behaviour log-probs [nats] rho is 1 and still has
    its gradient; then a row's gradient is A_i times that of its token-sum NLL, divided by N Lmax. `l_max` is Dr.GRPO's
    constant Lmax, in tokens.
    """

    def loss_of(indices: list[int], batch: TokenBatch) -> RowLoss:
        scale = torch.tensor([advantages[i] for i in indices], device=batch.ids.device)[:, None]
        old = None
        if behaviour is not None:
            old = torch.zeros(batch.ids.shape, device=batch.ids.device)
            old[batch.mask] = torch.cat([behaviour[i] for i in indices]).to(old)

        def loss(logps: Float[Tensor, "B T"]) -> Float[Tensor, " B"]:
            # Without old log-probs exp(logps - logps) is 1, but its gradient is that of the log-prob.
            ratio = (logps - (logps.detach() if old is None else old)).exp()
            objective = torch.minimum(ratio * scale, ratio.clamp(1 - EPSILON, 1 + EPSILON) * scale)
            return -(objective * batch.mask).sum(-1) / (num_rows * l_max)

        return loss

    return loss_of
