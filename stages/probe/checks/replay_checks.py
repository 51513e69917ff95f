"""T2 and T3: whether every row of a replay is measured, and whether the projection did what it says.

T3 shows mechanics and never evidence: a random direction passes its first part on every step. Thresholds:
docs/probe.md.
"""

from collections.abc import Sequence

import numpy as np

from stages.probe.checks.check import Check, judged
from stages.runs.records import Row

MIN_STEPS = 0.8


def measured_check(rows: Sequence[Row], guards: Sequence[Row]) -> Check:
    """T2: a finite cosine on 90 % of the vanilla rows, gradients above zero, and all the replay's own guards passed."""
    finite = sum(row["cos_S_contrib"] is not None for row in rows) / max(len(rows), 1)
    smallest = min((row["grad_norm_contrib"] for row in rows if row["grad_norm_contrib"] is not None), default=0.0)
    missed = [guard["check"] for guard in guards if guard["status"] != "PASS"]
    detail = f"{len(rows)} rows, smallest gradient {smallest:.3g}"
    if missed:
        detail += f"; guards not passed: {', '.join(missed)}"
    status = judged(finite >= 0.9 and smallest > 0 and not missed)
    return Check("T2", "T2", status, finite, "finite cosines >= .9, min gradient > 0", detail)


def projection_check(steps: Sequence[Row], random: dict[str, list[float]]) -> Check:
    """T3: cos_out < cos_in on 80 % of the steps, energy conserved, other modules unchanged, nothing left in fired ones.

    `steps` are the diagnostics of a projected replay, `random["fired"]` the share of modules in which each placebo
    would have fired. With all that, but without a projected update or firing beyond random directions, it is labelled
    "mechanics only".
    """
    if not steps:
        why = "no replay of the arm projected was given"
        return Check("T3", "T3", "INCONCLUSIVE", None, "a projected replay", why)
    lower, held = _lower(steps, "cos_in", "cos_out"), _lower(steps, "cos_upd_in", "cos_upd_out")
    fired, q95 = float(np.mean([s["frac_fired"] for s in steps])), float(np.quantile(random["fired"], 0.95))
    conserved = max(s["conservation_err"] for s in steps)
    sound = conserved < 1e-4 and all(s["kept_bits"] for s in steps) and max(s["residual"] for s in steps) <= 1e-3
    missing = [
        name
        for name, fails in (("update not projected", held < MIN_STEPS), ("fires no more than random", fired <= q95))
        if fails
    ]
    label = f"mechanics only ({', '.join(missing)})" if missing else "mechanics hold on gradient and update"
    detail = f"{label}; update lower on {held:.0%} of steps, fired {fired:.2f}, conservation {conserved:.1g}"
    status = judged(lower >= MIN_STEPS and sound)
    threshold = "cos_out < cos_in on 80 % of steps, energy conserved"
    return Check("T3", "T3", status, lower, threshold, detail, placebo_q95=q95)


def _lower(steps: Sequence[Row], before: str, after: str) -> float:
    known = [(s[before], s[after]) for s in steps if s[before] is not None and s[after] is not None]
    return sum(out < into for into, out in known) / len(known) if known else 0.0


def buckets(rows: Sequence[Row]) -> str:
    """A table of how many rows of each kind there are, by source; shown before any test."""
    sources = sorted({row["src_pool"] for row in rows})
    lines = [f"{'source':<16}{'hack+wrong':>11}{'hack+right':>11}{'wrong':>7}{'right':>7}{'unknown':>9}"]
    for source in sources:
        some = [row for row in rows if row["src_pool"] == source]
        known = [row for row in some if row["hacked"] is not None and row["gt_pass"] is not None]
        cells = [
            sum(r["hacked"] is h and r["gt_pass"] is g for r in known) for h in (True, False) for g in (False, True)
        ]
        lines.append(f"{source:<16}{cells[0]:>11}{cells[1]:>11}{cells[2]:>7}{cells[3]:>7}{len(some) - len(known):>9}")
    return "\n".join(lines)
