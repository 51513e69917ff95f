"""What teachers cost: calls, tokens, money and latency, and whether that is affordable. A `Tally` becomes a line."""

from array import array
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from composer_stages.endings import NOT_WHOLE
from composer_stages.layout import LEFT, RIGHT, aligned
from composer_stages.messages import answer_text
from composer_stages.runs import ledger
from composer_stages.runs.kinds import Row
from composer_stages.runs.run import Judgement
from composer_stages.teachers.config import Config
from composer_stages.words import Sentence


@dataclass(frozen=True)
class Spending:
    """One line of the table: a teacher, or all of them.

    failed: no answer; truncated: cut off at `max_tokens`; empty: whole, with nothing behind a thought; unpriced:
    answers whose price is not known. A rollout costs what the states cost that it recorded first. Latency is in seconds
    a step, over its samples and, for all, over its teachers the slowest; for a local model a batch's time divided by
    its size.
    """

    teacher: str
    answers: int
    failed: int
    truncated: int
    empty: int
    unpriced: int
    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    cost_usd: float
    usd_per_rollout: float
    p50_usd_per_rollout: float
    p95_usd_per_rollout: float
    p50_latency_s: float
    p95_latency_s: float
    answered: float
    """Share of complete answers that are not empty."""


def judge(folder: Path, summary: Mapping[str, Any], config: Config) -> Judgement:
    """Return AFFORDABLE, or the first reason against it: no answers, too few, too expensive, too slow, no price.

    A rollout costs its answers or, where that is more, its share of what the ledger has: calls without an answer are
    billed too, and answers that an earlier run paid for are in no ledger of this one.
    """
    total = Spending(**summary["teachers"][-1])
    spent, _ = ledger.totals(folder) or (0.0, 0.0)  # a published run has no ledger
    usd = max(total.usd_per_rollout, spent / max(summary["rollouts"], 1))

    def verdict(word: str, why: str, ok: bool | None = False) -> Judgement:
        return Judgement(ok, int(ok is False), f"{word}: {why}", {"verdict": word, "why": why})

    def costs(answered: float | None = None, unpriced: int = 0) -> Sentence:
        about = {"total": total, "usd": usd, "limits": config}
        return Sentence("teachers.cost-against-limits", answered=answered, unpriced=unpriced, **about)

    if total.answered <= 0:
        return verdict("INVALID-RUN", Sentence("teachers.nothing-measured"))
    if total.answered < config.min_answered:
        shares = {"answered": total.answered, "min_answered": config.min_answered}
        return verdict("TOO FEW ANSWERS", Sentence("teachers.too-few-answers", answers=total.answers, **shares))
    if usd > config.max_usd_per_rollout:
        return verdict("TOO EXPENSIVE", costs())
    if total.p95_latency_s > config.max_p95_latency_s:
        return verdict("TOO SLOW", costs())
    if total.unpriced:
        return verdict("UNPRICED", costs(unpriced=total.unpriced), None)
    return verdict("AFFORDABLE", costs(total.answered), True)


def table(lines: Sequence[Spending]) -> str:
    """Return the lines as plain text with a header; the tokens of a line include prompts and completions."""
    cells = [
        (
            line.teacher,
            line.answers,
            line.failed,
            line.truncated,
            line.empty,
            line.prompt_tokens + line.completion_tokens,
            line.cached_tokens,
            f"{line.cost_usd:.4f}",
            f"{line.usd_per_rollout:.4f}",
            f"{line.p50_usd_per_rollout:.4f}",
            f"{line.p95_usd_per_rollout:.4f}",
            f"{line.p50_latency_s:.2f}",
            f"{line.p95_latency_s:.2f}",
        )
        for line in lines
    ]
    counts = ("answers", "failed", "cut", "empty", "tokens", "cached")
    head = ("teacher", *counts, "USD", "USD/rollout", "p50", "p95", "p50 s/step", "p95 s/step")
    return aligned(cells, head, [LEFT, *[RIGHT] * (len(head) - 1)])


class Tally:
    """The sums of one line; 16 bytes per answer are stored for the quantiles of latency.

    rollout_ids: of all rollouts.
    """

    def __init__(self, rollout_ids: Sequence[str]) -> None:
        self._counts: Counter[str] = Counter()
        # Rollouts without questions cost 0, and count in the mean and the quantiles.
        self._by_rollout = dict.fromkeys(rollout_ids, 0.0)
        self._states, self._seconds = array("q"), array("d")

    def add(self, row: Row) -> None:
        """Count one `teacher_action` row."""
        complete = row["error_type"] is None
        self._counts["answers"] += 1
        self._counts["failed"] += not complete
        for name in ("prompt_tokens", "cached_tokens", "completion_tokens"):
            self._counts[name] += row[name]
        self._by_rollout[row["rollout_id"]] += row["cost_usd"] or 0.0
        if complete:
            is_cut = row["finish_reason"] in NOT_WHOLE
            self._counts["truncated"] += is_cut
            self._counts["empty"] += not is_cut and not answer_text(row["action"]).strip()
            self._counts["unpriced"] += row["cost_usd"] is None
            self._states.append(hash(row["state_sha256"]))  # 8 bytes instead of 64 characters; only equality counts
            self._seconds.append(row["latency_s"])

    def line(self, name: str) -> Spending:
        """Return the sums as a line of the table."""
        costs, seconds = list(self._by_rollout.values()) or [0.0], np.zeros(1)
        if self._states:
            # The slowest answer in each state: a step waits for all its samples, and in the last line for all teachers.
            states = np.array(self._states)
            order = np.argsort(states, kind="stable")
            begins = np.flatnonzero(np.diff(states[order], prepend=states[order[0]] - 1))
            seconds = np.maximum.reduceat(np.array(self._seconds)[order], begins)
        counted = (
            "answers",
            "failed",
            "truncated",
            "empty",
            "unpriced",
            "prompt_tokens",
            "cached_tokens",
            "completion_tokens",
        )
        num_whole = self._counts["answers"] - sum(self._counts[name] for name in ("failed", "truncated", "empty"))
        return Spending(
            teacher=name,
            **{name: self._counts[name] for name in counted},
            cost_usd=sum(costs),
            usd_per_rollout=sum(costs) / len(costs),
            p50_usd_per_rollout=float(np.quantile(costs, 0.5)),
            p95_usd_per_rollout=float(np.quantile(costs, 0.95)),
            p50_latency_s=float(np.quantile(seconds, 0.5)),
            p95_latency_s=float(np.quantile(seconds, 0.95)),
            answered=num_whole / max(self._counts["answers"], 1),
        )
