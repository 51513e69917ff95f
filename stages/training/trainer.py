"""The composed trainer: TRL's GRPOTrainer on our environments, with more channels in the same step.

With every channel's weight at 0 nothing of TRL's loss is touched: loss and gradients are `torch.equal` to plain
`GRPOTrainer`. With channels, GRPO's groups are scored in the same pass of the student as the channels' rows.
"""

import os
import warnings
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor
from transformers import PrinterCallback
from transformers.trainer import OPTIMIZER_NAME, SCHEDULER_NAME
from trl.trainer.grpo_config import GRPOConfig
from trl.trainer.grpo_trainer import GRPOTrainer

from stages.backends.ranks import Ranks, join
from stages.policy.local import LocalPolicy
from stages.training.channels import ChannelLoss
from stages.training.channels.active import Channels
from stages.training.data import ChannelBatch, OwnEpisode, collate
from stages.training.distributed import Sharded
from stages.training.rollouts import Rollouts, environment_reward
from stages.training.scoring import evened, group, pack, row_lengths, rows_of, share, statistics, taken
from stages.training.served import ServedRollouts
from stages.training.setup import ChannelRows
from stages.training.step import GRPO, StepReport

os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")  # rollout_func is announced as experimental on every start
warnings.filterwarnings("ignore", message="`(is_)?gradient_checkpointing` is deprecated")  # TRL sets it, not we


