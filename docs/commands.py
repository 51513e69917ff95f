"""The page of all commands with their settings, and of all records with their columns, from their declarations."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import typer

from composer_cli.app import click_command
from composer_cli.help import HelpCommand, describe_settings
from composer_stages import STAGES, command_words
from composer_stages.runs import kinds as record_kinds
from composer_stages.runs.stage import load_stage


def commands() -> str:
    """Return a section for each command: usage, options and settings."""
    return "\n".join(line for name, command in _named(click_command(), "composer") for line in _section(name, command))


def stages() -> str:
    """Return a table of the stages: the record kinds that each reads and writes."""
    rows = ["| command | reads | writes |", "| --- | --- | --- |"]
    for name in STAGES:
        stage = load_stage(name)
        reads = ", ".join(f"`{slot.kind}`" for slot in stage.inputs.values()) or "–"
        writes = ", ".join(f"`{kind}`" for kind in stage.outputs.values()) or "–"
        rows.append(f"| `{command_words(name)}` | {reads} | {writes} |")
    return "\n".join(rows)


def kinds() -> str:
    """Return a section for each kind of record: what a row is, and its columns with their Arrow types."""
    told = _meanings()
    lines = []
    for kind in record_kinds.KINDS.values():
        lines += [f"### {kind.plural}", "", f"`{kind}`. {told.get(kind.name, '')}".rstrip(), ""]
        lines += ["| column | type |", "| --- | --- |"]
        lines += [f"| `{one.name}` | `{one.type}` |" for one in kind.schema]
        lines.append("")
    return "\n".join(lines)


def _named(group: Any, path: str) -> Iterator[tuple[str, Any]]:
    """Yield the commands of a group and of the groups in it, with their whole names."""
    for name, command in group.commands.items():
        if command.hidden:
            continue
        if hasattr(command, "commands"):
            yield from _named(command, f"{path} {name}")
        else:
            yield f"{path} {name}", command


def _section(name: str, command: Any) -> Iterator[str]:
    context = typer.Context(command, info_name=name)
    yield from (f"### {name}", "", _cell(command.help or ""), "")
    yield from ("```", " ".join([name, *command.collect_usage_pieces(context)]), "```", "")
    given = command.all_params(context) if isinstance(command, HelpCommand) else command.get_params(context)
    options = [found for param in given if (found := param.get_help_record(context))]
    yield from _table("option", options)
    for title, config, prefix in command.settings(context) if isinstance(command, HelpCommand) else ():
        yield from (f"{title}:", "")
        yield from _table("setting", [(key, text) for _, key, text in describe_settings(config, prefix)])


def _table(head: str, rows: list[tuple[str, str]]) -> Iterator[str]:
    if rows:
        yield from (f"| {head} | meaning |", "| --- | --- |")
        yield from (f"| `{_cell(key)}` | {_cell(text)} |" for key, text in rows)
        yield ""


def _cell(text: str) -> str:
    """Return a text as one line of a table."""
    return " ".join(text.split()).replace("|", "\\|").replace("<", "&lt;")


def _meanings() -> dict[str, str]:
    """Return what is said of each kind: the comment above its table, by the kind's name."""
    source = Path(record_kinds.__file__).with_name("kinds.toml").read_text("utf-8")
    told, comment = dict[str, str](), list[str]()
    for line in source.splitlines():
        if line.startswith("#"):
            comment.append(line.removeprefix("#"))
        elif comment:
            told[line.strip("[]")] = _cell(" ".join(comment))
            comment = []
    return told
