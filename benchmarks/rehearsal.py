"""A GPU rehearsed on the CPU build of torch 2.13: fake tensors on a device of its own, counted operation by operation.

`rehearsed()` opens a device "gpu" whose tensors have a shape and a type but no numbers. A tensor of the wrong device
raises, as on a GPU. Small tensors that are made of Python numbers keep their values on the host beside the fake ones,
so that what depends on them (`tolist`, `nonzero`, a mask as an index) goes the way that it would go. Counted are:

- `launches`: dispatched operations that start a kernel; views and allocations are none. Attention is one, as a fused
  kernel is, and TRL's Triton kernels are one each.
- `waits`: where the host waits for the device, by the nearest line of the project.
- `copies`: between host and device, likewise. A copy to the host waits, too.
- `peak`: bytes of all storages on the device at once. CUDA's context, workspaces and fragmentation are not in it.

Registering a device changes a process for good (`torch.accelerator` finds it, autograd starts a thread for it), so this
belongs into a process of its own: benchmarks/scenarios.py. torch's entry point for it is experimental.
"""

import sys
import weakref
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.utils.checkpoint
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, unset_fake_temporarily
from torch.distributed.tensor import DTensor
from torch.utils import _pytree as tree, backend_registration
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes


class _Stream:
    """A stream, or an event on it, of a device on which everything is done in order."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    def __enter__(self) -> "_Stream":
        return self

    def __exit__(self, *args: Any) -> None:
        pass

    def _nothing(self, *args: Any, **kwargs: Any) -> None:
        pass

    wait_event = wait_stream = wait = record = synchronize = _nothing

    def record_event(self, event: "_Stream | None" = None) -> "_Stream":
        return event or self


class _Backend(backend_registration._DummyBackendModule):
    """What torch asks of a backend's module."""

    Stream = Event = _Stream

    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        return [torch.bfloat16]

    def current_stream(self, *args: Any) -> _Stream:
        return _Stream()

    def stream(self, stream: _Stream) -> _Stream:
        return stream


backend_registration._setup_privateuseone_for_python_backend("gpu", backend_module=_Backend())
(torch.ones(1, requires_grad=True) * 2).sum().backward()  # starts autograd's thread for the device, before others exist

GPU, CPU = torch.device("gpu", 0), torch.device("cpu")
ROOT = f"{Path(__file__).parents[1]}/"
LARGEST = 2_000_000
"""Numbers of a tensor whose values are kept."""
aten = torch.ops.aten
# fmt: off
NO_KERNEL = frozenset([
    "view", "_unsafe_view", "t", "transpose", "permute", "slice", "select", "expand", "unsqueeze", "squeeze",
    "detach", "alias", "as_strided", "split", "split_with_sizes", "unbind", "lift_fresh", "unfold", "narrow",
    "diagonal", "_reshape_alias", "chunk", "view_as_real", "empty", "empty_strided", "empty_like", "new_empty",
    "new_empty_strided", "resize_", "set_", "is_pinned", "lift",
])
# fmt: on
"""Operations that start no kernel: views and allocations."""
INDEXED = (
    aten.index.Tensor,
    aten.index_put.default,
    aten.index_put_.default,
    aten._index_put_impl_.default,
    aten._unsafe_index.Tensor,
)
SIZED_BY_VALUES = (aten.nonzero.default, aten.bincount.default, aten._unique2.default, aten.equal.default)
"""Operations whose result's shape, or whose result on the host, depends on the numbers."""
FAKE = FakeTensorMode(allow_non_fake_inputs=True)
AUTOCAST = torch.library.Library("aten", "IMPL")
AUTOCAST_OF_OTHERS = torch.library.Library("_", "IMPL", "AutocastPrivateUse1")
LOWERED = ("linear", "matmul", "mm", "addmm", "bmm", "baddbmm")
"""Operations that autocast computes in bfloat16 on CUDA, of those that a language model has."""
_lowered: dict[int, tuple[Any, Tensor]] = {}
"""The bfloat16 copies of weights within an autocast, by the weight's identity, as torch caches them."""


