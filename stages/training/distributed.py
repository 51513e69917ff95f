"""The model under training: float32 masters, FSDP2 shares of them, and the trainer on shares.

Precision: weights that learn are float32, because AdamW's steps at usual learning rates are smaller than half a unit in
bfloat16's last place, so most would be lost. A model whose weights come in 16 bits is either frozen as it is, with
float32 adapters or changes of its singular values, or trained as float32 masters under bfloat16 autocast, in which it
is sampled from and scored, too.

Shares (distribution.sharding = "fsdp2"): from the rollouts of a step to its last backward pass every process holds the
weights whole, in the type they compute in; of the float32 masters, the gradients and the optimiser's moments it holds
its share alone. Weights that were gathered layer by layer would need equally many passes on every process, and each
makes as many as its own rollouts and channels need. The means of gradients are taken, and cut into shares, by torch's
`fully_shard` as each layer's are done.
"""

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from types import MethodType
from typing import Any, Self

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
from stages.policy import adapters
from stages.policy.local import LocalPolicy
from stages.training.packing import HALF
from stages.training.plan import TrainPlan
from stages.training.scoring import Tree, score, token_log_probs
from stages.training.step import Batch, ComposedTrainer
from stages.training.trained import save_folded, train_singular_values

WITHIN = "composer_within"
"""The model's method that FSDP takes for its forward pass: whatever is computed from its weights before one backward
pass."""


@dataclass
class Student:
    """The model under training: what it computes in, how it is cut into shares, and how it is saved.

    policy: samples from it in this process. ranks: the processes that train it. mixed: whether float32 weights compute
    under bfloat16 autocast. sharded: its shares, None where every process holds all of it. base: what an adapter's
    checkpoint records of its base, None where all weights are trained. model: what is trained, that of `policy`; once
    the trainer has added an adapter, the model with it.
    """

    policy: LocalPolicy
    ranks: Ranks = field(default_factory=Ranks)
    mixed: bool = False
    sharded: "Sharded | None" = None
    base: adapters.AdapterBase | None = None
    model: Any = None

    def __post_init__(self) -> None:
        self.model = self.policy.model if self.model is None else self.model

    @classmethod
    def of(cls, model: Any, tokenizer: Any, plan: TrainPlan, ranks: Ranks) -> Self:
        """Make the weights that learn float32, cut them into shares where the plan has any, and return the student."""
        sampled, mixed, sharded = plan.config.policy.in_process(), False, None
        base = adapters.describe_base(sampled, model) if plan.config.adapter.rank else None
        if plan.sharded:
            mixed = model.dtype in HALF
            sharded = Sharded(model, ranks, mixed=mixed)
        elif plan.spectral:
            train_singular_values(model)
        elif not plan.config.adapter.rank and model.dtype in HALF:
            mixed = True
            model.float()
        return cls(LocalPolicy(model.eval(), tokenizer, sampled), ranks, mixed, sharded, base)

    @property
    def dtype(self) -> torch.dtype:
        """The type that the model computes in."""
        return torch.bfloat16 if self.mixed else self.policy.model.dtype

    def autocast(self) -> AbstractContextManager[Any]:
        """Return the bfloat16 autocast that accelerate puts around the model's forward pass, for other ways into it."""
        return torch.autocast(self.policy.model.device.type, torch.bfloat16) if self.mixed else nullcontext()

    def distribute(self) -> None:
        """Give every process the first one's weights, or its share of them."""
        if self.sharded is None:
            self.ranks.broadcast_weights(self.policy.model.parameters())
        else:
            self.sharded.scatter()

    def save(self, folder: Path) -> None:
        """Write the model and its tokenizer, of an adapter it alone. All processes must call it; the first writes."""
        weights = None if self.sharded is None else self.sharded.weights()
        if not self.ranks.first:
            return
        if self.base is not None:
            self.save_adapter(folder)
        elif not save_folded(self.policy.model, folder):
            self.policy.model.save_pretrained(folder, state_dict=weights)
        self.policy.tokenizer.save_pretrained(folder)

    def save_adapter(self, folder: Path) -> None:
        """Write the adapter, without a tokenizer."""
        if self.base is None:
            raise RuntimeError("all weights are trained, so there is no adapter")
        adapters.save_adapter(self.model, self.base, folder)


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
        # fully_shard hooks the model's forward pass, but trees are scored around it: this method stands in its place.
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

    def clip(self, most: float) -> float:
        """Return the Euclidean norm of the gradients over all shares, and clip them to `most`, if it is above 0."""
        # In two steps, as the norm is logged where nothing is clipped, too; the norm of DTensors is one itself.
        learning = [p for p in self.model.parameters() if p.grad is not None]
        norm = get_total_norm([p.grad for p in learning if p.grad is not None])
        whole = norm.full_tensor() if isinstance(norm, DTensor) else norm
        if most > 0:
            clip_grads_with_norm_(learning, most, whole)
        return float(whole)

    def weights(self) -> dict[str, Tensor] | None:
        """Return the whole masters, in the first process' memory; None elsewhere. All processes must call it."""
        self.scatter()
        # `parameters()` has tied weights once, which are gathered once, and written under each of their names below.
        whole = {id(parameter): self.whole(parameter) for parameter in self.model.parameters()}
        if not self._ranks.first:
            return None
        named = self.model.named_parameters(remove_duplicate=False)
        buffers = {name: value for name, value in self.model.state_dict().items() if not isinstance(value, DTensor)}
        return buffers | {name: whole[id(parameter)] for name, parameter in named}

    def whole(self, share: Any) -> Tensor:
        """Return a tensor of which each process holds a share, in the first process' memory; empty elsewhere."""
        values = share.detach().full_tensor()  # a collective: all processes must get here, and in the same order
        return values.cpu() if self._ranks.first else torch.empty(0)


