"""Metrics of gradients along a direction, the rows of a step, and the drift of the student.

First exact definitions and their values under chance, then the rows of a step, last the drift in the adapter's basis
and in weight space. Only weight space is common to all adapters.

norm_weighted_cos (cos_S_contrib) and hackfrac (there "cin") are quantities of wassname/grpo_proj2 @25ad306; cos_stack,
cos_global, energy, the chance levels and the quantities of drift are this project's own, from the definitions below.
The other columns of a probe row are those of the public pool of wassname/vGROUT_pub @c067218 and this project's
additions.

Shapes: B rows, R rows of a store, T tokens, N numbers, P directions, O outputs and I inputs of a Linear, own: a row's
own tokens. M is the number of modules that have a direction, and all sums run over those.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from composer_stages.gradients.basis import A_HALF, Lora, target_linears
from composer_stages.gradients.per_row import (
    MeasuredStudent,
    Sink,
    TokenRow,
    TotalSink,
    by_length,
    collate,
    mean_weights,
    own_log_probs,
    tapped,
)
from composer_stages.gradients.tensors import Layout, RowFile
from composer_stages.probe.direction import FLOOR, Direction, Placebos
from composer_stages.probe.rows import as_tokens, finite_or_none, mean_known
from composer_stages.runs.kinds import PROBE_ROW, Row

CHUNK_NUMBERS = 2**26
"""Gradients are read from disk in chunks of about this many numbers."""
SUMS = ("all", "inside", "dot", "dot_mean", "along", "toward")
"""The sums of a row in `MetricSums`."""
WeightDirection = dict[str, Float[Tensor, "O I"]]
"""A direction for every adapted weight, by module."""


def row_metrics(gradients: Float[Tensor, "B N"], direction: Direction) -> dict[str, Float[Tensor, " B"]]:
    """Compute each row's metrics by name; NaN where a gradient is 0. Only the first and the last have a unit.

    grad_dot = sum_m <c_m, v_m>, v_m the unit mean direction. norm_weighted_cos = grad_dot / ||c||, at most sqrt(M).
    cos_stack = norm_weighted_cos / sqrt(M), the cosine of the concatenations. cos_global is the cosine with the mean
    differences, not scaled to 1 in each module. energy = sum ||V c||^2 / ||c||^2. hackfrac = ||relu(V c)|| / ||c||.
    grad_norm is the norm over all modules, also those without a direction.
    """
    sums = MetricSums(direction)
    for name, part in direction.layout.split(gradients).items():
        sums(name, part)
    return sums.metrics()


class MetricSums:
    """A sink of per-sample gradients that accumulates the six sums a row of `row_metrics`.

    Only one module's gradients exist at a time, so gradients of any size can be measured.
    """

    def __init__(self, direction: Direction) -> None:
        self._direction = direction
        self._sums: dict[str, Tensor] = {}

    def __call__(self, name: str, contribution: Float[Tensor, "B n"]) -> None:
        """Add one module's gradients."""
        square = contribution.square().sum(-1)
        terms = {"all": square}
        if name in self._direction.axes:
            mean, axes = (part[name].to(contribution) for part in (self._direction.means, self._direction.axes))
            along = contribution @ axes.T
            terms |= {"inside": square, "dot": contribution @ (mean / mean.norm()), "dot_mean": contribution @ mean}
            terms |= {"along": along.square().sum(-1), "toward": along.relu().square().sum(-1)}
        if not self._sums:  # a module without a direction adds to one sum, but all six need the batch's shape
            self._sums = {key: torch.zeros_like(square) for key in SUMS}
        for key, value in terms.items():
            self._sums[key] += value

    def metrics(self) -> dict[str, Float[Tensor, " B"]]:
        """Return the rows' metrics, on the CPU."""
        totals = torch.stack(list(self._sums.values())).cpu() if self._sums else torch.zeros(len(SUMS))
        sums = dict(zip(SUMS, totals, strict=True))
        # Norms over modules with a direction only: modules without one must not lower a cosine.
        squares = [mean.square().sum() for mean in self._direction.means.values()]
        norm, strength = sums["inside"].sqrt(), sum(torch.stack(squares).tolist()) if squares else 0
        weighted = sums["dot"] / norm
        return {
            "grad_dot": sums["dot"],
            "norm_weighted_cos": weighted,
            "cos_stack": weighted / math.sqrt(max(len(self._direction.modules), 1)),
            "cos_global": sums["dot_mean"] / (norm * math.sqrt(strength)),
            "energy": sums["along"] / sums["inside"],
            "hackfrac": sums["toward"].sqrt() / norm,
            "grad_norm": sums["all"].sqrt(),
        }


