"""One golden case: its options, the tensors built from its inputs, and how numbers are compared with the recorded ones.

Every recorded loss, gradient, metric and state value is compared. NaN must be NaN: kernels return what upstream
returns (in gradients, see Tolerance).
"""

import json
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

GOLDEN = Path(__file__).parent / "golden"
FLOAT32_BY_DESIGN = ("TAID", "KDLoss", "_chunked_divergence_loss")
"""Starts of names of functions whose arithmetic is float32 whatever the dtype of the inputs."""
GRADIENT = "grad_wrt_"


@dataclass(frozen=True)
class Tolerance:
    """How far a number may be from the recorded one: absolute + relative * |recorded|.

    zero_meets_nan: for gradients. Upstream drops masked tokens after the divergence, so that 0 * inf can give them a
    NaN gradient under a sound loss; our kernels leave such tokens out, and their gradient is 0. Either is accepted.
    """

    relative: float
    absolute: float
    zero_meets_nan: bool = False

    def accepts(self, got: float, expected: float) -> bool:
        """Finite numbers within the tolerance; NaN for NaN and an infinity for itself."""
        if not math.isfinite(expected):
            same = got == expected or (math.isnan(got) and math.isnan(expected))
            return same or (self.zero_meets_nan and math.isnan(expected) and got == 0.0)
        return abs(got - expected) <= self.absolute + self.relative * abs(expected)


FLOAT64 = Tolerance(1e-10, 1e-12)
FLOAT32 = Tolerance(2e-5, 2e-6)
BFLOAT16 = Tolerance(2e-2, 1e-3)


@dataclass(frozen=True)
class Case:
    """args as recorded; inputs as tensors, or a list of them where the recorded lists are ragged; None stays None.

    chunk_tokens: None leaves the size of a chunk to the kernel, a number makes chunks of that many tokens.
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


def recorded_cases(folder: Path = GOLDEN) -> Iterator[tuple[str, Any]]:
    """The name of each golden file with each of its cases."""
    for file in sorted(folder.glob("*.json")):
        yield from ((file.name, case) for case in json.loads(file.read_text())["cases"])


def load_case(recorded: Mapping[str, Any], chunk_tokens: int | None = None) -> Case:
    """Fresh tensors for one run; those whose gradient is recorded want one."""
    wanted = {key.removeprefix(GRADIENT) for key in recorded["expected"] if key.startswith(GRADIENT)}
    inputs = {
        name: value
        if value is None or recorded["input_dtypes"][name] in ("none", "int")
        else _tensor(_numbers(value), getattr(torch, recorded["input_dtypes"][name]), name in wanted)
        for name, value in recorded["inputs"].items()
    }
    return Case(recorded["fn"], recorded["args"], inputs, chunk_tokens)


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


def differences(recorded: Mapping[str, Any], runner: Runner, chunk_tokens: int | None = None) -> Iterator[str]:
    """A sentence for every recorded value that the runner does not meet."""
    case = load_case(recorded, chunk_tokens)
    for path, got, wanted, allowed in _values(case, runner(case), recorded["expected"], _tolerance(recorded)):
        if difference := _compare(path, _plain(got), wanted, allowed):
            yield difference


def _values(
    case: Case, outcome: Outcome, expected: Mapping[str, Any], tolerance: Tolerance
) -> Iterator[tuple[str, Any, Any, Tolerance]]:
    """(path, ours, recorded, tolerance) of all that is recorded, but no gradients where the recorded loss is NaN."""
    yield "loss", outcome.loss, expected["loss"], tolerance
    names = [key.removeprefix(GRADIENT) for key in expected if key.startswith(GRADIENT)]
    if names and not _has_nan(expected["loss"]):
        for name, gradient in zip(names, _gradients(outcome.loss, [case.inputs[name] for name in names]), strict=True):
            yield GRADIENT + name, gradient, expected[GRADIENT + name], replace(tolerance, zero_meets_nan=True)
    looser = FLOAT32 if tolerance == FLOAT64 else tolerance
    for key, value in (expected.get("metrics") or {}).items():
        yield f"metrics {key}", outcome.metrics[key], value, looser
    for key, value in expected.items():
        if key not in ("loss", "metrics") and not key.startswith(GRADIENT):
            yield key, outcome.state[key], value, looser


def _gradients(loss: Tensor | None, inputs: list[Any]) -> list[Any]:
    """Of the loss's sum; zeros where the loss does not depend on an input. A list of tensors gives a list."""
    assert loss is not None, "the runner gives no loss, but gradients are recorded"
    leaves = [leaf for value in inputs for leaf in (value if isinstance(value, list) else [value])]
    given = torch.autograd.grad(loss.sum(), leaves, allow_unused=True) if loss.requires_grad else [None] * len(leaves)
    grads = iter(torch.zeros_like(leaf) if grad is None else grad for leaf, grad in zip(leaves, given, strict=True))
    return [[next(grads) for _ in value] if isinstance(value, list) else next(grads) for value in inputs]


def _tolerance(recorded: Mapping[str, Any]) -> Tolerance:
    """By the dtype of the inputs that carry the gradient; of every input where none does."""
    dtypes = recorded["input_dtypes"]
    carriers = {dtypes[key.removeprefix(GRADIENT)] for key in recorded["expected"] if key.startswith(GRADIENT)} or set(
        dtypes.values()
    )
    if carriers & {"bfloat16", "float16"}:
        return BFLOAT16
    return FLOAT32 if "float32" in carriers or recorded["fn"].startswith(FLOAT32_BY_DESIGN) else FLOAT64


def _has_nan(value: Any) -> bool:
    return any(map(_has_nan, value)) if isinstance(value, list) else value == "NaN"


def _plain(value: Any) -> Any:
    """Tensors as nested lists of numbers."""
    if hasattr(value, "tolist"):
        return value.tolist()
    return [_plain(item) for item in value] if isinstance(value, (list, tuple)) else value


def _compare(path: str, got: Any, expected: Any, tolerance: Tolerance) -> str | None:
    """A sentence about the first difference, or None."""
    if isinstance(expected, list) and isinstance(got, list):
        if len(got) != len(expected):
            return f"{path} has {len(got)} entries where {len(expected)} are recorded"
        pairs = enumerate(zip(got, expected, strict=True))
        return next((text for i, pair in pairs if (text := _compare(f"{path}[{i}]", *pair, tolerance))), None)
    if expected is None or got is None or isinstance(expected, list) or isinstance(got, list):
        same = expected is None and got is None
        return None if same else f"{path} is {str(got)[:60]} where {str(expected)[:60]} is recorded"
    if tolerance.accepts(float(got), float(expected)):
        return None
    return f"{path} is {float(got)!r} where {float(expected)!r} is recorded"
