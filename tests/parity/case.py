"""One case of a golden file: its options, the tensors built from its inputs, and what a kernel made of them."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from stages.errors import BadInput

DTYPES = {
    name: getattr(torch, name) for name in ("float64", "float32", "bfloat16", "float16", "int64", "int32", "bool")
}
GRADIENT = "grad_wrt_"


@dataclass(frozen=True)
class Case:
    """args as recorded; inputs as tensors, or a list of them where the recorded lists are ragged; None stays None.

    chunk_tokens: None runs the kernels in one piece, a number in chunks of that many tokens.
    """

    fn: str
    args: Mapping[str, Any]
    inputs: Mapping[str, Any]
    chunk_tokens: int | None = None

    def optional(self, name: str) -> Any:
        """The input, or None if the case does not have it."""
        return self.inputs.get(name)


@dataclass(frozen=True)
class Outcome:
    """loss: None where the case is about state. state: further results under the names of the golden file."""

    loss: Tensor | None = None
    metrics: Mapping[str, Any] = field(default_factory=dict)
    state: Mapping[str, Any] = field(default_factory=dict)


Runner = Callable[[Case], Outcome]


def load_case(recorded: Mapping[str, Any], chunk_tokens: int | None) -> Case:
    """Fresh tensors for one run; those whose gradient is recorded want one. Raises BadInput for an unknown dtype."""
    wanted = {key.removeprefix(GRADIENT) for key in recorded["expected"] if key.startswith(GRADIENT)}
    inputs = {
        name: _input(name, value, recorded["input_dtypes"].get(name), name in wanted)
        for name, value in recorded["inputs"].items()
    }
    return Case(recorded["fn"], recorded["args"], inputs, chunk_tokens)


def _input(name: str, value: Any, dtype: str | None, wants_gradient: bool) -> Any:
    if value is None or dtype in ("none", "int"):
        return value
    if dtype not in DTYPES:
        raise BadInput(f"input {name} has dtype {dtype!r}; known are {', '.join(DTYPES)}, int and none")
    return _tensor(_numbers(value), DTYPES[dtype], wants_gradient)


def _tensor(value: Any, dtype: torch.dtype, wants_gradient: bool) -> Any:
    if value is None:
        return None
    try:
        return torch.tensor(value, dtype=dtype).requires_grad_(wants_gradient)
    except (TypeError, ValueError, RuntimeError):  # ragged lists, or None among them
        if not isinstance(value, list):
            raise
        return [_tensor(item, dtype, wants_gradient) for item in value]


def _numbers(value: Any) -> Any:
    """Strings such as "NaN" and "-Infinity" as floats."""
    if isinstance(value, list):
        return [_numbers(item) for item in value]
    return float(value) if isinstance(value, str) else value


def sequences(values: Any, count: int) -> list[Any]:
    """One entry a sequence; an absent stream is absent from each."""
    return [None] * count if values is None else list(values)
