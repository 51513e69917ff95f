"""The program: one command a stage, and the commands about runs. Whatever is heavy is imported inside them."""

import sys
from collections.abc import Sequence
from typing import Annotated

import typer

from composer_cli import looking, options, swe
from composer_cli.printing import USAGE, as_sentences, say, tell_json
from composer_cli.stage_command import RunCommand, StageCommand, make
from composer_cli.version import about as about_version
from stages import STAGES

app = typer.Typer(
    name="composer",
    help="Post-train coding agents, one stage at a time. Every stage reads and writes runs that last.",
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["--help", "-h"], "max_content_width": 1000},
)


def _version(wanted: bool) -> None:
    if wanted:
        print(about_version())
        raise typer.Exit


@app.callback()
def composer(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Say which one.")
    ] = False,
) -> None:
    """Post-train coding agents, one stage at a time. Every stage reads and writes runs that last."""


probe = typer.Typer(
    help="Measure whether training pushes toward reward hacking.", rich_markup_mode=None, no_args_is_help=True
)
for _name, _stage in STAGES.items():
    _group = probe if _stage.group == "probe" else app
    _group.command(_name.removeprefix("probe-"), cls=StageCommand, help=_stage.help)(make(_name))
app.add_typer(probe, name="probe")
app.add_typer(swe.app, name="swe")


@app.command(cls=RunCommand)
@as_sentences
def run(
    preset: options.Preset = None,
    on: options.OnOrSubmit = "local",
    policy: options.PolicyOfAll = None,
    config: options.ConfigFiles = None,
    set_: options.Set = None,
    resume: options.Resume = False,
    clean: options.Clean = False,
    dry_run: options.DryRun = False,
    max_cost: options.MaxCostEach = None,
    json: options.Json = False,
    verbose: options.Verbose = False,
    quiet: options.Quiet = False,
    watch: options.Watch = False,
    artifacts: options.Artifacts = options.ARTIFACTS,
) -> None:
    """Run a preset: a chain of stages. Settings are written ENTRY.KEY=VALUE, or STAGE.KEY=VALUE."""
    from composer_cli import chain, settings
    from composer_cli import preset as presets
    from composer_cli.console import Console
    from composer_cli.executors import base, submit
    from composer_cli.launch import RunOptions, alone
    from composer_cli.printing import print_json, print_text
    from stages.policy.base import VLLM

    alone("composer run")
    wanted = presets.load(preset)
    model = presets.everywhere(wanted, "policy.model", policy, keeping=VLLM) if policy else []
    layers = [*map(settings.read_file, config or []), *model, *map(settings.assignment, set_ or [])]
    layers, where = submit.split(layers)
    configs = presets.configure(wanted, layers)
    if (executor := base.executor(on)) is not None:
        asked = submit.Asked(str(preset), config or [], policy, set_ or [], max_cost)
        submit.carry_out(on, executor, asked, configs, where, artifacts, clean=clean, dry_run=dry_run, json=json)
        return
    if dry_run and json:
        print_json({"entries": chain.plans(wanted, configs), "checked": chain.checked(configs, artifacts)})
        return
    if dry_run:
        print_text(chain.overview(wanted, configs, artifacts))
        return
    run_options = RunOptions(
        artifacts, resume=resume, clean=clean, max_cost=max_cost, on=None if on == base.LOCAL else on
    )
    results = chain.run(wanted, configs, run_options, Console(quiet, watch=watch))
    raise typer.Exit(chain.show(wanted, results, artifacts, json))


for look in (looking.status, looking.show, looking.cancel, looking.query, looking.report, looking.publish):
    app.command()(look)


@app.command()
@as_sentences
def parity(
    against: Annotated[
        str | None,
        typer.Option(
            "--against", metavar="CLONE", help="Upstream's own functions: FOLDER, FOLDER@COMMIT or OWNER/NAME@COMMIT."
        ),
    ] = None,
    json: options.Json = False,
    verbose: options.Verbose = False,
) -> None:
    """Compare the loss kernels, or upstream's functions in a clone, with the recorded numbers."""
    from composer_cli.printing import print_json, print_text
    from composer_cli.show import parity as about

    found = about.upstream(against) if against else about.kernels()
    if json:
        print_json(found)
    else:
        print_text(about.page(found))
    raise typer.Exit(0 if found["same"] else 1)


app.command()(looking.view)


@app.command()
@as_sentences
def serve(
    model: Annotated[
        str, typer.Argument(metavar="MODEL|RUN", help="A model folder or hub id, or a run whose checkpoint is served.")
    ],
    port: Annotated[int, typer.Option("--port", metavar="N", min=0, max=65535, help="0 takes a free one.")] = 0,
    set_: options.Set = None,
    json: options.Json = False,
    verbose: options.Verbose = False,
    quiet: options.Quiet = False,
    artifacts: options.Artifacts = options.ARTIFACTS,
) -> None:
    """Serve a model with vLLM, or with transformers where there is none, until Ctrl-C. Settings are a policy's."""
    from composer_cli import serve as serving
    from composer_cli.console import Console
    from stages.runs.artifact import Interrupted

    what, console = serving.served(model, artifacts), Console(quiet)
    config = serving.configured(what.model, set_ or [])
    try:
        with console.watching() as watch:
            program, server = serving.server_of(config, what.logs, artifacts, port, watch.listener("serve"))
        try:
            serving.announce(program, config, server, json)
            serving.until_ended(server, console)
        finally:
            server.stop()
    except (KeyboardInterrupt, Interrupted) as error:
        console.tell(f"The server of {config.source} has ended.")
        raise typer.Exit(128 + int(getattr(error, "signal_number", 2))) from None


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line and leave with its exit code; without words it shows its help."""
    try:
        sys.exit(app(arguments or sys.argv[1:] or ["--help"], prog_name="composer", standalone_mode=False))
    except typer.TyperException as error:
        message = error.format_message()
        if "--json" in (arguments or sys.argv[1:]):
            tell_json(message, USAGE)
        say(f"{message}{'' if message.endswith(('.', '?')) else '.'} `composer --help` lists the commands.")
        sys.exit(USAGE)
