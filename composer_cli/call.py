"""Run one stage: build its settings, execute it or reuse a complete run, print the result."""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from pydantic import field_validator

from composer_cli.console import Console, Listener
from composer_cli.printing import print_json, print_text
from composer_cli.trust import require_trusted_servers
from stages import command_words
from stages.backends import ranks
from stages.errors import UsageError
from stages.layout import duration
from stages.plurals import singular
from stages.runs import bucket, runner, settings
from stages.runs.activity import Checking
from stages.runs.bucket import Mirror
from stages.runs.run import Inputs, Run
from stages.runs.runner import Result, preflight
from stages.runs.settings import Given, Settings, StageConfig, with_default
from stages.runs.stage import Plan, load_stage, read_for_stage


class Arguments(Settings):
    """What every stage's function takes besides its settings."""

    config: Given[tuple[Path, ...], Path | str | Sequence[Path | str]] = with_default(())
    """A TOML file with settings, or several; later ones and keywords win."""
    artifacts: Given[Path, Path | str] = with_default(Path("artifacts"))
    """The folder where runs are kept."""
    out: Given[str | None, Path | str | None] = with_default(None)
    """Another folder for this run, or s3://BUCKET/RUN."""
    resume: bool = False
    """Go on with an unfinished run."""
    clean: bool = False
    """Delete what the run's folder holds and start anew."""
    on: str | None = None
    """Workers that do the work, such as "processes:4"."""
    max_cost: float | None = None
    """USD, never more, over all attempts."""
    trust: bool = False
    """Send a provider's key to another server where a settings file says so."""
    quiet: bool = False
    """No progress on stderr."""
    listener: Listener | None = None
    """Called with the progress in place of stderr: (what, units done, units in all)."""

    @field_validator("config", mode="before")
    @classmethod
    def _several_files(cls, given: Any) -> Any:
        return (given,) if isinstance(given, (str, Path)) else given

    @field_validator("out", mode="before")
    @classmethod
    def _folder_or_address(cls, given: Any) -> Any:
        return str(given) if isinstance(given, Path) else given


@dataclass(frozen=True)
class RunOptions:
    """How to carry a stage out, as opposed to what it is to compute."""

    root: Path
    out: Path | None = None
    resume: bool = False
    clean: bool = False
    max_cost: float | None = None
    on: str | None = None
    """The engine whose workers do the units, for stages that can deal them."""
    mirror: Mirror | None = None
    """The copy of the run in a bucket."""

    def __post_init__(self) -> None:
        if self.resume and self.clean:
            raise UsageError(
                "Both resume and clean are given, but resume goes on with what the run's folder holds, and clean "
                "deletes it. Leave out one of them."
            )

    def where(self) -> dict[str, Any]:
        """Return the folder, and what may be done with a run that it already holds."""
        return {"root": self.root, "out": self.out, "resume": self.resume, "clean": self.clean}


def with_out(stage: str, out: str | None, run_options: RunOptions) -> RunOptions:
    """Return the options with the folder of `--out`; a run at an address in a bucket is fetched first."""
    if out is None or not bucket.is_address(out):
        return replace(run_options, out=out if out is None else Path(out))
    mirror = Mirror(out, stage, run_options.root / "remote")
    mirror.bring()
    return replace(run_options, out=mirror.folder, mirror=mirror)


def configure(
    stage: str,
    files: Sequence[Path],
    positionals: Sequence[settings.Tree],
    values: Mapping[str, str | int | None],
    teachers: Path | None,
    limit: int | None,
    assignments: Sequence[str],
    notify: Callable[[str], None],
    *,
    trust: bool = False,
) -> StageConfig:
    """Return the stage's configuration: defaults, files, bare words, the short options, then --set.

    values: the short options that stand for one setting, by its key. teachers: a file with [[teachers]] tables. limit:
    the value of the setting that the stage names LIMIT; raises `UsageError` for a stage without one. notify: called
    with what is left out of files. trust: whether files may send a provider's key elsewhere.
    """
    read = read_for_stage(stage, files, notify)
    layers = [*positionals]
    layers += [settings.nested(key, value) for key, value in values.items() if value is not None]
    if teachers is not None:
        read.append(settings.read_table(teachers, "teachers"))
    if limit is not None:
        key = load_stage(stage).limit_setting
        if key is None:
            raise UsageError(
                f"{stage} has no work that a limit could cut short. `{command_words(stage)} --help` lists its settings."
            )
        layers.append(settings.nested(key, limit))
    model = load_stage(stage).config
    typed = [settings.expanded(model, layer) for layer in (*layers, *map(settings.assignment, assignments))]
    configuration = settings.build(stage, model, [*read, *typed])
    require_trusted_servers(stage, configuration, typed, trust=trust)
    return configuration


def require_one_process(what: str) -> None:
    """Raise `UsageError` where torchrun started several processes of what runs in one."""
    if (count := ranks.world_size()) > 1:
        raise UsageError(f"{what} runs in one process, and this is one of {count}. Start it without torchrun.")


