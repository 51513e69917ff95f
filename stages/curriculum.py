"""curriculum: how hard tasks are, measured by rollouts of them, and those within a band of difficulty in order.

Reads runs that hold tasks and rollouts of them, writes `difficulties`, for every task the share of its rollouts that
solved it with Wilson's interval, and `tasks`, those within the band, easiest first. `--set env.curriculum=RUN` has
every stage that plays take its tasks from there.
"""

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Literal

from pydantic import Field, model_validator

from stages.envs.base import TWIN
from stages.errors import BadInput, Incomplete
from stages.runs.artifact import Inputs, Run, RunWriter, Slot
from stages.runs.config import StageConfig
from stages.runs.records import DIFFICULTY, ROLLOUT, TASK, Row
from stages.runs.stage import Plan, Stage

READ = ["task_id", "gt_pass", "model"]


class Config(StageConfig):
    """Which tasks to keep, and in which order."""

    min_rate: float = Field(0.0, ge=0.0, le=1.0)
    """Tasks of which a smaller share of rollouts was solved are left out."""
    max_rate: float = Field(1.0, ge=0.0, le=1.0)
    """And those of which a larger share was."""
    min_rollouts: int = Field(4, gt=0)
    """Tasks with fewer graded rollouts are left out: nobody knows how hard they are."""
    order: Literal["easy-first", "hard-first"] = "easy-first"
    """By the share of rollouts that solved a task; equal ones by their ids."""

    @model_validator(mode="after")
    def _is_a_band(self) -> "Config":
        if self.min_rate > self.max_rate:
            raise ValueError(f"min_rate is {self.min_rate:g}, above max_rate, which is {self.max_rate:g}")
        return self

    def label(self) -> str:
        """The band."""
        return f"{self.min_rate:g}-to-{self.max_rate:g}"


@dataclass
class Measured:
    """One task, and how its rollouts ended; those that could not be graded count apart."""

    row: Row
    solved: int = 0
    graded: int = 0
    ungraded: int = 0

    @property
    def rate(self) -> float | None:
        """The share that solved it, of those that were graded; None where none was."""
        return self.solved / self.graded if self.graded else None

    def left_out(self, config: Config) -> str | None:
        """Why it is no part of the curriculum."""
        rate = self.rate
        if self.row["task_id"].endswith(TWIN):
            return "impossible variants, whose passes are hacks"
        if rate is None or self.graded < config.min_rollouts:
            return f"fewer than {config.min_rollouts} graded rollouts"
        if rate < config.min_rate:
            return f"solved by less than {100 * config.min_rate:g} %"
        return f"solved by more than {100 * config.max_rate:g} %" if rate > config.max_rate else None


def plan(inputs: Inputs, config: Config) -> Plan:
    """The tasks to look at."""
    del config
    return Plan(units=sum(len(run.scan(TASK)) for run in _distinct(inputs.many("tasks"))), what="tasks")


def run(inputs: Inputs, config: Config, out: RunWriter) -> None:
    """Count, then choose and order."""
    tasks, models = _measured(_distinct(inputs.many("tasks")), _distinct(inputs.many("rollouts")))
    sign = 1 if config.order == "easy-first" else -1
    why = {name: one.left_out(config) for name, one in tasks.items()}
    chosen = [one for name, one in tasks.items() if why[name] is None]
    chosen.sort(key=lambda one: (-sign * (one.rate or 0.0), one.row["task_id"]))
    places = {one.row["task_id"]: place for place, one in enumerate(chosen)}
    out.table(DIFFICULTY, (_difficulty(one, places) for one in tasks.values()), "difficulties")
    out.table(TASK, (one.row for one in chosen))
    reasons = Counter(reason for reason in why.values() if reason)
    ungraded = sum(one.ungraded for one in tasks.values())
    out.count(planned=len(tasks), done=len(chosen), ungraded=ungraded)
    out.count(**{f"left out, {reason}": number for reason, number in sorted(reasons.items())})
    out.set_summary(tasks=len(chosen))
    out.text("report.txt", _report(tasks, chosen, reasons, models, ungraded))
    if not chosen:
        raise Incomplete(
            f"None of {len(tasks)} tasks lies between {config.min_rate:g} and {config.max_rate:g}: {dict(reasons)}. "
            "Widen the band, or collect more rollouts of them."
        )


def _distinct(runs: Iterable[Run]) -> list[Run]:
    """Every run once, also where the same work was named by two paths."""
    return list({run.manifest.content: run for run in runs}.values())


def _measured(with_tasks: Iterable[Run], with_rollouts: Iterable[Run]) -> tuple[dict[str, Measured], list[str]]:
    """Every task with what its rollouts came to, and the models that played them."""
    tasks: dict[str, Measured] = {}
    for run in with_tasks:
        for row in run.scan(TASK).rows():
            known = tasks.setdefault(row["task_id"], Measured(row))
            if known.row != row:
                raise BadInput(
                    f"{run.path} has another task under the id {row['task_id']} than a run before it. "
                    "Give runs of the same tasks."
                )
    models: Counter[str] = Counter()
    for run in with_rollouts:
        for rollout in run.scan(ROLLOUT).rows(READ):
            one = tasks.get(rollout["task_id"])
            if one is None:
                raise BadInput(f"{run.path} has rollouts of {rollout['task_id']}, which no run given has as a task.")
            if rollout["gt_pass"] is None:
                one.ungraded += 1
                continue
            models[rollout["model"] or "unknown"] += 1
            one.graded += 1
            one.solved += rollout["gt_pass"]
    return tasks, sorted(models)


def _difficulty(one: Measured, places: Mapping[str, int]) -> Row:
    from stages.evaluation.stats import wilson

    low, high = wilson(one.rate, one.graded) if one.rate is not None else (None, None)
    return {
        **{name: one.row[name] for name in ("task_id", "env", "split", "family")},
        "num_rollouts": one.graded,
        "num_solved": one.solved,
        "rate": one.rate,
        "low": low,
        "high": high,
        "place": places.get(one.row["task_id"]),
    }


def _report(
    tasks: Mapping[str, Measured], chosen: list[Measured], reasons: Counter[str], models: list[str], ungraded: int
) -> str:
    """What was measured, what is left, and how the rates are spread."""
    graded = sum(one.graded for one in tasks.values())
    lines = [f"{len(chosen)} of {len(tasks)} tasks, by {graded} graded rollouts of {', '.join(models) or 'no model'}"]
    lines += [f"{number:>6}  left out, {reason}" for reason, number in reasons.most_common()]
    lines += [f"{ungraded:>6}  rollouts that could not be graded and count for nothing"] if ungraded else []
    if len(models) > 1:
        lines += ["", "Several models played: a rate is their mean, by how many rollouts each has."]
    spread = Counter(_band(one.rate) for one in tasks.values() if one.rate is not None)
    return "\n".join([*lines, "", *(f"{spread[band]:>6}  tasks solved by {band}" for band in BANDS)]) + "\n"


BANDS = ("none", "up to a quarter", "up to a half", "up to three quarters", "less than all", "all")


def _band(rate: float) -> str:
    if rate in (0.0, 1.0):
        return BANDS[0] if rate == 0.0 else BANDS[-1]
    return BANDS[1 + min(int(-(-rate * 4 // 1)) - 1, 3)]


STAGE = Stage(
    name="curriculum",
    version=1,
    config=Config,
    inputs={"tasks": Slot(TASK, many=True), "rollouts": Slot(ROLLOUT, many=True)},
    outputs={"tasks": TASK, "difficulties": DIFFICULTY},
    plan=plan,
    run=run,
)
