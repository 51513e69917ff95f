"""`composer swe check`: what this machine lacks for `--env swe-lite`, and how long building the rest will take."""

from typing import TYPE_CHECKING

import typer
from tabulate import tabulate

from composer_cli import options
from composer_cli.printing import as_sentences

if TYPE_CHECKING:
    from stages.envs.swe.requirements import Report, Way

INCOMPLETE = 3
COLOURS = {"missing": 31, "note": 33, "ok": 32}
app = typer.Typer(help="Look at what SWE-bench's tasks need.", rich_markup_mode=None, no_args_is_help=True)


@app.command()
@as_sentences
def check(
    set_: options.Set = None,
    json: options.Json = False,
    verbose: options.Verbose = False,
) -> None:
    """Tell what this machine lacks for `--env swe-lite`, and how long building takes. Settings are `env.KEY=VALUE`.

    Exit code 0 where `collect` can begin with these settings, 3 where something is missing.
    """
    from composer_cli import settings
    from composer_cli.printing import print_json, print_text
    from stages.envs import load
    from stages.envs.config import EnvStageConfig
    from stages.envs.swe.env import SweEnv
    from stages.errors import UsageError

    layers = [{"env": {"name": SweEnv.name, "split": "eval"}}, *map(settings.assignment, set_ or [])]
    config = settings.build("swe check", EnvStageConfig, layers)
    environment = load(config.env.name, {**config.env.options, "sandbox": config.sandbox})
    if type(environment) is not SweEnv:
        raise UsageError(f"`composer swe check` looks at swe-lite, not at {config.env.name!r}. Leave out env.name.")
    report = environment.requirements(config.env.split)
    if json:
        print_json(report.document())
    else:
        print_text(page(report), COLOURS)
    raise typer.Exit(0 if report.ready else INCOMPLETE)


def page(report: "Report") -> str:
    """A report for people."""
    rows = f"rows: {report.rows.state}, {report.rows.found}"
    if report.ready:
        end = f"Ready: `composer collect --env swe-lite` can begin here ({report.chosen})."
    else:
        end = "Not ready: what is marked missing is needed. `--env swe-mini` needs nothing but bubblewrap and pip."
    return "\n\n".join([rows, *map(_way, report.ways), end])


def _way(way: "Way") -> str:
    """A way's parts and, where environments are built, its repositories."""
    words = [(part.name, part.state, part.found, part.way_out) for part in way.parts]
    lines = [f"{way.name}: {'ready' if way.ready else 'parts are missing'}"]
    lines += [f"  {name:<14} {state:<8} {found}{f' -> {out}' if out else ''}" for name, state, found, out in words]
    if way.repositories:
        heads = ("repository", "rows", "cloned", "environments", "to build", "minutes to build")
        cells = [
            (
                one["repo"],
                one["rows"],
                "yes" if one["cloned"] else "no",
                one["environments"],
                one["to_build"],
                _minutes(one),
            )
            for one in way.repositories
        ]
        table = tabulate(cells, headers=heads, tablefmt="plain", disable_numparse=True)
        lines += ["", *(f"  {line}" for line in table.splitlines()), "", f"  {_time(way)}"]
    return "\n".join(lines)


def _minutes(repository: dict[str, float | None]) -> str:
    seconds = repository["build_s"]
    return "not measured" if seconds is None else f"{seconds / 60:.1f}"


def _time(way: "Way") -> str:
    building = sum(one["to_build"] for one in way.repositories)
    unknown = [one["repo"] for one in way.repositories if one["build_s"] is None]
    if not building:
        return "Nothing is to be built."
    said = f"Building {building} environments takes about {way.build_s / 60:.0f} minutes on two slow cores"
    return said + (f", and that of {', '.join(unknown)}, which was never measured." if unknown else ".")
