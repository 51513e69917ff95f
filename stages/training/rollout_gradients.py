"""The gradient of each rollout, its cosine with the hack direction, and its importance ratio, at a step's weights.

`RolloutGradients` follows a training (`probe.measure`, `probe.mixed`): it is called with the rollouts of each step,
before the step learns from them. The gradient is that of a rollout's own tokens' summed -log p, by what is trained
(`trained.Trained`), from one backward pass over many rollouts: no rollout's loss depends on another, so that a Linear's
inputs and its outputs' gradient give every rollout's own. At ratio 1 a rollout's share of the policy gradient is its
advantage times that gradient.

Ratios compare the student with the policy that wrote a rollout, which with mixed groups is the teacher for half of
them. Where tokens are clipped or vanish, or few rollouts have all the weight, nothing of the teacher's is learned from.

Shapes: R rollouts, B of a batch, T tokens, n trained numbers of a Linear, own: a rollout's own tokens.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from composer_stages.gradients.per_row import MAX_TOKENS, TokenRow, by_length, collate, own_log_probs
from composer_stages.rollouts.agent_loop import LiveRollout
from composer_stages.runs.kinds import ROLLOUT_GRADIENT
from composer_stages.runs.run import RunWriter
from composer_stages.training.channels.rollouts import own_rollout
from composer_stages.training.distributed import Student
from composer_stages.training.projection import Direction
from composer_stages.training.trained import Trained, linear_modules, trained_linears
from composer_stages.words import Sentence

EPSILON = 0.2
"""The clip range of ratios, PPO's and TRL's default."""
VANISHED = 0.1
"""Below this ratio a token of positive advantage has next to no gradient."""
MAX_LOST, MIN_ESS = 0.5, 0.2
"""Limits of the clipped and vanished share of tokens, and of the effective sample size, while ratios carry signal."""
Tap = Callable[[str, Float[Tensor, "B T I"], Float[Tensor, "B T O"]], None]
"""Receives a Linear's name, its inputs, and the gradient of its outputs."""


@dataclass(frozen=True)
class RatioReport:
    """How much of the data importance ratios leave unused: clipped and vanished tokens, effective sample size.

    clip_low, clip_high and vanish are shares of the own tokens of rollouts with an advantage: A < 0 and rho < 1 - eps;
    A > 0 and rho > 1 + eps; A > 0 and rho < .1. p5 to p95 are of all own tokens' ratios. ess is
    (sum w)^2 / sum w^2 / R, with w the product of a rollout's ratios.
    """

    clip_low: float
    clip_high: float
    vanish: float
    ess: float
    ratio_p5: float
    ratio_p50: float
    ratio_p95: float

    @property
    def saturated(self) -> str | None:
        """Return why the ratios carry no signal, as a clause; None while they do."""
        lost = self.clip_low + self.clip_high + self.vanish
        if lost > MAX_LOST:
            return Sentence("training.tokens-clipped", lost=lost)
        return Sentence("training.few-effective-rollouts", ess=self.ess) if self.ess < MIN_ESS else None


def ratio_report(
    current: Sequence[Float[Tensor, " own"]], behaviour: Sequence[Float[Tensor, " own"]], advantages: Sequence[float]
) -> RatioReport:
    """Compare log-probs [nats] now and at sampling; rollouts of advantage 0 count for the ess alone."""
    log_ratios = [new - old for new, old in zip(current, behaviour, strict=True)]
    ratios = [log_ratio.exp() for log_ratio in log_ratios]
    learned = [(rho, a) for rho, a in zip(ratios, advantages, strict=True) if a]
    total = max(sum(len(rho) for rho, _ in learned), 1)
    # A rollout's weight is a product over hundreds of tokens: less the largest before exp, so that none overflows; the
    # effective sample size does not depend on a common factor.
    log_weights = torch.stack([log_ratio.sum() for log_ratio in log_ratios]).double()
    weights = (log_weights - log_weights.max()).exp()
    quantiles = torch.cat(ratios).double().quantile(torch.tensor([0.05, 0.5, 0.95], dtype=torch.float64)).tolist()
    return RatioReport(
        clip_low=sum(int((rho < 1 - EPSILON).sum()) for rho, a in learned if a < 0) / total,
        clip_high=sum(int((rho > 1 + EPSILON).sum()) for rho, a in learned if a > 0) / total,
        vanish=sum(int((rho < VANISHED).sum()) for rho, a in learned if a > 0) / total,
        ess=float(weights.sum() ** 2 / weights.square().sum()) / len(weights),
        ratio_p5=quantiles[0],
        ratio_p50=quantiles[1],
        ratio_p95=quantiles[2],
    )


