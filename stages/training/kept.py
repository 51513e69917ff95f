"""Checkpoints that stay beside the result of a training, for whoever wants to see how it came about.

They are collected where a resumed training finds them, each renamed when it is whole, and become an output at the end.
"""

import os
from collections.abc import Mapping
from pathlib import Path
from shutil import copytree, ignore_patterns, rmtree
from typing import Any

from torch import Tensor
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from stages.policy import adapters
from stages.policy.local import LocalPolicy
from stages.runs.artifact import Out
from stages.training.sharding import Sharded

KEPT = "checkpoints"
"""The output that holds them: a folder `step_NNNNNN` each, by the number of steps taken before."""


class KeptCheckpoints(TrainerCallback):
    """Saves the model every so many steps."""

    def __init__(
        self, out: Out, policy: LocalPolicy, base: adapters.Base | None, every: int, sharded: Sharded | None = None
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


def write_kept(out: Out) -> None:
    """Make what was kept an output, by hard links."""
    kept = out.scratch(KEPT)
    out.checkpoint(lambda target: _link(kept, target), KEPT)


def _link(source: Path, target: Path) -> None:
    copytree(source, target, copy_function=os.link, dirs_exist_ok=True, ignore=ignore_patterns(".tmp"))
