"""Run one stage: build its settings, execute it or reuse a complete run, print the result."""

import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Self

import typer
from pydantic import Field, field_validator, model_validator

from composer_cli import options
from composer_cli.console import Console, Listener
from composer_cli.printing import fit_to_terminal, print_result
from composer_cli.trust import require_trusted_servers
from composer_stages import command_words
from composer_stages.backends import ranks
from composer_stages.errors import ComposerError, UsageError
from composer_stages.layout import duration, singular
from composer_stages.runs import bucket, runner, settings
from composer_stages.runs.activity import Checking
from composer_stages.runs.bucket import Mirror
from composer_stages.runs.run import Inputs, Run
from composer_stages.runs.runner import Result, preflight
from composer_stages.runs.settings import Settings, StageConfig, Tree
from composer_stages.runs.stage import Plan, load_stage
from composer_stages.stopping import Interrupted, on_signals
from composer_stages.words import Sentence


class Arguments(Settings):
    """How a stage is executed: options of its command and keywords of its function, besides its settings."""

    config: Annotated[tuple[Path, ...], options.CONFIG] = ()
    """A TOML file with settings, or several; later ones and keywords win."""
    artifacts: Annotated[Path, options.ARTIFACTS] = options.DEFAULT_ARTIFACTS
    """The folder where runs are kept."""
    out: Annotated[str | None, typer.Option("--out", metavar="FOLDER")] = None
    """Another folder for this run, or s3://BUCKET/RUN."""
    resume: Annotated[bool, typer.Option("--resume")] = False
    """Go on with an unfinished run."""
    clean: Annotated[bool, typer.Option("--clean")] = False
    """Delete what the run's folder holds and start again."""
    on: Annotated[str | None, typer.Option("--on", metavar="ENGINE", autocompletion=lambda: options.ENGINES)] = None
    """Workers to which the work is dealt, such as processes:4, ray or ray://HOST:PORT."""
    max_cost: Annotated[float | None, Field(ge=0), typer.Option("--max-cost", metavar="USD", min=0.0)] = None
    """USD, never more, over all attempts."""
    fresh: Annotated[bool, typer.Option("--fresh")] = False
    """Ask anew also where another run has bought the answer."""
    trust: Annotated[bool, typer.Option("--trust")] = False
    """Send a provider's key to another server where a settings file says so."""
    quiet: Annotated[bool, options.QUIET] = False
    """No progress on stderr."""
    listener: Listener | None = None
    """Called with the progress in place of stderr: (what, units done, units in all)."""

    @field_validator("config", mode="before", json_schema_input_type=Path | tuple[Path, ...])
    @classmethod
    def _several_files(cls, value: Any) -> Any:
        if not isinstance(value, (str, Path, list, tuple)):
            raise ValueError(Sentence("cli.config-takes-paths"))  # noqa: TRY004
        paths = (value,) if isinstance(value, (str, Path)) else value
        return tuple(options.at_home(path) if isinstance(path, (str, Path)) else path for path in paths)

    @field_validator("out", mode="before", json_schema_input_type=Path | None)
    @classmethod
    def _folder_or_address(cls, value: Any) -> Any:
        if value == "":
            raise ValueError(Sentence("cli.out-without-name"))
        is_folder = isinstance(value, Path) or (isinstance(value, str) and not bucket.is_address(value))
        return str(options.at_home(value)) if is_folder else value

    @field_validator("artifacts", mode="after")
    @classmethod
    def _at_home(cls, value: Path) -> Path:
        return options.at_home(value)

    @model_validator(mode="after")
    def _one_of_both(self) -> Self:
        if self.resume and self.clean:
            raise UsageError("cli.resume-and-clean")
        return self

    def folder(self) -> Path | None:
        """Return the run folder that was chosen, on this machine."""
        return None if self.out is None else Path(self.out)

    def where(self) -> dict[str, Any]:
        """Return the folder, and what may be done with a run that it already holds."""
        return {"root": self.artifacts, "out": self.folder(), "resume": self.resume, "clean": self.clean}


class ChainArguments(Arguments):
    """How a chain is executed."""

    policy: Annotated[str | None, typer.Option("--policy", metavar="MODEL")] = None
    """The model that every entry of the chain starts from."""
    out: None = None
    on: Annotated[str | None, typer.Option("--on", metavar="WHERE", autocompletion=options.complete_executors)] = None
    """Submit the chain instead of running it here, such as to slurm, hf-jobs or modal. Or deal its stages' work to
    workers: processes:N, ray or ray://HOST:PORT."""
    max_cost: Annotated[float | None, Field(ge=0), typer.Option("--max-cost", metavar="USD", min=0.0)] = None
    """USD, which all stages of the chain together do not exceed."""
    to_the_end: Annotated[bool, typer.Option("--to-the-end")] = False
    """Go on after a stage that did not pass its own checks, or left them open."""


