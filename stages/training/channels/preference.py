"""The channels on preference pairs: the student's log-probs of both completions, summed or averaged."""

from types import MappingProxyType
from typing import TYPE_CHECKING

from stages.training.channels.base import Channel, ChannelLoss, Metric

if TYPE_CHECKING:
    from stages.training.data import PairRows


class Dpo(Channel["PairRows"]):
    """DPO in the form `pairs.loss_type`: mean over pairs. Kernel and source: stages/losses/preference.py."""

    name = "dpo"
    description = "Direct preference optimisation on extracted pairs."
    row_source = "pairs"
    needs_reference = True
    columns = MappingProxyType({"accuracy": "dpo acc"})

    def loss(self, rows: "PairRows") -> ChannelLoss:
        """Return the loss; metrics are the means over pairs of TRL's reward margin, accuracy and log-prob sums.

        margin: beta * ((chosen - reference) - (rejected - reference)) in nats. accuracy: share of margins above 0.
        chosen_logps, rejected_logps: log-probs summed over a completion, in nats.
        """
        from stages.losses.preference import PairLogProbs, dpo_losses

        settings, sums, reference, lengths = self.settings.pairs, rows.sums, rows.reference, rows.lengths  # [P, 2]
        # Sums, not means over tokens: DPO's implicit reward is the log-ratio of whole completions. The lengths serve
        # the forms that divide by them (ipo, sigmoid_norm).
        terms = PairLogProbs(sums[:, 0], sums[:, 1], reference[:, 0], reference[:, 1], lengths[:, 0], lengths[:, 1])
        losses = dpo_losses(terms, settings.loss_type, settings.beta)
        margins = settings.beta * ((sums - reference)[:, 0] - (sums - reference)[:, 1]).detach()
        totals = {"margin": margins.sum(), "accuracy": (margins > 0).float().sum()}
        totals["chosen_logps"], totals["rejected_logps"] = sums.detach().sum(0)
        metrics = {name: Metric("mean", total, len(losses)) for name, total in totals.items()}
        return ChannelLoss(losses.sum() / rows.num_pairs, rows.num_pairs, metrics)


class Simpo(Channel["PairRows"]):
    """SimPO: mean over pairs. Kernel and source: stages/losses/preference.py."""

    name = "simpo"
    description = "SimPO on extracted pairs: length-averaged, without a reference."
    row_source = "pairs"

    def loss(self, rows: "PairRows") -> ChannelLoss:
        """Return the loss; the metric accuracy is the share of pairs whose chosen side has the higher mean log-prob."""
        from stages.losses.preference import simpo_loss

        settings, means = self.settings.pairs, rows.sums / rows.lengths  # [P, 2]
        losses = simpo_loss(
            means[:, 0], means[:, 1], beta=settings.simpo_beta, gamma_beta_ratio=settings.simpo_gamma_ratio
        )
        right = (means[:, 0] > means[:, 1]).float().sum()
        metrics = {"accuracy": Metric("mean", right, len(means))}
        return ChannelLoss(losses.sum() / rows.num_pairs, rows.num_pairs, metrics)


class Sft(Channel["PairRows"]):
    """Cross-entropy: minus the mean log-prob (nats) over all tokens of the chosen completions."""

    name = "sft"
    description = "Cross-entropy on the chosen action of extracted pairs."
    row_source = "pairs"

    def loss(self, rows: "PairRows") -> ChannelLoss:
        """Return the loss, without metrics."""
        # The rejected sides were scored as well: the rows of a source are scored once for all channels that read them.
        return ChannelLoss(-rows.sums[:, 0].sum() / rows.chosen_tokens, rows.chosen_tokens, {})
