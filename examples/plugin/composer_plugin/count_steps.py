"""count-steps: count the steps of the rollouts."""

from composer_post_training.kinds import ROLLOUT
from composer_post_training.stages import Inputs, Plan, RunWriter, Slot, Stage, StageConfig, StageEntry

ENTRY = StageEntry(__name__, "Count the steps of rollouts.", "beside")


class Config(StageConfig):
    """The settings of count-steps."""

    at_least: int = 0
    """Count only rollouts with at least so many steps."""


def plan(inputs: Inputs, config: Config) -> Plan:
    """Return the work ahead: one table."""
    return Plan(units=1, what="table")


def run(inputs: Inputs, config: Config, out: RunWriter) -> None:
    """Count the steps and write the report."""
    counts = [row["num_steps"] for row in inputs.one("rollouts").rows(ROLLOUT)]
    steps = sum(count for count in counts if count >= config.at_least)
    out.set_summary(steps=steps)
    out.write_file("report.txt", f"{steps} steps in {len(counts)} rollouts\n")


STAGE = Stage(name="count-steps", version=1, config=Config, inputs={"rollouts": Slot(ROLLOUT)}, plan=plan, run=run)
