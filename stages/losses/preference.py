"""DPO and SimPO: the loss of each preference pair from the log-probs of chosen and rejected completions.

`dpo_losses` takes sums over tokens under policy and reference and computes one of ten forms (`FORMS`, named as in TRL's
`DPOConfig.loss_type`); `simpo_loss` takes means over tokens and needs no reference. Which tokens are summed is decided
by the caller.

Not here: TRL's robust and exo_pair, which need a label smoothing, aot and aot_unpaired, which sort all pairs of a step,
and the f-divergences other than reverse KL. No setting selects them.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from composer_stages.errors import UsageError
from composer_stages.losses.tokens import PerPair

DISCOPOP_TAU = 0.05
"""Temperature of DiscoPOP's switch between the logistic and the exponential loss; TRL's default."""


@dataclass(frozen=True)
class PairLogProbs:
    """Summed log-probs (nats) of both sides under policy (gradient) and reference, and each completion's tokens."""

    chosen: PerPair
    rejected: PerPair
    ref_chosen: PerPair
    ref_rejected: PerPair
    chosen_tokens: Tensor | None = None
    rejected_tokens: Tensor | None = None


@dataclass(frozen=True)
class DpoTerms:
    """The inputs of the forms, each [p].

    chosen_ratio, rejected_ratio: log-ratios of policy to reference. chosen_tokens, rejected_tokens: lengths of the
    completions, for the forms that average over tokens.
    """

    beta: float
    chosen_ratio: PerPair
    rejected_ratio: PerPair
    chosen_tokens: Tensor | None = None
    rejected_tokens: Tensor | None = None

    @property
    def margin(self) -> PerPair:
        """Return beta times the difference of the log-ratios."""
        return self.beta * (self.chosen_ratio - self.rejected_ratio)

    @property
    def mean_difference(self) -> PerPair:
        """Return the difference of the log-ratios divided by the completions' lengths (at least 1)."""
        if self.chosen_tokens is None or self.rejected_tokens is None:
            raise UsageError("losses.no-token-counts")
        # TRL counts completion tokens before the shift, which is one more than were scored only where a completion
        # starts at position 0. An empty completion divides by 1.
        chosen = self.chosen_ratio / self.chosen_tokens.clamp(min=1.0)
        return chosen - self.rejected_ratio / self.rejected_tokens.clamp(min=1.0)


def _nca_pair(x: DpoTerms) -> Tensor:
    # Rewards against zero and not against each other, so that the chosen log-prob cannot fall along with the rejected.
    c, r = x.beta * x.chosen_ratio, x.beta * x.rejected_ratio
    return -F.logsigmoid(c) - 0.5 * F.logsigmoid(-c) - 0.5 * F.logsigmoid(-r)


def _discopop(x: DpoTerms, tau: float = DISCOPOP_TAU) -> Tensor:
    # Logistic where the pair is ranked wrongly (share near 0), exponential once it is ranked right.
    share = torch.sigmoid(x.margin / tau)
    return -F.logsigmoid(x.margin) * (1 - share) + torch.exp(-x.margin) * share


# TRL's label_smoothing has no effect on any of these forms in 1.16: conservative DPO is gone.
FORMS: dict[str, Callable[[DpoTerms], Tensor]] = {
    "sigmoid": lambda x: -F.logsigmoid(x.margin),
    "hinge": lambda x: torch.relu(1 - x.margin),
    "ipo": lambda x: (x.mean_difference - 1 / (2 * x.beta)) ** 2,
    "sigmoid_norm": lambda x: -F.logsigmoid(x.beta * x.mean_difference),
    "nca_pair": _nca_pair,
    "bco_pair": lambda x: -F.logsigmoid(x.beta * x.chosen_ratio) - F.logsigmoid(-x.beta * x.rejected_ratio),
    "sppo_hard": lambda x: (x.chosen_ratio - 0.5 / x.beta) ** 2 + (x.rejected_ratio + 0.5 / x.beta) ** 2,
    "apo_zero": lambda x: 1 - torch.sigmoid(x.beta * x.chosen_ratio) + torch.sigmoid(x.beta * x.rejected_ratio),
    "apo_down": lambda x: (
        torch.sigmoid(x.beta * x.chosen_ratio) + 1 - torch.sigmoid(x.beta * (x.chosen_ratio - x.rejected_ratio))
    ),
    "discopop": _discopop,
}
"""Form of DPO -> loss of each pair. The names are those of the setting `pairs.loss_type` and of TRL."""


def dpo_losses(pairs: PairLogProbs, loss_type: str = "sigmoid", beta: float = 0.1) -> PerPair:
    """Return the loss of each pair in nats for one of FORMS, [p]; the trainer takes the mean.

    Gradient to the policy's log-probs only. Raises UsageError for an unknown form, and for ipo and sigmoid_norm without
    token counts.
    Source: TRL 1.16 trainer/dpo_trainer.py:1338-1505.
    """
    if loss_type not in FORMS:
        raise UsageError("losses.no-dpo-form", loss_type=loss_type, forms=list(FORMS))
    chosen = pairs.chosen - pairs.ref_chosen.detach()
    rejected = pairs.rejected - pairs.ref_rejected.detach()
    return FORMS[loss_type](DpoTerms(beta, chosen, rejected, pairs.chosen_tokens, pairs.rejected_tokens))


def simpo_loss(chosen: PerPair, rejected: PerPair, *, beta: float = 2.0, gamma_beta_ratio: float = 0.25) -> PerPair:
    """Return -logsigmoid(beta (chosen - rejected - gamma_beta_ratio)) of log-probs averaged over tokens, [p] in nats.

    Source: princeton-nlp/SimPO 1b3e8f3 scripts/simpo_trainer.py:560-595.
    """
    # The margin gamma is beta * gamma_beta_ratio; TRL's CPOTrainer writes the same as simpo_gamma / beta.
    return -F.logsigmoid(beta * (chosen - rejected - gamma_beta_ratio))
