"""Checks of the measured gradients: every row has one, of the right tokens (T2).

Bounds and controls are this project's own unless a source is named. Thresholds: docs/probe-method.md.
"""

from collections import Counter
from collections.abc import Callable, Sequence

import torch
from jaxtyping import Float
from torch import Tensor

from composer_stages.gradients.basis import A_HALF, in_float32, target_linears
from composer_stages.gradients.per_row import MeasuredStudent, TokenRow, reference_gradient, reference_log_probs
from composer_stages.probe.checks.check import Finding, declared, failing
from composer_stages.probe.direction import Direction
from composer_stages.runs.kinds import Row
from composer_stages.words import Sentence

MAX_ERROR, MAX_SLOPE_ERROR, MAX_LOGP_GAP = 1e-3, 0.05, 0.02
"""Rounding in float32 grows with the layers: on the 30 of SmolLM2 rows differ by 1.5e-4 and their sum by 2e-4, as much
in passes of one row each, and with weights in float64 by 1e-7. A mask, a prompt or an adapter that is left out is off
by far more than 1e-3."""
STEP = 1e-2
"""The canary's longer finite difference, as a share of the weights' typical singular value."""
RowGradients = Callable[[Sequence[TokenRow]], Float[Tensor, "B N"]]
RowLogProbs = Callable[[Sequence[TokenRow]], list[Float[Tensor, " own"]]]


@declared("coverage")
def coverage(rows: Sequence[Row], planned: int) -> Finding:
    """Check that every planned row was measured or has a reason; a zero advantage is no reason."""
    reasons = Counter(row["null_reason"] for row in rows if row["null_reason"])
    measured = sum(row["cos_S_contrib"] is not None for row in rows)
    complete = len(rows) == measured + reasons.total() == planned and not reasons["zero_adv"]
    reason = ", ".join(f"{name} {count}" for name, count in sorted(reasons.items())) or "no nulls"
    share = measured / max(planned, 1)
    return Finding(complete and measured >= 0.9 * planned, share, f"{planned} rows; {reason}")


@declared("canary")
def canary(student: MeasuredStudent, rows: Sequence[TokenRow], direction: Direction, measure: RowGradients) -> Finding:
    """Check the gradients of one backward pass against one pass for each row, in sum and in their slope along v.

    The oracles are autograd and, for the slope, two central differences of the loss, extrapolated to a step of 0. The
    separate passes run the adapter as a path parallel to the clean weights, whether or not it is folded into them.
    """
    together = measure(rows)
    # The oracle runs the adapter as a path, so the weights must not contain its change.
    student.folded.restore()
    with in_float32(student.model):
        separate = torch.stack([reference_gradient(student.model, student.adapter, row).cpu() for row in rows])
    student.folded.refold()
    error, total = (
        float((measured - expected).abs().max() / expected.abs().max().clamp(min=1e-30))
        for measured, expected in ((together, separate), (together.sum(0), separate.sum(0)))
    )
    # v has norm 1 in each module, so with two modules a Linear (both halves of a LoRA) a step is shorter in each.
    share = min(1.0, len(target_linears(student.model)) / max(len(direction.modules), 1)) ** 0.5
    start, step = student.adapter.theta.clone(), STEP * student.weight_scale() * share
    slopes = []
    for length in (step, step / 2):
        losses = []
        for sign in (1, -1):
            student.move_to(start + sign * length * direction.unit.to(start))
            losses.append(sum(float(-logps.sum()) for logps in student.log_probs(rows)))
        slopes.append((losses[0] - losses[1]) / (2 * length))
    student.move_to(start)
    # Richardson's extrapolation of two central differences: one alone was 8 % off on the 30 layers of SmolLM2, this is
    # off by .07 %. Qwen3's RMSNorm computes in float32 whatever the model's type: a much smaller step would be lost in
    # rounding.
    slope, expected = (4 * slopes[1] - slopes[0]) / 3, float(together.sum(0) @ direction.unit)
    off = abs(slope - expected) / max(abs(slope), abs(expected), 1e-12)
    holds = max(error, total) <= MAX_ERROR and off <= MAX_SLOPE_ERROR and slope * expected > 0
    detail = Sentence("probe.checks.canary", total=total, expected=expected, slope=slope)
    return Finding(holds, error, detail)


