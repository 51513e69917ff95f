"""Checks that projection removes a direction from gradients and updates (T3).

T3 shows mechanics and is no evidence: a random direction passes its first part on every step. Thresholds:
docs/probe-method.md.
"""

from collections.abc import Sequence

import numpy as np
import torch

from composer_stages.gradients.basis import A_HALF
from composer_stages.gradients.tensors import GradientStore
from composer_stages.probe.checks.check import Check, Finding, declared, failing
from composer_stages.probe.direction import RANDOM, Direction, Placebos, haar, randsign, step_placebos
from composer_stages.probe.metrics import teacher_gradients
from composer_stages.runs import store
from composer_stages.runs.kinds import PROBE_ROW, VECTORS, Row
from composer_stages.runs.run import Run
from composer_stages.words import Sentence

MAX_CONSERVATION, MAX_RESIDUAL = 1e-4, 1e-3
MIN_STEPS = 0.8
"""The share of steps on which projection must lower the cosine."""
MIN_OVERLAP = 0.5


@declared("removal")
def removed(steps: Sequence[Row]) -> Finding:
    """Check that gradients of fired modules changed, energies add up, and the result does not share memory.

    steps: the step diagnostics of a replay, as in the two checks below.
    """
    faults = failing(
        {
            "gradient unchanged": any(s["frac_fired"] > 0 and s["change"] <= 0 for s in steps),
            "energy not conserved": any(s["conservation_err"] > MAX_CONSERVATION for s in steps),
            "same memory": any(s["shares_memory"] for s in steps),
        }
    )
    worst = max((s["conservation_err"] for s in steps), default=float("nan"))
    detail = ", ".join(faults) or f"{len(steps)} steps"
    return Finding(bool(steps) and not faults, worst, detail)


@declared("removed-sign")
def removed_toward_hack(steps: Sequence[Row]) -> Finding:
    """Check that one-sided removal took the part toward the hack, also from the update, and left nothing along v."""
    fired = [s for s in steps if s["frac_fired"] > 0]
    worst = min((s["removed_dot"] for s in fired), default=float("nan"))
    residual = max((s["residual"] for s in fired), default=float("nan"))
    # Under Adam a projected gradient gives no projected update, so the update is checked too; None: no gradient.
    turned = sum(
        not s["projects_update"]
        or s["cos_upd_in"] is None
        or s["cos_upd_out"] is None
        or s["cos_upd_out"] <= s["cos_upd_in"] + MAX_RESIDUAL
        for s in steps
    )
    holds = bool(fired) and worst > 0 and residual <= MAX_RESIDUAL and turned == len(steps)
    detail = Sentence("probe.checks.update-turned", residual=residual, turned=turned, steps=len(steps))
    return Finding(holds, worst, detail)


@declared("fires")
def fires(
    steps: Sequence[Row], num_modules: int, placebo_energy: Sequence[float], placebo_fired: Sequence[float]
) -> Finding:
    """Check that v has every module and removes more energy than placebos do.

    placebo_energy, placebo_fired: of each placebo, its share of the energy, and of modules that fire.
    """
    # Firing is only reported: random directions lower the cosine on 20 of 20 steps and fire in .53 of the modules.
    energy, fired = (float(np.mean([s[name] for s in steps])) for name in ("energy_removed", "frac_fired"))
    q95, fired_q95 = (float(np.quantile(x, 0.95)) if len(x) else float("nan") for x in (placebo_energy, placebo_fired))
    complete = all(s["n_modules"] == num_modules for s in steps)
    coverage = f"{steps[0]['n_modules']} of {num_modules} modules have a direction"
    detail = f"{coverage}; fired {fired:.2f} (placebo q95 {fired_q95:.2f}, chance .5)"
    return Finding(complete and energy > q95, energy, detail, q95)


@declared("basis")
def basis_stays(steps: Sequence[Row]) -> Finding:
    """Check that the row space of A keeps an overlap of half with its start over the steps.

    Also reports the one-sided p of a falling trend (Kendall's tau) of the removed part, over at least four steps with a
    removal.
    """
    overlap = min((step["basis_overlap"] for step in steps), default=float("nan"))
    gaps = [step["cos_in"] - step["cos_out"] for step in steps if step["cos_in"] is not None and step["frac_fired"] > 0]
    returns = ""
    if len(gaps) >= 4 and np.ptp(gaps) > 0:
        from scipy.stats import kendalltau

        returns = f"; removal fading at p {float(kendalltau(range(len(gaps)), gaps, alternative='less').pvalue):.2g}"
    return Finding(overlap >= MIN_OVERLAP, overlap, f"{len(steps)} steps{returns}")


def projection_checks(replay: Run | None, direction: Direction, num_placebos: int, seed: int) -> list[Check]:
    """Run T3, and the check that no module is missing from v."""
    if replay is None:
        return [projection_removes([], {})]
    count = replay.manifest.counts["steps"]
    steps = [store.read_json(replay.path / f"step_{number:03d}.diag.json") for number in range(count)]
    units = [haar(direction, num_placebos, seed), randsign(direction, num_placebos, seed + 1)]
    placebos = Placebos([family for family in RANDOM for _ in range(num_placebos)], torch.cat(units))
    rows, gradients = replay.rows(PROBE_ROW), GradientStore(replay.folder(VECTORS))
    random = step_placebos(teacher_gradients(rows, gradients.rows), placebos, direction)
    # A LoRA from PEFT's start has no gradient on A and so no direction there, which is not a missing module.
    probed = [name for name in direction.layout.names if not name.endswith(A_HALF)]
    return [projection_removes(steps, random), fires(steps, len(probed), random["energy"], random["fired"])]


@declared("T3")
def projection_removes(steps: Sequence[Row], random: dict[str, list[float]]) -> Finding:
    """Check T3: cos_out < cos_in on 80 % of the steps, energy conserved, other modules unchanged, fired ones emptied.

    steps: the diagnostics of a projected replay. random["fired"]: the share of modules in which each placebo would have
    fired. Without a projected update, or firing beyond random directions, a PASS is labelled "mechanics only".
    """
    if not steps:
        return Finding(None, None, Sentence("probe.checks.no-projected-replay"))
    # The share of steps on which the cosine with v falls, of the gradient and of the update.
    shares = []
    for before, after in (("cos_in", "cos_out"), ("cos_upd_in", "cos_upd_out")):
        cosines = [(s[before], s[after]) for s in steps if s[before] is not None and s[after] is not None]
        shares.append(sum(out < into for into, out in cosines) / len(cosines) if cosines else 0.0)
    lower, update_share = shares
    fired, q95 = float(np.mean([s["frac_fired"] for s in steps])), float(np.quantile(random["fired"], 0.95))
    conserved = max(s["conservation_err"] for s in steps)
    emptied = max(s["residual"] for s in steps) <= MAX_RESIDUAL
    sound = conserved <= MAX_CONSERVATION and all(s["kept_bits"] for s in steps) and emptied
    missing = failing({"update not projected": update_share < MIN_STEPS, "fires no more than random": fired <= q95})
    label = f"mechanics only ({', '.join(missing)})" if missing else "mechanics hold on gradient and update"
    detail = f"{label}; update lower on {update_share:.0%} of steps, fired {fired:.2f}, conservation {conserved:.1g}"
    return Finding(lower >= MIN_STEPS and sound, lower, detail, q95)
