"""One training step: its rows, one forward pass of the student, the channels' losses, their sum with GRPO's, a report.

transformers' trainer runs the loop of steps; TRL's `GRPOTrainer`, which is made from it, calls `ComposedStep`, and for
rollouts `ComposedTrainer`. A step is one generation of rollouts, trained in `_num_micro_batches` micro-batches. In each
of them, in this order:

1. `_prepare_inputs`: in a step's first micro-batch the rollouts are taken (rollouts.py) and TRL computes their
   advantages, and the sources of the channels give their rows (`Channels.rows`). Each micro-batch gets its share of
   both.
2. `_compute_loss`: cuts the micro-batch to the budget of tokens, and for each part `_part_loss` has the student score
   GRPO's rollouts and the channels' rows in one forward pass (`Channels.losses`), each channel compute its loss
   (channels/, with a kernel of stages/losses), TRL compute GRPO's, and `compose_loss` add them up.
3. After the last micro-batch: `StepReport` becomes the step's metrics, `_reduce_gradients` takes the gradients' mean
   over the processes, and transformers' trainer steps the optimiser.

With every channel's weight at 0 and GRPO's at 1 nothing of TRL's loss is touched: loss and gradients are `torch.equal`
to plain `GRPOTrainer`. With GRPO's weight at 0 rollouts are played and recorded, but not scored. Terms: a micro-batch
is TRL's, a part is what one forward and backward pass takes of it.
"""

import math
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import combinations
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from datasets import Dataset
from jaxtyping import Float
from torch import Tensor
from transformers import PrinterCallback
from trl.trainer.grpo_config import GRPOConfig
from trl.trainer.grpo_trainer import GRPOTrainer

from composer_stages.backends.ranks import Ranks, join
from composer_stages.backends.resources import peak_memory
from composer_stages.errors import BadInput, UsageError
from composer_stages.gradients.per_row import by_length
from composer_stages.policy import trials
from composer_stages.policy.local import LocalPolicy
from composer_stages.rollouts.agent_loop import LiveRollout
from composer_stages.runs.activity import activity
from composer_stages.stopping import Interrupted
from composer_stages.training.channels import CHANNELS, row_sources
from composer_stages.training.channels.base import ChannelLoss, RowSource, State, floats
from composer_stages.training.config import GRPO, Config
from composer_stages.training.packing import on_device
from composer_stages.training.rollouts import Rollouts, environment_reward, trl_columns
from composer_stages.training.scoring import PADDED, Scored, Tree, score, score_together, through_head, try_scoring

# Announced on every start. A filter and not TRL's variable: trainings of a chain get the variables of its process.
warnings.filterwarnings("ignore", message="You are using 'rollout_func'")

Value = TypeVar("Value")
GROUP_COLUMNS = ("prompt_ids", "prompt_mask", "completion_ids", "completion_mask", "advantages", "num_items_in_batch")


# 1. The rows


@dataclass(frozen=True)
class Batch:
    """The rows of all sources in one step, or in a part of it, by the name of the source."""

    rows: Mapping[str, Sequence[Any]] = field(default_factory=dict)
    parent: "Batch | None" = None
    """The step that this is a part of; None where it is the whole step."""

    @property
    def step(self) -> "Batch":
        """All rows of the step, from which the denominators come."""
        return self.parent or self

    def source_rows(self, source: str) -> Sequence[Any]:
        """Return the rows of a source; none where it has none."""
        return self.rows.get(source, ())

    def part(self, index: int, count: int) -> "Batch":
        """Return the share of one of `count` micro-batches; it may be empty."""
        return Batch({source: rows[index::count] for source, rows in self.rows.items()}, self.step)

    def packed(self, max_tokens: int, sources: Mapping[str, RowSource[Any]]) -> "list[Batch]":
        """Return parts of at most `max_tokens` tokens, of all trees of a row; a longer row is a part by itself."""
        rows = [(source, row) for source in sources for row in self.source_rows(source)]
        lengths = [
            sum(len(tree.prompt) + len(branch) for tree in sources[source].trees(row) for branch in tree.branches)
            for source, row in rows
        ]
        parts = []
        for indices in by_length(lengths, max_tokens):
            split: dict[str, list[Any]] = {source: [] for source in sources}
            for source, row in (rows[index] for index in indices):
                split[source].append(row)
            parts.append(Batch(split, self.step))
        return parts


