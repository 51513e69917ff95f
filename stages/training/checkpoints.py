"""Checkpoints of a training: those that a killed run resumes from, and those that are kept with the result.

A checkpoint to resume from counts only once `Supervision` has sealed it: its files are durable then, and the seal,
which comes last, holds their check values and the channels' state. `TrainingSession.fit` (assembly.py) resumes from the
newest one whose files have these values; `newest` deletes unfinished and damaged ones.
"""

import math
import time
from pathlib import Path
from shutil import rmtree
from typing import Any

from transformers import TrainerCallback, TrainerControl, TrainerState

from composer_stages.backends.ranks import Ranks
from composer_stages.errors import BadInput
from composer_stages.runs import store
from composer_stages.runs.activity import Notice
from composer_stages.runs.run import RunWriter
from composer_stages.training.distributed import Student
from composer_stages.training.rollouts import Rollouts
from composer_stages.training.step import Channels
from composer_stages.words import Sentence


def newest(folder: Path, out: RunWriter, most: float = math.inf) -> Path | None:
    """Return the newest complete checkpoint in a folder; unfinished and damaged ones are deleted, the latter by name.

    most: steps that it may have taken.
    """
    checkpoint, damaged = None, list[tuple[str, str]]()
    # A copy that someone kept under another name, such as checkpoint-5-old, is none of the training's.
    of_training = [path for path in folder.glob("checkpoint-*") if path.name.removeprefix("checkpoint-").isdecimal()]
    for path in sorted(of_training, key=steps_of, reverse=True):
        if not (path / store.SEAL).exists():  # its process was killed before it was complete
            _delete(path)
        elif checkpoint is None and steps_of(path) <= most:
            if damage := store.folder_damage(path):
                damaged.append((path.name, damage))
                _delete(path)
            else:
                checkpoint = path
    if damaged:
        name = checkpoint and checkpoint.name
        out.progress(Notice(Sentence("training.checkpoints-damaged", damaged=damaged, checkpoint=name)), 0, 0)
    return checkpoint


def _delete(checkpoint: Path) -> None:
    """Delete a checkpoint, or the link to one that was moved to another disk."""
    checkpoint.unlink() if checkpoint.is_symlink() else rmtree(checkpoint)


def steps_of(checkpoint: Path) -> int:
    """Return the steps that were taken before a checkpoint."""
    return int(checkpoint.name.rpartition("-")[2])


METRICS_EVERY_S = 2.0


class SourcesFollow(TrainerCallback):
    """Calls the followers of the model under training (`RowSource.follower`) at each step, and saves them."""

    def __init__(self, channels: Channels) -> None:
        self._channels = channels

    def on_train_begin(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Give the followers the model that training starts from."""
        # Not earlier: only now the model has its adapter, and the weights of the checkpoint that it resumes from.
        for follower in self._channels.followers:
            follower.begin(kwargs["model"])

    def on_step_end(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Call the followers after a step; args: `GRPOConfig`."""
        for follower in self._channels.followers:
            follower.after_step(kwargs["model"])

    def on_save(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Save the followers' state in the first process."""
        if state.is_world_process_zero:
            for follower in self._channels.followers:
                follower.save(Path(args.output_dir or "", f"checkpoint-{state.global_step}"))


class Supervision(SourcesFollow):
    """Seals complete checkpoints with the channels' and the rollouts' state, reports progress, stops when requested.

    Writes what was logged so far to `metrics.jsonl` while training runs, at most every two seconds.
    """

    def __init__(
        self, out: RunWriter, channels: Channels, rollouts: Rollouts, folder: Path, ranks: Ranks | None = None
    ) -> None:
        super().__init__(channels)
        self._out, self._rollouts = out, rollouts
        self._folder, self._ranks = folder, ranks or Ranks()
        self._written_at = float("-inf")

    def on_save(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Seal the checkpoint, after everything else of it has been written."""
        # Waits until each process has written its random states.
        rollouts = self._ranks.gather(self._rollouts.state())
        if not self._ranks.first:
            return
        super().on_save(args, state, control, **kwargs)
        folder = self._folder / f"checkpoint-{state.global_step}"
        state_dict = {"channels": self._channels.state(), "rollouts": rollouts}
        store.seal_folder(folder, {"step": state.global_step, **state_dict})

    def on_log(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Write the log history to metrics.jsonl."""
        # The whole file is written anew, so not after every step: tiny models take thousands of steps.
        if self._ranks.first and time.monotonic() - self._written_at >= METRICS_EVERY_S:
            # Besides the steps, transformers logs one row of runtime totals at the end, which has no loss.
            self._out.metrics([row for row in state.log_history if "loss" in row])
            self._written_at = time.monotonic()

    def on_step_end(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Call the followers, report progress and check for a request to stop; args: `GRPOConfig`."""
        super().on_step_end(args, state, control, **kwargs)
        self._out.progress("training steps", state.global_step, state.max_steps)
        # A signal reaches the processes at different steps; all must save and stop after the same one.
        stop = any(self._ranks.gather(self._out.stop.is_set()))
        if stop and state.global_step % args.num_iterations == 0:  # see `trl_config` on `save_steps`
            control.should_save = control.should_training_stop = True


# Kept checkpoints stay as an output next to the result, for `composer probe watch`. They are collected in the scratch
# folder, where a resumed training finds them, each renamed when it is complete, and become an output at the end.

KEPT = "checkpoints"
"""The output that holds them: a folder `step_NNNNNN` each, by the number of steps taken before."""


class KeptCheckpoints(TrainerCallback):
    """Saves the model every `every` steps."""

    def __init__(self, out: RunWriter, student: Student, interval: int) -> None:
        self._folder, self._student, self._every = out.scratch(KEPT), student, interval

    def on_step_end(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Save the model; a step that is taken again after a resume replaces its first copy."""
        if state.global_step % self._every:
            return
        temporary, final = self._folder / ".tmp", self._folder / f"step_{state.global_step:06d}"
        rmtree(temporary, ignore_errors=True)
        temporary.mkdir()
        self._student.save(temporary)
        store.seal_folder(temporary, {"step": state.global_step})
        store.publish_folder(temporary, final)


def link_kept(source: Path, target: Path) -> None:
    """Link all kept checkpoints into another folder of the same disk; `BadInput` for one that is damaged."""
    # By hard links: a checkpoint is gigabytes, and the scratch folder goes when the run is complete. A killed attempt
    # may have left .tmp, a model that was written in part.
    for folder in sorted(source.glob("step_*")):
        if damage := store.folder_damage(folder):
            raise BadInput("training.kept-checkpoint-damaged", folder=folder, damage=damage)
        store.link_folder(folder, target / folder.name)
