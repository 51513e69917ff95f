"""The gradients are those of every row, of the right tokens, and of the adapter.

The oracles are autograd and central differences; the checks and their bounds are this project's own.
"""

from collections import Counter
from collections.abc import Callable, Sequence

import torch
from jaxtyping import Float
from torch import Tensor

from stages.probe.adapters.attach import in_float32
from stages.probe.adapters.targets import target_linears
from stages.probe.checks.check import Check, judged
from stages.probe.directions.extraction import Direction
from stages.probe.gradients.reference_gradients import reference_gradient, reference_log_probs
from stages.probe.gradients.student import Student
from stages.probe.pool.tokens import TokenRow
from stages.runs.records import Row

Measure = Callable[[Sequence[TokenRow]], Float[Tensor, "B N"]]
Score = Callable[[Sequence[TokenRow]], list[Float[Tensor, " own"]]]
MAX_ROW_ERROR, MAX_SUM_ERROR, MAX_SLOPE_ERROR = 1e-4, 1e-5, 0.05
MAX_LOGP_GAP = 0.02
STEP = 1e-2


def coverage(rows: Sequence[Row], planned: int, loss: str) -> Check:
    """Every planned row was measured or says why not; under the loss `nll` no row is skipped for its reward."""
    reasons = Counter(row["null_reason"] for row in rows if row["null_reason"])
    measured = sum(row["cos_S_contrib"] is not None for row in rows)
    skipped = reasons["zero_adv"] if loss == "nll" else 0
    holds = (
        len(rows) == planned and skipped == 0 and measured + reasons.total() == planned and measured >= 0.9 * planned
    )
    shown = ", ".join(f"{name} {count}" for name, count in sorted(reasons.items())) or "no nulls"
    share = measured / max(planned, 1)
    return Check("coverage", "R2", judged(holds), share, ">= .9, none for a zero advantage", f"{planned} rows; {shown}")


def canary(student: Student, rows: Sequence[TokenRow], direction: Direction, measure: Measure) -> Check:
    """Gradients from one backward pass equal those from a pass of their own, in sum and in their slope along v.

    The slope is checked against central differences of the loss. The passes of their own run the adapter as a path
    beside the clean weights, wherever it stands.
    """
    together = measure(rows)
    student.folded.restore()
    with in_float32(student.model):
        separate = torch.stack([reference_gradient(student.model, student.adapter, row).cpu() for row in rows])
    student.folded.refold()
    error = _relative_error(together, separate)
    total = _relative_error(together.sum(0), separate.sum(0))
    slope, expected = _slope(student, rows, direction), float(together.sum(0) @ direction.unit)
    off = abs(slope - expected) / max(abs(slope), abs(expected), 1e-12)
    holds = error <= MAX_ROW_ERROR and total <= MAX_SUM_ERROR and off <= MAX_SLOPE_ERROR and slope * expected > 0
    detail = f"sum off by {total:.1g}, slope along v {expected:.4g}, by differences {slope:.4g}"
    return Check("canary", "T2", judged(holds), error, f"rows <= {MAX_ROW_ERROR:g}, slope within 5 %", detail)


def _relative_error(value: Tensor, expected: Tensor) -> float:
    return float((value - expected).abs().max() / expected.abs().max().clamp(min=1e-30))


def _slope(student: Student, rows: Sequence[TokenRow], direction: Direction) -> float:
    """The derivative of the summed loss along v by central differences.

    v has norm 1 in each module, so with two modules a Linear (both halves of a LoRA) a step is shorter in each.
    """
    share = min(1.0, len(target_linears(student.model)) / max(len(direction.modules), 1)) ** 0.5
    start, step = student.adapter.theta.clone(), STEP * student.weight_scale() * share
    losses = []
    for sign in (1, -1):
        student.move_to(start + sign * step * direction.unit.to(start))
        losses.append(sum(float(-logps.sum()) for logps in student.log_probs(rows)))
    student.move_to(start)
    return (losses[0] - losses[1]) / (2 * step)


def masks(
    student: Student, rows: Sequence[Row], tokens: Sequence[TokenRow], score: Score, own_model: str | None
) -> Check:
    """The tokens that are scored are the answer's own, all of them and no pads.

    Their log-probs (`score`, rows batched and padded) equal those of a pass over each unpadded row and, where the
    student `own_model` wrote the row at temperature 1, those that it reported while sampling.
    """
    scored = score(tokens)
    faults = Counter(
        fault for row, ids, logps in zip(rows, tokens, scored, strict=True) for fault in _mask_faults(row, ids, logps)
    )
    with in_float32(student.model):
        exact = [reference_log_probs(student.model, row) for row in tokens]
    gap = max(_gap(logps, expected) for logps, expected in zip(scored, exact, strict=True))
    sampled = [
        index
        for index, row in enumerate(rows)
        if row["gen_model"] == own_model and row["gen_temperature"] == 1.0 and row["behav_logp"]
    ]
    reported = max((_gap(scored[index], behaviour_log_probs(rows[index])) for index in sampled), default=0.0)
    faults["log-probs differ from one row's pass"] += gap > MAX_LOGP_GAP
    faults["log-probs differ from the generator's"] += reported > MAX_LOGP_GAP
    shown = ", ".join(sorted(+faults)) or f"{len(rows)} rows"
    detail = f"{shown}; {len(sampled)} rows of the student's own, off by {reported:.2g} nats a token"
    return Check("masks", "T2", judged(not +faults), max(gap, reported), f"<= {MAX_LOGP_GAP} nats, no fault", detail)


def _mask_faults(row: Row, tokens: TokenRow, logps: Float[Tensor, " own"]) -> list[str]:
    own = [token for token, is_own in zip(tokens.completion_ids, tokens.own, strict=True) if is_own]
    last_is_end = not row["ends_with_eos"] or tokens.own[-1]
    return [
        name
        for name, faulty in (
            ("number of scored tokens", len(logps) != row["n_loss_tokens"] or len(own) != row["n_loss_tokens"]),
            ("length", len(tokens.completion_ids) != row["comp_len"]),
            ("end token left out", not last_is_end),
        )
        if faulty
    ]


def behaviour_log_probs(row: Row) -> Float[Tensor, " own"]:
    """The log-probs in nats of a pool row's own tokens, as the policy that sampled them reported."""
    return torch.tensor([logp for logp in row["behav_logp"] if logp is not None])


def _gap(logps: Float[Tensor, " own"], expected: Float[Tensor, " own"]) -> float:
    return float("inf") if len(logps) != len(expected) else float((logps - expected).abs().mean())
