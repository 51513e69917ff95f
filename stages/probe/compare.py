"""probe compare: two scores of one pool, or the trainings of several arms.

Scores on an SVD and on a LoRA adapter are R6, scores under an NLL and a GRPO direction are R7; both compare effect
sizes with intervals on the same rows. Trainings (`composer train`) with nothing, v and a random direction taken out are
R5, with an evaluation of them that tells their solve rates; those of singular values and of a LoRA are R6 once more, by
how much projection slows each. Scores need the replays they were made from. Writes `trajectories` of trainings.
"""

from typing import TYPE_CHECKING

from pydantic import Field

from composer_stages.errors import BadInput
from composer_stages.runs.kinds import EVAL_ITEM, PROBE_CHECK, PROBE_ROW, PROBE_SCORE, TRAINING_REWARD, TRAJECTORY
from composer_stages.runs.run import Inputs, Run, RunWriter, Slot
from composer_stages.runs.settings import StageConfig
from composer_stages.runs.stage import Plan, Stage

if TYPE_CHECKING:
    from composer_stages.probe.checks.check import Check


class Config(StageConfig):
    """Settings of the resampling."""

    resamples: int = Field(default=2000, ge=100)


def plan(inputs: Inputs, config: Config) -> Plan:
    """Plan the comparisons, one unit an input."""
    del config
    return Plan(units=len(inputs), what="inputs")


def run(inputs: Inputs, config: Config, out: RunWriter) -> None:
    """Compare scores and trainings; `BadInput` without either."""
    from composer_stages.probe.checks.check import write_checks
    from composer_stages.probe.checks.trajectories import (
        arms_learn,
        reductions_match,
        trajectories,
        trajectories_slowed,
    )

    checks = []
    if "trainings" in inputs:
        rows = trajectories(inputs.many("trainings"), inputs.optional("evaluation"))
        matched = reductions_match(rows)
        # R5 needs three arms; trainings of two adapters without the random arm are compared by R6 alone.
        has_random = any(row["arm"] == "projected_random" for row in rows)
        checks += [*arms_learn(rows), *(trajectories_slowed(rows) if has_random or not matched else []), *matched]
        out.table(TRAJECTORY, rows, "trajectories")
    if "scores" in inputs:
        checks.append(_compare_scores(inputs.many("scores"), inputs.many("rows"), config))
    if not checks:
        raise BadInput("probe.nothing-to-compare")
    out.table(PROBE_CHECK, [check.row() for check in checks])
    write_checks(out, checks, "compare", checks={check.name: check.status for check in checks})


def _compare_scores(scores: list[Run], replays: list[Run], config: Config) -> "Check":
    """Check R6 for scores of an SVD and a LoRA adapter, R7 for an NLL and a GRPO direction; else `BadInput`."""
    import numpy as np

    from composer_stages.probe.checks.hacking import factorial_design
    from composer_stages.probe.checks.trajectories import grpo_against_nll, lora_against_svd
    from composer_stages.probe.statistics import compare_effects, labelled, regress

    # The reference comes first: SVD before LoRA, NLL before GRPO.
    facts = [(run.manifest.summary["adapter"], run.manifest.summary["loss_kind"]) for run in scores]
    adapters = len(scores) == 2 and sum(adapter.startswith("lora") for adapter, _ in facts) == 1
    if adapters:
        first, second = sorted(scores, key=lambda run: run.manifest.summary["adapter"].startswith("lora"))
    elif len(scores) == 2 and {loss for _, loss in facts} == {"nll_mean", "drgrpo_sum"}:
        first, second = sorted(scores, key=lambda run: run.manifest.summary["loss_kind"] != "nll_mean")
    else:
        raise BadInput("probe.scores-not-comparable", facts=str(facts))
    labels = {row["row_uid"]: row for run in replays for row in run.rows(PROBE_ROW)}
    scored = [{row["row_uid"]: row["cos_stack"] for row in run.rows(PROBE_SCORE)} for run in (first, second)]
    if scored[0].keys() != scored[1].keys() or not scored[0].keys() <= labels.keys():
        raise BadInput("probe.rows-differ")
    rows = [labels[uid] for uid in scored[0]]
    table = np.array([[scores[row["row_uid"]] for scores in scored] for row in rows], dtype=float)
    scored_rows = labelled(rows, table)
    # Effect sizes, not cosines: those of adapters with other numbers of parameters cannot be compared.
    effects = compare_effects(scored_rows, config.resamples, config.seed)
    if adapters:
        return lora_against_svd(effects)
    fit = regress(scored_rows.scores, scored_rows.hacked, factorial_design(scored_rows), scored_rows.problem)
    return grpo_against_nll(effects, fit.t.tolist())


STAGE = Stage(
    name="probe-compare",
    version=2,
    config=Config,
    inputs={
        "scores": Slot(PROBE_SCORE, many=True, optional=True),
        "rows": Slot(PROBE_ROW, many=True, optional=True),
        "trainings": Slot(TRAINING_REWARD, many=True, optional=True),
        "evaluation": Slot(EVAL_ITEM, optional=True),
    },
    outputs={"probe_checks": PROBE_CHECK, "trajectories": TRAJECTORY},
    plan=plan,
    run=run,
)
