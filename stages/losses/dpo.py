"""DPO and its relatives: the loss of each preference pair from sequence log-probs of policy and reference."""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn import functional as F

from stages.errors import UsageError
from stages.losses.shapes import PerPair
from stages.losses.simpo import smoothed_sigmoid

LARGEST_EXPONENT = {torch.float16: 11.0}  # of the alpha divergence; 80 for the wider dtypes


@dataclass(frozen=True)
class Pairs:
    """Summed log-probs (nats) of both sides under policy (gradient) and reference, and each completion's tokens."""

    chosen: PerPair
    rejected: PerPair
    ref_chosen: PerPair
    ref_rejected: PerPair
    chosen_tokens: Tensor | None = None
    rejected_tokens: Tensor | None = None


@dataclass(frozen=True)
class DpoOptions:
    """As in TRL's DPOConfig. label_smoothing acts in robust, exo_pair and the two aot types only."""

    beta: float = 0.1
    label_smoothing: float = 0.0
    f_divergence: str = "reverse_kl"
    f_alpha: float = 0.5
    discopop_tau: float = 0.05


@dataclass(frozen=True)
class _Terms:
    """c, r: log-ratios to the reference; score_c, score_r: f'(c), f'(r); delta their difference."""

    pairs: Pairs
    options: DpoOptions
    c: Tensor
    r: Tensor
    score_c: Tensor
    score_r: Tensor

    @property
    def delta(self) -> Tensor:
        return self.score_c - self.score_r

    @property
    def margin(self) -> Tensor:
        return self.options.beta * self.delta

    @property
    def mean_delta(self) -> Tensor:
        """Difference of the scores a token, the counts at least 1."""
        counts = self.pairs.chosen_tokens, self.pairs.rejected_tokens
        if counts[0] is None or counts[1] is None:
            raise UsageError(
                "ipo and sigmoid_norm need the token counts of both completions: give chosen_tokens and rejected_tokens"
            )
        return self.score_c / counts[0].clamp(min=1.0) - self.score_r / counts[1].clamp(min=1.0)


def dpo_losses(pairs: Pairs, loss_type: str = "sigmoid", options: DpoOptions | None = None) -> PerPair:
    """Loss of each pair for one of LOSS_TYPES; the trainer takes the mean. Formulas beside each type below; nats.

    Raises UsageError for an unknown type or f-divergence, for ipo and sigmoid_norm without token counts, for exo_pair
    without label_smoothing, and for robust with label_smoothing >= 0.5.
    Source: TRL 1.16 trainer/dpo_trainer.py:1338-1505.
    """
    options = options or DpoOptions()
    if loss_type not in LOSS_TYPES:
        raise UsageError(f"DPO's loss_type is {loss_type!r}; choose one of {', '.join(LOSS_TYPES)}")
    pairs = replace(pairs, ref_chosen=pairs.ref_chosen.detach(), ref_rejected=pairs.ref_rejected.detach())
    c, r = pairs.chosen - pairs.ref_chosen, pairs.rejected - pairs.ref_rejected
    return LOSS_TYPES[loss_type](_Terms(pairs, options, c, r, f_score(c, options), f_score(r, options)))


def f_score(log_ratio: PerPair, options: DpoOptions) -> PerPair:
    """f'(ratio) of the divergence that regularises the policy: the log-ratio itself for reverse_kl.

    The alpha divergence works in float64 too, where TRL raises KeyError. Raises UsageError for an unknown divergence.
    """
    power = options.f_alpha - 1.0
    if options.f_divergence == "reverse_kl" or (options.f_divergence == "alpha_divergence" and abs(power) < 1e-6):
        return log_ratio
    if options.f_divergence == "forward_kl":
        return 1 - torch.exp(-log_ratio)
    if options.f_divergence == "js_divergence":
        return math.log(2) + F.logsigmoid(log_ratio)
    if options.f_divergence == "alpha_divergence":
        exponent = (power * log_ratio).to(torch.promote_types(log_ratio.dtype, torch.float32))
        exponent = exponent.clamp(max=LARGEST_EXPONENT.get(log_ratio.dtype, 80.0))
        return (exponent.exp() - 1.0).to(log_ratio.dtype) / power
    raise UsageError(
        f"f_divergence is {options.f_divergence!r}; choose reverse_kl, forward_kl, js_divergence or alpha_divergence"
    )