@declared("masks")
def masks(
    student: MeasuredStudent, rows: Sequence[Row], tokens: Sequence[TokenRow], score: RowLogProbs, own_model: str | None
) -> Finding:
    """Check that the scored tokens are the answer's own, all of them and no pads.

    Their log-probs (`score`, rows batched and padded) equal those of a pass over each unpadded row and, where the
    student `own_model` sampled the row at temperature 1, those of the sampler.
    """
    # Log-probs decide: with a mask that is off by one token, gradients still have a cosine of .90 to .98 to the right
    # ones; counted pads lower it to 0 to .54.
    scored, faults = score(tokens), Counter[str]()
    for row, ids, logps in zip(rows, tokens, scored, strict=True):
        num_own = sum(bool(flag) for flag in ids.own)
        faults["number of scored tokens"] += {len(logps), num_own} != {row["n_loss_tokens"]}
        faults["length"] += len(ids.completion_ids) != row["comp_len"]
        faults["end token left out"] += bool(row["ends_with_eos"]) and not ids.own[-1]
    with in_float32(student.model):
        exact = [reference_log_probs(student.model, row) for row in tokens]
    gap = max(_gap(logps, expected) for logps, expected in zip(scored, exact, strict=True))
    # Only at temperature 1 are the sampler's log-probs those of the model's distribution.
    sampled = [
        index
        for index, row in enumerate(rows)
        if row["gen_model"] == own_model and row["gen_temperature"] == 1.0 and row["behav_logp"]
    ]
    reported = max((_gap(scored[index], behaviour_log_probs(rows[index])) for index in sampled), default=0.0)
    faults["log-probs differ from one row's pass"] += gap > MAX_LOGP_GAP
    faults["log-probs differ from the generator's"] += reported > MAX_LOGP_GAP
    summary = ", ".join(sorted(+faults)) or f"{len(rows)} rows"
    detail = f"{summary}; {len(sampled)} rows of the student's own, off by {reported:.2g} nats a token"
    return Finding(not +faults, max(gap, reported), detail)


def behaviour_log_probs(row: Row) -> Float[Tensor, " own"]:
    """Return the sampler's log-probs in nats of a pool row's own tokens."""
    return torch.tensor([logp for logp in row["behav_logp"] if logp is not None])


def _gap(logps: Float[Tensor, " own"], expected: Float[Tensor, " own"]) -> float:
    return float("inf") if len(logps) != len(expected) else float((logps - expected).abs().mean())


@declared("lora-B")
def b_is_probed(sums: Float[Tensor, "B N"], direction: Direction) -> Finding:
    """Check that a LoRA at B = 0 has no gradient on any A, and that v has a norm in every B and no part on an A.

    At B = 0, where PEFT starts, the gradient of A is exactly 0, so features are those of B alone, as in GRIFT (arXiv
    2604.16242).
    """
    parts = direction.layout.split(sums)
    halves = [name for name in parts if name.endswith(A_HALF)]
    largest = max((float(parts[name].abs().max()) for name in halves), default=0.0)
    on_a = [name for name in direction.modules if name.endswith(A_HALF)]
    bare = [name for name in parts if not name.endswith(A_HALF) and name not in direction.modules]
    errors = failing(
        {
            "gradients of A are not 0": largest > 0,
            f"v has {len(on_a)} modules on A": bool(on_a),
            f"{len(bare)} Bs without v": bool(bare),
        }
    )
    detail = ", ".join(errors) or f"{len(halves)} halves A, {len(direction.modules)} modules of v"
    return Finding(not errors, largest, detail)


@declared("T2")
def rows_are_measured(rows: Sequence[Row], guards: Sequence[Row]) -> Finding:
    """Check T2: a finite cosine on 90 % of the vanilla rows, gradients above zero, and all guards of the replay."""
    finite = sum(row["cos_S_contrib"] is not None for row in rows) / max(len(rows), 1)
    smallest = min((row["grad_norm_contrib"] for row in rows if row["grad_norm_contrib"] is not None), default=0.0)
    failed = [guard["check"] for guard in guards if guard["status"] != "PASS"]
    detail = f"{len(rows)} rows, smallest gradient {smallest:.3g}"
    if failed:
        detail += f"; guards not passed: {', '.join(failed)}"
    return Finding(finite >= 0.9 and smallest > 0 and not failed, finite, detail)
