"""One stage from words to result: read settings, carry it out, show what came of it."""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from composer_cli import settings
from composer_cli.console import Console, Listener, duration
from composer_cli.printing import print_json, print_text
from stages import command_words
from stages.backends import ranks
from stages.errors import UsageError
from stages.runs import bucket, runner
from stages.runs.artifact import Inputs, Run
from stages.runs.bucket import Mirror
from stages.runs.config import StageConfig
from stages.runs.runner import Result, preflight
from stages.runs.stage import Plan, load_stage


@dataclass(frozen=True)
class RunOptions:
    """How to carry a stage out, as opposed to what it is to compute."""

    root: Path
    out: Path | None = None
    resume: bool = False
    clean: bool = False
    max_cost: float | None = None
    on: str | None = None
    """The engine among whose workers the units are dealt, of stages that can do so."""
    mirror: Mirror | None = None
    """The place in a bucket that the run belongs to."""

    def where(self) -> dict[str, Any]:
        """The folder, and what may become of what it holds."""
        return {"root": self.root, "out": self.out, "resume": self.resume, "clean": self.clean}


def placed(stage: str, out: str | None, run_options: RunOptions) -> RunOptions:
    """With the folder that `out` means; what lies at an address in a bucket is brought here first."""
    if out is None or not bucket.is_address(out):
        return replace(run_options, out=out if out is None else Path(out))
    mirror = Mirror(out, stage, run_options.root / "remote")
    mirror.bring()
    return replace(run_options, out=mirror.folder, mirror=mirror)


def configure(
    stage: str, files: Sequence[Path], shortcuts: Sequence[settings.Tree], typed: Sequence[str]
) -> StageConfig:
    """The stage's configuration: defaults, files, the short options, then --set."""
    layers = [*map(settings.read_file, files), *shortcuts, *map(settings.assignment, typed)]
    return settings.build(stage, load_stage(stage).config, layers)


def shortcuts(
    stage: str, values: Mapping[str, str | int | None], teachers: Path | None, limit: int | None
) -> list[settings.Tree]:
    """The short options as settings: those that stand for one, by its key, and the two that mean more."""
    layers = [settings.nested(key, value) for key, value in values.items() if value is not None]
    if teachers is not None:
        layers.append(settings.read_table(teachers, "teachers"))
    if limit is not None:
        layers.append(settings.nested(_limited(stage), limit))
    return layers


def _limited(stage: str) -> str:
    key = load_stage(stage).limit_setting
    if key is None:
        raise UsageError(
            f"{stage} has nothing that --limit could cut short. `{command_words(stage)} --help` lists its settings."
        )
    return key


def alone(what: str) -> None:
    """`UsageError` where torchrun started several processes of what runs in one."""
    if (count := ranks.world_size()) > 1:
        raise UsageError(f"{what} runs in one process, and this is one of {count}. Start it without torchrun.")


@dataclass(frozen=True)
class Job:
    """A stage with everything it takes to run it, and the name by which people know it."""

    title: str
    stage: str
    inputs: Inputs
    config: StageConfig
    place: str = ""
    """Where it stands in a chain: " (stage 3 of 7)"."""

    def plan(self) -> Plan:
        """What would be done."""
        return load_stage(self.stage).plan(self.inputs, self.config)

    def checked(self, run_options: RunOptions) -> list[str]:
        """What it would need and has, a line each; raises what running it would raise before its work."""
        return preflight(self.stage, self.inputs, self.config, **run_options.where())

    def standing(self, run_options: RunOptions) -> Result | None:
        """Its result, when it was done before and is not to be done anew."""
        if run_options.clean:
            return None
        return runner.find_completed_run(
            self.stage, self.inputs, self.config, root=run_options.root, out=run_options.out
        )

    def folder(self, run_options: RunOptions) -> Path | None:
        """Where its run lies, once it has begun."""
        return runner.find_run_folder(self.stage, self.inputs, self.config, root=run_options.root, out=run_options.out)

    def run(self, run_options: RunOptions, listener: Listener) -> Result:
        """Do it, or find it done."""
        return runner.execute(
            self.stage,
            self.inputs,
            self.config,
            **run_options.where(),
            max_cost=run_options.max_cost,
            listener=listener,
            on=run_options.on if spreads(self.stage) else None,
            mirror=run_options.mirror,
        )


def spreads(stage: str) -> bool:
    """Whether the units of a stage can be dealt to workers."""
    return load_stage(stage).work is not None


def follow(job: Job, run_options: RunOptions) -> bool:
    """Whether this is a process that torchrun started beside the first; then its share of the work is done."""
    if not load_stage(job.stage).several_processes:
        alone(command_words(job.stage))
    if ranks.join().first:
        return False
    runner.execute_as_peer(job.stage, job.inputs, job.config, root=run_options.root)
    return True


def execute(job: Job, run_options: RunOptions, console: Console) -> Result:
    """Carry a stage out, telling people when it starts and how it ended."""
    with ranks.join().leading():
        return _execute(job, run_options, console)


def _execute(job: Job, run_options: RunOptions, console: Console) -> Result:
    if done := job.standing(run_options):
        console.tell(f"{job.title}: {done.reason}")
        return done
    started = time.monotonic()
    console.tell(f"{job.title}: starts{job.place}, {planned(job.plan())}")
    with console.watching() as watch:
        listener = watch.listener(job.title, partial(job.folder, run_options))
        result = job.run(run_options, listener)
    console.tell(f"{job.title}: {ending(result, time.monotonic() - started)}")
    return result


def ending(result: Result, seconds: float) -> str:
    """How a stage ended, in a few words."""
    again = "resumed, " if result.reason == "resumed" else ""
    return f"{again}done in {duration(seconds)}" if result.fresh else result.reason


def planned(plan: Plan) -> str:
    """A plan in a few words."""
    parts = [f"{plan.units:,} {plan.what}"]
    if plan.max_completion_tokens:
        parts.append(f"at most {plan.max_completion_tokens:,} sampled tokens")
    if plan.max_cost_usd:
        parts.append(f"at most {plan.max_cost_usd:,.2f} USD for them")
    return ", ".join([*parts, *plan.notes])


def show_plan(job: Job, run_options: RunOptions, as_json: bool) -> None:
    """Print what would be done, and what was checked for it."""
    plan, checked = job.plan(), job.checked(run_options)
    if as_json:
        print_json({**plan.as_dict(), "checked": checked})
    else:
        print_text("\n".join([planned(plan), *(f"  checked: {line}" for line in checked)]))


def summary(result: Result) -> dict[str, Any]:
    """What `--json` prints about a run."""
    manifest = Run(result.path).manifest
    return {
        "path": str(result.path),
        "status": result.status,
        "fresh": result.fresh,
        "reason": result.reason,
        "counts": manifest.counts,
        "ok": manifest.outcome.ok,
        "exit_code": manifest.outcome.exit_code,
        "summary": manifest.summary,
        "cost_usd": manifest.cost_usd,
        "seconds": manifest.seconds,
    }


def show(result: Result, as_json: bool) -> int:
    """Print a run's result on stdout; returns the exit code."""
    if as_json:
        print_json(summary(result))
    else:
        print_text(f"{(Run(result.path).read_file('report.txt') or b'').decode()}\n{result.path}".strip())
    return Run(result.path).manifest.outcome.exit_code
