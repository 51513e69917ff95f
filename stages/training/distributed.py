"""The model under training: float32 masters, FSDP2 shares of them, and the trainer on shares.

Precision: weights that learn are float32, because AdamW's steps at usual learning rates are smaller than half a unit in
bfloat16's last place, so most would be lost. A model whose weights come in 16 bits is either frozen as it is, with
float32 adapters or changes of its singular values, or trained as float32 masters under bfloat16 autocast, in which it
is sampled from and scored, too.

Shares (distribution.sharding = "fsdp2"): of weights, float32 masters, gradients and the optimiser's moments a process
holds its share alone. Torch's `fully_shard` gathers a layer for the time of its own computation, in the type that it
computes in, and cuts the mean of its gradients into shares once they are done. An adapter is whole in every process,
and its frozen base in shares. Weights are whole only while this process itself samples from them.

Each gathering is a message of all processes, and each makes as many passes as its own rollouts and channels need. So
they make them in step (`Sharded.in_step`): a process that has none left joins those of the others with one token.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from types import MethodType
from typing import Any, Self, TypeVar

import torch
from jaxtyping import Float
from safetensors import safe_open
from torch import Tensor, distributed, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard, register_fsdp_forward_method
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.nn.utils import clip_grads_with_norm_, get_total_norm
from transformers.trainer import OPTIMIZER_NAME, SCHEDULER_NAME

from composer_stages.backends.ranks import Ranks
from composer_stages.policy import adapters
from composer_stages.policy.local import LocalPolicy
from composer_stages.training.packing import HALF
from composer_stages.training.plan import TrainPlan
from composer_stages.training.step import Batch, ComposedTrainer
from composer_stages.training.trained import save_folded, train_singular_values

Value = TypeVar("Value")
WITHIN = "composer_within"
"""The model's method that FSDP takes for its forward pass: whatever is computed from its weights before one backward
pass."""


@dataclass
class Student:
    """The model under training: its precision, its shards, and how it is saved.

    policy: samples from it in this process. ranks: the processes that train it. mixed: whether float32 weights compute
    under bfloat16 autocast. sharded: its shares, None where every process holds all of it. base: what an adapter's
    checkpoint records of its base, None where all weights are trained. model: what is trained, that of `policy`; once
    the trainer has added an adapter, the model with it. frozen: teachers with their tokenizers, by
    `PolicyConfig.loaded`: each is loaded once for all that it teaches.
    """

    policy: LocalPolicy
    ranks: Ranks = field(default_factory=Ranks)
    mixed: bool = False
    sharded: "Sharded | None" = None
    base: adapters.AdapterBase | None = None
    model: Any = None
    frozen: dict[str, tuple[Any, Any]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.model = self.policy.model if self.model is None else self.model

    @classmethod
    def prepare(cls, model: Any, tokenizer: Any, plan: TrainPlan, ranks: Ranks) -> Self:
        """Make the weights that learn float32, cut them into shares where the plan has any, and return the student."""
        sampled, mixed, sharded = plan.config.policy.in_process(), False, None
        base = adapters.describe_base(sampled, model) if plan.config.adapter.rank else None
        if plan.sharded:
            mixed = base is None and model.dtype in HALF
            model.requires_grad_(base is None)  # before FSDP sees the weights: an adapter's base has no gradients
            sharded = Sharded(model, ranks, mixed=mixed, device=plan.device)
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

    @torch.no_grad()
    def score(self, work: Callable[[], Value]) -> Value:
        """Return the result of `work`, passes of the model without gradient; all processes must call it."""
        with self.autocast():
            return work() if self.sharded is None else self.sharded.in_step(work)

    def gather(self) -> None:
        """Gather all weights in every process until the next pass is scored; all processes must call it."""
        if self.sharded is not None:
            self.sharded.gather()

    def distribute(self) -> None:
        """Broadcast the weights of the first process to all processes, or to each its shard."""
        if self.sharded is not None:
            self.sharded.scatter()
        if self.sharded is None or self.base is not None:
            self.ranks.broadcast_weights(self.policy.model.parameters())

    def trained(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the full weights by name, tied weights once; in all processes but the first they are empty tensors.

        All processes must iterate to the end.
        """
        if self.sharded is not None:
            self.sharded.scatter()
        for name, parameter in self.policy.model.named_parameters():
            yield name, parameter.detach() if self.sharded is None else self.sharded.full_tensor(parameter)

    def save(self, folder: Path) -> None:
        """Write the model, or its adapter alone, and the tokenizer. All processes must call it; the first writes."""
        weights = None if self.sharded is None or self.base is not None else self.sharded.weights()
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
    """A model whose layers are sharded over the processes; between `gather` and `scatter` each process has all weights.

    mixed: whether weights that come in 16 bits get float32 masters and compute in bfloat16. device: that they compute
    on. The first process gives its weights to all, which need none of their own (`load_model`, empty).
    """

    def __init__(self, model: Any, ranks: Ranks, *, mixed: bool, device: str) -> None:
        self.model, self._ranks = model, ranks
        mesh = init_device_mesh(torch.device(device).type, (ranks.count,))
        policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32) if mixed else MixedPrecisionPolicy()
        layers = [module for module in model.modules() if type(module).__name__ in set(model._no_split_modules or ())]
        # One unit after the other, so that neither weights nor masters are whole on any device. What no layer holds,
        # embeddings and output head among it, is the last.
        for module in (*layers, model):
            self._from_first(module, device)
            if mixed:
                module.float()
            fully_shard(module, mesh=mesh, reshard_after_forward=module is not model, mp_policy=policy)
        # fully_shard hooks the model's forward pass, but trees are scored around it: this method stands in its place.
        setattr(model, WITHIN, MethodType(lambda model, work: work(), model))
        register_fsdp_forward_method(model, WITHIN)
        getattr(model, WITHIN)(lambda: None)  # the model, not the first layer that is called, is where FSDP begins
        self._layers: list[FSDPModule] = layers
        self.scatter()
        self._within, self._passing, self._joining = False, False, False
        self._last: list[Tensor] = []
        """The last token's hidden state of each pass with gradient."""
        model.get_decoder().register_forward_pre_hook(lambda *_: self._agree(torch.is_grad_enabled()))
        model.get_decoder().register_forward_hook(lambda _, __, output: self._passed(output))

    def _from_first(self, unit: nn.Module, device: str) -> None:
        """Broadcast a unit's tensors from the first process to the device of every process; tied tensors stay tied."""
        placed: dict[int, Tensor] = {}
        tables: list[dict[str, Any]] = [t for m in unit.modules() for t in (m._parameters, m._buffers)]
        for table in tables:
            for name, tensor in table.items():
                if tensor is None or isinstance(tensor, DTensor):
                    continue
                if id(tensor) not in placed:
                    empty = tensor.is_meta
                    full = torch.empty_like(tensor, device=device) if empty else tensor.detach().to(device)
                    distributed.broadcast(full, 0)
                    learns = isinstance(tensor, nn.Parameter)
                    placed[id(tensor)] = nn.Parameter(full, tensor.requires_grad) if learns else full
                table[name] = placed[id(tensor)]

    def gather(self) -> None:
        """Gather all weights on every process."""
        for unit in (self.model, *self._layers):
            unit.set_reshard_after_forward(False, recurse=False)
            unit.unshard()

    def scatter(self) -> None:
        """Keep only this process' shard, which the optimiser steps."""
        for unit in (self.model, *self._layers):
            unit.set_reshard_after_forward(unit is not self.model, recurse=False)
            unit.reshard()

    def within(self, work: Callable[[], Value]) -> Value:
        """Return the result of `work`, which is computed from the weights; its passes are made by `in_step`.

        With gradients enabled the result is a loss, whose backward pass reaches all layers in every process.
        """
        self.scatter()

        def reaching() -> Any:
            self._within, self._last = True, []
            try:
                value: Any = work()
                return self._reaching(value) if torch.is_grad_enabled() else value
            finally:
                self._within, self._last = False, []

        result: Value = getattr(self.model, WITHIN)(reaching)
        if not torch.is_grad_enabled():
            self.scatter()  # embeddings and output head, which stay whole for a backward pass
        return result

    def in_step(self, work: Callable[[], Value]) -> Value:
        """Return the result of `work`, during which the processes go through the model equally often.

        All must call it, and wait for each other in nothing else meanwhile.
        """
        if not self._within:
            return self.within(lambda: self.in_step(work))
        self._passing = True
        try:
            value = work()
            self._agree(None)
        finally:
            self._passing = False
        return value

    def _agree(self, with_gradient: bool | None) -> None:
        """Return once all processes are to make such a pass, and join the passes that others make before; None: none.

        Passes with gradients come first: backward passes must meet, too.
        """
        while self._passing and not self._joining:
            passes = {gradient_pass for gradient_pass in self._ranks.gather(with_gradient) if gradient_pass is not None}
            if not passes or (coming := max(passes)) == with_gradient:
                return
            self._join(coming)

    def _join(self, with_gradient: bool) -> None:
        """Go through the model with one token."""
        self._joining = True
        with torch.set_grad_enabled(with_gradient):
            self.model.get_decoder()(input_ids=torch.zeros(1, 1, dtype=torch.long, device=self.model.device))
        self._joining = False

    def _passed(self, output: Any) -> None:
        if self._within and torch.is_grad_enabled():
            self._last.append(output.last_hidden_state[:1, -1])

    def _reaching(self, loss: Float[Tensor, ""]) -> Float[Tensor, ""]:
        """Return the same loss, whose backward pass goes through all layers, as often as in every other process."""
        if not self._last:  # no process has rows
            self._join(with_gradient=True)
        reached = torch.cat(self._last)
        return loss + 0 * (reached if loss.requires_grad else self.model.get_output_embeddings()(reached)).sum()

    def clip(self, most: float) -> float:
        """Return the Euclidean norm of the gradients over all shares, and clip them to `most`, if it is above 0."""
        # In two steps, as the norm is logged where nothing is clipped, too; the norm of DTensors is one itself.
        learning = [p for p in self.model.parameters() if p.grad is not None]
        norm = get_total_norm([p.grad for p in learning if p.grad is not None])
        total_norm = norm.full_tensor() if isinstance(norm, DTensor) else norm
        if most > 0:
            clip_grads_with_norm_(learning, most, total_norm)
        return float(total_norm)

    def weights(self) -> dict[str, Tensor] | None:
        """Return the full float32 masters in the first process, None in the others. All processes must call it."""
        self.scatter()
        # `parameters()` has tied weights once, which are gathered once, and written under each of their names below.
        full_tensors = {id(parameter): self.full_tensor(parameter) for parameter in self.model.parameters()}
        if not self._ranks.first:
            return None
        named = self.model.named_parameters(remove_duplicate=False)
        buffers = {name: value for name, value in self.model.state_dict().items() if not isinstance(value, DTensor)}
        return buffers | {name: full_tensors[id(parameter)] for name, parameter in named}

    def full_tensor(self, share: Any) -> Tensor:
        """Return the full tensor of a sharded one in the first process' memory, an empty tensor in the others."""
        values = share.detach().full_tensor()  # a collective: all processes must get here, and in the same order
        return values.cpu() if self._ranks.first else torch.empty(0)


