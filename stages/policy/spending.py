"""What teachers cost: calls, tokens, money and latency, by teacher and in all, and whether that is affordable."""

from array import array
from collections import Counter
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


class Tally:
    """Answers added up one after the other: by teacher, in order of appearance, and in all."""

    def __init__(self, traces: Sequence[str]) -> None:
        """traces: the ids of all rollouts."""
        self._traces, self._of, self._all = traces, dict[str, _Sums](), _Sums(traces)

    def add(self, row: Row) -> None:
        """One `teacher_action` row."""
        if row["teacher"] not in self._of:
            self._of[row["teacher"]] = _Sums(self._traces)
        for sums in (self._of[row["teacher"]], self._all):
            sums.add(row)

    def lines(self) -> list[Spending]:
        """One line a teacher, and a last one for all of them."""
        return [*(sums.line(name) for name, sums in self._of.items()), self._all.line("all")]


class _Sums:
    """What one line is made of; 16 bytes an answer stay, for the quantiles of latency."""

    def __init__(self, traces: Sequence[str]) -> None:
        self._counts: Counter[str] = Counter()
        self._by_trace = dict.fromkeys(traces, 0.0)
        self._states, self._seconds = array("q"), array("d")

    def add(self, row: Row) -> None:
        whole = row["error_type"] is None
        self._counts["answers"] += 1
        self._counts["failed"] += not whole
        for name in ("prompt_tokens", "cached_tokens", "completion_tokens"):
            self._counts[name] += row[name]
        self._by_trace[row["rollout_id"]] += row["cost_usd"] or 0.0
        if whole:
            self._counts["truncated"] += row["finish_reason"] == "length"
            self._counts["unpriced"] += row["cost_usd"] is None
            self._states.append(hash(row["state_sha256"]))
            self._seconds.append(row["latency_s"])

    def line(self, name: str) -> Spending:
        seconds, costs = self._slowest(), list(self._by_trace.values()) or [0.0]
        counted = ("answers", "failed", "truncated", "unpriced", "prompt_tokens", "cached_tokens", "completion_tokens")
        return Spending(
            teacher=name,
            **{what: self._counts[what] for what in counted},
            cost_usd=sum(costs),
            usd_per_trace=sum(costs) / len(costs),
            p50_usd_per_trace=float(np.quantile(costs, 0.5)),
            p95_usd_per_trace=float(np.quantile(costs, 0.95)),
            p50_latency_s=float(np.quantile(seconds, 0.5)),
            p95_latency_s=float(np.quantile(seconds, 0.95)),
        )

    def _slowest(self) -> np.ndarray:
        """The most seconds that an answer took in each state, in no order; one 0 of nothing."""
        if not self._states:
            return np.zeros(1)
        states, seconds = np.array(self._states), np.array(self._seconds)
        order = np.argsort(states, kind="stable")
        begins = np.flatnonzero(np.diff(states[order], prepend=states[order[0]] - 1))
        return np.maximum.reduceat(seconds[order], begins)
