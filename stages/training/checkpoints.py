"""Checkpoints that a killed run can be resumed from: a folder counts only once its marker is there."""

import time
from pathlib import Path
from shutil import rmtree
from typing import Any

from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from stages.backends.ranks import Ranks
from stages.runs import store
from stages.runs.artifact import Out
from stages.runs.records import Row
from stages.training.channels.active import Channels

MARKER = "composer.json"


def history(state: TrainerState) -> list[Row]:
    """What was logged of each step so far."""
    return [row for row in state.log_history if "loss" in row]


def newest(folder: Path) -> Path | None:
    """The newest whole checkpoint below a folder; torn ones, which have no marker, are deleted."""
    whole = []
    for path in sorted(folder.glob("checkpoint-*"), key=lambda p: int(p.name.rpartition("-")[2])):
        if (path / MARKER).exists():
            whole.append(path)
        else:
            rmtree(path)
    return whole[-1] if whole else None


METRICS_EVERY_S = 2.0


class Supervision(TrainerCallback):
    """Marks whole checkpoints with the channels' state, reports progress, and stops between steps when asked to.

    What was logged so far is in `metrics.jsonl` also while training goes on, written at most every two seconds.
    """

    def __init__(self, out: Out, channels: Channels, folder: Path, ranks: Ranks | None = None) -> None:
        self._out, self._channels, self._folder, self._ranks = out, channels, folder, ranks or Ranks()
        self._written_at = float("-inf")

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """The model is whole, and loaded where training resumes."""
        self._channels.begin(kwargs["model"])

    def on_save(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Runs after everything else of a checkpoint has been written."""
        self._ranks.gather(None)  # each process has written its part of the checkpoint
        if not self._ranks.first:
            return
        folder = self._folder / f"checkpoint-{state.global_step}"
        self._channels.save(folder)
        store.write_json(folder / MARKER, {"step": state.global_step, "channels": self._channels.state()})

    def on_log(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """After a step's metrics were added to the history."""
        if self._ranks.first and time.monotonic() - self._written_at >= METRICS_EVERY_S:
            self._out.metrics(history(state))
            self._written_at = time.monotonic()

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Between two steps."""
        self._channels.after_step(kwargs["model"])
        self._out.progress("training steps", state.global_step, state.max_steps)
        if any(self._ranks.gather(self._out.stop.is_set())):
            control.should_save = control.should_training_stop = True