@dataclass(frozen=True)
class RolloutMeasurements:
    """Of each rollout: cosine with the direction [R], norm of the gradient [R], log-probs of its own tokens [nats].

    The cosine is that of the entire gradient with the unit directions of all Linears, concatenated; NaN without one.
    """

    cosines: Float[Tensor, " R"]
    norms: Float[Tensor, " R"]
    log_probs: list[Float[Tensor, " own"]]


def measure_rollouts(
    model: Any,
    toward: Direction,
    rows: Sequence[TokenRow],
    *,
    max_tokens: int = MAX_TOKENS,
    autocast: AbstractContextManager[Any] | None = None,
) -> RolloutMeasurements:
    """Measure rollouts against a direction in the space of the weights, at a model's present weights.

    Nothing of the model is changed. max_tokens: padded tokens of one pass. autocast: in which the model is trained.
    """
    linears = trained_linears(model, toward)
    slopes = {n: torch.cat([s.detach().flatten() for s in t.slopes(toward[n])]) for n, t in linears.items()}
    units = {name: slope / slope.norm() for name, slope in slopes.items() if float(slope.norm()) > 0}
    dots, squares = torch.zeros(len(rows)), torch.zeros(len(rows))
    log_probs: dict[int, Tensor] = {}
    device = next(model.parameters()).device
    with _frozen(model), torch.set_grad_enabled(bool(units)), autocast or nullcontext():
        for indices in by_length([len(row) for row in rows], max_tokens):
            batch = collate([rows[index] for index in indices])
            sums = torch.zeros(2, len(indices), device=device)
            with observed(linear_modules(model, units), partial(_add, linears, units, sums)):
                logps = own_log_probs(model, batch.to(device))
                if units:
                    (-logps.sum()).backward()
            dots[indices], squares[indices] = sums.cpu()
            values = zip(indices, logps.detach().cpu(), batch.mask, strict=True)
            log_probs |= {index: line[mask] for index, line, mask in values}
    norms = squares.sqrt()
    return RolloutMeasurements(dots / (norms * len(units) ** 0.5), norms, [log_probs[i] for i in range(len(rows))])


def _add(
    linears: Mapping[str, Trained],
    units: Mapping[str, Tensor],
    sums: Float[Tensor, "2 B"],
    name: str,
    x: Float[Tensor, "B T I"],
    g: Float[Tensor, "B T O"],
) -> None:
    """Add a Linear's share in each row's inner product with the direction, and in its squared norm."""
    with torch.autocast(x.device.type, enabled=False):
        gradients = linears[name].row_gradients(x, g)
        sums += torch.stack([gradients @ units[name].to(gradients), gradients.square().sum(1)])


@contextmanager
def observed(modules: Mapping[str, nn.Module], tap: Tap) -> Iterator[None]:
    """While open, pass each module's inputs and its outputs' gradient to the tap, once in a backward pass."""

    def observing(name: str) -> Callable[[nn.Module, tuple[Tensor, ...], Tensor], Any]:
        return lambda module, inputs, output: _Observed.apply(inputs[0], output, name, tap)

    handles = [module.register_forward_hook(observing(name)) for name, module in modules.items()]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


