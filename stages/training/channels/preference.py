"""The channels on preference pairs: the student's log-probs of both completions, summed or averaged."""

from types import MappingProxyType
from typing import TYPE_CHECKING

from stages.training.channels.base import Channel, ChannelLoss

if TYPE_CHECKING:
    from stages.training.rows import PairRows


class Dpo(Channel["PairRows"]):
    """DPO in the form `pairs.loss_type`: mean over pairs. Kernel and source: stages/losses/dpo.py."""

    name = "dpo"
    description = "Direct preference optimisation on extracted pairs."
    row_source = "pairs"
    needs_reference = True
    columns = MappingProxyType({"accuracy": "dpo acc"})

    def loss(self, rows: "PairRows") -> ChannelLoss:
        """Metrics: mean margin (nats, times beta), share of positive ones, mean log-prob sums of both sides (nats)."""
        from stages.losses.dpo import DpoOptions, dpo_losses
        from stages.losses.dpo import Pairs as PairSums

        settings, sums, reference, lengths = self.settings.pairs, rows.sums, rows.reference, rows.lengths  # [P, 2]
        terms = PairSums(sums[:, 0], sums[:, 1], reference[:, 0], reference[:, 1], lengths[:, 0], lengths[:, 1])
        losses = dpo_losses(terms, settings.loss_type, DpoOptions(beta=settings.beta))
        margins = settings.beta * ((sums - reference)[:, 0] - (sums - reference)[:, 1]).detach()
        metrics = {"margin": float(margins.mean()), "accuracy": float((margins > 0).float().mean())}
        metrics["chosen_logps"], metrics["rejected_logps"] = sums.detach().mean(0).tolist()
        return ChannelLoss(losses.mean(), len(losses), metrics)


class Simpo(Channel["PairRows"]):
    """SimPO: mean over pairs. Kernel and source: stages/losses/simpo.py."""

    name = "simpo"
    description = "SimPO on extracted pairs: length-averaged, without a reference."
    row_source = "pairs"

    def loss(self, rows: "PairRows") -> ChannelLoss:
        """Metric: share of pairs whose chosen completion has the higher mean log-prob."""
        from stages.losses.simpo import simpo_loss

        settings, means = self.settings.pairs, rows.sums / rows.lengths  # [P, 2]
        result = simpo_loss(
            means[:, 0], means[:, 1], beta=settings.simpo_beta, gamma_beta_ratio=settings.simpo_gamma_ratio
        )
        accuracy = float(result.metrics()["rewards/accuracies"])
        return ChannelLoss(result.losses.mean(), len(means), {"accuracy": accuracy})


class Sft(Channel["PairRows"]):
    """Cross-entropy: minus the mean log-prob (nats) over all tokens of the chosen completions."""

    name = "sft"
    description = "Cross-entropy on the chosen action of extracted pairs."
    row_source = "pairs"

    def loss(self, rows: "PairRows") -> ChannelLoss:
        """No metrics."""
        tokens = int(rows.lengths[:, 0].sum())
        return ChannelLoss(-rows.sums[:, 0].sum() / tokens, tokens, {})
