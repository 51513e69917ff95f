"""probe watch: does a training run turn toward a hack? An alarm, calibrated on directions that mean nothing.

Reads a training run with its checkpoints (`optimisation.keep_every`), a direction that was extracted on the model that
training started from, and the decomposition. For the start and every checkpoint it measures where the update since the
checkpoint before and the policy gradient on the rollouts that were played there point, beside placebo directions, and
the policy gradient with length held fixed; over all rollouts, whether v tells hacks from other answers, right or wrong
alike. Writes `watched`, `watch.json` and one figure. The unit is a checkpoint.
"""

from pydantic import Field

from stages.runs.artifact import Out, Slot
from stages.runs.config import StageConfig
from stages.runs.inputs import Inputs
from stages.runs.outcome_records import TRAINING_REWARD
from stages.runs.plan import Plan
from stages.runs.probe_records import DIRECTION, SVD_MODULE, WATCHED

VERSION = 1
INPUTS = {
    "training": Slot(TRAINING_REWARD),
    "direction": Slot(DIRECTION),
    "svd": Slot(SVD_MODULE, optional=True),
}
OUTPUTS = {"watched": WATCHED}


class Config(StageConfig):
    """How many placebos."""

    placebos: int = Field(334, ge=19)
    """Draws of each of five families; three of them are a null for the alarm."""
    permutations: int = Field(2000, ge=100)
    resamples: int = Field(2000, ge=100)
    max_tokens: int = Field(8192, gt=0, json_schema_extra={"affects_results": False})
    """Padded tokens of one backward pass."""


def plan(inputs: Inputs, config: Config) -> Plan:
    """The checkpoints."""
    del config
    from stages.probe.loops.watch_loop import checkpoints

    return Plan(units=len(checkpoints(inputs.one("training"))), what="checkpoints")


def run(inputs: Inputs, config: Config, out: Out) -> None:
    """Measure what is not measured yet, then judge; `BadInput` where v is not of the model that training began from."""
    from stages.probe.checks.check import EXIT_CODES, table, verdict
    from stages.probe.checks.contrast_checks import Draws
    from stages.probe.figures.figures import as_csv
    from stages.probe.figures.watch_figure import watch_png
    from stages.probe.loops.watch_loop import WatchLoop, checkpoints

    loop = WatchLoop(inputs, config.placebos, config.seed, config.max_tokens, out)
    found = checkpoints(inputs.one("training"))
    for index, (step, folder) in enumerate(found):
        out.progress("checkpoints", index, len(found))
        if not out.finished(f"step_{step:06d}"):
            out.stop_here()
            loop.measure(step, folder, None if index == 0 else found[index - 1][0])
    steps = [step for step, _ in found]
    watched, facts, checks = loop.finish(steps, Draws(config.permutations, config.resamples, config.seed))
    status = verdict(checks)
    out.table(WATCHED, watched, "watched")
    out.document("watch", {**facts, "checks": [check.as_json() for check in checks], "checkpoints": watched})
    out.text("watch.csv", as_csv(watched))
    out.figure("watch.png", watch_png(watched, facts["threshold"]))
    out.text("report.txt", table(checks) + "\n")
    out.count(planned=len(steps), done=len(steps))
    out.conclude(ok=status == "PASS", verdict=status, exit_code=EXIT_CODES[status], **facts)
