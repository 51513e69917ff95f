"""The student, the model that gradients are taken of: loaded, adapted, measured in batches, and its Dr.GRPO loss.

Gradients are those of `per_sample`, with their derivation there.

Shapes: B rows, R rows of all batches, T tokens, I inputs of a Linear, r its singular directions, N trained numbers,
own: a row's own tokens.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional as F

from stages.policy.base import PolicyConfig
from stages.probe.adapters.antipasto import RotatedAntipasto, pick_dims
from stages.probe.adapters.attach import Folded, ProbeAdapter, in_float32, replaced_forwards, target_linears
from stages.probe.adapters.choose import Start, check_spectrum, open_adapter
from stages.probe.adapters.lora import Lora
from stages.probe.adapters.names import SPECTRAL, AdapterName
from stages.probe.adapters.spectrum import Spectrum, load_spectrum
from stages.probe.gradients.per_sample import (
    RowLoss,
    Sink,
    TotalSink,
    mean_weights,
    own_log_probs,
    per_sample_gradients,
    token_sum,
)
from stages.probe.pool.tokens import TokenBatch, TokenRow, by_length, collate
from stages.runs.run import Run, RunWriter

if TYPE_CHECKING:
    from transformers import PreTrainedModel


LossOf = Callable[[list[int], TokenBatch], RowLoss]
"""The loss of a batch that holds the rows with these indices."""
MAX_TOKENS = 8192
"""Padded tokens of one backward pass."""
FETCHED_AT_ONCE = 2**24
"""Numbers of gradients that are copied from an accelerator together, 67 MB: each copy is waited for."""
WARM_UP_RATE = 1e-3
"""Learning rate of Adam in the warm-up of `lora_warmup`."""
EPSILON = 0.2
"""The clip range of Dr.GRPO."""
VANISHED = 0.1
"""Below this ratio a token of positive advantage has next to no gradient."""
MAX_LOST, MIN_ESS = 0.5, 0.2
"""Limits of the clipped and vanished share of tokens, and of the effective sample size, while ratios carry signal."""


@dataclass
class Student:
    """A model with an adapter folded into its weights."""

    model: "PreTrainedModel"
    tokenizer: Any
    adapter: ProbeAdapter
    folded: Folded
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
        held: list[tuple[list[int], str, Tensor]] = []

        def fetch() -> None:
            if held:
                pieces = torch.cat([part.flatten() for _, _, part in held]).cpu().split([p.numel() for _, _, p in held])
                for (indices, name, part), piece in zip(held, pieces, strict=True):
                    parts[name][indices] = piece.view(part.shape)
                held.clear()

        def sink_of(indices: list[int]) -> Sink:
            def put(name: str, contribution: Float[Tensor, "B n"]) -> None:
                if contribution.device.type == "cpu":
                    parts[name][indices] = contribution
                    return
                held.append((indices, name, contribution))
                if sum(part.numel() for _, _, part in held) >= FETCHED_AT_ONCE:
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
                given = collate([rows[i] for i in indices])
                batch = given.to(self.device)
                if sink_of is None:
                    found = own_log_probs(self.model, batch)
                else:
                    sink, loss = sink_of(indices), loss_of(indices, batch)
                    found = per_sample_gradients(self.model, self.adapter, batch, sink, loss)
                of_rows = zip(indices, found.cpu(), given.own, strict=True)
                logps.update((i, values[own]) for i, values, own in of_rows)
        return [logps[index] for index in range(len(rows))]

    @torch.no_grad()
    def log_probs(self, rows: Sequence[TokenRow]) -> list[Float[Tensor, " own"]]:
        """Compute the log-probs of each row's own tokens in nats, in the order given, on the CPU."""
        return self.stream(rows, None)

    def weight_scale(self) -> float:
        """Return the root mean square singular value of the adapted weights, the unit of a small change of theta."""
        linears = target_linears(self.model).values()
        return sum(float(m.weight.detach().float().norm()) / min(m.weight.shape) ** 0.5 for m in linears) / len(linears)


