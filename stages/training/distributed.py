"""Types and shares of the weights under training: float32 masters, FSDP2 shares of them, and the trainer on shares.

Precision: weights that learn are float32, because AdamW's steps at usual learning rates are smaller than half a unit in
bfloat16's last place, so most would be lost. A model whose weights come in 16 bits is either frozen as it is, with
float32 adapters, or trained as float32 masters under bfloat16 autocast, in which it is sampled from and scored, too.

Shares (distribution.sharding = "fsdp2"): from the rollouts of a step to its last backward pass every process holds the
weights whole, in the type they compute in; of the float32 masters, the gradients and the optimiser's moments it holds
its share alone. Weights that were gathered layer by layer would need equally many passes on every process, and each
makes as many as its own rollouts and channels need. The means of gradients are taken, and cut into shares, by torch's
`fully_shard` as each layer's are done.
"""

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from types import MethodType
from typing import Any

import torch
from jaxtyping import Float
from safetensors import safe_open
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard, register_fsdp_forward_method
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.nn.utils import clip_grads_with_norm_, get_total_norm
from transformers.trainer import OPTIMIZER_NAME, SCHEDULER_NAME

from stages.backends.ranks import Ranks
from stages.training.plan import TrainPlan
from stages.training.scoring import Tree, score, token_log_probs
from stages.training.step import ChannelBatch, ComposedTrainer

HALF = (torch.bfloat16, torch.float16)
WITHIN = "composer_within"
"""The model's method that FSDP takes for its forward pass: whatever is computed from its weights before one backward
pass."""


def trainable(model: Any, plan: TrainPlan, ranks: Ranks) -> "tuple[bool, Sharded | None]":
    """Make the weights that learn float32 and cut them into shares where the plan has any.

    Returns whether they compute under bfloat16 autocast, and the shares.
    """
    if plan.sharded:
        mixed = model.dtype in HALF
        return mixed, Sharded(model, ranks, mixed=mixed)
    if plan.config.adapter.rank or model.dtype not in HALF:
        return False, None
    model.float()
    return True, None


def autocast(model: Any, on: bool) -> AbstractContextManager[Any]:
    """Return the bfloat16 autocast that accelerate puts around the model's forward pass, for other ways into it."""
    return torch.autocast(model.device.type, torch.bfloat16) if on else nullcontext()


