"""The composed trainer: TRL's GRPOTrainer on our environments, with more channels in the same step.

With every channel's weight at 0 nothing of TRL's loss is touched: loss and gradients are `torch.equal` to plain
`GRPOTrainer`. With channels, GRPO's groups are scored in the same pass of the student as the channels' rows.
"""

import os
import warnings
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import combinations
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor
from transformers import PrinterCallback
from trl.trainer.grpo_config import GRPOConfig
from trl.trainer.grpo_trainer import GRPOTrainer

from stages.errors import UsageError
from stages.policy.local import LocalPolicy
from stages.training.channels import ChannelLoss
from stages.training.channels.active import Channels
from stages.training.rollouts import Rollouts, environment_reward
from stages.training.rows import ChannelBatch, collate
from stages.training.setup import ChannelRows
from stages.training.trees import Scored, Tree, token_statistics

os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")  # rollout_func is announced as experimental on every start
warnings.filterwarnings("ignore", message="`(is_)?gradient_checkpointing` is deprecated")  # TRL sets it, not we

GRPO = "grpo"
"""The loss whose weight is 1, as gradient norms and cosines name it."""


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
        **trl: Any,
    ) -> None:
        self._policy, self._rollouts, self.channels, self._channel_rows = policy, rollouts, channels, channel_rows
        self._gradient_cosine_every, self._shared_prompts = gradient_cosine_every, shared_prompts
        self._rows: list[dict[str, Any]] = []
        self._scored: tuple[Tensor, Tensor] | None = None
        super().__init__(
            model=policy.model,
            processing_class=policy.tokenizer,
            reward_funcs=environment_reward,
            rollout_func=self._play,
            **trl,
        )
        self.remove_callback(PrinterCallback)
        if self.accelerator.num_processes > 1:
            raise UsageError(
                f"This is one of {self.accelerator.num_processes} processes, and training runs in one. "
                "Start it without accelerate or torchrun."
            )

    def _play(self, prompts: list[Any], trainer: GRPOTrainer) -> dict[str, list[Any]]:
        """TRL hands over prompts alone; the rows, which know their task, were kept when the batch came in."""
        del prompts, trainer
        return self._rollouts.play(self._rows, self._policy, self.state.global_step)

    def _generate_and_score_completions(self, inputs: list[dict[str, Any]]) -> dict[str, Any]:
        self._rows = inputs
        return super()._generate_and_score_completions(inputs)

    def _prepare_inputs(self, generation_batch: Any) -> dict[str, Any]:
        inputs = super()._prepare_inputs(generation_batch)
        if not self.channels.weights:
            return inputs
        count = self.args.steps_per_generation or 1  # TRL sets it when the configuration is made
        micro = self._step % count
        if micro == 0:
            self._step_rows = self._channel_rows(self._rollouts.latest, self.state.global_step)
        return collate(inputs, self._step_rows.part(micro, count), self.channels.row_sources)

    def _compute_loss(self, model: Any, inputs: dict[str, Any]) -> Float[Tensor, ""]:
        if not self.channels.weights and not self._shared_prompts:
            return super()._compute_loss(model, inputs)
        plain = self.accelerator.unwrap_model(model)
        groups = group(inputs)
        losses, scored = self.channels.losses(
            plain, inputs.get("channels", ChannelBatch()), self.state.global_step, beside=groups.trees
        )
        if scored is not None:
            self._scored = statistics(plain, groups, scored, self.temperature)
        base = super()._compute_loss(model, inputs)
        self._log_channels(losses)
        if self._gradient_cosine_every and self.state.global_step % self._gradient_cosine_every == 0:
            self._log_gradient_cosines({GRPO: base} | {name: channel.loss for name, channel in losses.items()})
        return compose_loss(base, losses, self.channels.weights, accumulation=self.current_gradient_accumulation_steps)

    def _get_per_token_logps_and_entropies(self, *args: Any, **kwargs: Any) -> tuple[Any, Any, Any]:
        """What was scored together with the channels' rows, else TRL's own pass."""
        if self._scored is None:
            return super()._get_per_token_logps_and_entropies(*args, **kwargs)
        scored, self._scored = self._scored, None
        return (*scored, None)

    def _log_gradient_cosines(self, losses: dict[str, Tensor]) -> None:
        differentiable = {name: loss for name, loss in losses.items() if loss.requires_grad}
        for name, value in gradient_cosines(differentiable, self._policy.model.parameters()).metrics().items():
            self._metrics["train"][name].append(value)

    def _log_channels(self, losses: dict[str, ChannelLoss]) -> None:
        for name, channel in losses.items():
            values = {"loss": float(channel.loss.detach()), "denominator": channel.denominator, **channel.metrics}
            for key, value in values.items():
                self._metrics["train"][f"{name}/{key}"].append(float(value))


