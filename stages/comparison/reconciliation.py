"""Each side reconciled with the numbers that its own program reports: what we read is what the program counted.

A number is computed again from the samples as the program does it. Where that gives another one, the known reasons are
tried in turn, and one explains the difference only if it gives the reported number. What none explains was read wrong,
or the log is not what it says: nothing is decided on it.
"""

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from decimal import Decimal
from math import comb, isclose, isfinite, isnan
from typing import Literal

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from composer_stages.comparison.logs import ReadLog
from composer_stages.errors import BadInput
from composer_stages.formats.measurement import UNCOUNTED, Aggregate, MeasuredLog, Reported
from composer_stages.runs.tables import with_column

MEAN = "mean"
LOG_2 = float(np.log(2))
CLOSE = 1e-6
FEWEST_DIGITS = 3
"""Digits behind the point from which a reported number may be a rounded one."""
Values = np.ndarray[tuple[int], np.dtype[np.float64]]
Reason = Literal[
    "", "reducer", "missing", "recorded", "recorded and missing", "edited", "weighting", "absent", "unknown"
]


@dataclass(frozen=True)
class Reconciled:
    """One number of a program beside ours. reason: empty where they agree; number: of the samples that explain it.

    tasks: how many a group of tasks has; 0 for the number of one log.
    """

    program: str
    task: str
    name: str
    reported: float
    ours: float
    reason: Reason = ""
    number: int = 0
    reducer: str = ""
    tasks: int = 0


