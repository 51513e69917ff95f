"""Checkpoints that a killed run can be resumed from: a folder counts only once its marker is there."""

import os
import time
from collections.abc import Mapping
from pathlib import Path
from shutil import copytree, ignore_patterns, rmtree
from typing import Any

from torch import Tensor
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from stages.backends.ranks import Ranks
from stages.policy import adapters
from stages.policy.local import LocalPolicy
from stages.runs import store
from stages.runs.artifact import RunWriter
from stages.runs.records import Row
from stages.training.channels.active import Channels
from stages.training.distributed import Sharded

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

    def __init__(self, out: RunWriter, channels: Channels, folder: Path, ranks: Ranks | None = None) -> None:
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


# ---- kept
# Checkpoints that stay beside the result of a training, for whoever wants to see how it came about.
#
# They are collected where a resumed training finds them, each renamed when it is whole, and become an output at the
# end.

KEPT = "checkpoints"
"""The output that holds them: a folder `step_NNNNNN` each, by the number of steps taken before."""


class KeptCheckpoints(TrainerCallback):
    """Saves the model every so many steps."""

    def __init__(
        self,
        out: RunWriter,
        policy: LocalPolicy,
        base: adapters.Base | None,
        every: int,
        sharded: Sharded | None = None,
    ) -> None:
        self._folder, self._policy, self._base, self._every = out.scratch(KEPT), policy, base, every
        self._sharded = sharded

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """After a step; one that is taken again after a resume takes the place of its first copy."""
        if state.global_step % self._every:
            return
        whole = None if self._sharded is None else self._sharded.weights()
        if self._sharded is not None and whole is None:
            return
        temporary, final = self._folder / ".tmp", self._folder / f"step_{state.global_step:06d}"
        for folder in (temporary, final):
            rmtree(folder, ignore_errors=True)
        temporary.mkdir()
        save_model(kwargs["model"], self._policy, self._base, temporary, whole)
        temporary.rename(final)


def save_model(
    model: Any,
    policy: LocalPolicy,
    base: adapters.Base | None,
    folder: Path,
    whole: Mapping[str, Tensor] | None = None,
) -> None:
    """Write a model in training and its tokenizer; on a `base`, its adapter alone.

    whole: weights in place of the model's own.
    """
    if base is None:
        policy.model.save_pretrained(folder, state_dict=whole)
    else:
        adapters.save(model, base, folder)
    policy.tokenizer.save_pretrained(folder)


def write_kept(out: RunWriter) -> None:
    """Make what was kept an output, by hard links."""
    kept = out.scratch(KEPT)
    out.checkpoint(lambda target: _link(kept, target), KEPT)


def _link(source: Path, target: Path) -> None:
    copytree(source, target, copy_function=os.link, dirs_exist_ok=True, ignore=ignore_patterns(".tmp"))
