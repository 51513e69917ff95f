"""The output of `--help`: the settings and options that most runs need; with `--help --all` all of them.

A setting is basic where its field is marked (`composer_stages.runs.settings.Basic`); a stage with few settings shows
them all.
"""

from collections.abc import Iterable
from itertools import pairwise
from typing import Any, Literal, get_args, get_origin

from typer.core import TyperCommand, TyperGroup

from composer_stages import stages_of
from composer_stages.errors import ComposerError
from composer_stages.layout import counted

ALL, ENV = "--all", "--env"
FEW = 8
"""Settings of a stage that are shown without choosing among them."""
RARE_OPTIONS = (
    *("seed", "out", "on", "trust", "json", "verbose", "quiet", "watch", "artifacts", "dj", "diloco"),
    *("replicas", "tune", "plan"),
)
"""Names of a stage's options that only `--help --all` shows."""


class HelpCommand(TyperCommand):
    """A command whose help is short unless it is asked for with `--all`, in any order and place."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Record `--all` next to `--help`, since `--help` ends the command before later arguments are parsed."""
        before = args[: args.index("--")] if "--" in args else args
        ctx.meta[ALL] = ALL in before
        words = pairwise([*(part for word in before for part in word.split("=", 1)), ""])
        ctx.meta[ENV] = [value for word, value in words if word == ENV][-1:]
        return list(super().parse_args(ctx, [*(["--help"] if ctx.meta[ALL] else []), *args]))

    def settings(self, ctx: Any) -> Iterable[tuple[str, Any, str]]:
        """Yield (title, settings, prefix of their keys) for each section of settings."""
        return ()

    def all_params(self, ctx: Any) -> list[Any]:
        """Return the options of the command."""
        return super().get_params(ctx)

    def get_params(self, ctx: Any) -> list[Any]:
        """Return the options: all of them to parse, and to show those that were asked for."""
        params = self.all_params(ctx)
        if ctx.meta.get("shown") and not ctx.meta.get(ALL):
            return [param for param in params if param.name not in RARE_OPTIONS]
        return params

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """List the options."""
        ctx.meta["shown"] = True
        super().format_options(ctx, formatter)
        ctx.meta["shown"] = False

    def format_epilog(self, ctx: Any, formatter: Any) -> None:
        """List the settings with their defaults, from their declarations, and how many are not shown."""
        from composer_stages.runs.settings import basic_settings

        hidden, environments = 0, False
        for title, config, prefix in self.settings(ctx):
            rows, basic = describe_settings(config, prefix), basic_settings(config)
            environments |= any(key == "env.options" for key, *_ in rows)
            complete = ctx.meta.get(ALL) or len(rows) <= FEW
            entries = [(name, text) for key, name, text in rows if complete or key in basic]
            hidden += len(rows) - len(entries)
            if entries:
                with formatter.section(title):
                    formatter.write_dl(entries)
        for name in ctx.meta[ENV] if environments else ():
            with formatter.section(f"Options of {name}, for --set env.KEY=VALUE"):
                formatter.write_dl(describe_environment(name))
        if environments and ctx.meta.get(ALL):
            with formatter.section("Options of each environment, for --set env.KEY=VALUE"):
                formatter.write_dl(describe_environments())
        if not ctx.meta.get(ALL):
            rare = sum(param.name in RARE_OPTIONS and not param.hidden for param in self.all_params(ctx))
            more = [counted(hidden, "setting")] if hidden else []
            more += [counted(rare, "option")] if rare else []
            if more:
                formatter.write_paragraph()
                formatter.write_text(f"`{ctx.command_path} --help --all` lists {' and '.join(more)} more.")


class CommandGroup(TyperGroup):
    """A group whose commands are listed with their whole first sentence; typer cuts a summary off at one line."""

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        """List the commands, those of the pipeline first."""
        pipeline, commands = list[tuple[str, str]](), list[tuple[str, str]]()
        for name in self.list_commands(ctx):
            command = self.get_command(ctx, name)
            if command is not None and not command.hidden:
                rows = pipeline if name in stages_of("pipeline") else commands
                rows.append((name, first_sentence(command.help or "")))
        width = max(len(name) for name, _ in [*pipeline, *commands])
        for title, rows in (("The pipeline, in its order", pipeline), ("Commands", commands)):
            if rows:
                with formatter.section(title):
                    # Names of one width, so that the summaries of both lists begin below each other.
                    formatter.write_dl([(f"{name:<{width}}", text) for name, text in rows])


def first_sentence(text: str) -> str:
    """Return the first sentence of a help text."""
    first, more, _ = text.partition("\n\n")[0].partition(". ")
    return f"{first}." if more else first


def describe_settings(config: Any, prefix: str = "") -> list[tuple[str, str, str]]:
    """Return key, `KEY=DEFAULT` and description of every setting, with the allowed words where there are few."""
    from composer_stages.runs.settings import default_of, describe, known

    describe(config)
    rows = []
    for name, field in known(config):
        default = default_of(field)
        entry = name if default is None else f"{name}={default if default != '' else repr('')}"
        choices = f"One of {', '.join(get_args(field.annotation))}." if get_origin(field.annotation) is Literal else ""
        rows.append((name, f"{prefix}{entry}", " ".join(filter(None, [field.description, choices]))))
    return rows


def describe_environment(name: str) -> list[tuple[str, str]]:
    """Return the options of an environment with their defaults, or why it cannot be had."""
    from composer_stages import envs

    try:
        options = envs.constructor_options(name)
    except ComposerError as error:
        return [(name, str(error))]
    rows = [(f"env.{key}", f"{value} unless it is set" if value else "required") for key, value in options.items()]
    return rows or [(name, "It has none.")]


def describe_environments() -> list[tuple[str, str]]:
    """Return the environments that ship, and the options of each with their defaults."""
    from composer_stages import envs

    names = filter(envs.ENVIRONMENTS.ships, sorted(envs.ENVIRONMENTS))
    return [
        (name, ", ".join(f"{option}={default}" for option, default in envs.constructor_options(name).items()))
        for name in names
    ]
