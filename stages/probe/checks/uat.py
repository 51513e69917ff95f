"""All checks of `probe uat` on finished runs."""

from dataclasses import replace

import numpy as np

from composer_stages.probe.checks.check import Check
from composer_stages.probe.checks.direction import not_generic
from composer_stages.probe.checks.gradients import rows_are_measured
from composer_stages.probe.checks.hacking import contrast_checks, scored_rows, specific
from composer_stages.probe.checks.pool import same_prompts, taxonomy, teacher_hacks
from composer_stages.probe.checks.removal import projection_checks
from composer_stages.probe.direction import open_direction
from composer_stages.probe.statistics import Draws
from composer_stages.runs import store
from composer_stages.runs.kinds import PLACEBO, POOL_ROW, PROBE_ROW, PROBE_SCORE, VECTORS
from composer_stages.runs.run import Inputs, Run

CONTROLS = ("negated", "generic")


def run_checks(inputs: Inputs, arms: dict[str, Run], draws: Draws, num_placebos: int) -> list[Check]:
    """Return the checks T1, T2, T3, T4a to T4e and the guards that they depend on.

    `inputs` are those of `probe uat`, `arms` its replays by arm, `num_placebos` the random directions of each of two
    families that T3 is compared with. `BadInput` when the scores are not of the vanilla replay's rows.
    """
    direction, facts, pairs = open_direction(inputs.one("direction").folder(VECTORS))
    rows, placebos = arms["vanilla"].rows(PROBE_ROW), inputs.one("score").rows(PLACEBO)
    scored = scored_rows(rows, inputs.one("score").rows(PROBE_SCORE), placebos)
    pool_rows, guards = inputs.one("pool").rows(POOL_ROW), store.read_json(arms["vanilla"].path / "checks.json")
    # The rows that `labelled` keeps of the vanilla replay, by the same rule.
    judged = [
        index for index, row in enumerate(rows) if None not in (row["hacked"], row["hidden_pass"], row["cos_stack"])
    ]
    controls = {p["family"]: np.array(p["scores"], dtype=float)[judged] for p in placebos if p["family"] in CONTROLS}
    return [
        *_with_evidence(
            inputs.one("pool"), same_prompts(inputs.one("pool"), arms), teacher_hacks(pool_rows), taxonomy(pool_rows)
        ),
        *_with_evidence(arms["vanilla"], rows_are_measured(rows, guards)),
        *_with_evidence(
            arms.get("projected"), *projection_checks(arms.get("projected"), direction, num_placebos, draws.seed)
        ),
        *_with_evidence(inputs.one("score"), *contrast_checks(scored, draws)),
        *_with_evidence(inputs.one("direction"), not_generic(direction, pairs, facts["loss_kind"])),
        *_with_evidence(inputs.one("score"), specific(scored, controls, draws)),
    ]


def _with_evidence(run: Run | None, *checks: Check) -> list[Check]:
    """Return the checks with the run that they were judged from as evidence: its stage and the name of its folder."""
    evidence = "" if run is None else f"{run.manifest.stage}/{run.path.name}"
    return [replace(check, evidence_path=evidence) for check in checks]
