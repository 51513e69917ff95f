"""What `evaluate --plan` assumes and asks, and its answer, as JSON and as text."""

from collections.abc import Sequence
from dataclasses import asdict

from pydantic import Field

from stages.evaluation.lineup import of_start
from stages.runs.artifact import Run
from stages.runs.config import Settings
from stages.runs.outcome_records import EVAL_ITEM
from stages.runs.records import Row


class Planning(Settings):
    """What `--plan` assumes. Rates that are not given come from the pilot behind --from, or are assumed."""

    gain: float = Field(0.02, gt=-1, lt=1)
    """The true difference in pass@1, a fraction."""
    power: float = Field(0.8, gt=0.5, lt=1)
    seeds: int = Field(1, gt=0)
    """Training seeds."""
    base: float | None = Field(None, gt=0, lt=1)
    """The baseline's pass rate."""
    repeat: float | None = Field(None, gt=0, lt=1)
    """How often two rollouts of one model on one task differ."""
    discordance: float | None = Field(None, gt=0, le=1)
    """How often rollouts of the two arms on one task differ."""
    family_share: float | None = Field(None, ge=0, le=1)
    """The part of a task's difficulty that its family has."""
    seed_spread: float | None = Field(None, ge=0, lt=1)
    """The standard deviation of the gain from training to training."""
    usd_per_rollout: float | None = Field(None, ge=0)


def study(
    pilots: Sequence[Run],
    asked: Planning,
    *,
    baseline: str,
    treatment: str,
    num_arms: int,
    family_sizes: Sequence[int],
    samples: int,
    fixed: bool,
) -> tuple[Row, str]:
    """What an evaluation of `num_arms` arms would find and cost; `BadInput` for a pilot without rollouts.

    `family_sizes`: the tasks of each family. `fixed`: families are fixed strata.
    """
    from stages.evaluation import planner
    from stages.evaluation.pilot import GIVEN, Price, complete, measure
    from stages.evaluation.simulation import Design, World

    items = [item for run in pilots for item in (run.rows(EVAL_ITEM) if run.holds(EVAL_ITEM) else of_start(run))]
    given = {name: (getattr(asked, name), GIVEN) for name in World.__annotations__ if getattr(asked, name) is not None}
    rates = complete({**measure(items, baseline, treatment), **given}, asked.gain)
    world = World(**{name: value for name, (value, _) in rates.items()})
    design = Design(tuple(family_sizes), samples, asked.seeds, fixed)
    costs = [item["cost_usd"] for item in items if item["cost_usd"] is not None]
    price = asked.usd_per_rollout if asked.usd_per_rollout is not None else sum(costs) / len(costs) if costs else None
    found = planner.study(planner.Question(world, asked.gain, asked.power, num_arms, Price(price)), design, rates)
    return asdict(found), planner.text(found)
