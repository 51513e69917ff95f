"""The channels besides GRPO, listed without importing torch or a kernel; each file has a row source and its channels.

base.py - what a channel and a row source are: rows, losses, metrics
pairs.py - preference pairs; DPO, SimPO and SFT on them
hints.py - hinted turns; self-distillation on them
rollouts.py - the student's own rollouts; TAID and EOPD from a teacher model on them
opd.py - the student's own rollouts with their teachers; on-policy distillation from one or several

stages/training/step.py scores the rows of all sources in one pass and calls each channel for its loss. A channel of an
installed package is an entry point of `composer.channels`, which is a `ChannelSpec`; `weights.NAME` accepts it.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from importlib import import_module
from typing import TYPE_CHECKING, Any, Literal

from composer_stages.data_files import load_toml
from composer_stages.registry import Registry

if TYPE_CHECKING:
    from composer_stages.training.channels.base import Channel, RowSource

Need = Literal["pairs", "reference", "hints", "teacher", "distributions", "teachers"]


@dataclass(frozen=True)
class ChannelSpec:
    """What settings, plans and reports need to know of a channel before its code is imported.

    body: the subclass of `Channel`, or its address as `module:Class`. description: help of the setting `weights.NAME`.
    needs: preference pairs, their log-probs under the reference, which is the model that training starts from, hinted
    turns, a teacher model, its distributions and not only log-probs of a few tokens, or the teachers of the setting
    `opd.teachers` in place of the one teacher. columns: of the training table besides the loss, metric -> title.
    """

    body: "str | type[Channel[Any]]"
    description: str
    needs: tuple[Need, ...] = ()
    columns: Mapping[str, str] = field(default_factory=dict)

    def load(self) -> "type[Channel[Any]]":
        """Return the class, and import it where it was not yet."""
        if not isinstance(self.body, str):
            return self.body
        module, _, name = self.body.partition(":")
        loaded: type[Channel[Any]] = getattr(import_module(module), name)
        return loaded


CHANNELS = Registry[ChannelSpec](
    "composer.channels",
    {name: ChannelSpec(**about) for name, about in load_toml(__package__, "channels.toml").items()},
    kind=ChannelSpec,
)
"""All channels by name, in the order of settings, losses and columns; an entry point names a spec."""


def row_sources(names: Iterable[str]) -> "list[type[RowSource[Any]]]":
    """Return the kinds of rows that these channels learn from, each once, in the order of `CHANNELS`."""
    return list(dict.fromkeys(channel.load().source for name, channel in CHANNELS.items() if name in set(names)))
