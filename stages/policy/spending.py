"""What teachers cost: calls, tokens, money and latency, by teacher and in all."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from tabulate import tabulate

from stages.runs.records import Row


@dataclass(frozen=True)
class Spending:
    """One line of the table; latency in seconds a call, for a local model a batch's time divided by its size."""

    teacher: str
    answers: int
    failed: int
    prompt_tokens: int
    completion_tokens: int
    cost_usd: float
    usd_per_trace: float
    p50_latency_s: float
    p95_latency_s: float

    def as_dict(self) -> dict[str, Any]:
        """JSON-able."""
        return asdict(self)


def table(lines: Sequence[Spending]) -> str:
    """The lines as plain text, with a header; tokens are those of prompts and completions together."""
    cells = [
        (
            line.teacher,
            line.answers,
            line.failed,
            line.prompt_tokens + line.completion_tokens,
            line.cost_usd,
            line.usd_per_trace,
            line.p50_latency_s,
            line.p95_latency_s,
        )
        for line in lines
    ]
    headers = ("teacher", "answers", "failed", "tokens", "USD", "USD/trace", "p50 s", "p95 s")
    return tabulate(cells, headers, tablefmt="plain", floatfmt=("", "", "", "", ".4f", ".4f", ".2f", ".2f"))


def spending(rows: list[Row], num_traces: int) -> list[Spending]:
    """One line a teacher, in order of appearance, and a last one for all of them."""
    names = list(dict.fromkeys(row["teacher"] for row in rows))
    return [
        *(_line(n, [r for r in rows if r["teacher"] == n], num_traces) for n in names),
        _line("all", rows, num_traces),
    ]


def _line(name: str, rows: list[Row], num_traces: int) -> Spending:
    latencies = [row["latency_s"] for row in rows if row["error_type"] is None] or [0.0]
    cost = sum(row["cost_usd"] for row in rows)
    return Spending(
        teacher=name,
        answers=len(rows),
        failed=sum(row["error_type"] is not None for row in rows),
        prompt_tokens=sum(row["prompt_tokens"] for row in rows),
        completion_tokens=sum(row["completion_tokens"] for row in rows),
        cost_usd=cost,
        usd_per_trace=cost / max(num_traces, 1),
        p50_latency_s=float(np.quantile(latencies, 0.5)),
        p95_latency_s=float(np.quantile(latencies, 0.95)),
    )
