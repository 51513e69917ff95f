"""One golden case held against what a function makes of its inputs: a kernel of ours, or upstream's own (against.py).

Every recorded loss, gradient, metric and state value is compared; kernels once in one piece and once in chunks of
tokens. NaN must be NaN: kernels return what upstream returns, unless an option of ours asks for better (in gradients,
see Tolerance).
"""

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from parity import FLOAT32_BY_DESIGN, RUNNERS
from parity.case import GRADIENT, Case, Outcome, Runner, load_case

GOLDEN = Path(__file__).parent / "golden"
CHUNKS = (None, 2)

NOT_CLAIMED = {
    "CTKD": "TAID's repository compares with it; its learned temperature is a model, not a loss",
    "DKD": "TAID's repository compares with it; no channel of ours uses it",
    "ULDLoss.forward": "GOLD's loss across tokenizers; our teachers share the student's tokenizer",
    "compute_forward_kl_topk": "verl's forward KL on an engine's top-k log-probs; no numbers were recorded for it",
}
"""Upstream function -> why it has no kernel. Its cases are skipped with that reason; an unknown function fails."""


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
class CaseResult:
    """What became of one case; reason is empty for a pass."""

    case: str
    status: Literal["passed", "failed", "skipped"]
    reason: str = ""


def check_file(file: Path) -> list[CaseResult]:
    """One result a case; a single failure for a file that cannot be read or holds no cases."""
    try:
        cases = json.loads(file.read_text())["cases"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        return [CaseResult("(file)", "failed", f"not a golden file: {_sentence(error)}")]
    if not isinstance(cases, list) or not cases:
        return [CaseResult("(file)", "failed", "not a golden file: it holds no cases")]
    return [check_case(case) for case in cases]


def check_case(recorded: Any) -> CaseResult:
    """Passed if our kernel meets every recorded value; whatever a kernel raises is a failure."""
    name = str(recorded.get("name", "(unnamed)")) if isinstance(recorded, Mapping) else "(not an object)"
    try:
        fn = recorded["fn"]
        if fn in NOT_CLAIMED:
            return CaseResult(name, "skipped", NOT_CLAIMED[fn])
        difference = next((text for size in CHUNKS for text in differences(recorded, _kernel(fn), size)), None)
    except Exception as error:
        return CaseResult(name, "failed", _sentence(error))
    return CaseResult(name, "failed", difference) if difference else CaseResult(name, "passed")


def _kernel(fn: str) -> Runner:
    if fn not in RUNNERS:
        raise KeyError(f"no kernel for {fn!r}, and no reason for leaving it out")
    return RUNNERS[fn]


def _sentence(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())}"


def differences(recorded: Mapping[str, Any], runner: Runner, chunk_tokens: int | None = None) -> Iterator[str]:
    """A sentence for every recorded value that the runner does not meet."""
    case = load_case(recorded, chunk_tokens)
    outcome = runner(case)
    tolerance, expected = _tolerance(recorded), recorded["expected"]
    form = "" if chunk_tokens is None else f", in chunks of {chunk_tokens} tokens"
    for path, got, wanted, allowed in _values(case, outcome, expected, tolerance):
        difference = _compare(path, _plain(got), wanted, allowed)
        if difference:
            yield difference + form


def _values(
    case: Case, outcome: Outcome, expected: Mapping[str, Any], tolerance: Tolerance
) -> Iterator[tuple[str, Any, Any, Tolerance]]:
    """(path, ours, recorded, tolerance) of all that is recorded, but no gradients where the recorded loss is NaN."""
    yield "loss", outcome.loss, expected["loss"], tolerance
    names = [key.removeprefix(GRADIENT) for key in expected if key.startswith(GRADIENT)]
    if names and not _has_nan(expected["loss"]):
        for name, gradient in zip(names, _gradients(outcome.loss, [case.inputs[name] for name in names]), strict=True):
            yield GRADIENT + name, gradient, expected[GRADIENT + name], replace(tolerance, zero_meets_nan=True)
    for key, value in (expected.get("metrics") or {}).items():
        yield f"metrics {key}", _present(outcome.metrics, key), value, _looser(tolerance)
    for key, value in expected.items():
        if key not in ("loss", "metrics") and not key.startswith(GRADIENT):
            yield key, _present(outcome.state, key), value, _looser(tolerance)


def _present(values: Mapping[str, Any], key: str) -> Any:
    if key not in values:
        raise KeyError(f"the kernel gives no {key!r}; it gives {', '.join(values) or 'nothing of the kind'}")
    return values[key]


def _gradients(loss: Tensor | None, inputs: list[Any]) -> list[Any]:
    """Of the loss's sum; zeros where the loss does not depend on an input. A list of tensors gives a list."""
    if loss is None:
        raise KeyError("the kernel gives no loss, but gradients are recorded")
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
    return FLOAT32 if "float32" in carriers or recorded["fn"] in FLOAT32_BY_DESIGN else FLOAT64


def _looser(tolerance: Tolerance) -> Tolerance:
    return FLOAT32 if tolerance == FLOAT64 else tolerance


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
    return (
        None
        if tolerance.accepts(float(got), float(expected))
        else f"{path} is {float(got)!r} where {float(expected)!r} is recorded"
    )