def _share(full: Any, like: Any) -> Any:
    """Return this process' shard of a full tensor; a tensor of another shape than `like` (a counter) is not sharded."""
    if not isinstance(full, Tensor) or full.shape != like.shape:
        return full
    values = full.to(like.device, torch.promote_types(full.dtype, torch.float32))
    # src_data_rank None: each process cuts its own copy. By default the first process would send its copy to all.
    return distribute_tensor(values, like.device_mesh, like.placements, src_data_rank=None)


class TrainerInStep(ComposedTrainer):
    """The composed trainer on shares of a model, of which all processes gather a layer at a time.

    What it trains is an adapter, whole in every process.
    """

    def __init__(self, *, sharded: Sharded, **composed: Any) -> None:
        self._sharded = sharded
        super().__init__(**composed)

    def _generate_and_score_completions(self, inputs: list[dict[str, Any]]) -> dict[str, Any]:
        """Take the rollouts of a step; with whole weights where this process samples them."""
        if not self.rollouts.corrected:
            self._sharded.gather()
        return super()._generate_and_score_completions(inputs)

    def _parts(self, inputs: dict[str, Any]) -> list[dict[str, Any]]:
        """Return equally many parts on every process, the last ones without rows: each pass ends in a sum over all."""
        parts = super()._parts(inputs)
        return parts + [{"channels": Batch()}] * (max(self._ranks.gather(len(parts))) - len(parts))

    def _part_loss(self, model: Any, part: dict[str, Any], micro_batch: dict[str, Any]) -> Float[Tensor, ""]:
        """Return a part's loss, whose backward pass all processes make."""
        part_loss = super()._part_loss
        return self._sharded.within(lambda: part_loss(model, part, micro_batch))

    def _passes(self, work: Callable[[], Value]) -> Value:
        return self._sharded.in_step(work)

    def _get_per_token_logps_and_entropies(self, *args: Any, **kwargs: Any) -> tuple[Any, Any, Any]:
        """Return TRL's log-probs, before a step those of sampling or of a reference, of passes that all make."""
        log_probs = super()._get_per_token_logps_and_entropies
        return self._sharded.in_step(lambda: log_probs(*args, **kwargs))


