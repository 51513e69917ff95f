"""The channels besides GRPO. Importing this package loads neither torch nor a kernel.

base.py - the class of a channel, its loss and metrics, its settings
preference.py - DPO, SimPO and SFT on preference pairs
distillation.py - self-distillation on hinted turns; TAID and EOPD from a teacher model

stages/training/step.py scores the rows of all channels in one pass and calls each channel for its loss. A channel from
elsewhere joins by `CHANNELS[Mine.name] = Mine`; from then on `weights.NAME` accepts it.
"""

from typing import Any

from stages.training.channels.base import Channel, ChannelLoss, ChannelSettings, Metric
from stages.training.channels.distillation import Eopd, Sdpo, Taid
from stages.training.channels.preference import Dpo, Sft, Simpo

__all__ = ["CHANNELS", "Channel", "ChannelLoss", "ChannelSettings", "Metric"]

CHANNELS: dict[str, type[Channel[Any]]] = {
    Dpo.name: Dpo,
    Simpo.name: Simpo,
    Sft.name: Sft,
    Sdpo.name: Sdpo,
    Taid.name: Taid,
    Eopd.name: Eopd,
}
"""All channels by name, in the order of settings, losses and columns."""
