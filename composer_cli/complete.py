"""What a shell offers after Tab: runs, jobs, settings, presets, executors (`composer --install-completion`)."""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import typer


def runs(ctx: typer.Context, incomplete: str) -> list[str]:
    """The names of runs, and the stages whose latest run a name stands for."""
    from composer_cli.show import runs

    names = [runs.name(path) for path in runs.folders(_root(ctx))]
    return _beginning(incomplete, [*dict.fromkeys(name.partition("/")[0] for name in names), *names])


def settings(ctx: typer.Context, incomplete: str) -> list[str]:
    """The keys of the command's settings, each with its sign of equality; of a preset, those of its entries."""
    return _beginning(incomplete, [f"{key}=" for key in _keys(ctx)])


def _keys(ctx: typer.Context) -> Iterator[str]:
    from composer_cli import preset
    from composer_cli.settings import known
    from stages.errors import ComposerError
    from stages.runs.stage import load_stage

    command: Any = ctx.command
    if hasattr(command, "settings_keys"):
        yield from command.settings_keys()
    elif wanted := ctx.params.get("preset"):
        try:
            entries = preset.load(wanted).stage
        except ComposerError:
            return
        for entry in entries:
            yield from (f"{entry.title}.{key}" for key, _ in known(load_stage(entry.stage).config))


def presets(incomplete: str) -> list[str]:
    """The shipped presets."""
    from composer_cli import preset

    return _beginning(incomplete, preset.names())


def executors(incomplete: str) -> list[str]:
    """Where a chain can run."""
    from composer_cli.executors import base

    return [*_beginning(incomplete, [base.LOCAL, *base.EXECUTORS]), *engines(incomplete)]


def jobs(ctx: typer.Context, incomplete: str) -> list[str]:
    """The jobs that were submitted from here."""
    return _beginning(incomplete, _submitted(_root(ctx)))


def _submitted(root: Path) -> list[str]:
    return [path.parent.name for path in sorted(root.glob("submitted/*/job.json"))]


def _root(ctx: typer.Context) -> Path:
    return Path(ctx.params.get("artifacts") or os.environ.get("COMPOSER_ARTIFACTS") or "artifacts")


def runs_and_jobs(ctx: typer.Context, incomplete: str) -> list[str]:
    """What `composer show` shows."""
    return [*runs(ctx, incomplete), *jobs(ctx, incomplete)]


def environments(incomplete: str) -> list[str]:
    """The registered environments."""
    from stages import envs

    return _beginning(incomplete, sorted(envs.ENVIRONMENTS))


def engines(incomplete: str) -> list[str]:
    """Where work can be done."""
    return _beginning(incomplete, ["processes:", "ray", "ray://"])


def _beginning(incomplete: str, words: list[str]) -> list[str]:
    return [word for word in words if word.startswith(incomplete)]