def _share(whole: Any, like: Any) -> Any:
    """Return this process' share of a tensor that all hold whole; one of another shape (a counter) stays whole."""
    if not isinstance(whole, Tensor) or whole.shape != like.shape:
        return whole
    values = whole.to(like.device, torch.promote_types(whole.dtype, torch.float32))
    # src_data_rank None: each process cuts its own copy. By default the first process would send its copy to all.
    return distribute_tensor(values, like.device_mesh, like.placements, src_data_rank=None)


class ShardedTrainer(ComposedTrainer):
    """The composed trainer: whole weights from a step's rollouts to its last backward pass, shares in the optimiser.

    Its checkpoints are those of one process, so that any number of processes resumes from them, sharded or not.
    """

    optimizer: Any
    lr_scheduler: Any
    """Both are made by `train`, before anything here is called."""

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
        return parts + [{"channels": Batch()}] * (max(self._ranks.gather(len(parts))) - len(parts))

    def _part_loss(self, model: Any, part: dict[str, Any], whole: dict[str, Any]) -> Float[Tensor, ""]:
        """Return a part's loss; its backward pass ends in each process' share of the mean gradients.

        All processes must differentiate equally often, and each time from all layers, since every layer's backward pass
        ends in a sum over the processes.
        """
        whole_model, part_loss = self._sharded.model, super()._part_loss

        def from_all_layers() -> Float[Tensor, ""]:
            loss = part_loss(model, part, whole)
            if loss.requires_grad:
                return loss
            # A process without rows scores one token: times 0, it changes nothing and reaches all layers.
            return loss + 0 * token_log_probs(whole_model, score(whole_model, [Tree([0], ([0],))])).sum()

        loss: Float[Tensor, ""] = getattr(whole_model, WITHIN)(from_all_layers)
        return loss

    def _clip_grad_norm(self, model: Any) -> float:
        return self._sharded.clip(self.args.max_grad_norm)

    def _get_grad_norm(self, model: Any, grad_norm: float | None = None) -> float:
        return self._sharded.clip(0.0) if grad_norm is None else grad_norm

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Write the weights of all processes' shares, by the first process."""
        self._save(output_dir, state_dict=self._sharded.weights())

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        """Load this process' share of a checkpoint's weights, whichever number of processes wrote them."""
        self._sharded.scatter()
        parameters = dict(self._sharded.model.named_parameters(remove_duplicate=False))
        for path in sorted(Path(resume_from_checkpoint).glob("*.safetensors")):
            with safe_open(path, "pt") as file:  # one tensor at a time: the whole model is in no process' memory
                for name in file.keys():  # noqa: SIM118 - no dict
                    if name in parameters:
                        with torch.no_grad():
                            parameters[name].copy_(_share(file.get_tensor(name), parameters[name]))

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        """Write the optimiser's state as one process has it, by the first process; all must take part."""
        held, whole = self.optimizer.state_dict(), self._sharded.whole
        states = {
            number: {name: whole(value) if isinstance(value, DTensor) else value for name, value in state.items()}
            for number, state in held["state"].items()
        }
        if self.args.should_save:
            torch.save({**held, "state": states}, Path(output_dir) / OPTIMIZER_NAME)
            torch.save(self.lr_scheduler.state_dict(), Path(output_dir) / SCHEDULER_NAME)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        """Load this process' share of a whole state of the optimiser."""
        if checkpoint is None:
            return
        # Mapped, so that what is read of another process' share takes no memory of its own.
        held = torch.load(Path(checkpoint) / OPTIMIZER_NAME, map_location="cpu", mmap=True, weights_only=True)
        # A state refers to parameters by their number over all groups, in the order of the groups.
        numbered = [number for group in held["param_groups"] for number in group["params"]]
        parameters = [parameter for group in self.optimizer.param_groups for parameter in group["params"]]
        own = {
            number: {name: _share(value, parameter) for name, value in held["state"][number].items()}
            for number, parameter in zip(numbered, parameters, strict=True)
            if number in held["state"]
        }
        self.optimizer.load_state_dict({**held, "state": own})
        self.lr_scheduler.load_state_dict(torch.load(Path(checkpoint) / SCHEDULER_NAME, weights_only=True))
