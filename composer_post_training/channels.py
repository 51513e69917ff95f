"""Loss channels of a training: their rows, losses and metrics, and the table of channels.

    [project.entry-points."composer.channels"]
    mine = "my_package:SPEC"  # SPEC = ChannelSpec("my_package.losses:Mine", "What it lowers.", needs=("pairs",))

The table is here without torch; what a channel is made of imports it.
"""

from typing import TYPE_CHECKING

from composer_post_training.deferred import deferred
from composer_stages.training.channels import CHANNELS as CHANNELS, ChannelSpec as ChannelSpec

if TYPE_CHECKING:
    from composer_stages.training.channels.base import (
        Channel as Channel,
        ChannelLoss as ChannelLoss,
        Metric as Metric,
        RowSource as RowSource,
        ScoredRows as ScoredRows,
        SourceInputs as SourceInputs,
    )
    from composer_stages.training.channels.hints import HintedRows as HintedRows, HintSource as HintSource
    from composer_stages.training.channels.opd import TaughtRows as TaughtRows, TaughtSource as TaughtSource
    from composer_stages.training.channels.pairs import PairRows as PairRows, PairSource as PairSource
    from composer_stages.training.channels.rollouts import RolloutRows as RolloutRows, RolloutSource as RolloutSource
    from composer_stages.training.config import Config as Config
else:
    __getattr__ = deferred(
        __name__,
        {
            "composer_stages.training.channels.base": (
                "Channel",
                "ChannelLoss",
                "Metric",
                "RowSource",
                "ScoredRows",
                "SourceInputs",
            ),
            "composer_stages.training.channels.hints": ("HintedRows", "HintSource"),
            "composer_stages.training.channels.opd": ("TaughtRows", "TaughtSource"),
            "composer_stages.training.channels.pairs": ("PairRows", "PairSource"),
            "composer_stages.training.channels.rollouts": ("RolloutRows", "RolloutSource"),
            "composer_stages.training.config": ("Config",),
        },
    )