@dataclass(frozen=True)
class StageJob:
    """A stage with everything it takes to run it, and the title by which people know it."""

    title: str
    stage: str
    inputs: Inputs
    config: StageConfig
    position: str = ""
    """The position in a chain: " (stage 3 of 7)"."""
    gpus: int | None = None
    """As `runner.execute` takes it."""

    def plan(self) -> Plan:
        """Return what would be done."""
        return load_stage(self.stage).plan(self.inputs, self.config)

    def completed(self, run_options: RunOptions) -> Result | None:
        """Return the result of a completed run of the same work, unless it is to be done anew."""
        if run_options.clean:
            return None
        root, out = run_options.root, run_options.out
        return runner.resolve_run(self.stage, self.inputs, self.config, root=root, out=out).completed()

    def nothing_to_resume(self, run_options: RunOptions) -> str | None:
        """Return why --resume resumes nothing, where a run of other settings may have been meant."""
        if not run_options.resume:
            return None
        root, out = run_options.root, run_options.out
        return runner.nothing_to_resume(self.stage, self.inputs, self.config, root=root, out=out)

    def first_lines(self, run_options: RunOptions, place: str = "") -> list[str]:
        """Return what is printed when the work begins. place: the GPUs, as " on GPU 0"."""
        note = self.nothing_to_resume(run_options)
        starts = f"starts{self.position}{place}, {plan_in_words(self.plan())}"
        return [f"{self.title}: {line}" for line in (note, starts) if line]

    def folder(self, run_options: RunOptions) -> Path | None:
        """Return the run folder, once the run has begun."""
        root, out = run_options.root, run_options.out
        resolved = runner.resolve_run(self.stage, self.inputs, self.config, root=root, out=out, check=False)
        return resolved.folder if resolved.existing else None

    def run(self, run_options: RunOptions, listener: Listener) -> Result:
        """Run the stage, or find it done."""
        return runner.execute(
            self.stage,
            self.inputs,
            self.config,
            **run_options.where(),
            max_cost=run_options.max_cost,
            listener=listener,
            on=run_options.on if load_stage(self.stage).work else None,
            gpus=self.gpus,
            mirror=run_options.mirror,
        )


def follow(job: StageJob, run_options: RunOptions) -> bool:
    """Do the share of a process that torchrun started after the first; returns False in the first or only process."""
    if not load_stage(job.stage).several_processes:
        require_one_process(command_words(job.stage))
    if ranks.join().first:
        return False
    runner.execute_as_peer(job.stage, job.inputs, job.config, root=run_options.root)
    return True


def execute(job: StageJob, run_options: RunOptions, console: Console) -> Result:
    """Run a stage and print when it starts and how it ended."""
    with ranks.join().leading():
        if done := job.completed(run_options):
            console.notify(f"{job.title}: {done.reason}")
            return done
        lines = job.first_lines(run_options)
        started = time.monotonic()
        with console.watching() as watch:
            listener = watch.listener(job.title, partial(job.folder, run_options))
            result = job.run(run_options, telling_of_the_start(listener, console, lines))
        console.notify(f"{job.title}: {ending(result, time.monotonic() - started)}")
        return result


def telling_of_the_start(listener: Listener, console: Console, lines: Sequence[str]) -> Listener:
    """Return a listener that prints these lines when the work begins: before its first report that is no `Checking`.

    A run that its checks refuse has then printed nothing that looks like a start.
    """
    waiting = list(lines)

    def listen(what: str, done: int, total: int) -> None:
        while waiting and what and not isinstance(what, Checking):
            console.notify(waiting.pop(0))
        listener(what, done, total)

    return listen


def ending(result: Result, seconds: float) -> str:
    """Return how a stage ended, in a few words."""
    again = "resumed, " if result.reason == "resumed" else ""
    return f"{again}done in {duration(seconds)}" if result.fresh else result.reason


def plan_in_words(plan: Plan) -> str:
    """Return a plan in a few words."""
    units = f"1 {singular(plan.what)}" if plan.units == 1 else f"{plan.units:,} {plan.what}"
    parts = [f"up to {units}" if plan.up_to else units]
    if plan.max_completion_tokens:
        parts.append(f"at most {plan.max_completion_tokens:,} sampled tokens")
    if plan.max_cost_usd:
        bound = "less than 0.01" if plan.max_cost_usd < 0.01 else f"at most {plan.max_cost_usd:,.2f}"
        parts.append(f"{bound} USD for them")
    return ", ".join([*parts, *plan.notes])


def show_plan(job: StageJob, run_options: RunOptions, console: Console, as_json: bool) -> None:
    """Print what would be done and what was checked for it; raises what running it would raise before its work."""
    if note := job.nothing_to_resume(run_options):
        console.notify(note)
    plan, checked = job.plan(), preflight(job.stage, job.inputs, job.config, **run_options.where())
    if as_json:
        print_json({**asdict(plan), "checked": checked})
    else:
        print_text("\n".join([plan_in_words(plan), *(f"  checked: {line}" for line in checked)]))


def summary(result: Result) -> dict[str, Any]:
    """Return what `--json` prints about a run."""
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
    run = Run(result.path)
    if as_json:
        print_json(summary(result))
    else:
        print_text(f"{(run.read_file('report.txt') or b'').decode()}\n{result.path}".strip())
    return run.manifest.outcome.exit_code
