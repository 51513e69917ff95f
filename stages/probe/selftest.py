"""probe selftest: every guard on a sound world, then every fault, and whether exactly the right guard fails.

Reads nothing: it builds small models with a planted loophole. Writes `probe_checks`, one row a guard, one a fault, and
some for weights in half precision. The unit is a fault.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from stages.runs.artifact import Inputs, RunWriter
from stages.runs.config import StageConfig
from stages.runs.records import PROBE_CHECK
from stages.runs.stage import Plan, Stage

if TYPE_CHECKING:
    from stages.probe.checks.check import Check
    from stages.probe.synthetic.world import World


class Config(StageConfig):
    """Nothing but the seed."""


def plan(inputs: Inputs, config: Config) -> Plan:
    """The faults."""
    del inputs, config
    return Plan(units=27, what="faults", notes=("about half a minute on one core",))


def run(inputs: Inputs, config: Config, out: RunWriter) -> None:
    """Build, judge the sound world, break it in every way."""
    del inputs
    import copy

    from stages.probe.synthetic.half_precision import half_precision_checks
    from stages.probe.synthetic.loophole_world import honest_model, loophole_model
    from stages.probe.synthetic.world import build

    out.progress("models", 0, 2)
    base = honest_model(config.seed)
    teacher = loophole_model(copy.deepcopy(base), config.seed)
    out.progress("half precision", 1, 2)
    half = half_precision_checks(base, teacher, config.seed)
    judge_world(build(base, teacher, config.seed), out, half)


def judge_world(world: "World", out: RunWriter, others: Sequence["Check"] = ()) -> None:
    """Judge a sound world by all guards, then under every fault, and write the table of both and of `others`."""
    from stages.probe.checks.check import EXIT_CODES, Check, judged, table, verdict
    from stages.probe.synthetic.faults import FAULTS
    from stages.probe.synthetic.guard_checks import failing, judge

    sound = judge(world)
    checks = [*(check for check in sound.values() if check is not None), *others]
    for index, fault in enumerate(FAULTS):
        out.raise_if_stopped()
        out.progress("faults", index, len(FAULTS))
        failed = failing(judge(fault.inject(world), (world, sound)))
        status, detail = judged(failed == [fault.guard]), f"{fault.name}: {', '.join(failed) or 'nothing'} fails"
        checks.append(Check("fault", fault.item, status, float(len(failed)), f"only {fault.guard} fails", detail))
    status = verdict(checks)
    out.table(PROBE_CHECK, [check.row() for check in checks])
    out.document("selftest", [check.as_json() for check in checks])
    out.text("report.txt", table(checks) + "\n")
    out.count(guards=len(sound), faults=len(FAULTS))
    out.set_summary(ok=status == "PASS", verdict=status, exit_code=EXIT_CODES[status])


STAGE = Stage(
    name="probe-selftest",
    version=1,
    config=Config,
    outputs={"probe_checks": PROBE_CHECK},
    plan=plan,
    run=run,
)