class ShardedTrainer(TrainerInStep):
    """A `TrainerInStep` that trains all weights; the optimiser steps this process' shard.

    Its checkpoints are those of one process, so that any number of processes resumes from them, sharded or not.
    """

    optimizer: Any
    lr_scheduler: Any
    """Both are made by `train`, before anything here is called."""

    def _reduce_gradients(self) -> None:
        """Keep this process' share of the mean gradients, which FSDP2 has taken already."""

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
        optimizer_state, full_tensor = self.optimizer.state_dict(), self._sharded.full_tensor
        states = {
            number: {name: full_tensor(value) if isinstance(value, DTensor) else value for name, value in state.items()}
            for number, state in optimizer_state["state"].items()
        }
        if self.args.should_save:
            torch.save({**optimizer_state, "state": states}, Path(output_dir) / OPTIMIZER_NAME)
            torch.save(self.lr_scheduler.state_dict(), Path(output_dir) / SCHEDULER_NAME)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        """Load this process' share of a whole state of the optimiser."""
        if checkpoint is None:
            return
        # Mapped, so that what is read of another process' share takes no memory of its own.
        optimizer_state = torch.load(
            Path(checkpoint) / OPTIMIZER_NAME, map_location="cpu", mmap=True, weights_only=True
        )
        # A state refers to parameters by their number over all groups, in the order of the groups.
        numbered = [number for group in optimizer_state["param_groups"] for number in group["params"]]
        parameters = [parameter for group in self.optimizer.param_groups for parameter in group["params"]]
        shares = {
            number: {name: _share(value, parameter) for name, value in optimizer_state["state"][number].items()}
            for number, parameter in zip(numbered, parameters, strict=True)
            if number in optimizer_state["state"]
        }
        self.optimizer.load_state_dict({**optimizer_state, "state": shares})
        self.lr_scheduler.load_state_dict(torch.load(Path(checkpoint) / SCHEDULER_NAME, weights_only=True))
