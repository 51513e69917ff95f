"""normalize: the rollouts that a Data-Juicer recipe keeps, collected here or imported, with what it says of each.

Reads one run of rollouts, writes `rollouts`, `steps`, `tasks` and `origins` as they were without those that the
recipe drops, `selections` with every rollout, kept or not, its statistics or which operator dropped it, and the
collection gate of what is left. Texts stay as they are, whatever the recipe does to its own copy. A rollout without
steps has nothing to judge and stays.
"""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from tabulate import tabulate

from stages.errors import Incomplete, UsageError
from stages.formats import data_juicer
from stages.formats.data_juicer import JuicerConfig
from stages.messages import Message
from stages.rollouts import gate
from stages.rollouts.gate import Account
from stages.rollouts.trace import conversation, rollout_rows
from stages.runs import store
from stages.runs.artifact import Inputs, Run, RunWriter, Slot
from stages.runs.config import StageConfig
from stages.runs.records import ORIGIN, ROLLOUT, SELECTION, STEP, TASK, Row
from stages.runs.stage import Plan, Stage

SHOWN = 20


class Config(StageConfig):
    """Which recipe, and whose program."""

    dj: JuicerConfig = JuicerConfig()

    def identity(self) -> dict[str, Any]:
        """The content of the recipe stands for its path."""
        return {"dj": self.dj.identity()}

    def check(self) -> list[str]:
        """There is a recipe, and a program that may run it."""
        _wanted(self)
        return [f"{data_juicer.program(self.dj.command)} will run {self.dj.recipe}"]


@dataclass
class Told:
    """What rollouts came to, those that stay apart from those that go."""

    kept: Account = field(default_factory=Account)
    dropped: Account = field(default_factory=Account)
    tasks: Counter[str] = field(default_factory=Counter)
    names: list[str] = field(default_factory=list)

    def add(self, rollout: Row, steps: int, *, kept: bool, why: str) -> None:
        """One rollout, and which operator dropped it, where that is known."""
        (self.kept if kept else self.dropped).add(rollout, steps)
        self.tasks[rollout["task_id"]] += kept
        if not kept and len(self.names) < SHOWN:
            self.names.append(f"{rollout['rollout_id']}  {why}".rstrip())


def plan(inputs: Inputs, config: Config) -> Plan:
    """The rollouts to judge."""
    _wanted(config)
    return Plan(units=len(inputs.one("rollouts").scan(ROLLOUT)), what="rollouts")


def run(inputs: Inputs, config: Config, out: RunWriter) -> None:
    """Let the recipe judge, then write what it keeps."""
    _wanted(config)
    source = inputs.one("rollouts")
    out.progress("Data-Juicer", 0, 1)
    verdict = data_juicer.judge(_conversations(source), config.dj, out.scratch("data-juicer"))
    out.progress("Data-Juicer", 1, 1)
    told, checks = Told(), gate.Gate()
    dropped = set[str]()

    def judged() -> Iterator[Row]:
        missing = _missing(source)
        for rollout, steps in rollout_rows(source):
            name = rollout["rollout_id"]
            kept = name in verdict.kept or not steps
            reason, lacks = None if kept else verdict.dropped.get(name), next(missing, ())
            told.add(rollout, len(steps), kept=kept, why=reason or "")
            if kept:
                checks.add(rollout, steps, lacks)
            else:
                dropped.add(name)
            stats = store.encode(verdict.kept[name]).decode() if name in verdict.kept else None
            said = {"kept": kept, "stats_json": stats, "reason": reason}
            yield {"rollout_id": name, "task_id": rollout["task_id"], **said}

    out.table(SELECTION, judged())
    for kind in (ROLLOUT, STEP, ORIGIN):
        if source.holds(kind):
            out.table(kind, (row for row in source.scan(kind).rows() if row["rollout_id"] not in dropped))
    if source.holds(TASK):
        out.table(TASK, source.scan(TASK).rows())
    _report(told, checks.checks(told.kept.rollouts), out)


def _wanted(config: Config) -> None:
    if config.dj.recipe is None:
        raise UsageError("normalize needs a Data-Juicer recipe. Give one with --dj RECIPE.")


def _conversations(source: Run) -> Iterator[tuple[str, list[Message]]]:
    """Every rollout with steps: its id, and all that was said."""
    for rollout, steps in rollout_rows(source):
        if steps:
            yield rollout["rollout_id"], conversation(steps)


def _missing(source: Run) -> Iterator[list[Any]]:
    """What the source of each rollout cannot tell, in their order; nothing of rollouts that were played here."""
    return (row["missing"] for row in source.scan(ORIGIN).rows(["missing"])) if source.holds(ORIGIN) else iter(())


def _report(told: Told, checks: list[gate.GateCheck], out: RunWriter) -> None:
    kept, dropped = told.kept, told.dropped
    bare = sorted(task for task, number in told.tasks.items() if not number)
    out.count(planned=kept.rollouts + dropped.rollouts, done=kept.rollouts, dropped=dropped.rollouts, steps=kept.steps)
    out.set_summary(
        kept=kept.rollouts,
        dropped=dropped.rollouts,
        mean_reward_kept=kept.rewards.value,
        mean_reward_dropped=dropped.rewards.value,
        tasks_without_rollouts=len(bare),
        gate_ok=all(check.ok for check in checks),
        gate={check.name: [check.total - check.failed, check.total, check.unrecorded] for check in checks},
    )
    sides = [
        (name, one.rollouts, one.steps, one.rewards.number, _shown(one.rewards.value))
        for name, one in (("kept", kept), ("dropped", dropped))
    ]
    lines = [tabulate(sides, ("", "rollouts", "steps", "scored", "mean reward"), tablefmt="plain")]
    if told.names:
        more = dropped.rollouts - len(told.names)
        lines += ["", "dropped by the recipe", *(f"  {name}" for name in told.names)]
        lines += [f"  ... and {more} more: `kept` is false in selections.parquet"] if more else []
    lines += ["", f"tasks without a rollout left: {len(bare)}, among them {', '.join(bare[:5])}"] if bare else []
    out.write_file("report.txt", "\n".join([*lines, "", gate.table(checks)]) + "\n")
    if not kept.rollouts:
        raise Incomplete(f"The recipe keeps none of {dropped.rollouts} rollouts. Give one that asks for less.")


def _shown(value: float | None) -> str:
    return "nothing scored" if value is None else f"{value:.3f}"


STAGE = Stage(
    name="normalize",
    version=1,
    config=Config,
    inputs={"rollouts": Slot(STEP)},
    outputs={"tasks": TASK, "rollouts": ROLLOUT, "steps": STEP, "origins": ORIGIN, "selections": SELECTION},
    plan=plan,
    run=run,
)
