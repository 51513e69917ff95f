"""The program: one command per stage, `composer run`, and the commands about runs.

Heavy imports stay inside commands: `composer --help` and `--version` import neither pydantic nor numpy.
"""

import functools
import sys
from collections.abc import Sequence
from difflib import get_close_matches
from importlib import metadata
from pathlib import Path
from typing import Annotated, Any

import typer

from composer_cli import commands, tasks
from composer_cli.help import ALL, CommandGroup, HelpCommand
from composer_cli.printing import (
    FAILED,
    USAGE,
    discard,
    is_output_failure,
    open_missing_streams,
    print_error_json,
    say,
    sentence_and_code,
)
from composer_cli.stage_command import ChainCommand, StageCommand
from composer_stages import STAGES, command_words, stages_of
from composer_stages.errors import UsageError, refusal
from composer_stages.stopping import ending_process_on_second_signal
from composer_stages.words import Sentence

DISTRIBUTION = "composer-post-training"


class ComposerGroup(CommandGroup):
    """A group whose commands may have names of two words: `tasks` is a stage, and `tasks check` a command."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """Return the command that the first two words name, else that of the first."""
        if (command := self.get_command(ctx, name := " ".join(args[:2]))) is not None:
            return name, command, args[2:]
        longer = [name for name in self.list_commands(ctx) if name.startswith(f"{args[0]} ")]
        if near := get_close_matches(name, longer, 1, cutoff=0.8):
            ctx.fail(f"No such command {name!r}. Did you mean {near[0]!r}?")
        return super().resolve_command(ctx, args)


app = typer.Typer(
    name="composer",
    cls=ComposerGroup,
    help="Post-train coding agents, one stage at a time. Every stage reads and writes run folders.",
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["--help", "-h"], "max_content_width": 1000},
)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line and raise `SystemExit` with its exit code; without words it shows its help.

    arguments: the words after `composer`; those of this process if left out. It can be called many times in one
    process: signal handlers and stdout are as before when it returns.
    """
    words = list(sys.argv[1:] if arguments is None else arguments)
    try:
        open_missing_streams()
        require_working_folder()
        # Only now: what is opened before would get the number of a stream that is closed.
        with ending_process_on_second_signal():
            code = click_command()(words or ["--help"], prog_name="composer", standalone_mode=False)
        sys.stdout.flush()
        sys.exit(code)
    except BrokenPipeError:  # of --help and --version; commands have their own
        discard(sys.stdout)
        sys.exit(FAILED)
    except typer.TyperException as error:
        message = explain_mistake(error, words)
        if "--json" in words:
            print_error_json(message, USAGE)
        say(message)
        sys.exit(USAGE)
    except Exception as error:
        if is_output_failure(error):
            discard(sys.stdout)
        sentence, code = sentence_and_code(error)
        if "--json" in words:
            print_error_json(sentence, code)
        say(sentence)
        sys.exit(code)


def require_working_folder() -> None:
    """Raise `UsageError` where the working folder was deleted."""
    try:
        Path.cwd()
    except FileNotFoundError:
        raise UsageError("cli.working-folder-deleted") from None


def explain_mistake(error: typer.TyperException, words: Sequence[str]) -> str:
    """Return a message about a mistake in the words of a command, with the help that lists the right ones.

    A setting that was typed like an option is shown as it is written: `--samples 2` is `--set samples=2`.
    """
    message, context = error.format_message(), getattr(error, "ctx", None)
    if similar := getattr(error, "possibilities", ()):
        option = str(getattr(error, "option_name", ""))
        spelt = {word.lstrip("-"): word for word in similar}
        near = [spelt[word] for word in get_close_matches(option.lstrip("-"), spelt, 1)]
        message = f"No such option: {option}.{''.join(f' Did you mean {word}?' for word in near)}"
    if context is None and words:  # an option without its value
        root = click_command()
        above = root.context_class(root, info_name="composer")
        name, command, _ = root.resolve_command(above, [*words])
        context = command.context_class(command, info_name=name, parent=above)
    if context is None or isinstance(context.command, CommandGroup):
        end, listed = f"`{context.command_path if context else 'composer'} --help`", "commands"
    else:
        all_option = f" {ALL}" if isinstance(context.command, HelpCommand) else ""
        end, listed = f"`{context.command_path} --help{all_option}`", "options"
        other_options = getattr(error, "possibilities", ())  # None where none is spelt alike
        option = "" if other_options == () else str(getattr(error, "option_name", ""))
        parameter, refused = getattr(error, "param", None), getattr(error.__cause__, "errors", None)
        if parameter is not None and refused is not None:
            problem = refused(include_url=False)[0]
            message = f"{' / '.join(parameter.opts)} cannot be {problem['input']!r}: {refusal(problem)}."
        if message.startswith(TOO_MANY):
            message = _too_many_words(context, message.removeprefix(TOO_MANY).strip("() "), words)
        if option and isinstance(context.command, StageCommand):
            after = words[words.index(option) + 1] if option in words[:-1] else "-"
            value = "VALUE" if after.startswith("-") else after
            if meant := _instead_of_option(context.command, option, value, 1.0 if other_options else 0.7):
                message, listed = f"No such option: {option}. {meant}", "options and settings"
        elif option and isinstance(context.command, ChainCommand):
            end = f"Settings of its stages are written --set KEY=VALUE or --set STAGE.KEY=VALUE. {end}"
    return f"{message}{'' if message.endswith(('.', '?')) else '.'} {end} lists the {listed}."