def adapt(model: "PreTrainedModel", tokenizer: Any, adapter: ProbeAdapter) -> Student:
    """Adapt a model that is already loaded; its weights are frozen."""
    model.requires_grad_(False)
    return Student(model, tokenizer, adapter, Folded(model, adapter))


def open_student(
    config: PolicyConfig,
    adapter: AdapterName,
    rank: int,
    seed: int,
    svd: Run | None,
    out: RunWriter,
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


Pairs = Sequence[tuple[TokenRow, TokenRow]]


def start_from_pairs(
    student: Student, pairs: Pairs, spectrum: Spectrum | None, warmup_steps: int, seed: int
) -> Student:
    """Return the student with its adapter at the start that the (hack, clean) pairs decide, for adapters with one.

    lora_warmup starts after `warmup_steps` steps of Adam down the mean NLL of all completions; each step sees all of
    them. LESS (arXiv 2402.04333) trains its LoRA for some steps before it takes gradients, since at B = 0 those of A
    are 0; here on the pairs' hacks and clean answers alike, so that the steps do not lean to either. antipasto_paper
    adapts the singular directions that `choose_dims` picks.
    """
    adapter = student.adapter
    if isinstance(adapter, Lora) and adapter.kind == "lora_warmup":
        rows = [side for pair in pairs for side in pair]
        # All pairs in every step: the start must not depend on an order or a seed of batches.
        theta = adapter.theta.detach().clone().requires_grad_()
        optimiser = torch.optim.Adam([theta], lr=WARM_UP_RATE)
        for _ in range(warmup_steps):
            total = TotalSink(adapter.layout, mean_weights(rows, range(len(rows))), student.device)
            student.stream(rows, total.of)
            theta.grad = total.total.to(theta)
            optimiser.step()
            student.move_to(theta)
        adapter.begin_at(theta.detach())
        student.folded.refold()
    if isinstance(adapter, RotatedAntipasto) and spectrum is not None:
        dims = choose_dims(student, pairs, spectrum, adapter.rank)
        # The new adapter has other coordinates, so it is folded into the clean weights and not on top of the old one.
        student.folded.restore()
        weight = next(student.model.parameters())
        rotated = RotatedAntipasto(spectrum, adapter.rank, seed=seed, dims=dims).to(weight.device, weight.dtype)
        max_tokens, student = student.max_tokens, adapt(student.model, student.tokenizer, rotated)
        student.max_tokens = max_tokens
    return student


@torch.no_grad()
def choose_dims(student: Student, pairs: Pairs, spectrum: Spectrum, rank: int) -> dict[str, list[int]]:
    """Choose the singular directions of each adapted Linear by its inputs along them, on the unchanged model.

    Of each row the mean of Vh x over its own tokens is taken, and that of its absolute value; `pick_dims` ranks by
    them.
    """
    # The adapter starts near the model, not at it (`RotatedAntipasto`): at theta = 0 the inputs are the model's own.
    student.move_to(torch.zeros_like(student.adapter.theta))
    rows = [side for pair in pairs for side in pair]
    bases = {n: f.Vh.to(student.device) for n, f in spectrum.factors.items() if n in student.adapter.layout.names}
    found: dict[str, dict[int, Float[Tensor, "two r"]]] = {name: {} for name in bases}

    def record(
        indices: list[int], own: Float[Tensor, "B T one"], name: str, linear: nn.Linear, x: Float[Tensor, "B T I"]
    ) -> Float[Tensor, "B T O"]:
        """Compute the Linear, and keep its inputs' means along the singular directions, over the rows' own tokens."""
        if name in bases:
            along = F.linear(x.float(), bases[name]) * own
            means = torch.stack([along.sum(1), along.abs().sum(1)]) / own.sum(1)
            found[name].update(zip(indices, means.cpu().unbind(1), strict=True))
        return F.linear(x, linear.weight, linear.bias)

    for indices in by_length([len(row) for row in rows], student.max_tokens):
        batch = collate([rows[i] for i in indices]).to(student.device)
        with replaced_forwards(student.model, partial(record, indices, batch.own[..., None].float())):
            own_log_probs(student.model, batch)
    dims = {}
    for name, of in found.items():
        mean, size = torch.stack([of[i] for i in range(len(rows))], dim=1)
        # Rows alternate hack, clean.
        turned = mean[0::2].mean(0) - mean[1::2].mean(0)
        scores = (size[1::2].mean(0), size[0::2].mean(0), turned.abs())
        dims[name] = pick_dims([spectrum.factors[name].S * score for score in scores], rank)
    return dims


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
            old[batch.own] = torch.cat([behaviour[i] for i in indices]).to(old)

        def loss(logps: Float[Tensor, "B T"]) -> Float[Tensor, " B"]:
            # Without old log-probs exp(logps - logps) is 1, but its gradient is that of the log-prob.
            ratio = (logps - (logps.detach() if old is None else old)).exp()
            kept = torch.minimum(ratio * scale, ratio.clamp(1 - EPSILON, 1 + EPSILON) * scale)
            return -(kept * batch.own).sum(-1) / (num_rows * l_max)

        return loss

    return loss_of


@dataclass(frozen=True)
class RatioReport:
    """How much of the data importance ratios leave unused: clipped and vanished tokens, effective sample size.

    clip_low, clip_high and vanish are shares of the own tokens of rows with an advantage: A < 0 and rho < 1 - eps;
    A > 0 and rho > 1 + eps; A > 0 and rho < .1. p5 to mean are of all own tokens' ratios. The mean carries no
    information: it is 1 by construction when the current log-probs stand in for the old ones. ess is
    (sum w)^2 / sum w^2 / B, with w the product of a row's ratios.
    """

    clip_low: float
    clip_high: float
    vanish: float
    ess: float
    p5: float
    p50: float
    p95: float
    mean: float

    @property
    def saturated(self) -> str | None:
        """The reason to stop, as a clause; None while the ratios still carry a signal."""
        lost = self.clip_low + self.clip_high + self.vanish
        if lost > MAX_LOST:
            return f"{lost:.0%} of the tokens are clipped or vanish"
        return f"the effective sample size is {self.ess:.0%} of the rows" if self.ess < MIN_ESS else None


def ratio_report(
    current: Sequence[Float[Tensor, " own"]], behaviour: Sequence[Float[Tensor, " own"]], advantages: Sequence[float]
) -> RatioReport:
    """Compare rows' log-probs [nats] now and when they were sampled; rows of advantage 0 count for the ess alone."""
    log_ratios = [new - old for new, old in zip(current, behaviour, strict=True)]
    ratios = [log_ratio.exp() for log_ratio in log_ratios]
    learned = [(rho, a) for rho, a in zip(ratios, advantages, strict=True) if a]
    total = max(sum(len(rho) for rho, _ in learned), 1)
    # A row's weight is a product over hundreds of tokens: less the largest before exp, so that none overflows; the
    # effective sample size does not depend on a common factor.
    log_weights = torch.stack([log_ratio.sum() for log_ratio in log_ratios]).double()
    weights = (log_weights - log_weights.max()).exp()
    tokens = torch.cat(ratios)
    p5, p50, p95 = tokens.double().quantile(torch.tensor([0.05, 0.5, 0.95], dtype=torch.float64)).tolist()
    return RatioReport(
        clip_low=sum(int((rho < 1 - EPSILON).sum()) for rho, a in learned if a < 0) / total,
        clip_high=sum(int((rho > 1 + EPSILON).sum()) for rho, a in learned if a > 0) / total,
        vanish=sum(int((rho < VANISHED).sum()) for rho, a in learned if a > 0) / total,
        ess=float(weights.sum() ** 2 / weights.square().sum()) / len(weights),
        p5=p5,
        p50=p50,
        p95=p95,
        mean=float(tokens.mean()),
    )