def collate(groups: Mapping[str, Any], batch: Batch, needed: Iterable[str]) -> dict[str, Any]:
    """Return the batch of a step: TRL's group tensors plus `channels`.

    `BadInput` names a column that is missing or of the wrong length, and a source without a list of rows.
    needed: the row sources that active channels use.
    """
    if missing := [name for name in GROUP_COLUMNS if name not in groups]:
        raise BadInput("training.batch-lacks-column", column=missing[0], columns=sorted(groups))
    rows = {name: len(groups[name]) for name in GROUP_COLUMNS[:5]}
    if len(set(rows.values())) > 1:
        odd = next(name for name, count in rows.items() if count != rows["prompt_ids"])
        raise BadInput("training.column-length-differs", column=odd, rows=rows[odd], expected=rows["prompt_ids"])
    if absent := [name for name in needed if name not in batch.step.rows]:
        raise BadInput("training.no-rows-for-channel", source=absent[0])
    return {**groups, "channels": batch}


# 2. One forward pass, and each channel's loss


class Channels:
    """The channels that have a weight, and the sources of their rows.

    sources: of each kind that these channels use one; others are left out.
    """

    def __init__(self, config: Config, sources: Iterable[RowSource[Any]]) -> None:
        self.weights, self.grpo_weight = config.weights.active(), config.weights.grpo
        self._active = {name: CHANNELS[name].load()(config) for name in self.weights}
        opened = {source.name: source for source in sources}
        self.sources = {kind.name: opened[kind.name] for kind in row_sources(self.weights)}
        """By name, in the order of the channels that use them."""

    def rows(self, rollouts: Sequence[LiveRollout], step: int) -> Batch:
        """Return the channels' rows of a step from its rollouts; called once a step, in the first process."""
        return Batch({name: source.rows(rollouts, step) for name, source in self.sources.items()})

    def losses(
        self, model: Any, batch: Batch, grpo_trees: Sequence[Tree] = ()
    ) -> tuple[dict[str, ChannelLoss], Scored | None]:
        """Return each channel's share of a part that has rows of it, and `grpo_trees` scored in the same pass.

        The losses of all parts add up to those of the step: denominators are the whole step's (`Batch.step`).
        Teachers, references and hinted prompts are scored without gradients.
        """
        trees = [[source.trees(row)[0] for row in batch.source_rows(name)] for name, source in self.sources.items()]
        if not grpo_trees and not any(trees):
            return {}, None
        grpo_scored, *parts = score_together(model, [grpo_trees, *trees])
        losses: dict[str, ChannelLoss] = {}
        for (name, source), scored in zip(self.sources.items(), parts, strict=True):
            if batch.source_rows(name):
                shared = source.scored_rows(
                    batch.source_rows(name), batch.step.source_rows(name), model, scored, source
                )
                for channel_name, channel in self._active.items():
                    if channel.source.name == name:
                        losses[channel_name] = loss = channel.loss(shared)
                        if not isinstance(loss, ChannelLoss):  # of a user's own channel
                            raise UsageError("training.no-channel-loss", channel=channel_name, value=loss)
        return losses, grpo_scored

    @property
    def followers(self) -> list[Any]:
        """Return the followers of the sources (`RowSource.follower`)."""
        return [source.follower for source in self.sources.values() if source.follower is not None]

    def end_step(self, losses: Mapping[str, ChannelLoss], step: int) -> None:
        """Pass the loss of the training step to every channel that had rows."""
        for name, channel in losses.items():
            self._active[name].end_step(channel.loss, step)

    def state(self) -> dict[str, State]:
        """Return the state of each channel as JSON, for a resumed run; followers save their tensors themselves."""
        return {name: channel.state() for name, channel in self._active.items()}

    def load(self, state: Mapping[str, State], folder: Path) -> None:
        """Restore the channels from `state`, and the followers from the folder of a checkpoint."""
        for follower in self.followers:
            follower.load(folder)
        for name, channel in self._active.items():
            channel.load(state[name])


# 3. The step


if TYPE_CHECKING:
    AnyTrainer = GRPOTrainer