def configure(stage: str, files: Sequence[Tree], typed: Sequence[Tree], *, trust: bool = False) -> StageConfig:
    """Return the stage's configuration: defaults, files, then what was typed, in this order.

    files: as `read_for_stage` returns them. trust: whether they may send a provider's key elsewhere.
    """
    configuration: StageConfig = settings.build(stage, load_stage(stage).config, [*files, *typed])
    require_trusted_servers(stage, configuration, typed, trust=trust)
    return configuration


def require_one_process(work: str) -> None:
    """Raise `UsageError` where torchrun started several processes of what runs in one."""
    if (count := ranks.world_size()) > 1:
        raise UsageError("cli.one-process", work=work, processes=count)


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
    mirror: Mirror | None = None
    """The copy of the run in a bucket."""

    def plan(self) -> Plan:
        """Return the plan of the stage."""
        return load_stage(self.stage).plan(self.inputs, self.config)

    def resolved(self, arguments: Arguments, check: bool = True) -> runner.ResolvedRun:
        """Return the run folder of the same work, as `runner.resolve_run` does."""
        root, out = arguments.artifacts, arguments.folder()
        return runner.resolve_run(self.stage, self.inputs, self.config, root=root, out=out, check=check)

    def completed(self, arguments: Arguments) -> Result | None:
        """Return the result of a completed run of the same work, unless it is to be done anew."""
        if arguments.clean:
            return None
        return self.resolved(arguments).completed()

    def up_to_date(self, arguments: Arguments) -> Result | None:
        """Return the completed result, judged by the limits of these settings; None where finishing is left to do."""
        done = self.completed(arguments)
        if done is None or not runner.finished_to_the_end(done.path, arguments.artifacts / self.stage):
            return None
        return runner.judge_again(self.stage, self.config, done)

    def nothing_to_resume(self, arguments: Arguments) -> str | None:
        """Return why --resume resumes nothing, where a run of other settings may have been meant."""
        if not arguments.resume:
            return None
        root, out = arguments.artifacts, arguments.folder()
        return runner.nothing_to_resume(self.stage, self.inputs, self.config, root=root, out=out)

    def start_lines(self, arguments: Arguments, gpus: str = "") -> list[str]:
        """Return the lines that are printed when the work begins. gpus: the GPUs, as " on GPU 0"."""
        note = self.nothing_to_resume(arguments)
        starts = f"starts{self.position}{gpus}, {describe_plan(self.plan())}"
        return [f"{self.title}: {line}" for line in (note, starts) if line]

    def folder(self, arguments: Arguments) -> Path | None:
        """Return the run folder, once the run has begun."""
        resolved = self.resolved(arguments, check=False)
        return resolved.folder if resolved.existing else None

    def execution_arguments(self, arguments: Arguments) -> dict[str, Any]:
        """Return the keywords with which `runner.execute` runs the job."""
        on = arguments.on if load_stage(self.stage).work else None
        return {
            **arguments.where(),
            "max_cost": arguments.max_cost,
            "fresh": arguments.fresh,
            "on": on,
            "gpus": self.gpus,
            "mirror": self.mirror,
        }


def add_mirror(job: StageJob, arguments: Arguments) -> tuple[StageJob, Arguments]:
    """Return the job and its arguments with its copy in a bucket, fetched, where `out` is an address of one."""
    if arguments.out is None or not bucket.is_address(arguments.out):
        return job, arguments
    mirror = Mirror(arguments.out, job.stage, arguments.artifacts / "remote")
    mirror.bring()
    return replace(job, mirror=mirror), arguments.model_copy(update={"out": str(mirror.folder)})


def follow(job: StageJob, arguments: Arguments) -> bool:
    """Work as one of torchrun's further processes until it ends; returns False in the first or only process."""
    if not load_stage(job.stage).several_processes:
        require_one_process(command_words(job.stage))
    if ranks.join().first:
        return False
    runner.execute_as_peer(job.stage, job.inputs, job.config, root=arguments.artifacts)
    return True


def execute(job: StageJob, arguments: Arguments, console: Console) -> Result:
    """Run a stage and print when it starts and how it ended, or tell the listener of the arguments.

    Raises `Interrupted` also where the stage came to its end after a signal: nothing is to follow it.
    """
    with ranks.join().leading(), on_signals(console.announce_stop) as caught:
        finish = load_stage(job.stage).finish
        if done := job.up_to_date(arguments):
            console.notify(f"{job.title}: {done.reason}")
            finish(Run(done.path), job.config)
            return done
        started = time.monotonic()
        with console.watching() as watch:
            listener = arguments.listener or watch.listener(job.title, partial(job.folder, arguments))
            lines = job.start_lines(arguments)  # which takes a training half a minute
            if sys.stderr.isatty() and load_stage(job.stage).shows_progress:
                lines.append(Sentence("cli.view-shows-live", title=job.title))
            listener = announce_start(listener, console, lines)
            result = runner.execute(
                job.stage, job.inputs, job.config, listener=listener, **job.execution_arguments(arguments)
            )
        console.notify(f"{job.title}: {ending(result, time.monotonic() - started)}")
        if caught:
            complete = Sentence("cli.complete-after-signal", title=job.title)
            raise Interrupted(caught[0], "" if job.position else complete)
        finish(Run(result.path), job.config)
        return result


