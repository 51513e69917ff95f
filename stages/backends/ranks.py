"""The processes of one training, as torchrun starts them: collectives on Python values, weights and gradients.

Every process makes the same calls to this module in the same order; a process that makes another call would wait for
ever. Values other than gradients are pickled and sent over gloo, whatever the device.
"""

import atexit
import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import TYPE_CHECKING, Any, TypeVar

from composer_stages.errors import InfrastructureError

if TYPE_CHECKING:
    from torch import Tensor

Value = TypeVar("Value")
PATIENCE = timedelta(hours=12)
"""The time that a process waits for another that is alive; a dead one is noticed at once. No setting bounds it:
`limits.wall_s` is of one rollout, and a process plays several, starts servers, fetches models and writes checkpoints
while others wait."""
BUCKET = 2**26
"""Elements of gradients that are summed in one message: 256 MiB in float32, which is also the size of the copy."""


def world_size() -> int:
    """Return the number of processes that torchrun started; 1 without it."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def local_count() -> int:
    """Return the number of processes that torchrun started on this machine; 1 without it."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", "1"))


class Ranks:
    """The collectives of this process, one of `count`; in a single process each returns its argument."""

    def __init__(self, rank: int = 0, count: int = 1) -> None:
        self.rank, self.count = rank, count
        self.first = rank == 0
        """Whether this is the process that writes the run."""
        self._begun: bool | None = None
        """Whether the other processes were told to begin; None outside of `leading`."""

    def gather(self, value: Value) -> list[Value]:
        """Return the value of every process, in the order of ranks, on all of them."""
        if self.count == 1:
            return [value]
        from torch import distributed

        values: list[Any] = [None] * self.count
        distributed.all_gather_object(values, value)
        return values

    def gather_to_rank0(self, value: Value) -> list[Value]:
        """Return the value of every process, in the order of ranks, on rank 0; elsewhere only this process's value."""
        if self.count == 1:
            return [value]
        from torch import distributed

        values: list[Any] | None = [None] * self.count if self.first else None
        distributed.gather_object(value, values)
        return [value] if values is None else values

    def broadcast_from_rank0(self, make: Callable[[], Value]) -> Value:
        """Return on all processes the value that `make` returns on rank 0; it is called there only."""
        if self.count == 1:
            return make()
        from torch import distributed

        values: list[Any] = [make() if self.first else None]
        distributed.broadcast_object_list(values)
        value: Value = values[0]
        return value

    @contextmanager
    def naming_lost_peers(self) -> Iterator[None]:
        """Raise `InfrastructureError` when a process that the block needs is gone or has hung for `PATIENCE`."""
        try:
            yield
        except RuntimeError as error:
            # torch.distributed has no exception for a lost peer; the message names the backend of the connection.
            if self.count == 1 or not any(word in str(error).lower() for word in ("gloo", "nccl")):
                raise
            raise InfrastructureError(
                "backends.process-lost", others=self.count - 1, hours=PATIENCE.total_seconds() / 3600
            ) from error

    @contextmanager
    def leading(self) -> Iterator[None]:
        """Enclose all work of rank 0: the other processes wait until it calls `begin`, or the block ends without."""
        if self._begun is not None:
            yield
            return
        self._begun = False
        try:
            yield
        finally:
            if not self._begun:
                self.broadcast_from_rank0(lambda: False)
            self._begun = None

    def begin(self) -> None:
        """Let the other processes begin."""
        if self._begun is False:
            self._begun = self.broadcast_from_rank0(lambda: True)

    def total(self, values: "Tensor") -> "Tensor":
        """Return the sum of the processes' tensors, all of one shape."""
        if self.count > 1:
            from torch import distributed

            values = values.clone()  # all_reduce() works in place
            distributed.all_reduce(values)
        return values

    def broadcast_weights(self, parameters: "Iterable[Tensor]") -> None:
        """Give every process the trained weights of rank 0; frozen ones were read from the same files."""
        if self.count > 1:
            from torch import distributed

            for parameter in parameters:
                if parameter.requires_grad:
                    distributed.broadcast(parameter.data, 0)

    def average_gradients(self, parameters: "Iterable[Tensor]") -> None:
        """Replace each gradient by its mean over the processes; one that no process has stays None."""
        if self.count == 1:
            return
        import torch
        from torch import distributed

        trained = [parameter for parameter in parameters if parameter.requires_grad]
        if not trained:
            return
        # A process whose rollouts did not reach a parameter has no gradient of it, but must take part in its sum.
        has_gradient = torch.tensor([p.grad is not None for p in trained], dtype=torch.int32, device=trained[0].device)
        distributed.all_reduce(has_gradient, distributed.ReduceOp.MAX)
        learning = [p for p, somewhere in zip(trained, has_gradient.tolist(), strict=True) if somewhere]
        for parameter in learning:
            parameter.grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        for bucket in buckets([p.grad for p in learning if p.grad is not None]):
            flat = torch.cat([gradient.flatten() for gradient in bucket])
            distributed.all_reduce(flat)
            flat /= self.count
            for gradient, mean in zip(bucket, flat.split([g.numel() for g in bucket]), strict=True):
                gradient.copy_(mean.view_as(gradient))


def buckets(gradients: "list[Tensor]", elements: int = BUCKET) -> "Iterator[list[Tensor]]":
    """Yield neighbouring gradients of one type, together at most so many elements; a larger gradient is alone."""
    bucket: list[Tensor] = []
    for gradient in gradients:
        full = bucket and sum(g.numel() for g in bucket) + gradient.numel() > elements
        if bucket and (full or gradient.dtype != bucket[0].dtype):
            yield bucket
            bucket = []
        bucket.append(gradient)
    if bucket:
        yield bucket


_here: Ranks | None = None


def join(kind: type[Ranks] | None = None) -> Ranks:
    """Return the collectives of this process, after connecting to the other processes that torchrun started, if any.

    kind: a class that replaces `Ranks` from now on.
    """
    global _here
    if _here is None or kind is not None:
        _here = (kind or Ranks)(_connect() if world_size() > 1 else 0, world_size())
    return _here


def _connect() -> int:
    """Connect to the other processes and return the rank of this one."""
    import torch
    from torch import distributed

    gpu = torch.cuda.is_available()
    if gpu:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]) % torch.cuda.device_count())
    if not distributed.is_initialized():  # a program that builds the trainer from Python may have done so
        distributed.init_process_group("cpu:gloo,cuda:nccl" if gpu else "gloo", timeout=PATIENCE)
        # The threads of the process group may abort a process that ends while they run.
        atexit.register(lambda: distributed.destroy_process_group() if distributed.is_initialized() else None)
    return distributed.get_rank()