else:
    AnyTrainer = object


class ComposedStep(AnyTrainer):
    """Adds the losses of channels to the step of the `GRPOTrainer` that follows in the bases of a class.

    rows: returns the rows of the channels' sources; called once a step, in the first process, with TRL's micro-batches
    of the step there and the number of the step. gradient_cosine_every: steps between reports of gradient norms and
    cosines, 0 for none. shared_prompts: score each prompt once also without channels. max_tokens: of one forward pass;
    None does not cut. ranks: the processes that train. Methods without a caller here are hooks of TRL or transformers.
    """

    args: GRPOConfig
    model: Any

    def __init__(
        self,
        *args: Any,
        channels: Channels,
        rows: Callable[[Sequence[Mapping[str, Any]], int], Batch],
        gradient_cosine_every: int = 0,
        shared_prompts: bool = False,
        max_tokens: int | None = None,
        ranks: Ranks | None = None,
        **trl: Any,
    ) -> None:
        self.channels, self._rows, self._ranks = channels, rows, ranks or join()
        self._gradient_cosine_every, self._shared_prompts = gradient_cosine_every, shared_prompts
        self._max_tokens = max_tokens
        self._report = StepReport(channels.weights)
        self._unused: dict[str, list[Any]] = {}
        self._scored: tuple[Tensor, Tensor] | None = None
        for argument in (*args, *trl.values()):
            if isinstance(argument, GRPOConfig):
                # As in DPOTrainer: what a channel compares with (reference, teacher) computes without dropout, too.
                argument.disable_dropout |= bool(channels.weights)
                # A process trains on one GPU; the Trainer would split each batch over all that it sees (transformers
                # 5.23, trainer.py: DataParallel where args.n_gpu > 1), and leave the channels' rows on the first.
                argument._n_gpu = min(argument.n_gpu, 1)
        super().__init__(*args, **trl)
        # Trees are scored around the model's own forward pass, where DistributedDataParallel would see no gradients.
        prepare = partial(self.accelerator.prepare_model, evaluation_mode=True)
        self.accelerator.prepare_model = prepare
        self._num_micro_batches = self.args.gradient_accumulation_steps
        """Of one optimiser step, which by default trains on all of a generation."""

    def _prepare_inputs(self, generation_batch: Any) -> dict[str, Any]:
        """Return a micro-batch: TRL's tensors of its rollouts, and its share of the channels' rows."""
        inputs = super()._prepare_inputs(generation_batch)
        if not self.channels.weights or not self.model.training:  # TRL evaluates by GRPO's loss
            return inputs
        ranks, micro, count = self._ranks, self._step % self._num_micro_batches, self._num_micro_batches
        if micro == 0:  # TRL has just generated the step's rollouts, in super(), or trains on them again
            step = self.state.global_step
            # Hints may come from a model that is paid for, and the journal has one writer: one process asks for all.
            self._step_rows = ranks.broadcast_from_rank0(lambda: self._rows(self._buffered_inputs or [], step))
            self._unused = {
                name: list(self._step_rows.source_rows(name))
                for name, source in self.channels.sources.items()
                if source.whole_rollouts and ranks.count == 1
            }
        part = self._step_rows.part(ranks.rank * count + micro, ranks.count * count)
        # Where all rollouts of the step pass through this process, a row that is one of them is scored with GRPO's.
        last = micro == count - 1
        together = {name: rows_in_batch(unused, inputs, all_left=last) for name, unused in self._unused.items()}
        return collate(inputs, replace(part, rows={**part.rows, **together}), self.channels.sources)

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        """Train on a micro-batch; after a step's last one the gradients are their mean over all processes."""
        with activity(f"computing step {self.state.global_step + 1}"):
            loss = super().training_step(*args, **kwargs)
            if self.accelerator.sync_gradients:
                self._reduce_gradients()
                self._metrics["train"]["memory_gib"].append(peak_memory(self.accelerator.device) / 2**30)
        return loss

    def _reduce_gradients(self) -> None:
        """Called after the last backward pass of a step, before the optimiser."""
        self._ranks.average_gradients(self.model.parameters())

    def _compute_loss(self, model: Any, inputs: dict[str, Any]) -> Float[Tensor, ""]:
        """Return the loss of a micro-batch, all parts of which but the last have been differentiated already."""
        *earlier, last = self._parts(inputs)
        done: list[Tensor] = []
        for part in earlier:
            loss = self._part_loss(model, part, inputs)
            if loss.requires_grad:
                self.accelerator.backward(loss)
            done.append(loss.detach())
            del loss  # and with it the graph, before the next part makes another one
        loss = self._part_loss(model, last, inputs)
        if not loss.requires_grad:
            # Without GRPO a micro-batch may hold no row of any channel; accelerate needs a graph to differentiate.
            loss = loss + 0.0 * next(p for p in model.parameters() if p.requires_grad).sum()
        # TRL increments `_step` after this method, so this is the step's last micro-batch.
        if self.channels.weights and (self._step + 1) % self._num_micro_batches == 0:
            report = self._report.gathered(self._ranks)
            for name, value in report.metrics().items():
                self._metrics["train"][name].append(value)
            self.channels.end_step(report.losses, self.state.global_step)
            self._report = StepReport(self.channels.weights)
        return loss + sum(done) if done else loss

    def _parts(self, inputs: dict[str, Any]) -> list[dict[str, Any]]:
        """Return the micro-batch, or within the budget of tokens its rows and then the channels' rows; never empty."""
        if self._max_tokens is None:
            return [inputs]
        groups = {name: value for name, value in inputs.items() if name != "channels"}
        packed = by_length(row_lengths(groups), self._max_tokens)
        # As many parts as every other process: TRL's loss of a part waits for all of them.
        packed = split_until(packed, max(self._ranks.gather(len(packed))))
        parts = [rows_of(groups, rows) for rows in packed]
        rows = inputs.get("channels", Batch()).packed(self._max_tokens, self.channels.sources)
        return parts + [{"channels": part} for part in rows]

    def _part_loss(self, model: Any, part: dict[str, Any], micro_batch: dict[str, Any]) -> Float[Tensor, ""]:
        """Return a part's share of the step's loss: GRPO's, and each channel's times its weight."""
        composed = bool(self.channels.weights or self._shared_prompts)
        weight = self.channels.grpo_weight
        with_grpo = weight > 0 and "prompt_ids" in part
        losses: dict[str, ChannelLoss] = {}
        # 1. Score GRPO's rollouts and the channels' rows together; equal prompts and completions are computed once.
        if composed:
            plain = self.accelerator.unwrap_model(model)
            # What is more than tokens, or routed to experts that are to be balanced, TRL scores in a pass of its own.
            scored_by_trl = self.aux_loss_enabled or "pixel_values" in part
            groups = group(part) if with_grpo and not scored_by_trl else None
            with self.accelerator.autocast():  # accelerate wraps the model's own forward pass alone
                rows = part.get("channels", Batch())
                trees = groups.trees if groups else ()
                losses, scored = self._passes(lambda: self.channels.losses(plain, rows, trees))
                if groups is not None and scored is not None:
                    logps, entropies = statistics(plain, groups, scored, self.temperature)
                    # Only a bonus is learnt from: of logits the graph of entropies takes two tables more.
                    self._scored = logps, entropies if self._entropy_bonus_enabled else entropies.detach()
        # 2. TRL's loss of the rollouts, weighted so that the parts add up to the micro-batch's. It takes `_scored`.
        if not with_grpo:
            grpo = torch.zeros((), device=self.accelerator.device)
        else:
            grpo = super()._compute_loss(model, part)
            grpo = grpo if part is micro_batch else grpo * share(self.loss_type, part, micro_batch)
        if not composed:
            return weighted(grpo, weight)
        # 3. Add up, for the report and for the backward pass.
        self._report.add(losses)
        if self._gradient_cosine_every and self.state.global_step % self._gradient_cosine_every == 0:
            all_losses = {GRPO: grpo / self._ranks.count} | {name: channel.loss for name, channel in losses.items()}
            differentiable = {name: loss for name, loss in all_losses.items() if loss.requires_grad}
            self._report.add_gradients(differentiable, self.model.parameters())
        # A channel's denominator counts the rows of all processes, so its losses add up over them; the factor undoes
        # the division by their number in the gradients' mean.
        weights = {name: weight * self._ranks.count for name, weight in self.channels.weights.items()}
        return compose_loss(weighted(grpo, weight), losses, weights)

    def _passes(self, work: Callable[[], Value]) -> Value:
        """Return the result of `work`, which runs the model's passes of a part."""
        return work()

    def _get_per_token_logps_and_entropies(
        self, model: Any, input_ids: Tensor, attention_mask: Tensor, logits_to_keep: int, *args: Any, **kwargs: Any
    ) -> tuple[Any, Any, Any]:
        """Return the log-probs scored together with the channels' rows; without any, those of TRL's own pass.

        Of an architecture that cannot be padded as TRL's pass does it, also a reference's rows are scored as trees.
        """
        if self._scored is None:  # a reference's pass, or a step without channels
            if not self._shared_prompts or trials.outcome(model, try_scoring).get(PADDED) == "all":
                return super()._get_per_token_logps_and_entropies(
                    model, input_ids, attention_mask, logits_to_keep, *args, **kwargs
                )
            columns = {"ids": input_ids, "mask": attention_mask}
            rows = {f"prompt_{name}": column[:, :-logits_to_keep] for name, column in columns.items()}
            groups = group(rows | {f"completion_{name}": c[:, -logits_to_keep:] for name, c in columns.items()})
            plain = self.accelerator.unwrap_model(model)
            self._scored = statistics(plain, groups, score(plain, groups.trees), self.temperature)
        scored, self._scored = self._scored, None
        return (*scored, None)