class _Observed(torch.autograd.Function):
    """The identity on a module's outputs, whose backward passes (x, g) to a tap.

    No tensor hook: under gradient checkpointing a module runs twice, and its backward once.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, y: Tensor, name: str, tap: Tap) -> Tensor:
        ctx.save_for_backward(x)
        ctx.name, ctx.tap = name, tap
        return y.view_as(y)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[None, Tensor, None, None]:
        ctx.tap(ctx.name, *ctx.saved_tensors, g)
        return None, g, None, None


@contextmanager
def _frozen(model: Any) -> Iterator[None]:
    """While open, no parameter gets a gradient and no dropout acts, unless activations are recomputed."""
    learning = [parameter for parameter in model.parameters() if parameter.requires_grad]
    was_training = model.training
    # transformers recomputes activations in training mode alone.
    model.train(was_training and model.is_activation_checkpointing)
    for parameter in learning:
        parameter.requires_grad_(False)
    try:
        yield
    finally:
        for parameter in learning:
            parameter.requires_grad_(True)
        model.train(was_training)


@dataclass(frozen=True)
class RolloutGradients:
    """Measures the rollouts of each step of a training, and writes them as units of its journal.

    toward: the direction, empty where ratios alone are measured. generations: rollouts of a group.
    """

    student: Student
    toward: Direction
    generations: int
    max_tokens: int
    out: RunWriter

    def record(self, step: int, rollouts: Sequence[LiveRollout]) -> None:
        """Measure the rollouts of a step that were graded; called in the process that has all of them."""
        graded = [
            (index, rollout, tokens)
            for index, rollout in enumerate(rollouts)
            if rollout.error is None
            and rollout.grade.reward is not None
            and (tokens := own_rollout(rollout)) is not None
        ]
        if not graded:
            return
        rows = [
            TokenRow(tokens.tree.prompt, tokens.tree.branches[0], list(map(bool, tokens.mask)))
            for _, _, tokens in graded
        ]
        model = self.student.policy.model
        measurements = measure_rollouts(
            model, self.toward, rows, max_tokens=self.max_tokens, autocast=self.student.autocast()
        )
        rewards: dict[int, list[float]] = {}
        for index, rollout, _ in graded:
            rewards.setdefault(index // self.generations, []).append(float(rollout.grade.reward or 0.0))
        means = {group: sum(values) / len(values) for group, values in rewards.items()}
        advantages = [float(e.grade.reward or 0.0) - means[index // self.generations] for index, e, _ in graded]
        behaviour = [
            torch.tensor(tokens.logprobs)[torch.tensor(tokens.mask, dtype=torch.bool)] for _, _, tokens in graded
        ]
        ratios = ratio_report(measurements.log_probs, behaviour, advantages)
        measured = [
            {
                "training_step": step,
                "rollout_id": rollout.rollout_id,
                "advantage": advantage,
                "cos_stack": _known(cosine),
                "grad_norm": _known(norm) if self.toward else None,
                "logp_mean": float(now.double().mean()),
                "ratio": float((now.double() - then.double()).mean().exp()),
            }
            for (_, rollout, _), advantage, cosine, norm, now, then in zip(
                graded,
                advantages,
                measurements.cosines,
                measurements.norms,
                measurements.log_probs,
                behaviour,
                strict=True,
            )
        ]
        report = {"training_step": step, **asdict(ratios), "saturated": ratios.saturated}
        self.out.write(f"gradients-{step:06d}", {"measured_step": step, "gradients": measured, "ratios": report})


def _known(value: Float[Tensor, ""]) -> float | None:
    number = float(value)
    return number if math.isfinite(number) else None


def write_measured(out: RunWriter, num_steps: int) -> None:
    """Write what was measured of the first `num_steps` steps, if anything: a table of rollouts, and `ratios.json`."""
    units = [unit for unit in out.journal.records() if unit.get("measured_step", num_steps) < num_steps]
    units.sort(key=lambda unit: int(unit["measured_step"]))
    if units:
        out.table(ROLLOUT_GRADIENT, [row for unit in units for row in unit["gradients"]])
        out.document("ratios", [unit["ratios"] for unit in units])