def _sigmoid(x: _Terms) -> Tensor:
    return -F.logsigmoid(x.margin)


def _hinge(x: _Terms) -> Tensor:
    return torch.relu(1 - x.margin)


def _ipo(x: _Terms) -> Tensor:
    return (x.mean_delta - 1 / (2 * x.options.beta)) ** 2


def _sigmoid_norm(x: _Terms) -> Tensor:
    return -F.logsigmoid(x.options.beta * x.mean_delta)


def _exo_pair(x: _Terms) -> Tensor:
    """KL( (q, 1-q) || (1-e, e) ), q = sigmoid(margin); e is float32 whatever the dtype of the log-probs, as in TRL."""
    if x.options.label_smoothing <= 0:
        raise UsageError(
            f"exo_pair takes the logarithm of label_smoothing, which is {x.options.label_smoothing}; set 1e-3, say"
        )
    smoothing = torch.tensor(x.options.label_smoothing)
    won = torch.sigmoid(x.margin) * (F.logsigmoid(x.margin) - torch.log1p(-smoothing))
    lost = torch.sigmoid(-x.margin) * (F.logsigmoid(-x.margin) - torch.log(smoothing))
    return won + lost


def _robust(x: _Terms) -> Tensor:
    """[-(1-e) logsigmoid(m) + e logsigmoid(-m)] / (1 - 2e): unbiased if labels are flipped with probability e."""
    e = x.options.label_smoothing
    if not 0 <= e < 0.5:
        raise UsageError(f"robust needs 0 <= label_smoothing < 0.5, got {e}")
    return (-(1 - e) * F.logsigmoid(x.margin) + e * F.logsigmoid(-x.margin)) / (1 - 2 * e)


def _nca_pair(x: _Terms) -> Tensor:
    c, r = x.options.beta * x.c, x.options.beta * x.r
    return -F.logsigmoid(c) - 0.5 * F.logsigmoid(-c) - 0.5 * F.logsigmoid(-r)


def _bco_pair(x: _Terms) -> Tensor:
    return -F.logsigmoid(x.options.beta * x.c) - F.logsigmoid(-x.options.beta * x.r)


def _sppo_hard(x: _Terms) -> Tensor:
    return (x.c - 0.5 / x.options.beta) ** 2 + (x.r + 0.5 / x.options.beta) ** 2


def _aot(x: _Terms) -> Tensor:
    """Pair log-ratios under the policy against those under the reference, each sorted over the batch first."""
    policy, reference = x.pairs.chosen - x.pairs.rejected, x.pairs.ref_chosen - x.pairs.ref_rejected
    return smoothed_sigmoid(
        x.options.beta * (policy.sort().values - reference.sort().values), x.options.label_smoothing
    )


def _aot_unpaired(x: _Terms) -> Tensor:
    return smoothed_sigmoid(x.options.beta * (x.c.sort().values - x.r.sort().values), x.options.label_smoothing)


def _apo_zero(x: _Terms) -> Tensor:
    return 1 - torch.sigmoid(x.options.beta * x.c) + torch.sigmoid(x.options.beta * x.r)


def _apo_down(x: _Terms) -> Tensor:
    return torch.sigmoid(x.options.beta * x.c) + 1 - torch.sigmoid(x.options.beta * (x.c - x.r))


def _discopop(x: _Terms) -> Tensor:
    share = torch.sigmoid(x.margin / x.options.discopop_tau)
    return -F.logsigmoid(x.margin) * (1 - share) + torch.exp(-x.margin) * share


LOSS_TYPES: dict[str, Callable[[_Terms], Tensor]] = {
    "sigmoid": _sigmoid,
    "hinge": _hinge,
    "ipo": _ipo,
    "exo_pair": _exo_pair,
    "nca_pair": _nca_pair,
    "robust": _robust,
    "bco_pair": _bco_pair,
    "sppo_hard": _sppo_hard,
    "aot": _aot,
    "aot_unpaired": _aot_unpaired,
    "apo_zero": _apo_zero,
    "apo_down": _apo_down,
    "discopop": _discopop,
    "sigmoid_norm": _sigmoid_norm,
}