class ComposedTrainer(ComposedStep, GRPOTrainer):
    """TRL's GRPO on our environments, with channels.

    policy: the model under training. rollouts: what plays the rollouts of each step, recorded by `record`. rows: of the
    channels; called once a step, in the first process, with the rollouts of all. true_ratios: whether GRPO's ratios are
    to the log-probs of sampling, of another policy, and not 1 before the step. composed: further arguments of
    `ComposedStep` and `GRPOTrainer`. stages/train.py puts all of this together.
    """

    def __init__(
        self,
        *,
        policy: LocalPolicy,
        rollouts: Rollouts,
        record: Callable[[int, list[LiveRollout]], None],
        rows: Callable[[list[LiveRollout], int], Batch],
        true_ratios: bool = False,
        **composed: Any,
    ) -> None:
        self.rollouts, self._record, self._true_ratios = rollouts, record, true_ratios
        self._played: list[LiveRollout] = []
        self._columns: dict[str, list[Any]] = {}
        super().__init__(
            model=policy.model,
            processing_class=policy.tokenizer,
            reward_funcs=environment_reward,
            rollout_func=lambda prompts, trainer: self._columns,
            train_dataset=unused_rows(composed["args"]),
            rows=lambda batches, step: rows(self._played, step),
            **composed,
        )
        self.eos_token_ids = sorted(policy.model_facts.end_ids)  # by which TRL tells rollouts that were cut off
        self.remove_callback(PrinterCallback)  # prints every log to stdout, which is for results
        self.use_vllm = rollouts.corrected  # in TRL's loss: it never asks a server of its own here

    def _generate_and_score_completions(self, inputs: list[dict[str, Any]]) -> dict[str, Any]:
        """Replace the rows of TRL's sampler by the rollouts of the step; TRL computes their advantages."""
        step = self.state.global_step
        try:
            with activity(f"playing the rollouts of step {step + 1}"):
                process_rollouts, metrics = self.rollouts.take(step)
        except Interrupted:  # sampling changes nothing: this is still the state after the step before
            if step and not Path(self.args.output_dir or "", f"checkpoint-{step}").exists():
                self._save_checkpoint(self.model, trial=None)
                self.callback_handler.on_save(self.args, self.state, self.control)
            raise
        if len(process_rollouts) != len(inputs):
            raise RuntimeError(f"step {step} has {len(process_rollouts)} rollouts, and TRL expects {len(inputs)}")
        self._played = [rollout for rollouts in self._ranks.gather_to_rank0(process_rollouts) for rollout in rollouts]
        self._record(step, self._played)
        for name, value in metrics.items():
            self._metrics["train"][name].append(value)
        if protocol := [rollout.grade.protocol_ok for rollout in self._played if rollout.grade.protocol_ok is not None]:
            self._metrics["train"]["protocol"].append(sum(protocol) / len(protocol))
        self._columns = trl_columns(process_rollouts, self.processing_class)
        self._last_loaded_step = step  # else TRL would load the weights into a server of its own
        # Lists of messages, so that TRL sees conversations.
        rows: list[dict[str, Any]] = [
            {"prompt": [{"role": "user", "content": rollout.task.prompt}]} for rollout in process_rollouts
        ]
        batch = super()._generate_and_score_completions(rows)
        if (ratio := batch.get("importance_sampling_ratio")) is not None:
            self._metrics["train"]["sampling/importance_sampling_ratio/clipped"].append(self._clipped(ratio, batch))
        if self._true_ratios:
            batch["old_per_token_logps"] = batch["sampling_per_token_logps"]
        return batch

    def _clipped(self, ratio: Tensor, batch: Mapping[str, Tensor]) -> float:
        """Return the share of the sampled tokens whose importance ratio TRL has cut off, or set to 0."""
        sampled = (batch["completion_mask"] * batch.get("tool_mask", 1)).bool()
        least, most = self.vllm_importance_sampling_clip_min or 0.0, self.vllm_importance_sampling_clip_max
        clipped = (ratio <= least) | (ratio >= (math.inf if most is None else most))
        # A ratio of whole rollouts, [B, 1], counts for each of their tokens.
        gathered = self._ranks.gather((int((clipped & sampled).sum()), int(sampled.sum())))
        return sum(number for number, _ in gathered) / max(sum(tokens for _, tokens in gathered), 1)


