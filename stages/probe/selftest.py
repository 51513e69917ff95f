"""probe selftest: every guard on a sound world, then every fault, and whether exactly the right guard fails.

Reads nothing: it builds small models with a planted loophole. Writes `probe_checks`, one row a guard, one a fault, and
some for weights in half precision. The unit is a fault, or all checks in half precision. Faults and world belong to the
tests of the repository (tests/probe_faults), so the stage needs a checkout.
"""

import copy
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING

from stages.checkout import add_to_path
from stages.runs.kinds import PROBE_CHECK
from stages.runs.run import Inputs, RunWriter
from stages.runs.settings import StageConfig
from stages.runs.stage import Plan, Stage

if TYPE_CHECKING:
    from probe_faults.world import ProbeWorld  # type: ignore[import-not-found,unused-ignore]

    from stages.probe.checks.check import Check


HALF_PRECISION = "half precision"


class Config(StageConfig):
    """Nothing but the seed."""


def plan(inputs: Inputs, config: Config) -> Plan:
    """Return the number of faults; `UsageError` outside a checkout."""
    del inputs, config
    add_to_path("tests/probe_faults")
    return Plan(units=27, what="faults", notes=("about half a minute on one core",))


def run(inputs: Inputs, config: Config, out: RunWriter) -> None:
    """Build the models, check half precision, judge the sound world and every broken one."""
    del inputs
    add_to_path("tests/probe_faults")
    from probe_faults.half_precision import half_precision_checks  # type: ignore[import-not-found,unused-ignore]
    from probe_faults.loophole_world import honest_model, loophole_model  # type: ignore[import-not-found,unused-ignore]
    from probe_faults.world import build_world

    out.progress("models", 0, 2)
    base = honest_model(config.seed)
    teacher = loophole_model(copy.deepcopy(base), config.seed)
    out.progress(HALF_PRECISION, 1, 2)
    half = judged_once(HALF_PRECISION, lambda: half_precision_checks(base, teacher, config.seed), out)
    judge_faults(build_world(base, teacher, config.seed), out, half)


def judged_once(unit: str, judge: "Callable[[], Sequence[Check]]", out: RunWriter) -> "list[Check]":
    """Return the checks of a unit, judged in this attempt or in an earlier one."""
    from stages.probe.checks.check import Check

    if not out.finished(unit):
        out.raise_if_stopped()
        out.write(unit, {"checks": [check.row() for check in judge()]})
    return [Check.of_row(row) for row in (out.journal.get(unit) or {})["checks"]]


def judge_faults(world: "ProbeWorld", out: RunWriter, others: "Sequence[Check]" = ()) -> None:
    """Judge a sound world by all guards, then under every fault; write one table of both and of the checks `others`."""
    from probe_faults.faults import FAULTS, InjectedFault  # type: ignore[import-not-found,unused-ignore]
    from probe_faults.guard_checks import failing, judge_guards  # type: ignore[import-not-found,unused-ignore]

    from stages.probe.checks.check import Check, judged, write_checks

    sound = judge_guards(world)

    def inject(fault: InjectedFault) -> list[Check]:
        # Guards that build on the broken one are not judged, so that one fault shows as one failure.
        failed = failing(judge_guards(fault.inject(world), (world, sound)))
        status, detail = judged(failed == [fault.guard]), f"{fault.name}: {', '.join(failed) or 'nothing'} fails"
        return [Check("fault", fault.item, status, float(len(failed)), f"only {fault.guard} fails", detail)]

    checks = [*(check for check in sound.values() if check is not None), *others]
    for index, fault in enumerate(FAULTS):
        out.progress("faults", index, len(FAULTS))
        checks += judged_once(fault.name, partial(inject, fault), out)
    out.table(PROBE_CHECK, [check.row() for check in checks])
    out.count(guards=len(sound), faults=len(FAULTS))
    write_checks(out, checks, "selftest")


STAGE = Stage(
    name="probe-selftest",
    version=1,
    config=Config,
    outputs={"probe_checks": PROBE_CHECK},
    plan=plan,
    run=run,
)
