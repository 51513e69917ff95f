"""What teachers cost: calls, tokens, money and latency, by teacher and in all, and whether that is affordable."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from tabulate import tabulate

from stages.runs.records import Row


@dataclass(frozen=True)
class Spending:
    """One line of the table: a teacher, or all of them.

    failed: no answer; truncated: cut off at `max_tokens`; unpriced: answers whose price is not known. A trace costs
    what the states cost that it recorded first. Latency is in seconds a step, over its samples and, for all, over its
    teachers the slowest; for a local model a batch's time divided by its size.
    """

    teacher: str
    answers: int
    failed: int
    truncated: int
    unpriced: int
    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    cost_usd: float
    usd_per_trace: float
    p50_usd_per_trace: float
    p95_usd_per_trace: float
    p50_latency_s: float
    p95_latency_s: float

    @property
    def answered(self) -> float:
        """The share of whole answers."""
        return 1.0 - (self.failed + self.truncated) / max(self.answers, 1)

    def as_dict(self) -> dict[str, Any]:
        """JSON-able."""
        return {**asdict(self), "answered": self.answered}


@dataclass(frozen=True)
class Verdict:
    """Whether to go on with these teachers: a word, the reason, and None where nothing can be said."""

    word: str
    why: str
    ok: bool | None


def verdict(total: Spending, *, min_answered: float, max_usd_per_trace: float, max_p95_latency_s: float) -> Verdict:
    """AFFORDABLE, or the first of what speaks against it: no answers, too few, too expensive, too slow, no price."""
    answered = f"{total.answered:.1%} of {total.answers} questions were answered whole"
    cost = f"{total.usd_per_trace:.4f} USD a trace, {total.p95_latency_s:.2f} s a step (p95 of the slowest teacher)"
    limits = f"asked for were at most {max_usd_per_trace:g} USD and {max_p95_latency_s:g} s"
    if total.answered <= 0:
        return Verdict("INVALID-RUN", "no question was answered whole, so nothing was measured", False)
    if total.answered < min_answered:
        return Verdict("TOO FEW ANSWERS", f"{answered}, asked for were {min_answered:.1%}", False)
    if total.usd_per_trace > max_usd_per_trace:
        return Verdict("TOO EXPENSIVE", f"{cost}; {limits}", False)
    if total.p95_latency_s > max_p95_latency_s:
        return Verdict("TOO SLOW", f"{cost}; {limits}", False)
    if total.unpriced:
        return Verdict("UNPRICED", f"the price of {total.unpriced} answers is not known; {cost}; {limits}", None)
    return Verdict("AFFORDABLE", f"{answered}; {cost}; {limits}", True)


def table(lines: Sequence[Spending]) -> str:
    """The lines as plain text, with a header; tokens are those of prompts and completions together."""
    cells = [
        (
            line.teacher,
            line.answers,
            line.failed,
            line.truncated,
            line.prompt_tokens + line.completion_tokens,
            line.cached_tokens,
            line.cost_usd,
            line.usd_per_trace,
            line.p50_usd_per_trace,
            line.p95_usd_per_trace,
            line.p50_latency_s,
            line.p95_latency_s,
        )
        for line in lines
    ]
    headers = ("teacher", "answers", "failed", "cut", "tokens", "cached", "USD", "USD/trace", "p50", "p95")
    formats = ("",) * 6 + (".4f",) * 4 + (".2f",) * 2
    return tabulate(cells, (*headers, "p50 s/step", "p95 s/step"), tablefmt="plain", floatfmt=formats)


def spending(rows: list[Row], traces: Sequence[str]) -> list[Spending]:
    """One line a teacher, in order of appearance, and a last one for all of them; `traces` are all rollouts' ids."""
    names = list(dict.fromkeys(row["teacher"] for row in rows))
    return [
        *(_line(n, [r for r in rows if r["teacher"] == n], traces) for n in names),
        _line("all", rows, traces),
    ]


def _line(name: str, rows: list[Row], traces: Sequence[str]) -> Spending:
    whole = [row for row in rows if row["error_type"] is None]
    slowest: dict[str, float] = {}
    for row in whole:
        slowest[row["state_sha256"]] = max(slowest.get(row["state_sha256"], 0.0), row["latency_s"])
    by_trace = dict.fromkeys(traces, 0.0)
    for row in rows:
        by_trace[row["rollout_id"]] += row["cost_usd"] or 0.0
    seconds, costs = list(slowest.values()) or [0.0], list(by_trace.values()) or [0.0]
    return Spending(
        teacher=name,
        answers=len(rows),
        failed=len(rows) - len(whole),
        truncated=sum(row["finish_reason"] == "length" for row in whole),
        unpriced=sum(row["cost_usd"] is None for row in whole),
        prompt_tokens=sum(row["prompt_tokens"] for row in rows),
        cached_tokens=sum(row["cached_tokens"] for row in rows),
        completion_tokens=sum(row["completion_tokens"] for row in rows),
        cost_usd=sum(costs),
        usd_per_trace=sum(costs) / len(costs),
        p50_usd_per_trace=float(np.quantile(costs, 0.5)),
        p95_usd_per_trace=float(np.quantile(costs, 0.95)),
        p50_latency_s=float(np.quantile(seconds, 0.5)),
        p95_latency_s=float(np.quantile(seconds, 0.95)),
    )