def unused_rows(args: GRPOConfig) -> Dataset:
    """Return as many rows as TRL's sampler deals in a training; `Rollouts` decides what each step is made of."""
    prompts = (args.generation_batch_size or 1) // (args.num_generations or 1)
    return Dataset.from_dict({"prompt": [""] * (args.max_steps * prompts)})


def weighted(grpo: Float[Tensor, ""], weight: float) -> Float[Tensor, ""]:
    """Return GRPO's loss times its weight; at 1 the very tensor, so that plain GRPO stays equal bit for bit."""
    return grpo if weight == 1.0 else weight * grpo


def compose_loss(
    grpo: Float[Tensor, ""], channels: Mapping[str, ChannelLoss], weights: Mapping[str, float]
) -> Float[Tensor, ""]:
    """Return `grpo`, weighted already, + sum over channels of weight * loss: one part's share in the step's loss.

    With no channel of positive weight the very tensor `grpo` is returned, so loss and gradients are those of plain GRPO
    bit for bit. `grpo` has been divided by the number of micro-batches, as TRL does, or by the step's tokens.
    """
    total = grpo
    for name, weight in weights.items():
        # A denominator of 0 (no token of the step counts) comes with a loss of 0 / 0, which must not reach the sum.
        if weight and name in channels and channels[name].denominator:
            total = total + weight * channels[name].loss
    return total