class ComposedTrainer(GRPOTrainer):
    """GRPO with channels. `channel_rows` is asked once a generation for what goes beside the groups."""

    args: GRPOConfig

    def __init__(
        self,
        *,
        policy: LocalPolicy,
        rollouts: Rollouts,
        channels: Channels,
        channel_rows: ChannelRows,
        gradient_cosine_every: int,
        shared_prompts: bool = False,
        max_tokens: int | None = None,
        ranks: Ranks | None = None,
        served: ServedRollouts | None = None,
        **trl: Any,
    ) -> None:
        self._policy, self._rollouts, self.channels, self._channel_rows = policy, rollouts, channels, channel_rows
        self._gradient_cosine_every, self._shared_prompts = gradient_cosine_every, shared_prompts
        self._max_tokens, self._ranks, self._served = max_tokens, ranks or join(), served
        self._report = StepReport(channels.weights)
        self._rows: list[dict[str, Any]] = []
        self._left: list[OwnEpisode] = []
        self._scored: tuple[Tensor, Tensor] | None = None
        super().__init__(
            model=policy.model,
            processing_class=policy.tokenizer,
            reward_funcs=environment_reward,
            rollout_func=self._play,
            **trl,
        )
        self.remove_callback(PrinterCallback)
        # Trees are scored around the model's own forward pass, where DistributedDataParallel would see no gradients.
        prepare = partial(self.accelerator.prepare_model, evaluation_mode=True)
        self.accelerator.prepare_model = prepare
        if served is not None:
            self._sample_from(served)

    def _sample_from(self, served: ServedRollouts) -> None:
        """Let TRL synchronise before it asks for rollouts, and correct for what the server's policy differs."""
        self.use_vllm, self._last_loaded_step = True, -1
        setattr(self, "vllm_generation", served.sync)  # noqa: B010 (TRL calls its sync_weights alone)
        served.begin(lambda: (self.model, self.state.global_step), self._rows_of)

    def end_rollouts(self) -> None:
        """Play no further ahead."""
        if self._served is not None:
            self._served.end()

    def _rows_of(self, step: int) -> list[dict[str, Any]] | None:
        """The rows of a step's rollouts as TRL's sampler will hand them over here; None behind the last step."""
        rollouts, each = self.args.per_device_train_batch_size * self._micro_batches, self.num_generations or 1
        prompts = rollouts // each
        if step >= self.args.max_steps:
            return None
        dataset: Any = self.train_dataset
        start = (step * self._ranks.count + self._ranks.rank) * prompts
        return [dataset[i] for i in range(start, start + prompts) for _ in range(each)]

    def _play(self, prompts: list[Any], trainer: GRPOTrainer) -> dict[str, list[Any]]:
        """TRL hands over prompts alone; the rows, which know their task, were kept when the batch came in."""
        del prompts, trainer
        if self._served is not None:
            columns, metrics = self._served.play(self._rows, self.state.global_step)
            for name, value in metrics.items():
                self._metrics["train"][name].append(value)
            return columns
        return self._rollouts.play(self._rows, self._policy, self.state.global_step)

    def _generate_and_score_completions(self, inputs: list[dict[str, Any]]) -> dict[str, Any]:
        self._rows = inputs
        return super()._generate_and_score_completions(inputs)

    @property
    def _micro_batches(self) -> int:
        """Of one optimiser step, which is one generation."""
        return self.args.steps_per_generation or 1  # TRL sets it when the configuration is made

    def _prepare_inputs(self, generation_batch: Any) -> dict[str, Any]:
        inputs = super()._prepare_inputs(generation_batch)
        if not self.channels.weights:
            return inputs
        micro = self._step % self._micro_batches
        if micro == 0:
            step = self.state.global_step
            self._step_rows = self._ranks.broadcast_from_rank0(lambda: self._channel_rows(self._rollouts.latest, step))
            self._left = list(self._step_rows.episodes)
        part = self._step_rows.part(
            self._ranks.rank * self._micro_batches + micro, self._ranks.count * self._micro_batches
        )
        if self._ranks.count == 1 and self._step_rows.episodes:  # then all rollouts of the step pass here
            part = replace(part, episodes=taken(self._left, inputs, all_left=micro == self._micro_batches - 1))
        return collate(inputs, part, self.channels.row_sources)

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        """A micro-batch; after a step's last one the gradients are their mean over all processes."""
        loss = super().training_step(*args, **kwargs)
        if self.accelerator.sync_gradients:
            self._end_passes()
        return loss

    def _end_passes(self) -> None:
        """After the last backward pass of a step, before the optimiser."""
        self._ranks.average_gradients(self._policy.model.parameters())

    def _compute_loss(self, model: Any, inputs: dict[str, Any]) -> Float[Tensor, ""]:
        """The loss of a micro-batch; all its parts but the last are differentiated on the way."""
        *earlier, last = self._parts(inputs)
        done = [self._differentiated(model, part, inputs) for part in earlier]
        loss = self._part_loss(model, last, inputs)
        if self.channels.weights and (self._step + 1) % self._micro_batches == 0:
            self._end_step()
        return loss + sum(done) if done else loss

    def _parts(self, inputs: dict[str, Any]) -> list[dict[str, Any]]:
        """The micro-batch, or within the budget of tokens its rows and then the channels' rows; never empty."""
        if self._max_tokens is None:
            return [inputs]
        groups = {name: value for name, value in inputs.items() if name != "channels"}
        packed = pack(row_lengths(groups), self._max_tokens)
        packed = evened(packed, max(self._ranks.gather(len(packed))))  # TRL's loss of a part waits for all processes
        parts = [rows_of(groups, rows) for rows in packed]
        return parts + [{"channels": part} for part in inputs.get("channels", ChannelBatch()).packed(self._max_tokens)]

    def _differentiated(self, model: Any, part: dict[str, Any], whole: dict[str, Any]) -> Float[Tensor, ""]:
        loss = self._part_loss(model, part, whole)
        if loss.requires_grad:
            self.accelerator.backward(loss)
        return loss.detach()

    def _part_loss(self, model: Any, part: dict[str, Any], whole: dict[str, Any]) -> Float[Tensor, ""]:
        if not self.channels.weights and not self._shared_prompts:
            return self._base_loss(model, part, whole)
        plain = self.accelerator.unwrap_model(model)
        groups = group(part) if "prompt_ids" in part else None
        with self.accelerator.autocast():  # accelerate wraps the model's own forward pass alone
            losses, scored = self.channels.losses(
                plain,
                part.get("channels", ChannelBatch()),
                self.state.global_step,
                beside=groups.trees if groups else (),
            )
            if groups is not None and scored is not None:
                self._scored = statistics(plain, groups, scored, self.temperature)
        base = self._base_loss(model, part, whole)
        self._report.add(losses)
        if self._gradient_cosine_every and self.state.global_step % self._gradient_cosine_every == 0:
            all_losses = {GRPO: base / self._ranks.count} | {name: channel.loss for name, channel in losses.items()}
            differentiable = {name: loss for name, loss in all_losses.items() if loss.requires_grad}
            self._report.add_gradients(differentiable, self._policy.model.parameters())
        # A channel's losses add up over the processes, whose gradients' mean is taken.
        weights = {name: weight * self._ranks.count for name, weight in self.channels.weights.items()}
        return compose_loss(base, losses, weights)

    def _base_loss(self, model: Any, part: dict[str, Any], whole: dict[str, Any]) -> Float[Tensor, ""]:
        """GRPO's share of a part: TRL's loss of its rows, weighted so that the parts add up to the micro-batch's."""
        if "prompt_ids" not in part:
            return torch.zeros((), device=self.accelerator.device)
        loss: Tensor = super()._compute_loss(model, part)
        return loss if part is whole else loss * share(self.loss_type, part, whole)

    def _end_step(self) -> None:
        """Log what the channels did in the whole step, and let their schedules go on."""
        report = self._report.gathered(self._ranks)
        for name, value in report.metrics().items():
            self._metrics["train"][name].append(value)
        self.channels.end_step(report.losses, self.state.global_step)
        self._report = StepReport(self.channels.weights)

    def _get_per_token_logps_and_entropies(self, *args: Any, **kwargs: Any) -> tuple[Any, Any, Any]:
        """What was scored together with the channels' rows, else TRL's own pass."""
        if self._scored is None:
            return super()._get_per_token_logps_and_entropies(*args, **kwargs)
        scored, self._scored = self._scored, None
        return (*scored, None)


def compose_loss(
    base: Float[Tensor, ""], channels: Mapping[str, ChannelLoss], weights: Mapping[str, float]
) -> Float[Tensor, ""]:
    """GRPO's loss `base` + sum over channels of weight * loss: the share of one part in the step's loss.

    With no channel of positive weight the very tensor `base` is returned, so loss and gradients are those of plain GRPO
    bit for bit. `base` has been divided by the number of micro-batches, as TRL does, or by the step's tokens.
    """
    total = base
    for name, weight in weights.items():
        if weight and name in channels and channels[name].denominator:
            total = total + weight * channels[name].loss
    return total


# ---- sharded_trainer
# The composed trainer on a model whose masters, gradients and optimiser state are spread over the processes.
#
# Its checkpoints are those of one process, so that any number of processes goes on from them, sharded or not.


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