def lower(tensor: Any) -> Any:
    """Return a float32 tensor in bfloat16, as autocast casts what its operations are given."""
    if not isinstance(tensor, Tensor) or tensor.dtype != torch.float32:
        return tensor
    if not (tensor.is_leaf and tensor.requires_grad and torch.is_autocast_cache_enabled()):
        return tensor.to(torch.bfloat16)
    known = _lowered.get(id(tensor))
    if known is None or known[0]() is not tensor:
        _lowered[id(tensor)] = known = (weakref.ref(tensor), tensor.to(torch.bfloat16))
    return known[1]


def _under_autocast(name: str) -> Any:
    def run(*args: Any) -> Any:
        with torch._C._ExcludeDispatchKeyGuard(
            torch._C.DispatchKeySet(torch._C._dispatch_key_parse("AutocastPrivateUse1"))
        ):
            return getattr(aten, name)(*tree.tree_map(lower, args))

    return run


AUTOCAST_OF_OTHERS.fallback(torch.library.fallthrough_kernel)
for _name in LOWERED:
    AUTOCAST.impl(_name, _under_autocast(_name), "AutocastPrivateUse1")
resize_of = torch.UntypedStorage.resize_
made_of_numbers, attention_of_torch, item_of, module_to = (
    torch.tensor,
    nn.functional.scaled_dot_product_attention,
    Tensor.__getitem__,
    nn.Module.to,
)


def site() -> str:
    """The nearest line of the project below the caller, else the nearest one of a package other than torch."""
    frame, other = sys._getframe(2), "elsewhere"
    while frame is not None:
        name = frame.f_code.co_filename
        if name.startswith(f"{ROOT}composer_stages/"):
            return f"{name.removeprefix(f'{ROOT}composer_')}:{frame.f_code.co_name}"
        if other == "elsewhere" and "site-packages" in name and "/torch/" not in name:
            other = f"{name.split('site-packages/')[1]}:{frame.f_code.co_name}"
        frame = frame.f_back  # type: ignore[assignment]
    return other


def on_gpu(device: Any) -> bool:
    """Whether a keyword argument names the device."""
    return device is not None and torch.device(device).type == "gpu"