# 4. TRL's batches of rollouts, as trees and cut to a budget of tokens


@dataclass(frozen=True)
class Groups:
    """One tree a distinct prompt; `rows` names the row of each branch in TRL's batch, whose `shape` is [B, T]."""

    trees: list[Tree]
    rows: list[int]
    shape: tuple[int, int]


def group(inputs: Mapping[str, Tensor]) -> Groups:
    """Return the rows of TRL's batch, padding removed, gathered by prompt."""
    names = [f"{side}_{column}" for side in ("prompt", "completion") for column in ("ids", "mask")]
    table = torch.cat([inputs[name].long() for name in names], 1).cpu()  # one wait for the device instead of four
    columns = dict(zip(names, table.split([inputs[name].shape[1] for name in names], 1), strict=True))
    prompts, completions = (
        [row[mask.bool()].tolist() for row, mask in zip(columns[f"{side}_ids"], columns[f"{side}_mask"], strict=True)]
        for side in ("prompt", "completion")
    )
    members: dict[tuple[int, ...], list[int]] = {}
    for row, prompt in enumerate(prompts):
        members.setdefault(tuple(prompt), []).append(row)
    trees = [Tree(list(prompt), tuple(completions[row] for row in rows)) for prompt, rows in members.items()]
    height, width = inputs["completion_ids"].shape
    return Groups(trees, [row for rows in members.values() for row in rows], (height, width))


