"""The command of a stage. All stages take the same words; options for settings that a stage lacks are not offered."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import typer

from composer_cli import options
from composer_cli.help import ALL, HelpCommand, basic_settings
from composer_cli.printing import print_json, reports_errors
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
"""Options that are short for one setting."""


class StageCommand(HelpCommand):
    """A command that imports its stage only when it is called or asked for its own help."""

    def all_params(self, ctx: Any) -> list[Any]:
        """Return the options, without those that this stage has no use for."""
        from stages.runs.stage import load_stage

        stage, keys = load_stage(self._stage()), self.settings_keys()
        absent = {
            "words": not STAGES[self._stage()].positionals,
            "plan": stage.study is None,
            "limit": stage.limit_setting is None,
            "trust": not any(name.rpartition(".")[2] == "api_key_env" for name in keys),
            "on": stage.work is None,
            "watch": not stage.shows_progress,
        }
        for option, key in SHORTCUTS.items():
            absent[option] = not any(name == key or name.startswith(f"{key}.") for name in keys)
        params = [param for param in super().all_params(ctx) if not absent.get(param.name)]
        for param in params:
            if param.name == "limit":
                param.help = f"Short for --set {stage.limit_setting}=N."
        return params

    def settings_keys(self) -> list[str]:
        """Return the keys of the stage's settings, also for completion in a shell."""
        from stages.runs.settings import known
        from stages.runs.stage import load_stage

        return [name for name, _ in known(load_stage(self._stage()).config)]

    def basic_settings(self) -> set[str]:
        """Return the keys of the settings that most runs need."""
        from stages.runs.stage import load_stage

        return basic_settings(load_stage(self._stage()).config)

    def inputs(self) -> Mapping[str, Any]:
        """Return the slots of the runs that the stage reads, by name."""
        from stages.runs.stage import load_stage

        return load_stage(self._stage()).inputs

    def collect_usage_pieces(self, ctx: Any) -> list[str]:
        """Name the positional words by their meaning in the usage line."""
        # Click would name the one hidden argument that takes them all: [WORDS]...
        return ["[OPTIONS]", *STAGES[self._stage()].usage.split()]

    def settings(self, ctx: Any) -> Iterable[tuple[str, Any, str]]:
        """Yield the stage's settings."""
        from stages.runs.stage import load_stage

        yield "Settings, for --set KEY=VALUE or a --config file", load_stage(self._stage()).config, ""

    # Commands of the group `probe` are called without the group's name, which their stages have.
    def _stage(self) -> str:
        return str(self.name) if self.name in STAGES else f"probe-{self.name}"


class RunCommand(HelpCommand):
    """The command of a chain, whose help with `--all` lists the settings of each executor."""

    def settings(self, ctx: Any) -> Iterable[tuple[str, Any, str]]:
        """Yield the settings of every --on."""
        from composer_cli.executors import base

        for word in base.EXECUTORS if ctx.meta.get(ALL) else ():
            title = f"Settings of --on {word}, for --set on.KEY=VALUE or a table [on] in a file"
            yield title, base.load(word).settings, "on."


def command_function(stage: str) -> Callable[..., None]:
    """Return the function behind a stage's command."""

    @reports_errors
    def command(
        words: options.Words = None,
        from_: options.From = None,
        config: options.ConfigFiles = None,
        set_: options.Set = None,
        env: options.Env = None,
        policy: options.Policy = None,
        teachers: options.Teachers = None,
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
        trust: options.Trust = False,
        json: options.Json = False,
        verbose: options.Verbose = False,
        quiet: options.Quiet = False,
        watch: options.Watch = False,
        artifacts: options.Artifacts = options.ARTIFACTS,
        all_: options.All = False,
    ) -> None:
        from composer_cli import call
        from composer_cli.console import Console
        from composer_cli.preset import unlike_presets
        from stages.runs import catalog
        from stages.runs.activity import on_activity
        from stages.runs.run import Run
        from stages.runs.stage import load_stage

        console = Console(quiet, watch=watch)
        positionals, named = read_positionals(stage, words or [])
        values = {"env.name": env, "policy.model": policy, "arm": arm, "dj.recipe": dj, "seed": seed}
        values |= {"diloco.store": diloco, "diloco.replicas": replicas}
        configuration = call.configure(
            stage, config or [], positionals, values, teachers, limit, set_ or [], console.notify, trust=trust
        )
        if stage == "train" and (note := unlike_presets(configuration)):
            console.notify(f"train: {note}")
        study = load_stage(stage).study
        if plan and study is not None:
            pilots = [Run(catalog.find(artifacts, name)) for name in from_ or []]
            with console.watching() as shown:
                listen = shown.listener(f"{stage} --plan")
                with on_activity(lambda what: listen(what, 0, 0)):
                    numbers, text = study(pilots, configuration, listen)
            print_json(numbers) if json else print(text)
            return
        inputs = catalog.choose(stage, [*named, *(from_ or [])], artifacts, console.notify)
        job = call.StageJob(stage, stage, inputs, configuration)
        run_options = call.with_out(stage, out, call.RunOptions(artifacts, None, resume, clean, max_cost, on))
        if dry_run:
            call.show_plan(job, run_options, console, json)
        elif not call.follow(job, run_options):
            raise typer.Exit(call.show(call.execute(job, run_options, console), json))

    return command


def read_positionals(stage: str, words: Sequence[str]) -> tuple[list[dict[str, Any]], list[str]]:
    """Return the settings that the bare words after a stage's name stand for, and the runs to read that they name.

    An example is `composer export FORMAT RUN`. Raises `UsageError` when there are too many words.
    """
    from stages.runs.settings import nested

    meanings = STAGES[stage].positionals
    if meanings == ("paths",):
        return [nested("paths", list(words))] if words else [], []
    if len(words) > len(meanings):
        expected = f"`{command_words(stage)} {STAGES[stage].usage}`".replace(" `", "`")
        raise UsageError(f"{words[len(meanings)]!r} is one word too many: it is {expected}.")
    given = dict(zip(meanings, words, strict=False))
    runs = [given.pop("run")] if "run" in given else []
    return [nested(key, word) for key, word in given.items()], runs
