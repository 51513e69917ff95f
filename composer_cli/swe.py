"""`composer swe check`: what this machine lacks for `--env swe-lite`, and how long building the rest will take."""

from typing import TYPE_CHECKING

import typer

from composer_cli import options
from composer_cli.help import CommandGroup
from composer_cli.printing import reports_errors

if TYPE_CHECKING:
    from stages.envs.swe.requirements import WayToRun

COLOURS = {"missing": 31, "note": 33, "ok": 32}
app = typer.Typer(
    cls=CommandGroup, help="Look at what SWE-bench's tasks need.", rich_markup_mode=None, no_args_is_help=True
)


@app.command()
@reports_errors
def check(
    set_: options.Set = None,
    json: options.Json = False,
    verbose: options.Verbose = False,
) -> None:
    """Check whether this machine can run `--env swe-lite`. Settings are `env.KEY=VALUE`.

    Exit code 0 where `collect` can begin with these settings, 3 where something is missing.
    """
    from composer_cli.printing import print_result
    from stages.envs import load
    from stages.envs.config import EnvStageConfig
    from stages.envs.swe.env import SweEnv
    from stages.errors import Incomplete, UsageError
    from stages.runs import settings

    layers = [{"env": {"name": SweEnv.name, "split": "eval"}}, *map(settings.assignment, set_ or [])]
    config = settings.build("swe check", EnvStageConfig, layers)
    environment = load(config.env.name, {**config.env.options, "sandbox": config.sandbox})
    if type(environment) is not SweEnv:
        raise UsageError(f"`composer swe check` looks at swe-lite, not at {config.env.name!r}. Leave out env.name.")
    report = environment.requirements(config.env.split)
    rows = f"rows: {report.rows.state}, {report.rows.found}"
    end = "Not ready: what is marked missing is needed. `--env swe-mini` needs nothing but bubblewrap and pip."
    if report.ready:
        end = f"Ready: `composer collect --env swe-lite` can begin here ({report.chosen})."
    text = "\n\n".join([rows, *map(_requirements, report.ways), end])
    print_result(json, report.document(), text, COLOURS)
    raise typer.Exit(0 if report.ready else Incomplete.exit_code)


def _requirements(way: "WayToRun") -> str:
    """Return the requirements of one way to run."""
    lines = [f"{way.name}: {'ready' if way.ready else 'parts are missing'}"]
    lines += [
        f"  {part.name:<14} {part.state:<8} {part.found}{f' -> {part.way_out}' if part.way_out else ''}"
        for part in way.parts
    ]
    return "\n".join(lines)
