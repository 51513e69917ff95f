"""Probe rows: the metrics of pool rows' gradients, with a reason where one is null.

The columns beside the metrics of `metrics` are those of the public pool of wassname/vGROUT_pub @c067218 and this
project's additions. Shapes: B rows of a step, R rows of a store, N numbers.
"""

from collections.abc import Mapping, Sequence

import torch
from jaxtyping import Float
from torch import Tensor

from stages.probe.directions.extraction import FLOOR, Direction
from stages.probe.directions.metrics import row_metrics
from stages.probe.directions.streamed import stream
from stages.probe.gradients.student import Student
from stages.probe.pool.step_files import finite_or_none
from stages.probe.pool.tokens import TokenRow, as_tokens
from stages.runs.probe_records import PROBE_ROW
from stages.runs.records import Row


def probe_rows(
    rows: Sequence[Row],
    tokens: Sequence[TokenRow],
    sums: Float[Tensor, "B N"],
    logps: Sequence[Tensor],
    direction: Direction,
) -> list[Row]:
    """The `probe_row/1` of pool rows, with the step's own columns still null.

    `sums` are the rows' token-sum gradients, `logps` the log-probs in nats of their own tokens. Metrics are those of
    the gradient of the mean NLL a token.
    """
    return rows_of_metrics(rows, tokens, row_metrics(sums, direction), logps, len(direction.modules))


def rows_of_metrics(
    rows: Sequence[Row],
    tokens: Sequence[TokenRow],
    metrics: Mapping[str, Float[Tensor, " B"]],
    logps: Sequence[Tensor],
    num_modules: int,
) -> list[Row]:
    """The same from `row_metrics` of the rows' token-sum gradients, along a direction in so many modules."""
    lengths = torch.tensor([float(row.num_own) for row in tokens])
    by_token = {name: metrics[name] / lengths for name in ("grad_dot", "grad_norm")}  # the others are shares
    scaled = {**metrics, **by_token}
    return [
        dict.fromkeys(PROBE_ROW.columns)
        | row
        | _measured(scaled, index, logps[index], num_modules)
        | {"imp_ratio": _importance_ratio(row, logps[index])}
        for index, row in enumerate(rows)
    ]


def _measured(metrics: dict[str, Tensor], index: int, logps: Tensor, num_modules: int) -> Row:
    values = {name: finite_or_none(column[index]) for name, column in metrics.items()}
    mean = float(logps.double().mean())
    reason = None
    if values["norm_weighted_cos"] is None:
        reason = "no_direction" if num_modules == 0 else "zero_grad"
    return {
        "cos_S_contrib": values["norm_weighted_cos"],
        **{name: values[name] for name in ("cos_stack", "cos_global", "energy", "hackfrac", "grad_dot")},
        "cos_first128": values["cos_stack"],
        "grad_norm_contrib": values["grad_norm"],
        "per_sample_loss": -mean,
        "logp_mean": mean,
        "n_modules_v": num_modules,
        "null_reason": reason,
    }


def _importance_ratio(row: Row, logps: Tensor) -> float | None:
    """The geometric mean over own tokens of pi / behaviour; None where the generator's log-probs are unknown."""
    behaviour = [logp for logp in row["behav_logp"] or [] if logp is not None]
    if len(behaviour) != len(logps):
        return None
    return finite_or_none((logps.double() - torch.tensor(behaviour, dtype=torch.float64)).mean().exp())


def set_first_token_cosines(
    student: Student, rows: list[Row], tokens: Sequence[TokenRow], direction: Direction, count: int
) -> None:
    """Set cos_first128 of rows with more than `count` completion tokens, by a backward pass of their first `count`.

    Length cannot explain a difference in it.
    """
    long = [index for index, row in enumerate(tokens) if len(row.completion_ids) > count and any(row.own[:count])]
    if not long:
        return
    cosines = stream(student, [tokens[index].first(count) for index in long], direction, [0.0] * len(long)).metrics[
        "cos_stack"
    ]
    for place, index in enumerate(long):
        rows[index]["cos_first128"] = finite_or_none(cosines[place])


def mean_weights(tokens: Sequence[TokenRow], indices: Sequence[int]) -> Float[Tensor, " B"]:
    """Weights of token-sum gradients that give the mean, over the rows with these indices, of the mean NLL's gradient.

    Zeros without any such row.
    """
    weights = torch.zeros(len(tokens))
    for index in indices:
        weights[index] = 1 / (tokens[index].num_own * len(indices))
    return weights


def teacher_gradients(rows: Sequence[Row], sums: Float[Tensor, "R N"]) -> list[Float[Tensor, " N"]]:
    """Each step's mean gradient over the teacher's rows, of the steps that have any; `sums` are the store's rows."""
    means = []
    for step in sorted({row["step"] for row in rows}):
        teacher = [row for row in rows if row["step"] == step and row["src_pool"] == "teacher"]
        if teacher:
            step_sums = sums[[row["grad_store_offset"] for row in teacher]].float()
            weights = mean_weights([as_tokens(row) for row in teacher], range(len(teacher)))
            means.append(weights @ step_sums)
    return means


def step_facts(rows: Sequence[Row], gradient: Float[Tensor, " N"], theta: Float[Tensor, " N"]) -> Row:
    """A step's rates of hacks, right answers and nulls, and its mean cos_stack by source."""
    sources = sorted({row["src_pool"] for row in rows})
    by_source = {s: _mean([r["cos_stack"] for r in rows if r["src_pool"] == s]) for s in sources}
    student = [row for row in rows if row["src_pool"] == "student"]
    return {
        "cos_by_source": by_source,
        "delta_S_norm": float(theta.norm()),
        "zero_gradient": float(gradient.norm()) <= FLOOR,
        "hack_rate_all": _mean([row["hacked"] for row in rows]),
        "hack_rate_student": _mean([row["hacked"] for row in student]),
        "gt_rate_student": _mean([row["gt_pass"] for row in student]),
        "null_rate": sum(row["cos_S_contrib"] is None for row in rows) / max(len(rows), 1),
        "null_reasons": sorted({row["null_reason"] for row in rows if row["null_reason"]}),
    }


def _mean(values: Sequence[float | bool | None]) -> float | None:
    known = [float(value) for value in values if value is not None]
    return sum(known) / len(known) if known else None
