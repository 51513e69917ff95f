"""All checks of `probe uat`: their inputs are gathered from finished runs, and judged.

T3 shows mechanics and is no evidence: a random direction passes its first part on every step. Thresholds:
docs/probe.md.
"""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch

from stages.errors import BadInput
from stages.probe.adapters.lora import A_HALF
from stages.probe.checks.check import Check, judged
from stages.probe.checks.contrast_checks import Draws, contrast_checks, pool_check, taxonomy
from stages.probe.checks.contrasts import Labelled, labelled
from stages.probe.checks.guards import fires, not_generic, specific
from stages.probe.directions.extraction import Direction, open_direction
from stages.probe.directions.metrics import teacher_gradients
from stages.probe.directions.scoring import DRAWN, RANDOM, Placebos, haar, randsign, step_placebos
from stages.probe.gradients.store import GradientStore
from stages.runs import store
from stages.runs.kinds import PLACEBO, POOL_ROW, PROBE_ROW, PROBE_SCORE, Row
from stages.runs.run import Inputs, Run

MIN_STEPS = 0.8
"""The share of steps on which projection must lower the cosine."""
CONTROLS = ("negated", "generic")


def judge_runs(inputs: Inputs, arms: dict[str, Run], draws: Draws, num_placebos: int) -> list[Check]:
    """Return the checks T1, T2, T3, T4a to T4e and the guards that they depend on.

    `inputs` are those of `probe uat`, `arms` its replays by arm, `num_placebos` the random directions of each of two
    families that T3 is compared with. `BadInput` when the scores are not of the vanilla replay's rows.
    """
    direction, facts, pairs = open_direction(inputs.one("direction").folder())
    rows, placebos = arms["vanilla"].rows(PROBE_ROW), inputs.one("score").rows(PLACEBO)
    scored = scored_rows(rows, inputs.one("score").rows(PROBE_SCORE), placebos)
    pool_rows, guards = inputs.one("pool").rows(POOL_ROW), store.read_json(arms["vanilla"].path / "checks.json")
    # The rows that `labelled` keeps of the vanilla replay, by the same rule.
    kept = [index for index, row in enumerate(rows) if None not in (row["hacked"], row["gt_pass"], row["cos_stack"])]
    controls = {p["family"]: np.array(p["scores"], dtype=float)[kept] for p in placebos if p["family"] in CONTROLS}
    return [
        *_on(inputs.one("pool"), same_prompts(inputs.one("pool"), arms), pool_check(pool_rows), taxonomy(pool_rows)),
        *_on(arms["vanilla"], measured_check(rows, guards)),
        *_on(arms.get("projected"), *_projection(arms.get("projected"), direction, num_placebos, draws.seed)),
        *_on(inputs.one("score"), *contrast_checks(scored, draws)),
        *_on(inputs.one("direction"), not_generic(direction, pairs, facts["loss_kind"])),
        *_on(inputs.one("score"), specific(scored, controls, draws)),
    ]


def _on(run: Run | None, *checks: Check) -> list[Check]:
    """Return the checks with the run that they were judged from as evidence: its stage and the name of its folder."""
    evidence = "" if run is None else f"{run.manifest.stage}/{run.path.name}"
    return [replace(check, evidence_path=evidence) for check in checks]


def same_prompts(pool: Run, arms: dict[str, Run]) -> Check:
    """Check E1: every replay was made from a pool of the same prompts as this one."""
    expected = pool.manifest.summary["contract_sha256"]
    others = sorted(name for name, run in arms.items() if run.manifest.summary["contract_sha256"] != expected)
    roles = {row["prompt_role"] for row in pool.rows(POOL_ROW) if row["src_pool"] == "teacher"}
    detail = (
        "other prompts in " + ", ".join(others) if others else f"teacher prompts: {', '.join(sorted(map(str, roles)))}"
    )
    return Check(
        "prompts", "E1", judged(not others and roles == {"rh"}), float(len(others)), "one contract, role rh", detail
    )


def scored_rows(rows: list[Row], scores: list[Row], placebos: list[Row]) -> Labelled:
    """Return rows with v's score and those of all drawn placebos; `BadInput` when the scores are of other rows."""
    if [row["row_uid"] for row in rows] != [score["row_uid"] for score in scores]:
        raise BadInput(
            "The scores are not those of the vanilla replay's rows. Give the score run that was made from it."
        )
    # Single placebos (negated, generic, unrelated) are controls and no draws: v is not ranked among them.
    drawn = [row for row in placebos if row["family"] in DRAWN]
    columns = [[score["cos_stack"] for score in scores], *(row["scores"] for row in drawn)]
    return labelled(rows, np.array(columns, dtype=float).T, [row["family"] for row in drawn])


def measured_check(rows: Sequence[Row], guards: Sequence[Row]) -> Check:
    """Check T2: a finite cosine on 90 % of the vanilla rows, gradients above zero, and all guards of the replay."""
    finite = sum(row["cos_S_contrib"] is not None for row in rows) / max(len(rows), 1)
    smallest = min((row["grad_norm_contrib"] for row in rows if row["grad_norm_contrib"] is not None), default=0.0)
    missed = [guard["check"] for guard in guards if guard["status"] != "PASS"]
    detail = f"{len(rows)} rows, smallest gradient {smallest:.3g}"
    if missed:
        detail += f"; guards not passed: {', '.join(missed)}"
    status = judged(finite >= 0.9 and smallest > 0 and not missed)
    return Check("T2", "T2", status, finite, "finite cosines >= .9, min gradient > 0", detail)


def _projection(replay: Run | None, direction: Direction, num_placebos: int, seed: int) -> list[Check]:
    """Check T3, and that no module is missing from v."""
    if replay is None:
        return [projection_check([], {})]
    count = replay.manifest.counts["steps"]
    steps = [store.read_json(replay.path / f"step_{number:03d}.diag.json") for number in range(count)]
    units = [haar(direction, num_placebos, seed), randsign(direction, num_placebos, seed + 1)]
    placebos = Placebos([name for name, some in zip(RANDOM, units, strict=True) for _ in some], torch.cat(units))
    rows, kept = replay.rows(PROBE_ROW), GradientStore(replay.folder())
    random = step_placebos(teacher_gradients(rows, kept.rows), placebos, direction)
    # A LoRA from PEFT's start has no gradient on A and so no direction there, which is not a missing module.
    probed = [name for name in direction.layout.names if not name.endswith(A_HALF)]
    return [projection_check(steps, random), fires(steps, len(probed), random["energy"], random["fired"])]


def projection_check(steps: Sequence[Row], random: dict[str, list[float]]) -> Check:
    """Check T3: cos_out < cos_in on 80 % of the steps, energy conserved, other modules unchanged, fired ones emptied.

    `steps` are the diagnostics of a projected replay, `random["fired"]` the share of modules in which each placebo
    would have fired. With all that, but without a projected update or firing beyond random directions, it is labelled
    "mechanics only".
    """
    if not steps:
        why = "no replay of the arm projected was given"
        return Check("T3", "T3", "INCONCLUSIVE", None, "a projected replay", why)
    # The share of steps on which the cosine with v falls, of the gradient and of the update.
    shares = []
    for before, after in (("cos_in", "cos_out"), ("cos_upd_in", "cos_upd_out")):
        known = [(s[before], s[after]) for s in steps if s[before] is not None and s[after] is not None]
        shares.append(sum(out < into for into, out in known) / len(known) if known else 0.0)
    lower, held = shares
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


def bucket_table(rows: Sequence[Row]) -> str:
    """Return a table of the number of rows of each kind by source, which is shown before any test."""
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
