"""DPO and its relatives: the loss of each preference pair from sequence log-probs of policy and reference."""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn import functional as F

from stages.errors import UsageError
from stages.losses.reduction import PerPair, Scalar

# ---- simpo
# SimPO: preference loss on length-averaged log-probs, no reference model; and TRL's CPO, with another margin.


@dataclass(frozen=True)
class PairLosses:
    """Loss and implicit rewards of each pair, in nats; the rewards carry no gradient."""

    losses: PerPair
    chosen_rewards: PerPair
    rejected_rewards: PerPair

    def metrics(self) -> dict[str, Scalar]:
        """Means over pairs, under upstream's keys."""
        return {
            "rewards/chosen": self.chosen_rewards.mean(),
            "rewards/rejected": self.rejected_rewards.mean(),
            "rewards/accuracies": (self.chosen_rewards > self.rejected_rewards).float().mean(),
            "rewards/margins": (self.chosen_rewards - self.rejected_rewards).mean(),
        }


def simpo_loss(
    chosen: PerPair,
    rejected: PerPair,
    *,
    beta: float = 2.0,
    gamma_beta_ratio: float = 0.25,
    label_smoothing: float = 0.0,
    loss_type: str = "sigmoid",
) -> PairLosses:
    """Loss of each pair from log-probs averaged over tokens; the trainer takes the mean.

    With x = beta (chosen - rejected - gamma_beta_ratio) and e = label_smoothing:
        sigmoid  -(1-e) logsigmoid(x) - e logsigmoid(-x)
        hinge    relu(1 - x), e unused
    Rewards are beta * log-prob, without the margin. Raises UsageError for another loss_type.
    Source: princeton-nlp/SimPO 1b3e8f3 scripts/simpo_trainer.py:560-595.
    """
    if loss_type not in ("sigmoid", "hinge"):
        raise UsageError(f"SimPO's loss_type is {loss_type!r}; choose sigmoid or hinge")
    x = beta * (chosen - rejected - gamma_beta_ratio)
    losses = smoothed_sigmoid(x, label_smoothing) if loss_type == "sigmoid" else torch.relu(1 - x)
    return PairLosses(losses, beta * chosen.detach(), beta * rejected.detach())


def cpo_loss(
    chosen: PerPair,
    rejected: PerPair,
    *,
    beta: float = 0.1,
    simpo_gamma: float = 0.5,
    label_smoothing: float = 0.0,
    alpha: float = 0.0,
    loss_type: str = "simpo",
) -> PairLosses:
    """TRL's form: simpo's margin is simpo_gamma / beta, equal to SimPO's iff simpo_gamma = beta * gamma_beta_ratio.

    With d the difference of rewards, reward = log-prob, or (1 - p^-alpha)/alpha if alpha is not 0 (AlphaPO):
        simpo    smoothed_sigmoid at beta (d - simpo_gamma/beta)
        sigmoid  smoothed_sigmoid at beta d
        hinge    relu(1 - beta d)
        ipo      (d - 1/(2 beta))^2
    Logged rewards are beta * reward. Raises UsageError for another loss_type. Serves the parity check only.
    Source: TRL 1.16 experimental/cpo/cpo_trainer.py:678-749.
    """
    rewards = [values if alpha == 0.0 else (1 - values.exp().pow(-alpha)) / alpha for values in (chosen, rejected)]
    difference = rewards[0] - rewards[1]
    if loss_type in ("simpo", "sigmoid"):
        margin = simpo_gamma / beta if loss_type == "simpo" else 0.0
        losses = smoothed_sigmoid(beta * (difference - margin), label_smoothing)
    elif loss_type == "hinge":
        losses = torch.relu(1 - beta * difference)
    elif loss_type == "ipo":
        losses = (difference - 1 / (2 * beta)) ** 2
    else:
        raise UsageError(f"CPO's loss_type is {loss_type!r}; choose simpo, sigmoid, hinge or ipo")
    return PairLosses(losses, beta * rewards[0].detach(), beta * rewards[1].detach())


def smoothed_sigmoid(x: PerPair, label_smoothing: float) -> PerPair:
    """-(1-e) logsigmoid(x) - e logsigmoid(-x)."""
    return -(1 - label_smoothing) * F.logsigmoid(x) - label_smoothing * F.logsigmoid(-x)


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