class Sharded:
    """A model cut into shares of its layers, which is whole between `gather` and `scatter`.

    mixed: whether weights that come in 16 bits get float32 masters and compute in bfloat16.
    """

    def __init__(self, model: Any, ranks: Ranks, *, mixed: bool) -> None:
        self.model, self._ranks = model, ranks
        mesh = init_device_mesh(model.device.type, (ranks.count,))
        policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32) if mixed else MixedPrecisionPolicy()
        layers = [module for module in model.modules() if type(module).__name__ in set(model._no_split_modules or ())]
        for module in (*layers, model):  # what no layer holds, embeddings and output head among it, is the last unit
            if mixed:
                module.float()  # one unit after the other, so that the masters are never whole anywhere
            fully_shard(module, mesh=mesh, reshard_after_forward=False, mp_policy=policy)
        model.set_reshard_after_backward(False)
        setattr(model, WITHIN, MethodType(lambda model, work: work(), model))
        register_fsdp_forward_method(model, WITHIN)
        getattr(model, WITHIN)(lambda: None)  # the model, not the first layer that is called, is where FSDP begins
        self._units = [module for module in model.modules() if isinstance(module, FSDPModule)]

    def gather(self) -> None:
        """Make the weights whole on every process, unless they are."""
        for unit in self._units:
            unit.unshard()

    def scatter(self) -> None:
        """Keep this process' share alone, which the optimiser steps."""
        for unit in self._units:
            unit.reshard()

    def loss(self, work: Callable[[], Float[Tensor, ""]]) -> Float[Tensor, ""]:
        """Return a loss from the whole weights; its backward pass ends in each process' share of the mean gradients.

        All processes must differentiate equally often, and each time from all layers: where a process has no rows, a
        token of weight 0 in the loss reaches all of them.
        """

        def from_all_layers() -> Float[Tensor, ""]:
            loss = work()
            if loss.requires_grad:
                return loss
            return loss + 0 * token_log_probs(self.model, score(self.model, [Tree([0], ([0],))])).sum()

        loss: Float[Tensor, ""] = getattr(self.model, WITHIN)(from_all_layers)
        return loss

    def clip(self, most: float) -> float:
        """Return the Euclidean norm of the gradients over all shares, and clip them to `most`, if it is above 0."""
        learning = [p for p in self.model.parameters() if p.grad is not None]
        norm = get_total_norm([p.grad for p in learning if p.grad is not None])
        whole = norm.full_tensor() if isinstance(norm, DTensor) else norm
        if most > 0:
            clip_grads_with_norm_(learning, most, whole)
        return float(whole)

    def weights(self) -> dict[str, Tensor] | None:
        """Return the whole masters, in the first process' memory; None elsewhere. All processes must call it."""
        self.scatter()
        whole: dict[int, Tensor] = {}
        for parameter in self.model.parameters():  # tied weights once
            whole[id(parameter)] = self._whole(parameter)
        if not self._ranks.first:
            return None
        named = self.model.named_parameters(remove_duplicate=False)
        buffers = {name: value for name, value in self.model.state_dict().items() if not isinstance(value, DTensor)}
        return buffers | {name: whole[id(parameter)] for name, parameter in named}

    def load_weights(self, folder: Path) -> None:
        """Load this process' share of a checkpoint, whichever number of processes wrote it."""
        self.scatter()
        parameters = dict(self.model.named_parameters(remove_duplicate=False))
        for path in sorted(folder.glob("*.safetensors")):
            with safe_open(path, "pt") as file:
                for name in file.keys():  # noqa: SIM118 - no dict
                    if name in parameters:
                        with torch.no_grad():
                            parameters[name].copy_(_share(file.get_tensor(name), parameters[name]))

    def optimiser_state(self, optimizer: Any) -> dict[str, Any]:
        """Return the state as one process has it, in the first process' memory. All processes must call it."""
        held = optimizer.state_dict()
        states = {
            number: {name: self._whole(value) if isinstance(value, DTensor) else value for name, value in state.items()}
            for number, state in held["state"].items()
        }
        return {**held, "state": states}

    def load_optimiser_state(self, optimizer: Any, held: Mapping[str, Any]) -> None:
        """Load this process' share of a whole state."""
        numbered = [number for group in held["param_groups"] for number in group["params"]]
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        own = {
            number: {name: _share(value, parameter) for name, value in held["state"][number].items()}
            for number, parameter in zip(numbered, parameters, strict=True)
            if number in held["state"]
        }
        optimizer.load_state_dict({**held, "state": own})

    def _whole(self, share: Any) -> Tensor:
        values = share.detach().full_tensor()
        return values.cpu() if self._ranks.first else torch.empty(0)


def _share(whole: Any, like: Any) -> Any:
    """Return this process' share of a tensor that all hold whole; one of another shape (a counter) stays whole."""
    if not isinstance(whole, Tensor) or whole.shape != like.shape:
        return whole
    values = whole.to(like.device, torch.promote_types(whole.dtype, torch.float32))
    return distribute_tensor(values, like.device_mesh, like.placements, src_data_rank=None)


class ShardedTrainer(ComposedTrainer):
    """The composed trainer: whole weights from a step's rollouts to its last backward pass, shares in the optimiser.

    Its checkpoints are those of one process, so that any number of processes resumes from them, sharded or not.
    """

    lr_scheduler: Any
    """Made by `train`, before anything here is called."""

    def __init__(self, *, sharded: Sharded, **composed: Any) -> None:
        self._sharded = sharded
        super().__init__(**composed)

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        """Train on a micro-batch, in whose preparation the step's rollouts are played."""
        self._sharded.gather()
        return super().training_step(*args, **kwargs)

    def _reduce_gradients(self) -> None:
        """Keep this process' share of the mean gradients, which FSDP2 has taken already."""
        self._sharded.scatter()

    def _parts(self, inputs: dict[str, Any]) -> list[dict[str, Any]]:
        """Return equally many parts on every process, the last ones without rows: each pass ends in a sum over all."""
        parts = super()._parts(inputs)
        return parts + [{"channels": ChannelBatch()}] * (max(self._ranks.gather(len(parts))) - len(parts))

    def _part_loss(self, model: Any, part: dict[str, Any], whole: dict[str, Any]) -> Float[Tensor, ""]:
        part_loss = super()._part_loss
        return self._sharded.loss(lambda: part_loss(model, part, whole))

    def _clip_grad_norm(self, model: Any) -> float:
        return self._sharded.clip(self.args.max_grad_norm)

    def _get_grad_norm(self, model: Any, grad_norm: float | None = None) -> float:
        return self._sharded.clip(0.0) if grad_norm is None else grad_norm

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Write the weights of all processes' shares, by the first process."""
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
