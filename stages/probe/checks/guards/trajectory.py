"""A GRPO step still learns, and from what it should.

Groups of equal rewards have no advantage (Dr.GRPO, arXiv 2503.20783). The checks and their bounds are this
project's own.
"""

from collections.abc import Sequence

import numpy as np

from stages.probe.checks.check import Check, judged
from stages.runs.records import Row

MAX_FLAT, MAX_BAD_STEPS, MAX_CONFOUNDING = 0.5, 3, 0.95


def flat_groups(groups: Sequence[Sequence[float]]) -> int:
    """How many groups of rewards have one reward throughout: no advantage, no gradient."""
    return sum(max(group) - min(group) < 1e-9 for group in groups)


def rewards_vary(steps: Sequence[Row]) -> Check:
    """At most half of a step's groups have one reward; not worse three steps in a row."""
    bad = [step["zero_variance_groups"] > MAX_FLAT * step["groups"] for step in steps]
    streak = longest_streak(bad)
    share = sum(bad) / max(len(bad), 1)
    status = judged(bool(steps) and streak < MAX_BAD_STEPS)
    detail = f"{sum(bad)} of {len(bad)} steps bad, {streak} in a row"
    return Check("variance", "R5", status, share, "<= half of the groups flat", detail)


def longest_streak(flags: Sequence[bool]) -> int:
    """The most true values in a row."""
    best = run = 0
    for flag in flags:
        run = run + 1 if flag else 0
        best = max(best, run)
    return best


def ratios_carry_signal(steps: Sequence[Row]) -> Check:
    """Ratios are against the true behaviour policy, and neither clipped, nor vanished, nor carried by a few rows."""
    bailed = [step["bailed"] for step in steps if step["bailed"]]
    constant = [
        s for s in steps if s["off_policy"] and s["ratio_p5"] is not None and s["ratio_p95"] - s["ratio_p5"] < 1e-6
    ]
    detail = f"{len(steps)} steps"
    if bailed:
        detail = bailed[0]
    elif constant:
        detail = "off-policy rows with every ratio 1: old log-probs are not the generator's"
    stat = min((step["ess"] for step in steps if step["ess"] is not None), default=None)
    status = judged(not bailed and not constant)
    return Check("ratios", "R5", status, stat, "clipped + vanished <= .5, ESS >= .2", detail)


def advantages_favour_hacks(steps: Sequence[Row]) -> Check:
    """The advantages of hacks sum to more than 0, so there is a pull to slow, and do not merely tell sources apart."""
    sums = [step["hack_advantage_sum"] for step in steps if step["hack_advantage_sum"] is not None]
    away = sum(value <= 0 for value in sums)
    by_source = max((abs(step["corr_advantage_source"] or 0.0) for step in steps), default=0.0)
    holds = bool(sums) and away < 0.5 * len(sums) and by_source < MAX_CONFOUNDING
    detail = f"pull away from hacking on {away} of {len(sums)} steps, |corr(A, source)| up to {by_source:.2f}"
    stat = float(np.mean(sums)) if sums else None
    return Check("advantages", "R5", judged(holds), stat, "sum over hacks > 0, corr with source < .95", detail)


def correlation(x: Sequence[float], y: Sequence[float]) -> float | None:
    """Pearson's r; None where one of them does not vary."""
    a, b = np.asarray(x, dtype=float), np.asarray(y, dtype=float)
    return float(np.corrcoef(a, b)[0, 1]) if len(a) > 1 and a.std() > 0 and b.std() > 0 else None