def module_cosines(gradients: Float[Tensor, "B N"], direction: Direction) -> Float[Tensor, "B M"]:
    """Compute the cosine within each module that has a direction; NaN where a module's gradient is 0."""
    dots = direction.layout.sums(gradients * direction.unit)[:, direction.indices]
    return dots / direction.layout.norms(gradients)[:, direction.indices]


def stacked_cosines(
    gradients: Float[Tensor, "B N"], units: Float[Tensor, "P N"], inside: Float[Tensor, " N"], num_modules: int
) -> Float[Tensor, "B P"]:
    """Compute the cos_stack of many rows with many directions of the same modules, in one pass over a mapped store.

    `units` have norm 1 in each of the `num_modules` modules where `inside` is 1.
    """
    # 268 MB in float32 at a time, read from the mapped file as they are used.
    step = max(1, CHUNK_NUMBERS // max(gradients.shape[-1], 1))
    cosines = []
    for start in range(0, len(gradients), step):
        piece = gradients[start : start + step].to(units.dtype)
        norm = torch.linalg.vector_norm(piece * inside, dim=-1, keepdim=True)
        cosines.append(piece @ units.T / (norm * math.sqrt(num_modules)))
    return torch.cat(cosines)


def chance(gradients: Float[Tensor, "B N"], direction: Direction) -> dict[str, float]:
    """Compute the metrics expected of isotropic random directions, averaged over rows; no units.

    Too small for real gradients, so reported beside placebos. With w_m = ||c_m|| / ||c||, n_m numbers and k_m
    axes in module m: sd(norm_weighted_cos) = sqrt(sum w^2 / n), E[energy] = sum w^2 k / n, and hackfrac about
    sqrt(E[energy] / 2), as half of the signs are positive.
    """
    layout = direction.layout
    squares = layout.norms(gradients)[:, direction.indices].square()
    weights = squares / squares.sum(-1, keepdim=True).clamp(min=FLOOR)
    sizes = torch.tensor([float(layout.sizes[name]) for name in direction.modules])
    axes = torch.tensor([float(len(direction.axes[name])) for name in direction.modules])
    spread = (weights / sizes).sum(-1).sqrt().mean()
    energy = float((weights * axes / sizes).sum(-1).mean())
    return {
        "sd_norm_weighted_cos": float(spread),
        "sd_cos_stack": float(spread) / math.sqrt(len(direction.modules)),
        "energy": energy,
        "hackfrac": math.sqrt(energy / 2),
    }


@dataclass(frozen=True)
class Streamed:
    """The measured rows: `metrics` by name [B] of token-sum gradients, their weighted sum `total`, `logps` in nats."""

    metrics: dict[str, Float[Tensor, " B"]]
    total: Float[Tensor, " N"]
    logps: list[Float[Tensor, " own"]]


def stream(
    student: MeasuredStudent,
    rows: Sequence[TokenRow],
    direction: Direction,
    weights: Sequence[float] | Float[Tensor, " B"],
) -> Streamed:
    """Measure rows against a direction, and sum their token-sum gradients with these weights, in one backward pass.

    No row's gradient is stored, and the result is exact: a row of a LoRA of rank 32 at Qwen3-4B takes 264 MB, a step of
    sixteen 4 GB, but a step only needs six numbers a row and one vector.
    """
    total = TotalSink(student.adapter.layout, torch.as_tensor(weights, dtype=torch.float32), student.device)
    measured: list[tuple[list[int], MetricSums]] = []
    wide = torch.promote_types(next(student.model.parameters()).dtype, torch.float32)
    direction = direction.to(student.device, wide)  # once, and not by module in each batch

    def sink_of(indices: list[int]) -> Sink:
        metrics, add = MetricSums(direction), total.batch_sink(indices)
        measured.append((indices, metrics))

        def both(name: str, contribution: Float[Tensor, "B n"]) -> None:
            metrics(name, contribution)
            add(name, contribution)

        return both

    logps = student.stream(rows, sink_of)
    order = torch.tensor([index for indices, _ in measured for index in indices]).argsort()
    # Batches are in order of length: `order` restores the order of `rows`.
    batches = [metrics.metrics() for _, metrics in measured]
    metrics = {name: torch.cat([part[name] for part in batches])[order] for name in batches[0]}
    return Streamed(metrics, total.total.cpu(), logps)


def probe_rows(
    rows: Sequence[Row],
    tokens: Sequence[TokenRow],
    metrics: Mapping[str, Float[Tensor, " B"]],
    logps: Sequence[Float[Tensor, " own"]],
    direction: Direction,
) -> list[Row]:
    """Build the `probe_row/1` of pool rows, with null in the columns of the step.

    metrics: of the rows' token-sum gradients along the direction (`row_metrics`). logps: the log-probs in nats of the
    rows' own tokens. The columns hold the metrics of the gradient of the mean NLL a token, and a reason for nulls.
    `imp_ratio` is the geometric mean over own tokens of pi / behaviour, null without the generator's log-probs.
    """
    lengths = torch.tensor([float(row.num_own) for row in tokens])
    by_token = {name: metrics[name] / lengths for name in ("grad_dot", "grad_norm")}  # the others are shares
    scaled = {**metrics, **by_token}
    probed = []
    for index, (row, current) in enumerate(zip(rows, logps, strict=True)):
        values = {name: finite_or_none(column[index]) for name, column in scaled.items()}
        mean = float(current.double().mean())
        reason = None
        if values["norm_weighted_cos"] is None:
            reason = "zero_grad" if direction.modules else "no_direction"
        behaviour = [logp for logp in row["behav_logp"] or [] if logp is not None]
        # In float64: the mean of log-ratios of a long answer is small beside the log-probs.
        ratio = None
        if len(behaviour) == len(current):
            ratio = finite_or_none((current.double() - torch.tensor(behaviour, dtype=torch.float64)).mean().exp())
        measured = {
            "cos_S_contrib": values["norm_weighted_cos"],
            **{name: values[name] for name in ("cos_stack", "cos_global", "energy", "hackfrac", "grad_dot")},
            # Of short answers; `set_first_token_cosines` replaces it for longer ones.
            "cos_first128": values["cos_stack"],
            "grad_norm_contrib": values["grad_norm"],
            "per_sample_loss": -mean,
            "logp_mean": mean,
            "n_modules_v": len(direction.modules),
            "null_reason": reason,
            "imp_ratio": ratio,
        }
        probed.append(dict.fromkeys(PROBE_ROW.columns) | row | measured)
    return probed


def set_first_token_cosines(
    student: MeasuredStudent, rows: list[Row], tokens: Sequence[TokenRow], direction: Direction, count: int
) -> None:
    """Set cos_first128 of rows with more than `count` completion tokens by a backward pass of their first `count`.

    This cosine does not depend on the length of the answer.
    """
    long = [index for index, row in enumerate(tokens) if len(row.completion_ids) > count and any(row.own[:count])]
    if not long:
        return
    # Weights of 0: only the metrics are needed, not the sum of gradients.
    cosines = stream(student, [tokens[index].first(count) for index in long], direction, [0.0] * len(long)).metrics[
        "cos_stack"
    ]
    for position, index in enumerate(long):
        rows[index]["cos_first128"] = finite_or_none(cosines[position])


def teacher_gradients(rows: Sequence[Row], sums: Float[Tensor, "R N"]) -> list[Float[Tensor, " N"]]:
    """Return the mean gradient over the teacher's rows of each step that has any; `sums` are the store's rows."""
    means = []
    for step in sorted({row["step"] for row in rows}):
        teacher = [row for row in rows if row["step"] == step and row["src_pool"] == "teacher"]
        if teacher:
            step_sums = sums[[row["grad_store_offset"] for row in teacher]].float()
            weights = mean_weights([as_tokens(row) for row in teacher], range(len(teacher)))
            means.append(weights @ step_sums)
    return means


def step_facts(rows: Sequence[Row], gradient: Float[Tensor, " N"], theta: Float[Tensor, " N"]) -> Row:
    """Return a step's rates of hacks, right answers and nulls, and its mean cos_stack by source."""
    sources = sorted({row["src_pool"] for row in rows})
    by_source = {s: mean_known([r["cos_stack"] for r in rows if r["src_pool"] == s]) for s in sources}
    student = [row for row in rows if row["src_pool"] == "student"]
    return {
        "cos_by_source": by_source,
        "delta_S_norm": float(theta.norm()),
        "zero_gradient": float(gradient.norm()) <= FLOOR,
        "hack_rate_all": mean_known([row["hacked"] for row in rows]),
        "hack_rate_student": mean_known([row["hacked"] for row in student]),
        "hidden_pass_rate_student": mean_known([row["hidden_pass"] for row in student]),
        "null_rate": sum(row["cos_S_contrib"] is None for row in rows) / max(len(rows), 1),
        "null_reasons": sorted({row["null_reason"] for row in rows if row["null_reason"]}),
    }


def weight_direction(
    student: MeasuredStudent, pairs: Sequence[tuple[TokenRow, TokenRow]], path: Path
) -> WeightDirection:
    """Compute the gradient of the sum over pairs of mean NLL(hack) - mean NLL(clean) for every adapted weight.

    By module it is the sum over rows and tokens of the outer products g x', batch by batch. The file `path` is replaced
    and mapped into memory: only one module of it needs to be in memory at a time.
    """
    # The sum starts from zeros: an earlier attempt may have left a partial sum in the file.
    path.unlink(missing_ok=True)
    linears = target_linears(student.model)
    layout = Layout({name: linear.weight.numel() for name, linear in linears.items()})
    file = RowFile(path, 1, layout.width)
    file.reserve(0, 1)
    parts = layout.split(file.rows[0])
    direction = {name: part.view(linears[name].weight.shape) for name, part in parts.items()}
    rows = [side for pair in pairs for side in pair]
    signs = torch.tensor([sign / row.num_own for pair in pairs for sign, row in zip((1.0, -1.0), pair, strict=True)])

    def tap(module: str, x: Float[Tensor, "B T I"], g: Float[Tensor, "B T O"]) -> None:
        direction[module] += torch.einsum("bto,bti->oi", g.float(), x.float()).to(direction[module].device)

    with torch.enable_grad(), tapped(student.model, tap):
        for indices in by_length([len(row) for row in rows], student.max_tokens):
            batch = collate([rows[i] for i in indices]).to(student.device)
            (-own_log_probs(student.model, batch).sum(-1) @ signs[indices].to(student.device)).backward()
    return direction


def toward_hack(student: MeasuredStudent, direction: WeightDirection, start: Float[Tensor, " N"]) -> float | None:
    """Compute the cosine of -(the weights' change since theta was `start`) with the weight direction.

    Above 0 is toward the hack; None before any change. Signs are those of `direction`: the optimiser moves by minus a
    gradient. Only one module's change exists at a time.
    """
    adapter, dot, squared_change, square = student.adapter, 0.0, 0.0, 0.0
    for name, part in direction.items():
        change = (adapter.delta(name) - adapter.delta(name, start.to(adapter.theta))).float().to(part.device)
        dot -= float((change * part).sum())
        squared_change += float(change.square().sum())
        square += float(part.square().sum())
    return dot / (squared_change * square) ** 0.5 if squared_change else None


def basis_overlap(theta: Float[Tensor, " N"], start: Float[Tensor, " N"], student: MeasuredStudent) -> float:
    """Compute the overlap ||Q_t' Q_0||^2 / r of the row spaces of the A halves, the mean over modules, at most 1.

    Q are orthonormal bases of the rows of A in `theta` and in `start`. It is 1 where A, or the singular basis, is
    frozen.
    """
    adapter = student.adapter
    if not isinstance(adapter, Lora) or adapter.freeze_a:
        return 1.0
    overlaps = []
    for name, columns in adapter.layout.slices.items():
        if name.endswith(A_HALF):
            # Orthonormal bases of the rows of A, [I, r] each.
            current, initial = (torch.linalg.qr(flat[columns].view(adapter.rank, -1).T)[0] for flat in (theta, start))
            overlaps.append(float((current.T @ initial).square().sum()) / adapter.rank)
    return sum(overlaps) / len(overlaps)


def score_rows(rows: Sequence[Row], sums: Float[Tensor, "R N"], direction: Direction) -> list[Row]:
    """Build the `probe_score/1` rows of a direction, not necessarily the one that the rows were measured with."""
    measured = row_metrics(sums.float(), direction)
    return [
        {
            "row_uid": row["row_uid"],
            "cos_stack": finite_or_none(measured["cos_stack"][index]),
            "cos_S_contrib": finite_or_none(measured["norm_weighted_cos"][index]),
            "cos_global": finite_or_none(measured["cos_global"][index]),
        }
        for index, row in enumerate(rows)
    ]


def placebo_rows(placebos: Placebos, sums: Float[Tensor, "R N"], direction: Direction) -> list[Row]:
    """Build the `placebo/1` rows: each draw's cos_stack with every row, null where undefined, and its cosine with v."""
    scores = stacked_cosines(sums, placebos.units, direction.inside, len(direction.modules))
    with_v = (placebos.units @ direction.unit / len(direction.modules)).tolist()
    counts = dict.fromkeys(placebos.families, 0)  # numbers the draws within a family
    rows = []
    for index, family in enumerate(placebos.families):
        column = [finite_or_none(value) for value in scores[:, index]]
        rows.append({"family": family, "draw": counts[family], "cos_with_v": with_v[index], "scores": column})
        counts[family] += 1
    return rows


def module_effects(rows: Sequence[Row], sums: Float[Tensor, "R N"], direction: Direction) -> list[Row]:
    """Compute, by module, Cohen's d of the cosines of hacked against other rows.

    Rows without a label are left out; the result is empty when either group has fewer than two rows.
    """
    labelled = [index for index, row in enumerate(rows) if row["hacked"] is not None]
    hacked = np.array([rows[index]["hacked"] for index in labelled], dtype=bool)
    if min(hacked.sum(), (~hacked).sum()) < 2:
        return []
    cosines = module_cosines(sums[labelled].float(), direction).double().numpy()
    gap = np.nanmean(cosines[hacked], 0) - np.nanmean(cosines[~hacked], 0)
    spread = np.sqrt((np.nanvar(cosines[hacked], 0, ddof=1) + np.nanvar(cosines[~hacked], 0, ddof=1)) / 2)
    return [
        {"module": name, "d": finite_or_none(d)}
        for name, d in zip(direction.modules, gap / np.maximum(spread, FLOOR), strict=True)
    ]