@dataclass(frozen=True)
class Groups:
    """One tree a distinct prompt; `rows` names the row of each branch in TRL's batch, whose `shape` is [B, T]."""

    trees: list[Tree]
    rows: list[int]
    shape: tuple[int, int]


def group(inputs: Mapping[str, Tensor]) -> Groups:
    """The rows of TRL's batch, padding removed, gathered by prompt."""
    prompts = _unpadded(inputs["prompt_ids"], inputs["prompt_mask"])
    completions = _unpadded(inputs["completion_ids"], inputs["completion_mask"])
    members: dict[tuple[int, ...], list[int]] = {}
    for row, prompt in enumerate(prompts):
        members.setdefault(tuple(prompt), []).append(row)
    trees = [Tree(list(prompt), tuple(completions[row] for row in rows)) for prompt, rows in members.items()]
    height, width = inputs["completion_ids"].shape
    return Groups(trees, [row for rows in members.values() for row in rows], (height, width))


def _unpadded(ids: Tensor, mask: Tensor) -> list[list[int]]:
    return [row[kept.bool()].tolist() for row, kept in zip(ids.cpu(), mask.cpu(), strict=True)]


def statistics(
    model: Any, groups: Groups, scored: Scored, temperature: float
) -> tuple[Float[Tensor, "B T"], Float[Tensor, "B T"]]:
    """Log-probs and entropies (nats) of completions where TRL expects them, 0 at padding; no gradient to entropies."""
    logps, entropy = token_statistics(model, scored, temperature)
    rows = torch.tensor(groups.rows, device=logps.device)[scored.branch]  # [N]
    columns = torch.cat([torch.arange(n, device=logps.device) for n in scored.lengths.tolist()])  # [N]
    empty = torch.zeros(groups.shape, dtype=logps.dtype, device=logps.device)
    return empty.index_put((rows, columns), logps), empty.index_put((rows, columns), entropy.detach())


def compose_loss(
    base: Float[Tensor, ""], channels: Mapping[str, ChannelLoss], weights: Mapping[str, float], *, accumulation: int = 1
) -> Float[Tensor, ""]:
    """GRPO's loss `base` + sum over channels of weight * loss / accumulation.

    With no channel of positive weight the very tensor `base` is returned, so loss and gradients are those of plain GRPO
    bit for bit. accumulation: micro-batches an optimiser step is summed over; `base` has been divided by it already, as
    TRL does.
    """
    total = base
    for name, weight in weights.items():
        if weight and name in channels and channels[name].denominator:
            total = total + weight * channels[name].loss / accumulation
    return total


@dataclass(frozen=True)
class GradientCosines:
    """Euclidean norm of each loss' (unweighted) gradient and the cosine of each pair of them."""

    norms: Mapping[str, float]
    cosines: Mapping[str, float]

    def metrics(self) -> dict[str, float]:
        """Flat names: `gradient/norm/dpo`, `gradient/cosine/grpo~dpo`."""
        return {f"gradient/norm/{n}": v for n, v in self.norms.items()} | {
            f"gradient/cosine/{n}": v for n, v in self.cosines.items()
        }


def gradient_cosines(losses: Mapping[str, Float[Tensor, ""]], parameters: Iterable[Tensor]) -> GradientCosines:
    """Differentiate every loss by itself; the graph stays alive for the backward pass that follows.

    The cosine with a gradient of norm zero is NaN: it has no direction.
    """
    parameters = [p for p in parameters if p.requires_grad]
    flat = {name: _gradient(loss, parameters) for name, loss in losses.items()}
    norms = {name: float(g.norm()) for name, g in flat.items()}
    cosines = {f"{a}~{b}": _cosine(flat[a], flat[b]) for a, b in combinations(flat, 2)}
    return GradientCosines(norms, cosines)


def _gradient(loss: Float[Tensor, ""], parameters: list[Tensor]) -> Float[Tensor, " p"]:
    gradients = torch.autograd.grad(loss, parameters, retain_graph=True, allow_unused=True)
    flat = [
        torch.zeros(p.numel(), device=p.device) if g is None else g.flatten().float()
        for g, p in zip(gradients, parameters, strict=True)
    ]
    return torch.cat(flat)


def _cosine(a: Float[Tensor, " p"], b: Float[Tensor, " p"]) -> float:
    scale = a.norm() * b.norm()
    return float(a @ b / scale) if scale > 0 else float("nan")