def statistics(
    model: Any, groups: Groups, scored: Scored, temperature: float
) -> tuple[Float[Tensor, "B T"], Float[Tensor, "B T"]]:
    """Return log-probs and entropies (nats) of completions where TRL expects them, 0 at padding."""
    logps, entropy = through_head(model, scored, temperature, ("entropy",))
    of_rows = [row for row, size in zip(groups.rows, scored.sizes, strict=True) for _ in range(size)]
    of_columns = [column for size in scored.sizes for column in range(size)]
    indices = [torch.tensor(positions, dtype=torch.long) for positions in (of_rows, of_columns)]  # [N] each; N may be 0
    rows, columns = on_device(indices, logps.device)
    empty = torch.zeros(groups.shape, dtype=logps.dtype, device=logps.device)
    return empty.index_put((rows, columns), logps), empty.index_put((rows, columns), entropy)


def rows_in_batch(unused: list[Any], inputs: Mapping[str, Tensor], *, all_left: bool) -> list[Any]:
    """Take the rows of one completion that are in TRL's batch out of `unused`; with `all_left`, all rows.

    Scored together with the batch these rows cost nothing (`score_together`), and TRL shuffles a step's rollouts before
    it cuts them into batches.
    """
    in_batch = Counter((tuple(tree.prompt), tuple(branch)) for tree in group(inputs).trees for branch in tree.branches)
    batch_rows, remaining = list[Any](), list[Any]()
    for row in unused:
        key = (tuple(row.tree.prompt), tuple(row.tree.branches[0]))
        in_this_batch = all_left or in_batch[key] > 0
        in_batch[key] -= in_this_batch
        (batch_rows if in_this_batch else remaining).append(row)
    unused[:] = remaining
    return batch_rows


def split_until(parts: list[list[int]], count: int) -> list[list[int]]:
    """Return the same rows in `count` parts, at least `len(parts)` and at most the rows: the largest are halved."""
    parts = list(parts)
    while len(parts) < count:
        largest = max(range(len(parts)), key=lambda i: len(parts[i]))
        rows, half = parts[largest], len(parts[largest]) // 2
        parts[largest : largest + 1] = [rows[:half], rows[half:]]
    return parts


def row_lengths(inputs: Mapping[str, Tensor]) -> list[int]:
    """Return the tokens of each row of TRL's batch, prompt and completion, without padding."""
    lengths: list[int] = (inputs["prompt_mask"].sum(1) + inputs["completion_mask"].sum(1)).tolist()
    return lengths


def rows_of(inputs: Mapping[str, Any], rows: Sequence[int]) -> dict[str, Any]:
    """Return some rows of TRL's batch, padded to their longest: prompts on the left, completions on the right."""
    height, width = inputs["completion_ids"].shape
    index = torch.tensor(rows, device=inputs["completion_ids"].device)
    masks = (inputs["prompt_mask"], inputs["completion_mask"])
    # At least one token: TRL's pass takes no fewer, and a rollout that was cut off may be masked whole.
    prompt, completion = torch.stack([mask[index].sum(1).max().clamp(min=1) for mask in masks]).tolist()
    part: dict[str, Any] = {}
    for name, value in inputs.items():
        if not isinstance(value, Tensor) or value.dim() == 0 or len(value) != height:
            part[name] = value
        elif name in ("prompt_ids", "prompt_mask"):
            part[name] = value[index][:, value.shape[1] - prompt :]
        else:
            part[name] = value[index][:, :completion] if value.dim() > 1 and value.shape[1] == width else value[index]
    return part


TOKEN_SUMS = ("cispo", "dapo", "vespo")
"""TRL's loss types whose denominator is that of the whole generation batch, so that parts of a batch add up."""


def share(loss_type: str, part: Mapping[str, Tensor], micro_batch: Mapping[str, Tensor]) -> float:
    """Return the factor of a part's loss, as TRL computes it, with which the parts of a batch add up to its loss."""
    if loss_type in TOKEN_SUMS:
        return 1.0
    if loss_type != "bnpo":
        return len(part["completion_ids"]) / len(micro_batch["completion_ids"])
    tokens, of_whole = (
        float((inputs["completion_mask"] * inputs.get("tool_mask", 1)).sum()) for inputs in (part, micro_batch)
    )
    return tokens / max(of_whole, 1.0)


