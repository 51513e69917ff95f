"""probe uat: the checks T1 to T4 on a pool, its replays and its scores, and what they decide.

Reads the pool, the replays (vanilla, and projected for T3), the scores of the vanilla replay and the direction. Writes
`uat.json`, `probe_checks` and a table for people. PASS, FAIL and INCONCLUSIVE have exit codes of their own: 0, 1 and 3.
"""

from pydantic import Field

from composer_stages.errors import BadInput
from composer_stages.runs.kinds import DIRECTION, POOL_ROW, PROBE_CHECK, PROBE_ROW, PROBE_SCORE
from composer_stages.runs.run import Inputs, RunWriter, Slot
from composer_stages.runs.settings import StageConfig
from composer_stages.runs.stage import Plan, Stage


class Config(StageConfig):
    """Settings of the resampling."""

    permutations: int = Field(default=2000, ge=100)
    placebos: int = Field(default=64, ge=1)
    """Random directions of each of two families that T3 is compared with."""


def plan(inputs: Inputs, config: Config) -> Plan:
    """Plan the checks."""
    del inputs, config
    return Plan(units=8, what="checks")


def run(inputs: Inputs, config: Config, out: RunWriter) -> None:
    """Judge the runs and write the checks.

    `BadInput` without a vanilla replay, with two replays of one arm, or with scores of other rows.
    """
    from composer_stages.probe.checks.check import write_checks
    from composer_stages.probe.checks.pool import bucket_table
    from composer_stages.probe.checks.uat import run_checks
    from composer_stages.probe.statistics import Draws

    replays = inputs.many("replays")
    names = [run.manifest.summary["arm"] for run in replays]
    if "vanilla" not in names or len(set(names)) < len(names):
        raise BadInput("probe.arms-not-distinct", names=names)
    arms = dict(zip(names, replays, strict=True))
    checks = run_checks(inputs, arms, Draws(config.permutations, config.seed), config.placebos)
    rows = arms["vanilla"].rows(PROBE_ROW)
    out.table(PROBE_CHECK, [check.row() for check in checks])
    out.count(planned=len(checks), done=len(checks))
    # Counts come before any test: with one row of a kind no test has power.
    statuses = {check.name: check.status for check in checks}
    write_checks(out, checks, "uat", f"{bucket_table(rows)}\n\n", checks=statuses)


STAGE = Stage(
    name="probe-uat",
    version=2,
    config=Config,
    inputs={
        "pool": Slot(POOL_ROW),
        "replays": Slot(PROBE_ROW, many=True),
        "score": Slot(PROBE_SCORE),
        "direction": Slot(DIRECTION),
    },
    outputs={"probe_checks": PROBE_CHECK},
    plan=plan,
    run=run,
)
