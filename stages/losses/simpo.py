"""SimPO: preference loss on length-averaged log-probs, no reference model; and TRL's CPO, with another margin."""

from dataclasses import dataclass

import torch
from torch.nn import functional as F

from stages.errors import UsageError
from stages.losses.shapes import PerPair, Scalar


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
