"""The processes of one training, as torchrun starts them: what they tell each other, and the mean of their gradients.

Every process works the same way through the same calls; each call here is made by all of them, in the same order.
Values other than gradients are pickled and travel over gloo, whatever the device.
"""

import atexit
import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import TYPE_CHECKING, Any, TypeVar

from stages.errors import InfrastructureError

if TYPE_CHECKING:
    from torch import Tensor

Value = TypeVar("Value")
PATIENCE = timedelta(hours=12)
"""How long one waits for another that still lives: rollouts differ by hours. One that died is noticed at once."""
BUCKET = 2**26
"""Elements of gradients that are summed in one message."""


def world_size() -> int:
    """How many processes torchrun started; 1 without it."""
    return int(os.environ.get("WORLD_SIZE", "1"))


class Ranks:
    """This process among `count`; alone it talks to nobody, and everything is what it was given."""

    def __init__(self, rank: int = 0, count: int = 1) -> None:
        self.rank, self.count = rank, count
        self._begun: bool | None = None
        """Whether the others were told to begin; None outside of `leading`."""

    @property
    def first(self) -> bool:
        """Whether this is the process that writes the run."""
        return self.rank == 0

    def gather(self, value: Value) -> list[Value]:
        """The value of every process, in the order of ranks, on all of them."""
        if self.count == 1:
            return [value]
        from torch import distributed

        values: list[Any] = [None] * self.count
        distributed.all_gather_object(values, value)
        return values

    def gather_to_rank0(self, value: Value) -> list[Value]:
        """The value of every process, in the order of ranks, on the first; elsewhere one's own alone."""
        if self.count == 1:
            return [value]
        from torch import distributed

        values: list[Any] | None = [None] * self.count if self.first else None
        distributed.gather_object(value, values)
        return [value] if values is None else values

    def broadcast_from_rank0(self, make: Callable[[], Value]) -> Value:
        """What the first process makes, on all of them."""
        if self.count == 1:
            return make()
        from torch import distributed

        values: list[Any] = [make() if self.first else None]
        distributed.broadcast_object_list(values)
        value: Value = values[0]
        return value

    @contextmanager
    def naming_lost_peers(self) -> Iterator[None]:
        """Work that needs the others: `InfrastructureError` where one of them is gone."""
        try:
            yield
        except RuntimeError as error:
            if self.count == 1 or not any(word in str(error).lower() for word in ("gloo", "nccl")):
                raise
            raise InfrastructureError(
                f"One of the other {self.count - 1} processes of this training is gone. "
                "The same command with --resume goes on from the newest checkpoint, with any number of processes."
            ) from error

    @contextmanager
    def leading(self) -> Iterator[None]:
        """In the first process around all its work: the others wait until it says `begin`, or ends without."""
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
        """Let the others begin, too."""
        if self._begun is False:
            self._begun = self.broadcast_from_rank0(lambda: True)

    def total(self, values: "Tensor") -> "Tensor":
        """The sum over the processes of tensors of one shape."""
        if self.count > 1:
            from torch import distributed

            values = values.clone()
            distributed.all_reduce(values)
        return values

    def broadcast_weights(self, parameters: "Iterable[Tensor]") -> None:
        """Give every process the first one's weights, those that learn; frozen ones come from the same files."""
        if self.count > 1:
            from torch import distributed

            for parameter in parameters:
                if parameter.requires_grad:
                    distributed.broadcast(parameter.data, 0)

    def average_gradients(self, parameters: "Iterable[Tensor]") -> None:
        """Replace each gradient by its mean over the processes; one that is nowhere stays None."""
        if self.count == 1:
            return
        import torch
        from torch import distributed

        trained = [parameter for parameter in parameters if parameter.requires_grad]
        if not trained:
            return
        held = torch.tensor([p.grad is not None for p in trained], dtype=torch.int32, device=trained[0].device)
        distributed.all_reduce(held, distributed.ReduceOp.MAX)
        learning = [p for p, somewhere in zip(trained, held.tolist(), strict=True) if somewhere]
        for parameter in learning:
            parameter.grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        for bucket in buckets([p.grad for p in learning if p.grad is not None]):
            flat = torch.cat([gradient.flatten() for gradient in bucket])
            distributed.all_reduce(flat)
            flat /= self.count
            for gradient, mean in zip(bucket, flat.split([g.numel() for g in bucket]), strict=True):
                gradient.copy_(mean.view_as(gradient))


def buckets(gradients: "list[Tensor]", elements: int = BUCKET) -> "Iterator[list[Tensor]]":
    """Neighbours of one type, up to so many elements; a larger one is alone."""
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
    """This process among those that torchrun started, which then know each other; alone where it started none.

    kind: another way to talk, from now on.
    """
    global _here
    if _here is None or kind is not None:
        _here = (kind or Ranks)(_connect() if world_size() > 1 else 0, world_size())
    return _here


def _leave() -> None:
    """End the threads of the process group, which may abort a process that ends while they run."""
    from torch import distributed

    if distributed.is_initialized():
        distributed.destroy_process_group()


def _connect() -> int:
    import torch
    from torch import distributed

    gpu = torch.cuda.is_available()
    if gpu:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]) % torch.cuda.device_count())
    if not distributed.is_initialized():  # whoever builds the trainer from Python may have done so
        distributed.init_process_group("cpu:gloo,cuda:nccl" if gpu else "gloo", timeout=PATIENCE)
        atexit.register(_leave)
    return distributed.get_rank()
