"""The loss of the channel unlikelihood."""

from composer_post_training.channels import Channel, ChannelLoss, PairRows, PairSource


class Unlikelihood(Channel[PairRows]):
    """Lowers the log-probs of rejected actions."""

    source = PairSource

    def loss(self, rows: PairRows) -> ChannelLoss:
        """Return the mean log-prob of the rejected actions' tokens; rows.sums and rows.lengths are [pairs, 2]."""
        tokens = int(rows.lengths[:, 1].sum())
        return ChannelLoss(rows.sums[:, 1].sum() / tokens, tokens, {})
