"""The command of a stage. All stages take the same words; those that its settings have no use for are not offered."""

from collections.abc import Callable, Sequence
from typing import Any, Literal, get_args, get_origin

import typer
from typer.core import TyperCommand

from composer_cli import options
from composer_cli.printing import as_sentences, print_json
from composer_cli.settings import nested
from stages import STAGES, command_words
from stages.errors import UsageError

SHORTCUTS = {
    "env": "env.name",
    "policy": "policy.model",
    "teachers": "teachers",
    "arm": "arm",
    "dj": "dj.recipe",
    "diloco": "diloco.store",
    "replicas": "diloco.replicas",
}
"""Words that are short for one setting."""


class StageCommand(TyperCommand):
    """A command that looks at its stage's settings only when it is called or asked for its own help."""

    def get_params(self, ctx: Any) -> list[Any]:
        """The options, without short ones for settings that the stage does not have."""
        from stages.runs.stage import load_stage

        keys = [name for name, _ in self._settings()]
        params = [p for p in super().get_params(ctx) if p.name not in SHORTCUTS or _has(keys, SHORTCUTS[p.name])]
        stage = load_stage(self._stage())
        absent = {
            "words": not STAGES[self._stage()].positionals,
            "plan": stage.study is None,
            "limit": stage.limit_setting is None,
            "batch": "batch" not in keys,
            "on": stage.work is None,
            "watch": not stage.shows_progress,
        }
        return [p for p in params if not absent.get(p.name)]

    def settings_keys(self) -> list[str]:
        """The keys of the stage's settings, for completion."""
        return [name for name, _ in self._settings()]

    def collect_usage_pieces(self, ctx: Any) -> list[str]:
        """The words by their meaning."""
        return ["[OPTIONS]", *STAGES[self._stage()].usage.split()]

    def _stage(self) -> str:
        return str(self.name) if self.name in STAGES else f"probe-{self.name}"

    def _settings(self) -> list[tuple[str, Any]]:
        from composer_cli.settings import known
        from stages.runs.stage import load_stage

        return list(known(load_stage(self._stage()).config))

    def format_epilog(self, ctx: Any, formatter: Any) -> None:
        """The stage's settings with their defaults, from their declarations."""
        rows = [(_shown(name, field), _described(field)) for name, field in self._settings()]
        if rows:
            with formatter.section("Settings, for --set KEY=VALUE or a --config file"):
                formatter.write_dl(rows)


class RunCommand(TyperCommand):
    """The command of a chain, whose help lists what each executor can be told."""

    def format_epilog(self, ctx: Any, formatter: Any) -> None:
        """The settings behind --on, from their declarations."""
        from composer_cli.executors import base
        from composer_cli.settings import known

        for word in base.EXECUTORS:
            fields = known(base.found(word).settings)
            rows = [(f"on.{_shown(name, field)}", _described(field)) for name, field in fields]
            with formatter.section(f"Settings of --on {word}, for --set on.KEY=VALUE or a table [on] in a file"):
                formatter.write_dl(rows)


def _has(keys: list[str], key: str) -> bool:
    return any(name == key or name.startswith(f"{key}.") for name in keys)


def _shown(name: str, field: Any) -> str:
    default = None if field.is_required() else field.get_default(call_default_factory=True)
    return name if default is None else f"{name}={default if default != '' else repr('')}"


def _described(field: Any) -> str:
    """What a setting is, and the words it can be where they are few."""
    words = [f"One of {', '.join(get_args(field.annotation))}."] if get_origin(field.annotation) is Literal else []
    return " ".join([*filter(None, [field.description]), *words])


def make(stage: str) -> Callable[..., None]:
    """The function behind a stage's command."""

    @as_sentences
    def command(
        words: options.Words = None,
        from_: options.From = None,
        config: options.ConfigFiles = None,
        set_: options.Set = None,
        env: options.Env = None,
        policy: options.Policy = None,
        teachers: options.Teachers = None,
        batch: options.Batch = False,
        arm: options.Arm = None,
        dj: options.Dj = None,
        diloco: options.DilocoStore = None,
        replicas: options.Replicas = None,
        limit: options.Limit = None,
        seed: options.Seed = None,
        out: options.OutFolder = None,
        resume: options.Resume = False,
        clean: options.Clean = False,
        on: options.On = None,
        plan: options.PlanAhead = False,
        dry_run: options.DryRun = False,
        max_cost: options.MaxCost = None,
        json: options.Json = False,
        verbose: options.Verbose = False,
        quiet: options.Quiet = False,
        watch: options.Watch = False,
        artifacts: options.Artifacts = options.ARTIFACTS,
    ) -> None:
        from composer_cli import launch
        from composer_cli.console import Console
        from composer_cli.show import runs
        from stages.runs.artifact import Run
        from stages.runs.stage import load_stage

        console = Console(quiet, watch=watch)
        said, named = read(stage, words or [])
        values = {"env.name": env, "policy.model": policy, "arm": arm, "dj.recipe": dj, "seed": seed}
        values |= {"diloco.store": diloco, "diloco.replicas": replicas}
        values |= {"batch": True} if batch else {}
        short = [*said, *launch.shortcuts(stage, values, teachers, limit)]
        settings = launch.configure(stage, config or [], short, set_ or [])
        study = load_stage(stage).study
        if plan and study is not None:
            numbers, text = study([Run(runs.find(artifacts, name)) for name in from_ or []], settings)
            print_json(numbers) if json else print(text)
            return
        inputs = runs.choose(stage, [*named, *(from_ or [])], artifacts, console.tell)
        job = launch.Job(stage, stage, inputs, settings)
        run_options = launch.placed(stage, out, launch.RunOptions(artifacts, None, resume, clean, max_cost, on))
        if dry_run:
            launch.show_plan(job, run_options, json)
            return
        if launch.follow(job, run_options):
            return
        result = launch.execute(job, run_options, console)
        raise typer.Exit(launch.show(result, json))

    return command


# ---- positionals
# The bare words after a stage's name, for the stages that take some: `composer export FORMAT RUN`.


def read(stage: str, words: Sequence[str]) -> tuple[list[dict[str, Any]], list[str]]:
    """What the words say: layers of settings, and runs to read; `UsageError` when there are too many."""
    meaning = STAGES[stage].positionals
    if meaning == ("paths",):
        return [nested("paths", list(words))] if words else [], []
    if len(words) > len(meaning):
        expected = f"`{command_words(stage)} {STAGES[stage].usage}`".replace(" `", "`")
        raise UsageError(f"{words[len(meaning)]!r} is one word too many: it is {expected}.")
    said = dict(zip(meaning, words, strict=False))
    runs = [said.pop("run")] if "run" in said else []
    return [nested(key, word) for key, word in said.items()], runs
