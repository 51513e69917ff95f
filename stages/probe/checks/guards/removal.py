"""A direction was really taken out of the gradients and updates of a replay: the right one, in all modules.

Steps are the diagnostics of `loops.descent.diagnostics`. Thresholds: docs/probe.md.
"""

from collections.abc import Sequence

import numpy as np

from stages.probe.checks.check import Check, judged
from stages.runs.records import Row

MAX_CONSERVATION, MAX_RESIDUAL = 1e-4, 1e-3


def removed(steps: Sequence[Row]) -> Check:
    """Where a module fired its gradient changed, the energies add up, and the result lies in memory of its own."""
    faults = [
        name
        for name, faulty in (
            ("gradient unchanged", any(s["frac_fired"] > 0 and s["change"] <= 0 for s in steps)),
            ("energy not conserved", any(s["conservation_err"] > MAX_CONSERVATION for s in steps)),
            ("same memory", any(s["shares_memory"] for s in steps)),
        )
        if faulty
    ]
    worst = max((s["conservation_err"] for s in steps), default=float("nan"))
    detail = ", ".join(faults) or f"{len(steps)} steps"
    status = judged(bool(steps) and not faults)
    return Check("removal", "R3", status, worst, f"conservation <= {MAX_CONSERVATION:g}", detail)


def removed_toward_hack(steps: Sequence[Row]) -> Check:
    """One-sided removal took what points toward the hack, in the update too, and left fired modules nothing along v."""
    fired = [s for s in steps if s["frac_fired"] > 0]
    worst = min((s["removed_dot"] for s in fired), default=float("nan"))
    left = max((s["residual"] for s in fired), default=float("nan"))
    turned = sum(_update_turned_away(s) for s in steps)
    status = judged(bool(fired) and worst > 0 and left <= MAX_RESIDUAL and turned == len(steps))
    detail = f"residual {left:.1g}, update no more toward v on {turned} of {len(steps)} steps"
    return Check("removed-sign", "T3", status, worst, f"> 0, residual <= {MAX_RESIDUAL:g}", detail)


def _update_turned_away(step: Row) -> bool:
    before, after = step["cos_upd_in"], step["cos_upd_out"]
    return not step["projects_update"] or before is None or after is None or after <= before + MAX_RESIDUAL


def fires(
    steps: Sequence[Row], num_modules: int, placebo_energy: Sequence[float], placebo_fired: Sequence[float]
) -> Check:
    """No module is silently missing from v, and more energy is removed than by placebos; firing alone is chance, 1/2.

    `placebo_energy` and `placebo_fired` hold a value a placebo: its share of the energy, of modules in which it fires.
    """
    energy, fired = (float(np.mean([s[name] for s in steps])) for name in ("energy_removed", "frac_fired"))
    q95, fired_q95 = (float(np.quantile(x, 0.95)) if len(x) else float("nan") for x in (placebo_energy, placebo_fired))
    complete = all(s["n_modules"] == num_modules for s in steps)
    held = f"{steps[0]['n_modules']} of {num_modules} modules have a direction"
    detail = f"{held}; fired {fired:.2f} (placebo q95 {fired_q95:.2f}, chance .5)"
    threshold = "energy removed > placebo q95, all modules"
    return Check("fires", "T3", judged(complete and energy > q95), energy, threshold, detail, placebo_q95=q95)
