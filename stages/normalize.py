"""normalize: keep the rollouts that a Data-Juicer recipe keeps, collected here or imported, with its judgement of each.

Reads one run of rollouts, writes `rollouts`, `steps`, `tasks` and `origins` as they were without those that the
recipe drops, `selections` with every rollout, kept or not, its statistics or which operator dropped it, and the
collection gate of what is left. Texts stay as they are, whatever the recipe does to its own copy. A rollout without
steps has nothing to judge and stays.
"""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tabulate import tabulate

from stages.errors import Incomplete, UsageError
from stages.formats import data_juicer
from stages.formats.data_juicer import JuicerConfig
from stages.rollouts import gate
from stages.rollouts.gate import Account
from stages.rollouts.trace import conversation, rollout_rows
from stages.runs import store
from stages.runs.kinds import ORIGIN, ROLLOUT, SELECTION, STEP, TASK, Row
from stages.runs.run import Inputs, RunWriter, Slot
from stages.runs.settings import StageConfig
from stages.runs.stage import Plan, Stage

SHOWN = 20
"""Dropped rollouts that the report names."""


class Config(StageConfig):
    """The recipe, and the program that runs it."""

    dj: JuicerConfig = JuicerConfig()

    def identity(self) -> dict[str, Any]:
        """Replace the path of the recipe by its content."""
        return {"dj": self.dj.identity()}

    def check(self, cache: Path) -> list[str]:
        """Return a line about the program that will run the recipe; `UsageError` without a recipe."""
        del cache
        _require_recipe(self)
        return [f"{data_juicer.program(self.dj.command)} will run {self.dj.recipe}"]


@dataclass
class JudgedRollouts:
    """The counts of kept and of dropped rollouts for the report, with the names of the first dropped ones."""

    kept: Account = field(default_factory=Account)
    dropped: Account = field(default_factory=Account)
    tasks: Counter[str] = field(default_factory=Counter)
    """Kept rollouts by task; 0 for a task that lost all of its rollouts."""
    names: list[str] = field(default_factory=list)


def plan(inputs: Inputs, config: Config) -> Plan:
    """Return the number of rollouts to judge."""
    _require_recipe(config)
    return Plan(units=len(inputs.one("rollouts").scan(ROLLOUT)), what="rollouts")


def run(inputs: Inputs, config: Config, out: RunWriter) -> None:
    """Let the recipe judge, then write what it keeps."""
    _require_recipe(config)
    source = inputs.one("rollouts")
    out.progress("Data-Juicer", 0, 1)
    conversations = ((row["rollout_id"], conversation(steps)) for row, steps in rollout_rows(source) if steps)
    verdict = data_juicer.judge(conversations, config.dj, out.scratch("data-juicer"))
    out.progress("Data-Juicer", 1, 1)
    counted, checks = JudgedRollouts(), gate.Gate()
    dropped = set[str]()

    def judged() -> Iterator[Row]:
        # Facts that the source of each rollout does not record, in the rollouts' order; none for our own rollouts.
        origins = source.scan(ORIGIN).rows(["missing"]) if source.holds(ORIGIN) else iter(())
        for rollout, steps in rollout_rows(source):
            name = rollout["rollout_id"]
            kept = name in verdict.kept or not steps
            reason, lacks = None if kept else verdict.dropped.get(name), next(origins, {"missing": ()})["missing"]
            (counted.kept if kept else counted.dropped).add(rollout, len(steps))
            counted.tasks[rollout["task_id"]] += kept
            if kept:
                checks.add(rollout, steps, lacks)
            else:
                dropped.add(name)
                if len(counted.names) < SHOWN:
                    counted.names.append(f"{name}  {reason or ''}".rstrip())
            stats = store.encode(verdict.kept[name]).decode() if name in verdict.kept else None
            about = {"kept": kept, "stats_json": stats, "reason": reason}
            yield {"rollout_id": name, "task_id": rollout["task_id"], **about}

    out.table(SELECTION, judged())  # fills `dropped`, which the other tables need
    for kind in (ROLLOUT, STEP, ORIGIN):
        if source.holds(kind):
            rows = (row for row in source.scan(kind).rows() if row["rollout_id"] not in dropped)
            out.table(kind, map(kind.upgraded, rows))
    if source.holds(TASK):
        out.table(TASK, source.scan(TASK).rows())
    _report(counted, checks.checks(counted.kept.rollouts), out)


def _require_recipe(config: Config) -> None:
    if config.dj.recipe is None:
        raise UsageError("normalize needs a Data-Juicer recipe. Give one with --dj RECIPE.")


def _report(counted: JudgedRollouts, checks: list[gate.GateCheck], out: RunWriter) -> None:
    """Write the counts, the summary and the report; raise `Incomplete` when nothing is kept."""
    kept, dropped = counted.kept, counted.dropped
    bare = sorted(task for task, number in counted.tasks.items() if not number)
    out.count(planned=kept.rollouts + dropped.rollouts, done=kept.rollouts, dropped=dropped.rollouts, steps=kept.steps)
    out.set_summary(
        kept=kept.rollouts,
        dropped=dropped.rollouts,
        mean_reward_kept=kept.rewards.value,
        mean_reward_dropped=dropped.rewards.value,
        tasks_without_rollouts=len(bare),
        gate_failed=[check.name for check in checks if not check.ok],
        gate={check.name: [check.total - check.failed, check.total, check.unrecorded] for check in checks},
    )
    sides = []
    for name, one in (("kept", kept), ("dropped", dropped)):
        mean = "nothing scored" if one.rewards.value is None else f"{one.rewards.value:.3f}"
        sides.append((name, one.rollouts, one.steps, one.rewards.number, mean))
    lines = [tabulate(sides, ("", "rollouts", "steps", "scored", "mean reward"), tablefmt="plain")]
    if counted.names:
        more = dropped.rollouts - len(counted.names)
        lines += ["", "dropped by the recipe", *(f"  {name}" for name in counted.names)]
        lines += [f"  ... and {more} more: `kept` is false in selections.parquet"] if more else []
    lines += ["", f"tasks without a rollout left: {len(bare)}, among them {', '.join(bare[:5])}"] if bare else []
    out.write_file("report.txt", "\n".join([*lines, "", gate.table(checks)]) + "\n")
    if not kept.rollouts:
        raise Incomplete(f"The recipe keeps none of {dropped.rollouts} rollouts. Give one that asks for less.")


STAGE = Stage(
    name="normalize",
    version=1,
    config=Config,
    inputs={"rollouts": Slot(STEP)},
    outputs={"tasks": TASK, "rollouts": ROLLOUT, "steps": STEP, "origins": ORIGIN, "selections": SELECTION},
    plan=plan,
    run=run,
)