def announce_start(listener: Listener, console: Console, lines: Sequence[str]) -> Listener:
    """Return a listener that prints these lines before the first report that is not a `Checking`.

    A run that its checks refuse has then printed nothing that looks like a start.
    """
    waiting = list(lines)

    def listen(activity: str, done: int, total: int) -> None:
        while waiting and activity and not isinstance(activity, Checking):
            console.notify(waiting.pop(0))
        listener(activity, done, total)

    return listen


def ending(result: Result, seconds: float) -> str:
    """Describe how a stage ended, in a few words."""
    again = "resumed, " if result.reason == "resumed" else ""
    return f"{again}done in {duration(seconds)}" if result.fresh else result.reason


def describe_plan(plan: Plan) -> str:
    """Return a plan in a few words."""
    units = f"1 {singular(plan.what)}" if plan.units == 1 else f"{plan.units:,} {plan.what}"
    parts = [f"up to {units}" if plan.up_to else units]
    if plan.max_completion_tokens:
        parts.append(f"at most {plan.max_completion_tokens:,} sampled tokens")
    if plan.max_cost_usd:
        bound = "less than 0.01" if plan.max_cost_usd < 0.01 else f"at most {plan.max_cost_usd:,.2f}"
        parts.append(f"{bound} USD for them")
    return ", ".join([*parts, *plan.notes])


Configured = Callable[[Sequence[Tree]], Mapping[str, StageConfig]]
"""Returns the configurations of one or several entries by title, from these settings files."""


def planned(
    job: StageJob, plan: Plan, paths: Sequence[Path], files: Sequence[Tree], configured: Configured
) -> tuple[Plan, list[str]]:
    """Return a job's plan for the tasks that there are, and the numbers in settings files that change its bill.

    These are lines, with the plan without each number. Such a number at the top of a file goes to every stage that has
    a setting of its name.
    """
    lines, drawn = list[str](), dict[str, Any]()
    if plan.up_to:  # drawn once: no other number of a file changes which tasks there are
        config: Any = job.config.with_tasks_drawn()
        plan = replace(job, config=config).plan()
        drawn = {"tasks": config.tasks} if config is not job.config else {}
    for number, (path, tree) in enumerate(zip(paths, files, strict=True)):
        for key in (key for key, value in tree.items() if type(value) is int and key != "seed"):
            remaining = [*files[:number], {name: tree[name] for name in tree if name != key}, *files[number + 1 :]]
            with suppress(ComposerError):  # what cannot be planned without the number has no other bill
                config_without = configured(remaining)[job.title].model_copy(update=drawn)
                bill = replace(replace(job, config=config_without).plan(), notes=plan.notes)
                if replace(bill, up_to=plan.up_to) != plan:
                    bill = replace(bill, notes=())
                    lines.append(
                        Sentence(
                            "cli.file-changes-bill",
                            path=path,
                            key=key,
                            value=tree[key],
                            title=job.title,
                            bill=describe_plan(bill),
                        )
                    )
    return plan, lines


def show_plan(
    job: StageJob, arguments: Arguments, console: Console, as_json: bool, files: Sequence[Tree], configured: Configured
) -> None:
    """Print the plan and the checks that passed; raise what the run would raise before its work."""
    if note := job.nothing_to_resume(arguments):
        console.notify(note)
    plan, checked = job.plan(), preflight(job.stage, job.inputs, job.config, **arguments.where())
    plan, bills = planned(job, plan, arguments.config, files, configured)
    text = "\n".join([describe_plan(plan), *indented(bills, checked)])
    print_result(as_json, {**asdict(plan), "files": bills, "checked": checked}, text)


def indented(bills: Sequence[str], checked: Sequence[str]) -> list[str]:
    """Return the lines below a plan: the changes by settings files, and the checks that passed."""
    return [*(f"  {line}" for line in bills), *(f"  checked: {line}" for line in checked)]


def summary(result: Result) -> dict[str, Any]:
    """Return the document that `--json` prints about a run."""
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
    text = (run.read_file("report.txt") or b"").decode()
    print_result(as_json, summary(result), f"{fit_to_terminal(text)}\n{result.path}".strip())
    return run.manifest.outcome.exit_code
