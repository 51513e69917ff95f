"""All checks of `probe uat`: what they need from finished runs is gathered here, and judged."""

from dataclasses import replace

import numpy as np
import torch

from stages.errors import BadInput
from stages.probe.adapters.lora import A_HALF
from stages.probe.checks.check import Check, judged
from stages.probe.checks.contrast_checks import Draws, contrast_checks
from stages.probe.checks.guards.claims import not_generic, specific
from stages.probe.checks.guards.removal import fires
from stages.probe.checks.labelled import Labelled, labelled
from stages.probe.checks.pool_checks import pool_check, taxonomy
from stages.probe.checks.replay_checks import measured_check, projection_check
from stages.probe.directions.extraction import Direction
from stages.probe.directions.measure import teacher_gradients
from stages.probe.directions.pair_gradients import open_direction
from stages.probe.directions.placebos import haar, randsign
from stages.probe.directions.scoring import DRAWN, RANDOM, Placebos, step_placebos
from stages.probe.gradients.store import GradientStore
from stages.runs import store
from stages.runs.artifact import Run
from stages.runs.inputs import Inputs
from stages.runs.probe_records import PLACEBO, POOL_ROW, PROBE_ROW, PROBE_SCORE
from stages.runs.records import Row

CONTROLS = ("negated", "generic")


def judge(inputs: Inputs, arms: dict[str, Run], draws: Draws, num_placebos: int) -> list[Check]:
    """T1, T2, T3, T4a to T4e, and the guards on which they stand.

    `inputs` are those of `probe uat`, `arms` its replays by arm, `num_placebos` the random directions of each of two
    families that T3 is held against. `BadInput` when the scores are not of the vanilla replay's rows.
    """
    direction, facts, pairs = open_direction(inputs.one("direction").folder())
    rows, placebos = arms["vanilla"].rows(PROBE_ROW), inputs.one("score").rows(PLACEBO)
    scored = scored_rows(rows, inputs.one("score").rows(PROBE_SCORE), placebos)
    pool_rows, guards = inputs.one("pool").rows(POOL_ROW), store.read_json(arms["vanilla"].path / "checks.json")
    return [
        *_on(inputs.one("pool"), same_prompts(inputs.one("pool"), arms), pool_check(pool_rows), taxonomy(pool_rows)),
        *_on(arms["vanilla"], measured_check(rows, guards)),
        *_on(arms.get("projected"), *_projection(arms.get("projected"), direction, num_placebos, draws.seed)),
        *_on(inputs.one("score"), *contrast_checks(scored, draws)),
        *_on(inputs.one("direction"), not_generic(direction, pairs, facts["loss_kind"])),
        *_on(inputs.one("score"), specific(scored, _controls(rows, placebos), draws)),
    ]


def _on(run: Run | None, *checks: Check) -> list[Check]:
    """The checks with the run that they were judged from as evidence: its stage and the name of its folder."""
    evidence = "" if run is None else f"{run.manifest.stage}/{run.path.name}"
    return [replace(check, evidence_path=evidence) for check in checks]


def same_prompts(pool: Run, arms: dict[str, Run]) -> Check:
    """E1: every replay was made from a pool of the same prompts as this one."""
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
    """Rows with v's score and those of all drawn placebos; `BadInput` when the scores are of other rows."""
    if [row["row_uid"] for row in rows] != [score["row_uid"] for score in scores]:
        raise BadInput(
            "The scores are not those of the vanilla replay's rows. Give the score run that was made from it."
        )
    drawn = [row for row in placebos if row["family"] in DRAWN]
    columns = [[score["cos_stack"] for score in scores], *(row["scores"] for row in drawn)]
    return labelled(rows, np.array(columns, dtype=float).T, [row["family"] for row in drawn])


def _controls(rows: list[Row], placebos: list[Row]) -> dict[str, np.ndarray]:
    """Scores under each control, of the rows that `labelled` keeps."""
    keep = [index for index, row in enumerate(rows) if None not in (row["hacked"], row["gt_pass"], row["cos_stack"])]
    return {row["family"]: np.array(row["scores"], dtype=float)[keep] for row in placebos if row["family"] in CONTROLS}


def _projection(replay: Run | None, direction: Direction, num_placebos: int, seed: int) -> list[Check]:
    """T3, and that no module is missing from v."""
    if replay is None:
        return [projection_check([], {})]
    count = replay.manifest.counts["steps"]
    steps = [store.read_json(replay.path / f"step_{number:03d}.diag.json") for number in range(count)]
    units = [haar(direction, num_placebos, seed), randsign(direction, num_placebos, seed + 1)]
    placebos = Placebos([name for name, some in zip(RANDOM, units, strict=True) for _ in some], torch.cat(units))
    rows, kept = replay.rows(PROBE_ROW), GradientStore.open(replay.folder())
    random = step_placebos(teacher_gradients(rows, kept.rows), placebos, direction)
    probed = [name for name in direction.layout.names if not name.endswith(A_HALF)]
    return [projection_check(steps, random), fires(steps, len(probed), random["energy"], random["fired"])]
