"""A training of all weights whose masters, gradients and optimiser state are spread over its processes, by FSDP2.

From the rollouts of a step to its last backward pass every process holds the weights whole, in the type they compute
in; of the float32 masters, the gradients and the optimiser's moments it holds its share alone. Weights that were
gathered layer by layer would ask every process for equally many passes, and each makes as many as its own rollouts and
channels need. The means of gradients are taken, and cut into shares, by torch's `fully_shard` as each layer's are done.
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

from stages.backends.ranks import Ranks
from stages.training.scoring import Tree, score, token_log_probs

WITHIN = "composer_within"
"""The model's method that FSDP takes for its forward pass: whatever is computed from its weights before one backward
pass."""


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
        self._within(lambda: None)  # the model, not the first layer that is called, is where FSDP begins
        self._units = [module for module in model.modules() if isinstance(module, FSDPModule)]

    def _within(self, work: Callable[[], Any]) -> Any:
        return getattr(self.model, WITHIN)(work)

    def gather(self) -> None:
        """Make the weights whole everywhere; nothing where they are."""
        for unit in self._units:
            unit.unshard()

    def scatter(self) -> None:
        """Keep one's share alone, which is what the optimiser steps."""
        for unit in self._units:
            unit.reshard()

    def loss(self, work: Callable[[], Float[Tensor, ""]]) -> Float[Tensor, ""]:
        """A loss from the whole weights; its backward pass ends in each process' share of the mean gradients.

        All processes must differentiate equally often, and each time from all layers: where a process has no rows, a
        token without weight in the loss sees to that.
        """

        def from_all_layers() -> Float[Tensor, ""]:
            loss = work()
            if loss.requires_grad:
                return loss
            return loss + 0 * token_log_probs(self.model, score(self.model, [Tree([0], ([0],))])).sum()

        loss: Float[Tensor, ""] = self._within(from_all_layers)
        return loss

    def clip(self, most: float) -> float:
        """The Euclidean norm of the gradients over all shares, which become no longer than `most`."""
        learning = [p for p in self.model.parameters() if p.grad is not None]
        norm = get_total_norm([p.grad for p in learning if p.grad is not None])
        whole = norm.full_tensor() if isinstance(norm, DTensor) else norm
        if most > 0:
            clip_grads_with_norm_(learning, most, whole)
        return float(whole)

    def weights(self) -> dict[str, Tensor] | None:
        """The masters, whole, in the first process' memory; None elsewhere. All processes ask for them."""
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
        """Take this process' share of a checkpoint, whichever number of processes wrote it."""
        self.scatter()
        parameters = dict(self.model.named_parameters(remove_duplicate=False))
        for path in sorted(folder.glob("*.safetensors")):
            with safe_open(path, "pt") as file:
                for name in file.keys():  # noqa: SIM118 - no dict
                    if name in parameters:
                        with torch.no_grad():
                            parameters[name].copy_(_share(file.get_tensor(name), parameters[name]))

    def optimiser_state(self, optimizer: Any) -> dict[str, Any]:
        """The state as one process has it, in the first process' memory. All processes ask for it."""
        held = optimizer.state_dict()
        return {**held, "state": {number: self._whole_values(state) for number, state in held["state"].items()}}

    def load_optimiser_state(self, optimizer: Any, held: Mapping[str, Any]) -> None:
        """Take this process' share of a whole state."""
        numbered = [number for group in held["param_groups"] for number in group["params"]]
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        own = {
            number: {name: _share(value, parameter) for name, value in held["state"][number].items()}
            for number, parameter in zip(numbered, parameters, strict=True)
            if number in held["state"]
        }
        optimizer.load_state_dict({**held, "state": own})

    def _whole_values(self, state: Mapping[str, Any]) -> dict[str, Any]:
        return {name: self._whole(value) if isinstance(value, DTensor) else value for name, value in state.items()}

    def _whole(self, share: Any) -> Tensor:
        values = share.detach().full_tensor()
        return values.cpu() if self._ranks.first else torch.empty(0)


def _share(whole: Any, like: Any) -> Any:
    """This process' share of a tensor that all processes hold whole; what has another shape (a counter) stays whole."""
    if not isinstance(whole, Tensor) or whole.shape != like.shape:
        return whole
    values = whole.to(like.device, torch.promote_types(whole.dtype, torch.float32))
    return distribute_tensor(values, like.device_mesh, like.placements, src_data_rank=None)


# ---- precision
# Which types training computes in.
#
# Weights that learn are float32: AdamW's steps at usual learning rates are smaller than half a unit in bfloat16's last
# place, so most would be lost. A model whose weights come in 16 bits is either frozen as it is, beside float32
# adapters,
# or trained as float32 masters under bfloat16 autocast, in which it is sampled from and scored, too.

HALF = (torch.bfloat16, torch.float16)


def masters(model: Any, *, adapter: bool) -> bool:
    """Make all weights float32 where they are to be trained and come in 16 bits; whether they did."""
    if adapter or model.dtype not in HALF:
        return False
    model.float()
    return True


def autocast(model: Any, on: bool) -> AbstractContextManager[Any]:
    """The bfloat16 autocast that accelerate puts around the model's forward pass, for other ways into the model."""
    return torch.autocast(model.device.type, torch.bfloat16) if on else nullcontext()
