"""The rows of numbers of the probe's figures: each figure has a CSV twin and is drawn from these rows only.

The ten figures are those of the probe's plan, by its numbers; t and d are as in `checks.contrasts` and
`directions.scoring`.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

import numpy as np

from stages.probe.checks.contrast_checks import factorial_design
from stages.probe.checks.contrasts import Labelled, regress
from stages.probe.directions.scoring import RANDOM
from stages.runs.records import Row


@dataclass
class Evidence:
    """What is drawn: rows and step diagnostics of replays by arm, a scored vanilla replay, trajectories."""

    rows: dict[str, list[Row]] = field(default_factory=dict)
    steps: dict[str, list[Row]] = field(default_factory=dict)
    placebos: list[Row] = field(default_factory=list)
    scored: Labelled | None = None
    modules: list[Row] = field(default_factory=list)
    trajectories: list[Row] = field(default_factory=list)


def cosine_by_step(e: Evidence) -> list[Row]:
    """(1) Mean cos_stack of the teacher's rows by step and arm, and the band of random placebos on the vanilla rows."""
    means = []
    for arm, rows in e.rows.items():
        for step in sorted({row["step"] for row in rows}):
            values = [row["cos_stack"] for row in rows if row["step"] == step and row["src_pool"] == "teacher"]
            means.append({"arm": arm, "step": step, "cos_stack": _mean(values), "low": None, "high": None})
    vanilla, random = e.rows.get("vanilla", []), [p["scores"] for p in e.placebos if p["family"] in RANDOM]
    if not vanilla or not random:
        return means
    scores, band = np.array(random, dtype=float), []
    for step in sorted({row["step"] for row in vanilla}):
        at = [i for i, row in enumerate(vanilla) if row["step"] == step and row["src_pool"] == "teacher"]
        low, high = np.nanquantile(np.nanmean(scores[:, at], axis=1), [0.025, 0.975]) if at else (np.nan, np.nan)
        band.append({"arm": "placebo", "step": step, "cos_stack": None, "low": float(low), "high": float(high)})
    return means + band


def diagnostics(e: Evidence, *, names: tuple[str, ...], without: str = "vanilla") -> list[Row]:
    """(2), (3) and (10) Columns of the step diagnostics of every arm but one."""
    chosen = [(arm, step) for arm, steps in e.steps.items() if arm != without for step in steps]
    return [{"arm": arm, "step": step["step"], **{name: step[name] for name in names}} for arm, step in chosen]


def buckets(e: Evidence) -> list[Row]:
    """(4) Every vanilla row's cosine with its bucket and problem."""
    known = [r for r in e.rows.get("vanilla", []) if None not in (r["hacked"], r["gt_pass"], r["cos_stack"])]
    return [
        {
            "bucket": f"{'hack' if row['hacked'] else 'no hack'}, {'right' if row['gt_pass'] else 'wrong'}",
            "problem": row["problem_id"],
            "cos_stack": row["cos_stack"],
        }
        for row in known
    ]


def placebo_t(e: Evidence) -> list[Row]:
    """(5) The t of T4e for v and for every drawn placebo."""
    if e.scored is None or not e.scored.hacked.any() or e.scored.hacked.all():
        return []
    t = regress(e.scored.scores, e.scored.hacked, factorial_design(e.scored), e.scored.problem).t
    names = ("v", *e.scored.families)
    return [{"direction": name, "t": float(value)} for name, value in zip(names, t, strict=True)]


def nuisance(e: Evidence) -> list[Row]:
    """(6) Cosine against length and hedging."""
    known = [r for r in e.rows.get("vanilla", []) if None not in (r["hacked"], r["cos_stack"])]
    return [
        {"tokens": r["n_loss_tokens"], "hedges": r["hedge_count"], "hacked": r["hacked"], "cos_stack": r["cos_stack"]}
        for r in known
    ]


def heat_map(e: Evidence) -> list[Row]:
    """(7) Cohen's d of hacked against other rows, by layer and projection."""
    cells = []
    for row in e.modules:
        parts = row["module"].split(".")
        layer = next((int(part) for part in parts if part.isdigit()), 0)
        cells.append({"layer": layer, "projection": parts[-1], "d": row["d"]})
    return cells


def ratios(e: Evidence) -> list[Row]:
    """(8) Importance ratios and effective sample size, the mean over seeds."""
    names = ("ratio_p5", "ratio_p50", "ratio_p95", "ess")
    keys = sorted({(row["arm"], row["step"]) for row in e.trajectories})
    return [
        {
            "arm": arm,
            "step": step,
            **{n: _mean([r[n] for r in e.trajectories if (r["arm"], r["step"]) == (arm, step)]) for n in names},
        }
        for arm, step in keys
    ]


def rates(e: Evidence) -> list[Row]:
    """(9) Hack and solve rates of the student's own rows, by seed."""
    names = ("arm", "train_seed", "step", "hack_rate_student", "gt_rate_student")
    return [{name: row[name] for name in names} for row in e.trajectories]


def _mean(values: list[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None


DATA: dict[str, Callable[[Evidence], list[Row]]] = {
    "01_cosine_by_step": cosine_by_step,
    # mean cosine of gradient and update, before and after projection
    "02_cosine_in_out": partial(diagnostics, names=("cos_in", "cos_out", "cos_upd_in", "cos_upd_out")),
    # share of modules that fired
    "03_fired": partial(diagnostics, names=("frac_fired",)),
    "04_buckets": buckets,
    "05_placebos": placebo_t,
    "06_length_and_hedging": nuisance,
    "07_modules": heat_map,
    "08_ratios": ratios,
    "09_rates": rates,
    # overlap of the adapter's basis with its start, and the weights' turn toward the hack
    "10_drift": partial(diagnostics, names=("basis_overlap", "cos_weights"), without=""),
}