class Rehearsal(TorchDispatchMode):
    """Counts what a program asks of the device, and answers with values where they are known."""

    def __init__(self) -> None:
        super().__init__()
        self.kernels, self.waits, self.copies = Counter[str](), Counter[str](), Counter[str]()
        self.held = self.peak = 0
        self._live: dict[int, int] = {}
        self._stale: dict[int, Tensor] = {}
        """Values that were written into by numbers that are not known, by their storage."""

    @property
    def launches(self) -> int:
        """Kernels since the last `reset`."""
        return sum(self.kernels.values())

    def reset(self) -> None:
        """Count from here; what is held stays held."""
        self.peak = self.held
        for counter in (self.kernels, self.waits, self.copies):
            counter.clear()

    def account(self) -> dict[str, Any]:
        """Return the counts as JSON."""
        return {
            "launches": self.launches,
            "waits": dict(self.waits.most_common()),
            "copies": dict(self.copies.most_common()),
            "kernels": dict(self.kernels.most_common(12)),
            "peak": self.peak,
        }

    # Memory

    def hold(self, tensor: Tensor) -> None:
        """Count a tensor's storage until it is freed."""
        if not isinstance(tensor, FakeTensor) or tensor.fake_device.type != "gpu":
            return
        storage = tensor.untyped_storage()
        if storage._cdata not in self._live:
            self._live[storage._cdata] = storage.nbytes()
            self.held += storage.nbytes()
            self.peak = max(self.peak, self.held)
            weakref.finalize(storage, self._free, storage._cdata)

    def resize(self, storage: Any, size: int) -> Any:
        """Resize a storage, as FSDP2 does to free gathered weights and to have them again."""
        found = resize_of(storage, size)
        if storage._cdata in self._live:
            self.held += storage.nbytes() - self._live[storage._cdata]
            self._live[storage._cdata] = storage.nbytes()
            self.peak = max(self.peak, self.held)
        return found

    def _free(self, key: int) -> None:
        self.held -= self._live.pop(key, 0)

    # Values beside the fake tensors

    def value(self, tensor: Tensor) -> Tensor | None:
        """The numbers of a tensor, where they are known."""
        if not isinstance(tensor, FakeTensor):
            return tensor if tensor.device.type == "cpu" else None
        value: Tensor | None = getattr(tensor, "host_value", None)
        return None if value is None or value.untyped_storage()._cdata in self._stale else value

    def fake(self, value: Tensor) -> Tensor:
        """A tensor on the device with these numbers."""
        with FAKE:
            made = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=GPU)
        if value.numel() <= LARGEST:
            made.host_value = value  # type: ignore[attr-defined]
        self.hold(made)
        return made

    def on_host(self, tensor: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        """The numbers of a tensor as they arrive on the host; ones, or halves, where they are not known."""
        with unset_fake_temporarily():
            value = self.value(tensor)
            if value is None:
                value = torch.full(tensor.shape, 0.5 if tensor.is_floating_point() else 1, dtype=tensor.dtype)
            return value.to(dtype or value.dtype, copy=True)

    # Every operation

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run one operation: on the host for real, on the device for its shapes."""
        kwargs = dict(kwargs or {})
        if func.namespace == "prim":
            return func(*args, **kwargs)
        tensors = [x for x in tree.tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        if any(isinstance(x, DTensor) for x in tensors):
            return NotImplemented  # it asks the same of its own share, which is counted
        fakes = [x for x in tensors if isinstance(x, FakeTensor)]
        for x in fakes:  # FakeTensorMode keeps small constants itself, but drops them at the first write
            if x.constant is not None:
                if x.constant.device.type == "cpu" and getattr(x, "host_value", None) is None:
                    x.host_value = x.constant  # type: ignore[attr-defined]
                x.constant = None
        to_gpu = on_gpu(kwargs.get("device"))
        if not to_gpu and not any(x.fake_device.type == "gpu" for x in fakes):
            if fakes:
                return func(*args, **kwargs)
            with unset_fake_temporarily():
                return func(*args, **kwargs)
        if to_gpu:
            kwargs["device"] = GPU
        if func in INDEXED:
            args = self._with_places(args)
            tensors = [x for x in tree.tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        moved = self._moved(func, args, kwargs, to_gpu)
        if moved is not NotImplemented:
            return moved
        name = func._schema.name.split("::")[1]
        if func in SIZED_BY_VALUES:
            return self._sized_by_values(func, name, args, kwargs)
        if name not in NO_KERNEL:
            self.kernels[name] += 1
        out = func(*args, **kwargs)
        for x in tree.tree_leaves(out):
            if isinstance(x, Tensor):
                self.hold(x)
        self._follow(func, args, kwargs, tensors, out)
        return out

    def _with_places(self, args: Any) -> Any:
        """Replace masks among the indices by places, as CUDA does, which waits for their number."""
        indices: list[Tensor | None] = []
        for index in args[1]:
            if index is not None and index.dtype in (torch.bool, torch.uint8):
                self.waits[f"mask as index at {site()}"] += 1
                self.kernels["nonzero"] += 1
                with unset_fake_temporarily():
                    value = self.value(index)
                    mask = torch.ones(index.shape, dtype=torch.bool) if value is None else value
                    places = [place.contiguous() for place in mask.nonzero().unbind(1)]
                indices += [self.fake(place) for place in places]
            else:
                if index is not None and not isinstance(index, FakeTensor) and index.dim():
                    self.copies[f"index from the host at {site()}"] += 1
                indices.append(index)
        return (args[0], indices, *args[2:])

    def _moved(self, func: Any, args: Any, kwargs: Any, to_gpu: bool) -> Any:
        """Copy between host and device; `NotImplemented` for all other operations."""
        if func is aten._local_scalar_dense.default:
            self.waits[f"item at {site()}"] += 1
            value = self.on_host(args[0])
            with unset_fake_temporarily():
                return value.item()
        if func is aten._to_copy.default and not to_gpu and kwargs.get("device") is not None:
            self.copies[f"to the host at {site()}"] += 1
            return self.on_host(args[0], kwargs.get("dtype"))
        if func is aten.copy_.default and not isinstance(args[0], FakeTensor):
            self.copies[f"to the host at {site()}"] += 1
            value = self.on_host(args[1])
            with unset_fake_temporarily():
                return args[0].copy_(value)
        if func is aten._to_copy.default and to_gpu and not isinstance(args[0], FakeTensor):
            self.copies[f"to the device at {site()}"] += 1
            self.kernels["copy to the device"] += 1
            with unset_fake_temporarily():
                value = args[0].detach().to(kwargs.get("dtype") or args[0].dtype, copy=True)
            return self.fake(value)
        return NotImplemented

    def _sized_by_values(self, func: Any, name: str, args: Any, kwargs: Any) -> Any:
        self.waits[f"{name} at {site()}"] += 1
        self.kernels[name] += 1
        values = [self.value(x) if isinstance(x, Tensor) else x for x in args]
        if any(value is None and given is not None for value, given in zip(values, args, strict=True)):
            raise RuntimeError(f"{name} at {site()} depends on numbers that are not known here")
        with unset_fake_temporarily():
            found = func(*values, **{**kwargs, **({"device": CPU} if "device" in kwargs else {})})
        return tree.tree_map(lambda x: self.fake(x) if isinstance(x, Tensor) else x, found)

    def _follow(self, func: Any, args: Any, kwargs: Any, tensors: list[Tensor], out: Any) -> None:
        """Repeat an operation on the host where all of its numbers are known."""
        outs = [x for x in tree.tree_leaves(out) if isinstance(x, Tensor)]
        values, mutable = [self.value(x) for x in tensors], func._schema.is_mutable
        known = all(value is not None for value in values) and all(x.numel() <= LARGEST for x in (*tensors, *outs))
        if not tensors and outs and outs[0].is_floating_point() and outs[0].numel() > 10_000:
            known = False
        if func.namespace == "torch_attn":  # flash attention has no kernel for a host
            known = False
        if known and (outs or mutable):
            beside = {id(tensor): value for tensor, value in zip(tensors, values, strict=True)}
            given, named = tree.tree_map(lambda x: beside.get(id(x), x) if isinstance(x, Tensor) else x, (args, kwargs))
            if "device" in named:
                named["device"] = CPU
            with unset_fake_temporarily():
                found = func(*given, **named)
            if not mutable:
                leaves = [y for y in tree.tree_leaves(found) if isinstance(y, Tensor)]
                for x, value in zip(outs, leaves, strict=True):
                    x.host_value = value  # type: ignore[attr-defined]
        elif mutable:
            for argument, given in zip(func._schema.arguments, args, strict=False):
                if argument.alias_info is not None and argument.alias_info.is_write:
                    for x in tree.tree_leaves(given):
                        value = getattr(x, "host_value", None)
                        if value is not None:
                            self._stale[value.untyped_storage()._cdata] = value


class _FusedAttention(torch.autograd.Function):
    """Attention as CUDA has it: one kernel forward, one backward, which keep the output and a number a query."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, launch: Any) -> Tensor:
        rows, heads, queries, _ = q.shape
        out = q.new_empty(rows, queries, heads, v.shape[-1]).transpose(1, 2)
        ctx.launch = launch
        launch("attention")
        kept = (q, k, v, out, q.new_empty(rows, heads, queries, dtype=torch.float32))
        ctx.save_for_backward(*kept, *([] if mask is None else [mask]))
        return out

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, *_ = ctx.saved_tensors
        ctx.launch("attention, backward")
        # The accumulator of the queries' gradient is float32.
        _accumulator, of_q = torch.empty_like(q, dtype=torch.float32), torch.empty_like(q)
        groups = q.shape[1] // k.shape[1]
        of_k, of_v = (x.new_empty(x.shape[0], q.shape[1], *x.shape[2:]) for x in (k, v))
        if groups > 1:
            of_k, of_v = (x.unflatten(1, (-1, groups)).sum(2) for x in (of_k, of_v))
        return of_q, of_k, of_v, None, None


class _Kernel:
    """In the place of a Triton kernel, which the CPU build lacks."""

    def __init__(self, launch: Any, name: str) -> None:
        self.launch, self.name = launch, name

    def __getitem__(self, grid: Any) -> Any:
        return lambda *args, **kwargs: self.launch(self.name)


@contextmanager
def rehearsed() -> Iterator[Rehearsal]:
    """While open, tensors on "gpu" are fake, and every operation on them is counted."""
    from trl.kernels import chunked_logprob

    mode, addmm_of_trl = Rehearsal(), chunked_logprob._addmm_fp32

    def launch(name: str) -> None:
        mode.kernels[name] += 1

    def tensor(data: Any, *, dtype: Any = None, device: Any = None, requires_grad: bool = False, **_: Any) -> Tensor:
        """torch.tensor, which cannot make tensors of this device itself."""
        if any(isinstance(x, Tensor) for x in (data if isinstance(data, list | tuple) else [data])):
            return made_of_numbers(data, dtype=dtype, device=device)
        with _disable_current_modes():
            made = made_of_numbers(data, dtype=dtype)
            if on_gpu(device):
                mode.copies[f"to the device at {site()}"] += 1
                made = mode.fake(made)
        return made.requires_grad_() if requires_grad else made

    def as_list(self: Tensor) -> Any:
        if self.device.type != "gpu":
            return [x.tolist() for x in self] if self.dim() else self.item()
        mode.waits[f"tolist at {site()}"] += 1
        with _disable_current_modes():
            return mode.on_host(self).tolist()

    def attention(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Tensor:
        if not isinstance(q, FakeTensor):
            return attention_of_torch(q, k, v, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa)
        if torch.is_autocast_enabled("gpu"):
            q, k, v = lower(q), lower(k), lower(v)
        if attn_mask is not None and attn_mask.dtype == torch.bool:  # CUDA's kernels add a mask, padded to eighths
            attn_mask = torch.zeros_like(attn_mask, dtype=q.dtype).masked_fill_(attn_mask.logical_not(), float("-inf"))
            attn_mask = nn.functional.pad(attn_mask, (0, -attn_mask.shape[-1] % 8))
        return _FusedAttention.apply(q, k, v, attn_mask, launch)

    def unmoved(self: nn.Module, *args: Any, **kwargs: Any) -> nn.Module:
        """Module.to that leaves a module alone where nothing moves: fake parameters cannot be set."""
        device, dtype, _, _ = torch._C._nn._parse_to(*args, **kwargs)
        for p in (*self.parameters(), *self.buffers()):
            same = dtype is None or not p.is_floating_point() or p.dtype == dtype
            if not same or (device is not None and p.device.type != device.type):
                return module_to(self, *args, **kwargs)
        return self

    def widened(self: nn.Module) -> nn.Module:
        """Module.float, which cannot exchange a fake parameter's data; tied parameters stay tied."""
        made: dict[int, nn.Parameter] = {}
        for module in self.modules():
            for name, p in list(module._parameters.items()):
                if p is not None and p.is_floating_point() and p.dtype != torch.float32:
                    made.setdefault(id(p), nn.Parameter(p.detach().to(torch.float32), p.requires_grad))
                    module._parameters[name] = made[id(p)]
        return self

    def item(self: Tensor, key: Any) -> Any:
        return item_of(self, tensor(key, device=self.device) if isinstance(key, list) else key)

    def addmm(out: Tensor, *args: Any) -> None:
        if isinstance(out, FakeTensor):
            launch("addmm into float32")
        else:  # as where a small model of the architecture is tried on the host
            addmm_of_trl(out, *args)

    class Triton:
        cdiv = staticmethod(lambda a, b: -(-a // b))

    replaced: list[tuple[Any, str, Any]] = [
        (torch, "tensor", tensor),
        (torch.UntypedStorage, "resize_", lambda storage, size: mode.resize(storage, size)),
        (torch, "clear_autocast_cache", _lowered.clear),
        (FakeTensor, "tolist", as_list),
        (FakeTensor, "__getitem__", item),
        (nn.functional, "scaled_dot_product_attention", attention),
        (nn.Module, "to", unmoved),
        (nn.Module, "float", widened),
        (chunked_logprob, "_use_triton", lambda device: device.type == "gpu"),
        (chunked_logprob, "_forward_kernel", _Kernel(launch, "log-prob kernel")),
        (chunked_logprob, "_backward_kernel", _Kernel(launch, "log-prob kernel, backward")),
        (chunked_logprob, "_addmm_fp32", addmm),
        (chunked_logprob, "triton", Triton),
    ]
    with ExitStack() as stack:
        for place, name, new in replaced:
            stack.enter_context(mock.patch.object(place, name, new, create=True))
        stack.enter_context(FAKE)
        stack.enter_context(mode)
        yield mode


def model(mode: Rehearsal, size: str, layers: int | None = None, dtype: str = "bfloat16") -> Any:
    """A model of this size on the device."""
    from shapes import shape
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        made = AutoModelForCausalLM.from_config(shape(size, layers), dtype=getattr(torch, dtype))
    made = made.to_empty(device=GPU)
    made.tie_weights()
    for tensor in (*made.parameters(), *made.buffers()):
        mode.hold(tensor)
    return made