# 5. The report


class StepReport:
    """Sums over the parts of one step, however it was cut; `names` gives the order of the losses after GRPO's."""

    def __init__(self, names: Iterable[str]) -> None:
        self._names = [GRPO, *names]
        self.gradients: dict[str, Float[Tensor, " p"]] = {}
        """By loss, GRPO's among them; the sum over the parts so far."""
        self.losses: dict[str, ChannelLoss] = {}
        """By channel; those that had rows in some part."""

    def add(self, losses: Mapping[str, ChannelLoss]) -> None:
        """Add the channels' losses of one part, without their graph."""
        for name, loss in losses.items():
            loss = replace(loss, loss=loss.loss.detach())
            self.losses[name] = self.losses[name] + loss if name in self.losses else loss

    def add_gradients(self, losses: Mapping[str, Float[Tensor, ""]], parameters: Iterable[Tensor]) -> None:
        """Add the (unweighted) gradients of one part's losses; the graph stays for the backward pass that follows."""
        trained = [p for p in parameters if p.requires_grad]
        for name, loss in losses.items():
            gradients = zip(
                torch.autograd.grad(loss, trained, retain_graph=True, allow_unused=True), trained, strict=True
            )
            filled = [(torch.zeros_like(p) if g is None else g).flatten() for g, p in gradients]
            # float32 at least: the square of a half-precision norm overflows at 65,504.
            flat = torch.cat([g.to(torch.promote_types(g.dtype, torch.float32)) for g in filled])
            self.gradients[name] = self.gradients[name] + flat if name in self.gradients else flat

    def gathered(self, ranks: Ranks) -> "StepReport":
        """Return the sums over all processes, on each; the parts of each are those that it had."""
        if ranks.count == 1:
            return self
        total = StepReport(self._names[1:])
        portable = {}  # without tensors on a device: unpickled elsewhere, they would claim the sender's device
        measured = [metric for loss in self.losses.values() for metric in loss.metrics.values()]
        numbers = iter(floats([value for metric in measured for value in (metric.total, metric.count)]))
        for name, loss in self.losses.items():
            metrics = {
                key: replace(metric, total=next(numbers), count=next(numbers)) for key, metric in loss.metrics.items()
            }
            portable[name] = replace(loss, loss=loss.loss.cpu(), metrics=metrics)
        for losses in ranks.gather(portable):
            total.add(losses)
        # A process without rows of a channel has no gradient of it, but each must take part in every sum.
        somewhere = {name for names in ranks.gather(list(self.gradients)) for name in names}
        for name in self._names:
            if name in somewhere:
                gradient = self.gradients.get(name)
                total.gradients[name] = ranks.total(
                    torch.zeros_like(self.gradients[GRPO]) if gradient is None else gradient
                )
        return total

    def metrics(self) -> dict[str, float]:
        """Return the step's metrics, where gradients were added with each one's Euclidean norm and all pairs' cosines.

        Names: `NAME/loss`, `NAME/denominator`, `NAME/KEY`, `gradient/norm/dpo`, `gradient/cosine/grpo~dpo`. The cosine
        with a gradient of norm zero is NaN: it has no direction.
        """
        values: dict[str, float | Tensor] = {}
        for name in self._names:
            if (channel := self.losses.get(name)) is not None:
                values |= {f"{name}/loss": channel.loss, f"{name}/denominator": channel.denominator}
                values |= {f"{name}/{key}": metric.value() for key, metric in channel.metrics.items()}
        gradients = {name: self.gradients[name] for name in self._names if name in self.gradients}
        norms = {name: gradient.norm() for name, gradient in gradients.items()}
        values |= {f"gradient/norm/{name}": norm for name, norm in norms.items()}
        for a, b in combinations(gradients, 2):  # 0 / 0 is NaN
            values[f"gradient/cosine/{a}~{b}"] = gradients[a] @ gradients[b] / (norms[a] * norms[b])
        return dict(zip(values, floats(list(values.values())), strict=True))
