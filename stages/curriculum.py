"""curriculum: measure how hard tasks are by rollouts of them, and order those within a band of difficulty.

Reads runs that hold tasks and rollouts of them; writes `difficulties`, for every task the share of its rollouts that
solved it with Wilson's interval, and `tasks`, those within the band in order. `--set env.curriculum=RUN` makes every
stage that plays take its tasks from the result.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil
from typing import Literal

from pydantic import Field, model_validator

from composer_stages.data_files import load_template
from composer_stages.envs.base import Grade
from composer_stages.errors import BadInput, Incomplete
from composer_stages.rollouts.trace import inherited, lineage, require_unmixed
from composer_stages.runs.kinds import DIFFICULTY, ROLLOUT, TASK, Row
from composer_stages.runs.run import Inputs, RunWriter, Slot
from composer_stages.runs.settings import StageConfig
from composer_stages.runs.stage import Plan, Stage
from composer_stages.terms import TWIN
from composer_stages.words import Sentence

ROLLOUT_COLUMNS = ["task_id", "hidden_pass", "reward", "model"]
BANDS = ("none", "up to a quarter", "up to a half", "up to three quarters", "less than all", "all")
"""Bands of the share of rollouts that solved a task, for the report."""


class Config(StageConfig):
    """The tasks to keep, and their order."""

    min_rate: float = Field(default=0.0, ge=0.0, le=1.0)
    """Tasks of which a smaller share of rollouts was solved are left out."""
    max_rate: float = Field(default=1.0, ge=0.0, le=1.0)
    """Tasks of which a larger share of rollouts was solved are left out."""
    min_rollouts: int = Field(default=4, gt=0)
    """Tasks with fewer graded rollouts are left out: their difficulty is not known."""
    order: Literal["easy-first", "hard-first"] = "easy-first"
    """By the share of rollouts that solved a task; equal ones by their ids."""

    @model_validator(mode="after")
    def _check_band(self) -> "Config":
        if self.min_rate > self.max_rate:
            raise ValueError(Sentence("band-is-empty", min_rate=self.min_rate, max_rate=self.max_rate))
        return self

    def label(self) -> str:
        """Return the band."""
        return f"{self.min_rate:g}-to-{self.max_rate:g}"


@dataclass
class MeasuredTask:
    """One task and the results of its rollouts; those that could not be graded are counted separately."""

    row: Row
    solved: int = 0
    graded: int = 0
    ungraded: int = 0

    @property
    def rate(self) -> float | None:
        """Return the share of graded rollouts that solved the task; None where none was graded."""
        return self.solved / self.graded if self.graded else None

    def exclusion_reason(self, config: Config) -> str | None:
        """Return why the task is left out of the curriculum, or None."""
        rate = self.rate
        if self.row["task_id"].endswith(TWIN):
            return "impossible variants, whose passes are hacks"
        if rate is None or self.graded < config.min_rollouts:
            return f"fewer than {config.min_rollouts} graded rollouts"
        if rate < config.min_rate:
            return f"solved by less than {100 * config.min_rate:g} %"
        return f"solved by more than {100 * config.max_rate:g} %" if rate > config.max_rate else None

    def difficulty(self, position: int | None) -> Row:
        """Return the `difficulty` row of the task; `position`: its index in the curriculum."""
        from composer_stages.evaluation.inference import wilson  # imports numpy

        low, high = wilson(self.rate, self.graded) if self.rate is not None else (None, None)
        return {
            **{name: self.row[name] for name in ("task_id", "env", "split", "family")},
            "num_rollouts": self.graded,
            "num_solved": self.solved,
            "rate": self.rate,
            "low": low,
            "high": high,
            "place": position,
        }


def plan(inputs: Inputs, config: Config) -> Plan:
    """Return the number of tasks to measure."""
    del config
    # A run counts once, also where two paths name the same content.
    distinct = {run.manifest.content: run for run in inputs.many("tasks")}.values()
    return Plan(units=sum(len(run.scan(TASK)) for run in distinct), what="tasks")


def run(inputs: Inputs, config: Config, out: RunWriter) -> None:
    """Measure every task, then choose and order those within the band."""
    tasks, models = _measure(inputs)
    sign = 1 if config.order == "easy-first" else -1
    why = {name: task.exclusion_reason(config) for name, task in tasks.items()}
    selected = [task for name, task in tasks.items() if why[name] is None]
    selected.sort(key=lambda task: (-sign * (task.rate or 0.0), task.row["task_id"]))
    places = {task.row["task_id"]: position for position, task in enumerate(selected)}
    out.table(DIFFICULTY, (task.difficulty(places.get(name)) for name, task in tasks.items()), "difficulties")
    out.table(TASK, (task.row for task in selected))
    reasons = Counter(reason for reason in why.values() if reason)
    out.count(planned=len(tasks), done=len(selected), ungraded=sum(task.ungraded for task in tasks.values()))
    out.count(**{f"left out, {reason}": number for reason, number in sorted(reasons.items())})
    out.set_summary(tasks=len(selected), selected_by=_selected_by(inputs))
    out.write_file("report.txt", _report(list(tasks.values()), len(selected), reasons, models))
    if not selected:
        raise Incomplete(
            "no-task-in-band",
            num_tasks=len(tasks),
            min_rate=config.min_rate,
            max_rate=config.max_rate,
            reasons=dict(reasons),
        )


def _selected_by(inputs: Inputs) -> list[str]:
    """Return the digests of what holds the rollouts that select, and of those that selected their tasks before.

    Chance that made a task pass here is gone where it is played again, so these rollouts are no measure of its model.
    """
    return sorted({digest for digests in inherited(inputs.many("rollouts")).values() for digest in digests})


def _measure(inputs: Inputs) -> tuple[dict[str, MeasuredTask], list[str]]:
    """Count solved and graded rollouts by task; return them with the names of the models."""
    with_tasks, with_rollouts = (
        {run.manifest.content: run for run in inputs.many(slot)}.values() for slot in ("tasks", "rollouts")
    )
    tasks: dict[str, MeasuredTask] = {}
    for run in with_tasks:
        for row in run.scan(TASK).rows():
            task = tasks.setdefault(row["task_id"], MeasuredTask(row))
            if task.row != row:
                raise BadInput("task-id-reused", run=run.path, task_id=row["task_id"])
    models: Counter[str] = Counter()
    # Nor do rollouts count again that another run has of one of these, such as those that a recipe keeps.
    contents = {run.manifest.content for run in with_rollouts}
    for run in (run for run in with_rollouts if not contents & lineage(run) - {run.manifest.content}):
        for rollout in require_unmixed(run).scan(ROLLOUT).rows(ROLLOUT_COLUMNS):
            entry = tasks.get(rollout["task_id"])
            if entry is None:
                raise BadInput("rollouts-without-task", run=run.path, task_id=rollout["task_id"])
            passed = Grade(rollout["reward"], rollout["hidden_pass"]).passed
            if passed is None:  # an error of the infrastructure tells nothing about the task
                entry.ungraded += 1
                continue
            models[rollout["model"] or "unknown"] += 1
            entry.graded += 1
            entry.solved += passed
    return tasks, sorted(models)


def _report(tasks: Sequence[MeasuredTask], num_chosen: int, reasons: Counter[str], models: list[str]) -> str:
    """Return the report: what was measured, what was left out, and the distribution of rates."""
    rates = [task.rate for task in tasks if task.rate is not None]
    # A quarter exactly belongs to the band up to a quarter.
    spread = Counter(BANDS[-1] if rate == 1.0 else BANDS[ceil(4 * rate)] for rate in rates)
    return load_template(__package__, "curriculum_report.jinja").render(
        tasks=tasks,
        num_chosen=num_chosen,
        reasons=reasons,
        models=models,
        bands=[(band, spread[band]) for band in BANDS],
    )


STAGE = Stage(
    name="curriculum",
    version=1,
    example="""\
>>> ordered = composer.curriculum(rollouts, min_rollouts=1, max_rate=1.0, quiet=True)
>>> len(ordered.scan("tasks"))
2""",
    config=Config,
    inputs={"tasks": Slot(TASK, many=True), "rollouts": Slot(ROLLOUT, many=True)},
    outputs={"tasks": TASK, "difficulties": DIFFICULTY},
    plan=plan,
    run=run,
)