@dataclass(frozen=True)
class LogRows:
    """The samples of a log: the numbers of their tasks, their scores as we count them, and as the log has them.

    NaN for no score. before: those that a person has changed, as they were.
    """

    tasks: np.ndarray[tuple[int], np.dtype[np.int64]]
    counted: Values
    recorded: Values
    weights: Values
    before: Values

    def number(self, values: Values, aggregate: str, reducer: str = "") -> float:
        """Return the one number that a program makes of these scores; NaN of none."""
        at = ~np.isnan(values)
        if not at.any():
            return float("nan")
        valid, weights = values[at], self.weights[at]
        if aggregate == Aggregate.SUM:
            return float(valid.sum())
        if aggregate in (Aggregate.PERPLEXITY, Aggregate.BITS):
            return aggregated(valid, weights, aggregate)
        if aggregate == Aggregate.MEDIAN:
            return float(np.sort(valid)[len(valid) // 2])
        if aggregate == Aggregate.SAMPLES:
            return float(valid.mean())
        tasks = self.tasks[at]
        if reducer in ("", MEAN):
            num, total = np.bincount(tasks), np.bincount(tasks, valid)
            return float((total[num > 0] / num[num > 0]).mean())
        order = np.argsort(tasks, kind="stable")
        parts = np.split(valid[order], np.flatnonzero(np.diff(tasks[order])) + 1)
        reduced = np.array([reduce_epochs(scores.tolist(), reducer) for scores in parts])
        reduced = reduced[~np.isnan(reduced)]
        return float(reduced.mean()) if len(reduced) else float("nan")


def aggregated(values: Values, weights: Values, aggregate: str) -> float:
    """Return a perplexity, or bits, of log-likelihoods and their weights as lm-evaluation-harness computes them."""
    mean = -float(values.sum() / weights.sum())
    return mean / LOG_2 if aggregate == Aggregate.BITS else float(np.exp(mean))


def contributions(values: Values, weights: Values, aggregate: str) -> Values:
    """Return scores of documents whose mean is `aggregated`, and whose spread is that of its linear approximation."""
    valid = ~np.isnan(values)
    if not valid.any():
        return values
    number, ratio = aggregated(values[valid], weights[valid], aggregate), values[valid].sum() / weights[valid].sum()
    slope = 1 / LOG_2 if aggregate == Aggregate.BITS else number
    result: Values = number - slope * (values - ratio * weights) / weights[valid].mean()
    return result


def weigh(log: ReadLog) -> ReadLog:
    """Return a side whose scores are the documents' contributions, where their program aggregates them by weight."""
    if log.chosen not in log.weights:
        return log
    column, weights = log.items["score"], log.weights[log.chosen]
    values, at = _numbers(column), np.asarray(pc.fill_null(log.items["log"], -1))
    for number, measured in enumerate(log.logs):
        aggregate, rows = measured.kind(log.chosen).aggregate, at == number
        if aggregate in (Aggregate.PERPLEXITY, Aggregate.BITS):
            values[rows] = contributions(values[rows], _numbers(weights)[rows], aggregate)
    score = pa.array(values, pa.float64(), from_pandas=True)
    return replace(log, items=with_column(log.items, "score", score))


def reduce_epochs(scores: Sequence[float], reducer: str) -> float:
    """Return what Inspect makes of the scores of a sample's epochs (`scorer/_reducer/reducer.py`)."""
    kind, _, k = reducer.rpartition("_") if re.search(r"_\d+$", reducer) else (reducer, "", "1")
    total, passed, drawn = len(scores), sum(score >= 1 for score in scores), int(k)
    if kind == "median":
        return float(np.median(scores))
    if kind in ("mode", "majority"):
        most = max(dict.fromkeys(scores), key=scores.count)
        return most if kind == "mode" or 2 * scores.count(most) > total else float("nan")
    if kind == "max":
        return max(scores)
    if kind == "at_least":
        return float(passed >= drawn)
    if kind in ("pass_at", "pass_k"):
        if total < drawn:
            return float("nan")
        of_all = comb(total, drawn)
        return comb(passed, drawn) / of_all if kind == "pass_k" else 1 - comb(total - passed, drawn) / of_all
    return float(np.mean(scores))


def reconcile(log: ReadLog) -> tuple[Reconciled, ...]:
    """Return the numbers that the programs of a side report of its score, beside ours."""
    results, groups = list[Reconciled](), dict[Reported, list[int]]()
    for at, measured in enumerate(log.logs):
        reported = [number for number in measured.reported if number.score == log.chosen and not number.tasks]
        for number in measured.reported:
            if number.score == log.chosen and number.tasks:
                groups.setdefault(number, []).append(at)
        if not reported:
            continue
        # A log that was tried again repeats samples of another one, which count there.
        kin = [n for n, each in enumerate(log.logs) if _evaluation(each) == _evaluation(measured)]
        sets = [
            rows for numbers in ([at], *([kin] if len(kin) > 1 else [])) if len((rows := rows_of(log, numbers)).tasks)
        ]
        order = REASONS.index
        each = [
            min((explain(measured, number, rows) for rows in sets), key=lambda result: order(result.reason))
            for number in reported
            if sets
        ]
        unknown = [result for result in each if result.reason == "unknown"]
        results += unknown[:1] or sorted(each, key=lambda result: order(result.reason))[:1]
    return (*results, *(explain_group(log, number, numbers) for number, numbers in groups.items()))


def explain_group(log: ReadLog, reported: Reported, numbers: Sequence[int]) -> Reconciled:
    """Return the number of a group of tasks beside ours, in which tasks weigh by their samples or all alike.

    numbers: of the logs of its tasks. Nothing can be said where some of them are not here.
    """
    logs, rows = [log.logs[at] for at in numbers], [rows_of(log, [at]) for at in numbers]
    aggregates = [each.kind(reported.score).aggregate for each in logs]
    values = [each.number(each.counted, aggregate) for each, aggregate in zip(rows, aggregates, strict=True)]
    sizes = [int((~np.isnan(each.counted)).sum()) for each in rows]
    absent = len({*reported.tasks} - {each.task for each in logs})
    means = [float(np.average(values, weights=weights)) for weights in (sizes, None)] if all(sizes) else [float("nan")]
    computed = next((mean for mean in means if same(reported.value, mean, Aggregate.OTHER)), means[0])
    agrees = same(reported.value, computed, Aggregate.OTHER)
    reason: Reason = "" if agrees else "absent" if absent else "unknown"
    program, name, value = logs[0].program, reported.name, reported.value
    return Reconciled(program, "", name, value, computed, reason, absent, tasks=len(reported.tasks))


def _evaluation(log: MeasuredLog) -> tuple[str, str, str | None]:
    return log.program, log.task, log.model


def rows_of(log: ReadLog, numbers: Sequence[int]) -> LogRows:
    """Return the samples of some of a side's logs."""
    at = pc.fill_null(pc.is_in(log.items["log"], pa.array(numbers, pa.int64())), False)
    items, recorded = log.items.filter(at), _numbers(log.scores[log.chosen].filter(at))
    ones, none = np.ones(len(items)), np.full(len(items), np.nan)
    weights, before = (
        default if values is None else _numbers(values.filter(at))
        for values, default in ((log.weights.get(log.chosen), ones), (log.before.get(log.chosen), none))
    )
    uncounted = pc.fill_null(pc.is_in(items["state"], pa.array([state.value for state in UNCOUNTED])), False)
    return LogRows(
        np.asarray(items["task"].combine_chunks().dictionary_encode().indices, dtype=np.int64),
        np.where(uncounted.to_numpy(), np.nan, recorded),
        recorded,
        weights,
        before,
    )


def _numbers(column: pa.ChunkedArray) -> Values:
    values: Values = np.asarray(pc.fill_null(pc.cast(column, pa.float64()), float("nan"))).copy()
    return values


def explain(log: MeasuredLog, reported: Reported, rows: LogRows) -> Reconciled:
    """Return a reported number beside ours, with the first known reason that gives it where they differ."""
    aggregate = log.kind(reported.score).aggregate if reported.aggregate == Aggregate.TASKS else reported.aggregate
    computed = rows.number(rows.counted, aggregate if aggregate != Aggregate.SAMPLES else Aggregate.TASKS)
    reason, number = next(
        (
            (reason, number)
            for reason, number, value in guesses(reported, rows, aggregate)
            if same(reported.value, value(), aggregate)
        ),
        ("unknown", 0),
    )
    if reason in ("", "weighting"):
        reason = "" if same(reported.value, computed, aggregate) else "weighting"
    absent = (reported.count or 0) - int((~np.isnan(rows.counted)).sum())
    if reason == "unknown" and absent > 0:
        total, size = float(np.nansum(rows.counted)), reported.count or 1
        low, high = (total, total + absent) if aggregate == Aggregate.SUM else (total / size, (total + absent) / size)
        if aggregate != Aggregate.PERPLEXITY and low - CLOSE <= reported.value <= high + CLOSE:
            reason, number = "absent", absent
    return Reconciled(log.program, log.task, reported.name, reported.value, computed, reason, number, reported.reducer)


def guesses(reported: Reported, rows: LogRows, aggregate: str) -> Iterator[tuple[Reason, int, Callable[[], float]]]:
    """Yield how the program may have come to its number: the reason, its number of samples, and the number."""
    missing = int(np.isnan(rows.counted).sum())
    recorded = int((np.isnan(rows.counted) & ~np.isnan(rows.recorded)).sum())
    swapped = Aggregate.SAMPLES if aggregate == Aggregate.TASKS else Aggregate.TASKS
    reducer = reported.reducer
    first: Reason = "reducer" if reducer not in ("", MEAN) else ""
    yield first, 0, lambda: rows.number(rows.counted, aggregate, reducer)
    if edited := int((~np.isnan(rows.before)).sum()):
        first_scores = np.where(np.isnan(rows.before) | np.isnan(rows.counted), rows.counted, rows.before)
        yield "edited", edited, lambda: rows.number(first_scores, aggregate, reducer)
    if recorded:
        yield "recorded", recorded, lambda: rows.number(rows.recorded, aggregate, reducer)
        zeros = np.nan_to_num(rows.recorded)
        yield "recorded and missing", missing, lambda: rows.number(zeros, aggregate, reducer)
    if missing:
        yield "missing", missing, lambda: rows.number(np.nan_to_num(rows.counted), aggregate, reducer)
    if aggregate in (Aggregate.TASKS, Aggregate.SAMPLES):
        yield "weighting", 0, lambda: rows.number(rows.counted, swapped)
        yield "missing", missing, lambda: rows.number(np.nan_to_num(rows.counted), swapped)


REASONS: tuple[Reason, ...] = (
    *("", "reducer", "weighting", "edited", "recorded", "missing", "recorded and missing", "absent", "unknown"),
)
"""From the one that needs the least explanation."""


def same(reported: float, computed: float, aggregate: str) -> bool:
    """Return whether two numbers are the same, but for how the program wrote its own: rounded, or a mean in percent."""
    if not isfinite(reported) or not isfinite(computed):
        return isnan(reported) and isnan(computed)
    is_mean = aggregate in (Aggregate.TASKS, Aggregate.SAMPLES)
    digits = -int(Decimal(repr(reported)).as_tuple().exponent)
    for scaled, fewest in ((computed, FEWEST_DIGITS), (100 * computed, FEWEST_DIGITS - 2))[: 1 + is_mean]:
        is_rounded = digits >= fewest and abs(round(scaled, digits) - reported) < 10.0**-digits / 2
        if isclose(scaled, reported, rel_tol=CLOSE, abs_tol=CLOSE) or is_rounded:
            return True
    return False


def require(name: str, numbers: Sequence[Reconciled], unreconciled: bool) -> None:
    """Raise `BadInput` for a side of which a number is not explained, unless the user lets it pass."""
    first = next((number for number in numbers if number.reason == "unknown"), None)
    if first and not unreconciled:
        raise BadInput(
            "comparison.unreconciled",
            name=name,
            program=first.program,
            task=first.task,
            ours=first.ours,
            reported=first.reported,
            number=first.name,
        )
