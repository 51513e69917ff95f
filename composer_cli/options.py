"""The options of several commands, and those that only the command line has, with the values that a shell offers.

The other options of a stage are fields: of `call.Arguments`, and of its settings where they are marked (`Option`).
The completion functions import what they list only when a shell asks: `composer --help` stays fast. They return all
values; typer keeps those that begin with what was typed.
"""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import typer

from composer_stages.errors import UsageError, not_a_folder


def complete_runs(ctx: typer.Context) -> list[str]:
    """Return the names of all runs, and of the stages that have one: a stage's name selects its latest run."""
    from composer_stages.runs import catalog

    names = [catalog.name(path) for path in catalog.folders(_artifacts(ctx))]
    return [*dict.fromkeys(name.partition("/")[0] for name in names), *names]


def complete_rollouts(ctx: typer.Context, incomplete: str) -> list[str]:
    """Return the ids of the rollouts of the run that was typed before, of those that hold what was typed."""
    from composer_stages.errors import ComposerError
    from composer_stages.runs import catalog, queries
    from composer_stages.runs.run import Run

    try:
        return queries.rollout_ids(Run(catalog.find(_artifacts(ctx), ctx.params["run"])), incomplete)
    except ComposerError:  # a job, or no run
        return []


def complete_jobs(ctx: typer.Context) -> list[str]:
    """Return the names of the jobs that were submitted from here."""
    return [path.parent.name for path in sorted(_artifacts(ctx).glob("submitted/*/job.json"))]


def _artifacts(ctx: typer.Context) -> Path:
    # A shell asks while the line is incomplete: what was typed before counts, then what the command itself would use.
    return Path(ctx.params.get("artifacts") or os.environ.get("COMPOSER_ARTIFACTS") or "artifacts")


def complete_settings(ctx: typer.Context) -> Iterator[str]:
    """Yield `KEY=` for every setting of the stage; of a preset's entries both `KEY=` and `ENTRY.KEY=`."""
    from composer_cli.preset import load_preset
    from composer_stages.errors import ComposerError
    from composer_stages.runs import settings
    from composer_stages.runs.stage import load_stage

    command: Any = ctx.command
    if hasattr(command, "settings_keys"):
        yield from (f"{key}=" for key in command.settings_keys())
    elif preset := ctx.params.get("preset"):
        try:
            entries = load_preset(preset).stage
        except ComposerError:
            return
        keys = {entry.title: [key for key, _ in settings.known(load_stage(entry.stage).config)] for entry in entries}
        yield from dict.fromkeys(f"{key}=" for of_entry in keys.values() for key in of_entry)
        yield from (f"{title}.{key}=" for title, of_entry in keys.items() for key in of_entry)


def complete_presets() -> list[str]:
    """Return the names of the shipped presets."""
    from composer_cli.preset import preset_names

    return preset_names()


ENGINES = ["processes:", "ray", "ray://"]
"""The beginnings of what names an engine, whose workers can do a stage's units."""


def complete_executors() -> list[str]:
    """Return where a chain can run."""
    from composer_cli.executors import base

    return [base.LOCAL, *base.EXECUTORS, *ENGINES]


def complete_environments() -> list[str]:
    """Return the names of the registered environments."""
    from composer_stages import envs

    return sorted(envs.ENVIRONMENTS)


From = Annotated[
    list[str] | None,
    typer.Option(
        "--from",
        metavar="RUN",
        help="A run to read: its folder, its name in `composer status`, or s3://BUCKET/RUN. Repeatable.",
        autocompletion=complete_runs,
    ),
]
CONFIG = typer.Option("--config", "-c", metavar="FILE", help="Settings from a TOML file. Repeatable: later files win.")
ConfigFiles = Annotated[list[Path] | None, CONFIG]
Preset = Annotated[
    str | None,
    typer.Option(
        "--preset",
        metavar="NAME",
        help="A shipped preset, or a TOML file of one's own.",
        autocompletion=complete_presets,
    ),
]
Set = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        "-s",
        metavar="KEY=VALUE",
        help="One setting, its value as in TOML. Wins over files.",
        autocompletion=complete_settings,
    ),
]
Tune = Annotated[
    str | None,
    typer.Option(
        "--tune", metavar="KEY=V1,V2", help="Train each arm once with every value and keep the best by tuning tasks."
    ),
]
Words = Annotated[list[str] | None, typer.Argument(hidden=True)]
Env = Annotated[
    str | None,
    typer.Option("--env", metavar="NAME", help="Short for --set env=NAME.", autocompletion=complete_environments),
]
Seed = Annotated[int | None, typer.Option("--seed", metavar="N", help="Short for --set seed=N.")]
PlanAhead = Annotated[
    bool, typer.Option("--plan", help="Simulate what it would show and cost, from a pilot behind --from, and stop.")
]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Check all that it needs, say what it may cost, and stop.")]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object on stdout instead of text.")]
Verbose = Annotated[bool, typer.Option("--verbose", "-v", help="Show the traceback of a failure.")]
QUIET = typer.Option("--quiet", "-q", help="No progress on stderr, only errors.")
Quiet = Annotated[bool, QUIET]
Watch = Annotated[
    bool, typer.Option("--watch", help="Show live rollouts or training steps too, as `composer show --follow` does.")
]
All = Annotated[bool, typer.Option("--all", hidden=True, help="With --help: all options and settings.")]


def at_home(path: Path | str) -> Path:
    """Return a path with the home folder for ~, which shells put there at the beginning of a word alone."""
    return Path(os.path.expanduser(path))


def _require_folder(folder: Path) -> Path:
    folder = at_home(folder)
    if folder.parts and folder.parts[0].endswith(":"):
        raise UsageError("cli.artifacts-is-address", folder=folder)
    if folder.is_file():
        raise not_a_folder(folder, "artifacts")
    return folder


ARTIFACTS = typer.Option(
    "--artifacts", metavar="DIR", envvar="COMPOSER_ARTIFACTS", help="Where runs are kept.", callback=_require_folder
)
Artifacts = Annotated[Path, ARTIFACTS]
DEFAULT_ARTIFACTS = Path("artifacts")
