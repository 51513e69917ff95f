"""`composer tasks check` and `composer tasks convert`: look at tasks before they are played, and write them as folders.

A path is a file of rows (`--env tasks`) or a folder of Harbor tasks (`--env harbor`). `composer swe check` says what
a machine lacks for `--env swe-lite`, and how long building the rest will take.
"""

import os
import signal
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_args

import typer

from composer_cli import options
from composer_cli.help import CommandGroup
from composer_cli.printing import interrupt_leaves, print_result, reports_errors, say, sentence_and_code
from composer_cli.stage_command import option_layers
from composer_stages.errors import BadInput, Incomplete, UsageError
from composer_stages.layout import counted
from composer_stages.words import Sentence

if TYPE_CHECKING:
    from composer_stages.envs.swe.env import WayToRun
    from composer_stages.envs.task_checks import TaskCheck, TaskChecksConfig

COLOURS = {"ok": 32, "fails": 31, "empty": 31, "flaky": 31, "forgeable": 33, "error": 31}
Words = Annotated[
    str | None,
    typer.Argument(metavar="[PATH]", help="A file of rows (--env tasks), or a folder of Harbor tasks (--env harbor)."),
]
Limit = Annotated[int | None, typer.Option("--limit", "-n", metavar="N", min=1, help="At most N tasks of each split.")]


@reports_errors
def check(
    path: Words = None,
    env: options.Env = None,
    config: options.ConfigFiles = None,
    set_: options.Set = None,
    limit: Limit = None,
    seed: options.Seed = None,
    json: options.Json = False,
    verbose: options.Verbose = False,
    quiet: options.Quiet = False,
) -> None:
    """Play each task's solution, no solution, and cheap forgeries, and list the tasks that grade any of them wrongly.

    Each task is told on stderr as it is finished; the table has the worst first. Settings are `env.KEY=VALUE`,
    `repeats=5` and `workers=N`. Exit code 0 where all tasks are good, 4 where some are bad, 3 where some could not be
    played. Ctrl-C prints the tasks that were checked by then.
    """
    from composer_cli.console import Console
    from composer_stages.envs import task_checks
    from composer_stages.runs.activity import Notice
    from composer_stages.stopping import Interrupted

    configuration = configured("tasks check", path, env, config, set_, limit, seed)
    console, checks, interrupted = Console(quiet), list["TaskCheck"](), None
    with console.watching() as watch:
        notify = watch.listener("tasks check")
        notify("reading tasks", 0, 0)
        tasks = task_checks.draw_tasks(configuration)
        try:
            workers = configuration.workers or os.cpu_count() or 1
            for checked in task_checks.check(configuration, tasks, workers, notify):
                checks.append(checked)  # one by one: an interrupt keeps those before it
                remark = f"{checked.task_id}: {checked.verdict}{f': {checked.reason}' if checked.reason else ''}"
                notify(Notice(f"{len(checks)} of {len(tasks)} tasks, {remark}"), 0, 0)
        except (KeyboardInterrupt, Interrupted) as error:
            if not checks:
                raise
            interrupted = sentence_and_code(
                Interrupted(
                    getattr(error, "signal_number", signal.SIGINT),
                    Sentence("cli.tasks-checked", checked=len(checks), tasks=len(tasks)),
                )
            )
        watch.ended("tasks check")
    order = {task.task_id: number for number, task in enumerate(tasks)}
    checks.sort(key=lambda checked: (task_checks.WORST_FIRST.index(checked.verdict), order[checked.task_id]))
    num_of = Counter(checked.verdict for checked in checks)
    counts = {verdict: num_of[verdict] for verdict in get_args(task_checks.Verdict) if num_of[verdict]}
    summary = {"interrupted": interrupted is not None, "of": len(tasks), "counts": counts}
    document = {"env": configuration.env.name, **summary, "tasks": [_document(checked) for checked in checks]}
    print_result(json, document, _page(checks, counts, forged=configuration.sandbox != "none"), COLOURS)
    if interrupted:
        say(interrupted[0])
        raise typer.Exit(interrupted[1])
    bad = any(num_of[verdict] for verdict in task_checks.BAD)
    raise typer.Exit(BadInput.exit_code if bad else Incomplete.exit_code if num_of["error"] else 0)


