"""The composed trainer on a model whose masters, gradients and optimiser state are spread over the processes.

Its checkpoints are those of one process, so that any number of processes goes on from them, sharded or not.
"""

from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor
from transformers.trainer import OPTIMIZER_NAME, SCHEDULER_NAME

from stages.training.composed import ComposedTrainer
from stages.training.rows import ChannelBatch
from stages.training.sharding import Sharded


class ShardedTrainer(ComposedTrainer):
    """Whole weights from a step's rollouts to its last backward pass; shares of them while the optimiser steps."""

    lr_scheduler: Any
    """Made by `train`, before anything here is called."""

    def __init__(self, *, sharded: Sharded, **composed: Any) -> None:
        self._sharded = sharded
        super().__init__(**composed)

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        """A micro-batch, in whose preparation the step's rollouts are played."""
        self._sharded.gather()
        return super().training_step(*args, **kwargs)

    def _end_passes(self) -> None:
        self._sharded.scatter()

    def _parts(self, inputs: dict[str, Any]) -> list[dict[str, Any]]:
        """As many on every process, the last ones without rows: each pass ends in a sum over all processes."""
        parts = super()._parts(inputs)
        return parts + [{"channels": ChannelBatch()}] * (max(self._ranks.gather(len(parts))) - len(parts))

    def _part_loss(self, model: Any, part: dict[str, Any], whole: dict[str, Any]) -> Float[Tensor, ""]:
        own = super()._part_loss
        return self._sharded.loss(lambda: own(model, part, whole))

    def _clip_grad_norm(self, model: Any) -> float:
        return self._sharded.clip(self.args.max_grad_norm)

    def _get_grad_norm(self, model: Any, grad_norm: float | None = None) -> float:
        return self._sharded.clip(0.0) if grad_norm is None else grad_norm

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """The first process writes what all hand over."""
        self._save(output_dir, state_dict=self._sharded.weights())

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        state = self._sharded.optimiser_state(self.optimizer)
        if self.args.should_save:
            torch.save(state, Path(output_dir) / OPTIMIZER_NAME)
            torch.save(self.lr_scheduler.state_dict(), Path(output_dir) / SCHEDULER_NAME)

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        self._sharded.load_weights(Path(resume_from_checkpoint))

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if checkpoint is None:
            return
        # Mapped, so that what is read of another process' share takes no memory of its own.
        state = torch.load(Path(checkpoint) / OPTIMIZER_NAME, map_location="cpu", mmap=True, weights_only=True)
        self._sharded.load_optimiser_state(self.optimizer, state)
        self.lr_scheduler.load_state_dict(torch.load(Path(checkpoint) / SCHEDULER_NAME, weights_only=True))