def _instead_of_option(command: StageCommand, option: str, value: str, cutoff: float) -> str:
    """Return the input or setting that an unknown option may mean; "" where none is similar."""
    from composer_stages.runs.catalog import writers
    from composer_stages.runs.settings import nearest_keys

    word, stage = option.lstrip("-").replace("-", "_"), command.loaded
    for name, slot in stage.inputs.items():
        if word in (name, slot.kind.plural):
            makers = " or ".join(f"`{command_words(writer)}`" for writer in writers(slot.kind))
            return Sentence("cli.run-given-with-from", records=slot.kind.plural, makers=makers)
    nearest = next(iter(nearest_keys(stage.config, word, cutoff)), "")
    # A group stands for the setting that it begins with: `policies.NAME.model`.
    key = next((key for key in command.settings_keys() if nearest and f"{key}.".startswith(f"{nearest}.")), "")
    return f"Did you mean the setting --set {key}={value}?" if key else ""


TOO_MANY = "Got unexpected extra argument"
"""How Click begins a message about words that no argument takes."""


def _too_many_words(context: Any, extra: str, words: Sequence[str]) -> str:
    """Return a message about surplus words, given as Click lists them, with the likely meaning."""
    from composer_stages import envs

    extra = extra.removeprefix("s) (")
    first = extra.partition(" ")[0]
    command, message = context.command, f"`{context.command_path}` takes no argument {extra!r}."
    if any(word.startswith("=") for word in words) or ("--set" in words and any(word.endswith("=") for word in words)):
        return f"{message} A setting is written without spaces: --set KEY=VALUE."
    if isinstance(command, ChainCommand):
        from composer_cli.preset import preset_names

        return f"{message} Did you mean --preset {next(iter(get_close_matches(first, preset_names(), 1)), first)}?"
    if isinstance(command, StageCommand) and "env.name" in command.settings_keys():
        if envs.is_task_file(first):
            return f"{message} Tasks in a file are given with --env tasks --set env.path={first}."
        if first in envs.ENVIRONMENTS:
            return f"{message} Did you mean --env {first}?"
    if isinstance(command, StageCommand) and command.loaded.inputs:
        return f"{message} A run that it is to read is given with --from {first}."
    return f"{message} {'Quote what is one argument.' if command.name == 'query' else 'Leave it out.'}"


@functools.cache
def click_command() -> Any:
    """Return the command of Click that typer makes of `app`, with the commands of the stages and of a chain."""
    root: Any = typer.main.get_command(app)
    of_stages = {stage: StageCommand(stage) for stage in STAGES}
    probe_stages = stages_of("probe")
    alone = {stage: command for stage, command in of_stages.items() if stage not in probe_stages}
    chain = ChainCommand(
        "run", "Run a preset: a chain of stages. Settings are written KEY=VALUE, STAGE.KEY=VALUE or ENTRY.KEY=VALUE."
    )
    root.commands = {**alone, "run": chain, **root.commands}
    root.commands["probe"].commands = {of_stages[stage].name: of_stages[stage] for stage in probe_stages}
    return root


def _print_version(requested: bool) -> None:
    """Print name, version and place: two other projects install a command of this name."""
    if requested:
        root = Path(__file__).resolve().parents[1]
        print(f"Composer {metadata.version(DISTRIBUTION)}, the pipeline for post-training coding agents, from {root}")
        raise typer.Exit


@app.callback()
def composer(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Post-train coding agents, one stage at a time. Every stage reads and writes run folders."""


probe = typer.Typer(
    cls=CommandGroup,
    help="Measure whether training pushes toward reward hacking.",
    rich_markup_mode=None,
    callback=lambda: None,
)
app.add_typer(probe, name="probe")
app.add_typer(tasks.swe, name="swe")
app.command("tasks check")(tasks.check)
app.command("tasks convert")(tasks.convert)
for _command in (
    commands.status,
    commands.show,
    commands.cancel,
    commands.query,
    commands.report,
    commands.publish,
    commands.view,
    commands.serve,
):
    app.command()(_command)