@reports_errors
def convert(
    path: Words = None,
    to: Annotated[
        tuple[str, Path] | None, typer.Option("--to", metavar="harbor DIR", help="The format, and a new folder.")
    ] = None,
    env: options.Env = None,
    config: options.ConfigFiles = None,
    set_: options.Set = None,
    limit: Limit = None,
    seed: options.Seed = None,
    base_image: Annotated[
        str, typer.Option("--base-image", metavar="IMAGE", help="What each Dockerfile begins with.")
    ] = "python:3.11-slim",
    json: options.Json = False,
    verbose: options.Verbose = False,
    quiet: options.Quiet = False,
) -> None:
    """Write tasks as folders in Harbor's format, each with its verifier and its solution."""
    from composer_cli.console import Console
    from composer_stages.envs import task_checks
    from composer_stages.envs.harbor import write as harbor

    if to is None or to[0] != harbor.FORMAT:
        raise UsageError("cli.convert-without-folder")
    configuration = configured("tasks convert", path, env, config, set_, limit, seed)
    tasks, names = task_checks.draw_tasks(configuration), list[str]()
    console = Console(quiet)
    with console.watching() as watch:
        listen = watch.listener("tasks convert")

        def notify(name: str) -> None:
            names.append(name)
            listen("tasks", len(names), len(tasks))

        options_ = configuration.env_options()
        with interrupt_leaves(Sentence("cli.tasks-partly-written", folder=to[1])):
            harbor.write_tasks(configuration.env.name, options_, tasks, to[1], base_image, notify)
        watch.ended("tasks convert")
    document = {"env": configuration.env.name, "folder": str(to[1]), "tasks": names}
    print_result(json, document, f"{counted(len(names), 'task')} in {to[1]}")


def configured(
    command: str,
    path: str | None,
    env: str | None,
    files: list[Path] | None,
    typed: list[str] | None,
    limit: int | None,
    seed: int | None,
) -> "TaskChecksConfig":
    """Return the configuration that the words of a command make; a path names its environment by what it holds."""
    from composer_stages.envs.task_checks import TaskChecksConfig
    from composer_stages.runs import settings

    if path is None and env is None:
        raise UsageError("cli.no-tasks-given")
    default_env = "harbor" if path is not None and Path(path).expanduser().is_dir() else "tasks"
    env_settings = {"name": env or default_env} | ({} if path is None else {"path": path})
    options = option_layers(TaskChecksConfig, {"limit": limit, "seed": seed}, typed or [], "limit")
    return settings.build(
        command, TaskChecksConfig, [{"env": env_settings}, *map(settings.read_file, files or []), *options]
    )


def _document(check: "TaskCheck") -> dict[str, Any]:
    """Return a check as JSON-able values."""
    names = ("task_id", "split", "family", "verdict", "reason", "ground", "solution", "nothing", "forgeries", "errors")
    return {name: getattr(check, name) for name in names}


def _page(checks: "list[TaskCheck]", counts: Mapping[str, int], *, forged: bool) -> str:
    """Return a table of the tasks that have a reason to be named, and how many there are of each kind."""
    from composer_stages.layout import aligned

    rows = [(task.task_id, task.split, task.verdict, task.reason) for task in checks if task.reason]
    table = aligned(rows, ("task", "split", "verdict", "reason")) if rows else ""
    sums = ", ".join(f"{count} {verdict}" for verdict, count in counts.items())
    lines = [table] if rows else []
    lines.append(f"{counted(len(checks), 'task')}: {sums}")
    if not forged:
        lines.append(Sentence("cli.no-forgeries-tried"))
    return "\n".join(lines)


REQUIREMENT_COLOURS = {"missing": 31, "note": 33, "ok": 32}
swe = typer.Typer(cls=CommandGroup, help="Look at what SWE-bench's tasks need.", rich_markup_mode=None)


@swe.command("check")
@reports_errors
def check_swe(set_: options.Set = None, json: options.Json = False, verbose: options.Verbose = False) -> None:
    """Check whether this machine can run `--env swe-lite`. Settings are `env.KEY=VALUE`.

    Exit code 0 where `collect` can begin with these settings, 3 where something is missing.
    """
    from composer_stages.envs import load
    from composer_stages.envs.config import EnvStageConfig
    from composer_stages.envs.swe.env import SweEnv
    from composer_stages.runs import settings

    layers = [{"env": {"name": SweEnv.name, "split": "eval"}}, *map(settings.assignment, set_ or [])]
    config = settings.build("swe check", EnvStageConfig, layers)
    environment = load(config.env.name, {**config.env.options, "sandbox": config.sandbox})
    if type(environment) is not SweEnv:
        raise UsageError("cli.swe-check-other-env", name=config.env.name)
    report = environment.requirements(config.env.split)
    rows = f"rows: {report.rows.state}, {report.rows.found}"
    end = Sentence("cli.swe-not-ready")
    if report.ready:
        end = Sentence("cli.swe-ready", chosen=report.chosen)
    text = "\n\n".join([rows, *map(_requirements, report.ways), end])
    print_result(json, report.document(), text, REQUIREMENT_COLOURS)
    raise typer.Exit(0 if report.ready else Incomplete.exit_code)


def _requirements(way: "WayToRun") -> str:
    """Return the requirements of one way to run."""
    lines = [f"{way.name}: {'ready' if way.ready else 'parts are missing'}"]
    lines += [
        f"  {part.name:<14} {part.state:<8} {part.found}{f' -> {part.way_out}' if part.way_out else ''}"
        for part in way.parts
    ]
    return "\n".join(lines)
