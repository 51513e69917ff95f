"""unlikelihood: a channel that lowers the log-probs of rejected actions. Imported without torch; its loss is not."""

from composer_post_training.channels import ChannelSpec

SPEC = ChannelSpec(
    "composer_plugin.unlikelihood:Unlikelihood", "The mean log-prob of the rejected action's tokens.", needs=("pairs",)
)
