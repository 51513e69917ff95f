"""All channels with a weight: the student scores their rows in one pass, then each channel computes its loss.

Teachers, references and hinted prompts are scored without gradients.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from stages.training.channels import CHANNELS
from stages.training.channels.base import ChannelLoss, ChannelSettings, State
from stages.training.config import ChannelWeights
from stages.training.data import ChannelBatch, PairSource
from stages.training.scored_rows import SCORED_ROWS, Frozen, SelfTeacher
from stages.training.scoring import Scored, Tree, score_together
from stages.training.settings import Eopd, Hints, Pairs, Taid


class Channels:
    """The channels that have a weight. `source` is needed by channels on pairs, `teacher` by those that need one."""

    def __init__(
        self,
        weights: ChannelWeights,
        pairs: Pairs,
        hints: Hints,
        *,
        source: PairSource | None,
        teacher: Any | None,
        temperature: float,
        num_steps: int,
        taid: Taid = Taid(),  # noqa: B008 (frozen)
        eopd: Eopd = Eopd(),  # noqa: B008 (frozen)
    ) -> None:
        settings = ChannelSettings(pairs, hints, temperature, num_steps, taid, eopd)
        self.weights = weights.active()
        self._active = {name: CHANNELS[name](settings) for name in self.weights}
        self._frozen = Frozen(teacher, source, SelfTeacher(hints) if "sdpo" in self.weights else SelfTeacher())
        used = {channel.row_source for channel in self._active.values()}
        self.row_sources = [row_source for row_source in SCORED_ROWS if row_source in used]
        """The sources whose rows some channel uses."""

    def losses(
        self, model: Any, batch: ChannelBatch, step: int, beside: Sequence[Tree] = ()
    ) -> tuple[dict[str, ChannelLoss], Scored | None]:
        """What a part of a step adds to each channel that has rows, and the trees `beside`, scored in the same pass.

        The losses of all parts add up to those of the step: denominators are the whole step's (`ChannelBatch.step`).
        """
        rows = {row_source: batch.of(row_source) for row_source in self.row_sources}
        trees = [[row.tree for row in of_source] for of_source in rows.values()]
        if not beside and not any(trees):
            return {}, None
        others, *parts = score_together(model, [beside, *trees])
        losses: dict[str, ChannelLoss] = {}
        for (row_source, of_source), part in zip(rows.items(), parts, strict=True):
            if of_source:
                whole = batch.step.of(row_source)
                shared = SCORED_ROWS[row_source](of_source, whole, model, part, step, self._frozen)
                for name, channel in self._active.items():
                    if channel.row_source == row_source:
                        losses[name] = channel.loss(shared)
        return losses, others

    def end_step(self, losses: Mapping[str, ChannelLoss], step: int) -> None:
        """Tell every channel the loss of a whole step of training."""
        for name, channel in losses.items():
            self._active[name].end_step(channel.loss, step)

    def begin(self, model: Any) -> None:
        """Called before the first step of this process, with the student as it is trained, its adapter included."""
        self._frozen.itself.begin(model)

    def after_step(self, model: Any) -> None:
        """Called between two steps, with the student as the optimiser left it."""
        self._frozen.itself.after_step(model)

    def state(self) -> dict[str, State]:
        """What a resumed run needs, as JSON, by channel."""
        return {name: channel.state() for name, channel in self._active.items()}

    def save(self, folder: Path) -> None:
        """Put what `state` cannot hold, tensors, beside a checkpoint."""
        self._frozen.itself.save(folder)

    def load(self, state: Mapping[str, State], folder: Path | None = None) -> None:
        """Continue from `state` and what `save` put into the folder."""
        if folder is not None:
            self._frozen.itself.load(folder)
        for name, channel in self._active.items():
            channel.load(state[name])
