"""The commands of a stage and of a chain, whose options follow from the declarations of arguments and settings.

An option is a field of `call.Arguments` that has one, a setting of the stage that is marked (`settings.Option`), or one
that only the command line has (`options.py`). Options that a stage has no use for are not offered.
"""

from collections.abc import Iterable, Mapping, Sequence
from copy import copy
from functools import partial
from inspect import Parameter, Signature
from typing import Annotated, Any, get_args, get_origin

import typer
from typer.models import OptionInfo

from composer_cli import options
from composer_cli.help import ALL, HelpCommand
from composer_cli.printing import interrupt_leaves, print_json, reporting_errors
from composer_stages import STAGES, command_words
from composer_stages.errors import UsageError, refusal
from composer_stages.words import Sentence

Declared = dict[str, tuple[Any, Any]]
"""The options of a command: by their names in Python, the annotation that typer reads, and the default."""
ON_COMMAND_LINE: Declared = {
    "plan": (options.PlanAhead, False),
    "dry_run": (options.DryRun, False),
    "json": (options.Json, False),
    "verbose": (options.Verbose, False),
    "watch": (options.Watch, False),
    "all_": (options.All, False),
}
"""The options of a stage that have no meaning in Python, beside what is read and which settings are given."""


class StageCommand(HelpCommand):
    """The command of one stage, which is imported only when the command is called or asked for its own help."""

    def __init__(self, stage: str) -> None:
        name = command_words(stage).rpartition(" ")[2]
        super().__init__(name, help=STAGES[stage].help, rich_markup_mode=None)
        self.stage = stage

    def all_params(self, ctx: Any) -> list[Any]:
        """Return the options, without those that this stage has no use for."""
        self.params = self.params or parameters(self._declared())
        return super().all_params(ctx)

    @property
    def loaded(self) -> Any:
        """Return the stage, imported."""
        from composer_stages.runs.stage import load_stage

        return load_stage(self.stage)

    def _declared(self) -> Declared:
        from composer_cli.call import Arguments

        stage, keys = self.loaded, self.settings_keys()
        declared: Declared = {"words": (options.Words, None)} if STAGES[self.stage].positionals else {}
        declared |= {"from_": (options.From, None), "set_": (options.Set, None), **of_settings(stage.config)}
        if stage.limit_setting is not None:
            short = f"Short for --set {stage.limit_setting}=N."
            limit = typer.Option("--limit", "-n", metavar="N", min=1, help=short)
            declared["limit"] = (Annotated[int | None, limit], None)
        declared |= of_fields(Arguments) | ON_COMMAND_LINE
        absent = {
            "from_": not stage.inputs,
            "plan": stage.study is None,
            "trust": not any(name.rpartition(".")[2] == "api_key_env" for name in keys),
            "on": stage.work is None,
            "watch": not stage.shows_progress,
        }
        return {name: option for name, option in declared.items() if not absent.get(name)}

    def settings_keys(self) -> list[str]:
        """Return the keys of the stage's settings, also for completion in a shell."""
        from composer_stages.runs.settings import known

        return [name for name, _ in known(self.loaded.config)]

    def collect_usage_pieces(self, ctx: Any) -> list[str]:
        """Name the positional words by their meaning in the usage line."""
        # Click would name the one hidden argument that takes them all: [WORDS]...
        return ["[OPTIONS]", *STAGES[self.stage].usage.split()]

    def settings(self, ctx: Any) -> Iterable[tuple[str, Any, str]]:
        """Yield the stage's settings."""
        yield "Settings, for --set KEY=VALUE or a --config file", self.loaded.config, ""

    def invoke(self, ctx: Any) -> None:
        """Execute the stage, or show its plan, as its words and options ask."""
        from composer_cli import call
        from composer_cli.console import Console
        from composer_stages.runs import catalog
        from composer_stages.runs.activity import on_activity
        from composer_stages.runs.run import Run
        from composer_stages.runs.stage import read_for_stage, with_inherited

        values, stage = ctx.params, self.stage
        # Neither a plan nor a dry run makes a run that --resume could continue.
        resumes = not (values.get("plan") or values["dry_run"])
        with reporting_errors(json=values["json"], verbose=values["verbose"], resumes=resumes):
            arguments = read_arguments(call.Arguments, values)
            console = Console(arguments.quiet, watch=bool(values.get("watch")))
            positionals, named = read_positionals(stage, values.get("words") or ())
            typed = [*positionals, *typed_settings(stage, values)]
            files = read_for_stage(stage, arguments.config, console.notify)
            configured = partial(call.configure, stage, typed=typed, trust=arguments.trust)
            configuration = configured(files)
            if stage == "train":
                from composer_cli.preset import describe_unlike_presets

                if note := describe_unlike_presets(configuration):
                    console.notify(f"train: {note}")
            study, runs = self.loaded.study, list(values.get("from_") or ())
            if values.get("plan") and study is not None:
                pilots = [Run(catalog.find(arguments.artifacts, name)) for name in runs]
                with console.watching() as watch:
                    listen = watch.listener(f"{stage} --plan")
                    with on_activity(lambda activity: listen(activity, 0, 0)):
                        numbers, text = study(pilots, configuration, listen)
                print_json(numbers) if values["json"] else print(text)
                return
            unasked = configuration.reads_runs()
            inputs = catalog.choose(stage, [*named, *runs], arguments.artifacts, console.notify, unasked=unasked)
            configuration = with_inherited(stage, inputs, configuration)
            if len(configuration.each_seed()) > 1:
                from composer_cli import chain  # with the pages that it writes

                preset, configs = chain.of_seeds(stage, configuration, arguments)
                chain_call, read = (preset, configs, arguments, console), [*inputs.runs()]
                if not values["dry_run"]:
                    results = chain.run(*chain_call, read)
                    raise typer.Exit(chain.show(preset, results, arguments.artifacts, values["json"]))

                def configured_each(trees: Any) -> Any:
                    return chain.of_seeds(stage, with_inherited(stage, inputs, configured(trees)), arguments)[1]

                chain.show_plan(*chain_call, values["json"], files, configured_each, read)
                return
            job, arguments = call.add_mirror(call.StageJob(stage, stage, inputs, configuration), arguments)
            if values["dry_run"]:
                call.show_plan(
                    *(job, arguments, console, values["json"], files),
                    lambda trees: {stage: with_inherited(stage, inputs, configured(trees))},
                )
            elif not call.follow(job, arguments):
                result = call.execute(job, arguments, console)
                code = call.show(result, values["json"])
                if code == 0 and (reader := STAGES[stage].read_by):
                    console.notify(Sentence("cli.next-stage", reader=reader, run=str(result.path)))
                raise typer.Exit(code)


def of_fields(model: Any) -> Declared:
    """Return the options that fields of a model are: those that carry one of typer's, with their text as its help."""
    from composer_stages.runs.settings import describe

    describe(model)
    declared: Declared = {}
    for name, field in model.model_fields.items():
        for mark in (mark for mark in field.metadata if isinstance(mark, OptionInfo)):
            option, kind = copy(mark), field.annotation
            option.help = option.help or " ".join((field.description or "").split())
            several = get_origin(kind) is tuple
            kind = list[get_args(kind)[0]] | None if several else kind  # type: ignore[misc]
            declared[name] = Annotated[kind, option], None if several else field.default
    return declared


def of_settings(config: Any) -> Declared:
    """Return the options that settings of a stage are, each short for one of --set."""
    from composer_stages.runs.settings import options as marked

    declared: Declared = {}
    for key, field, mark in marked(config):
        name = key.rpartition(".")[2]
        kind: Any = next((basic for basic in (bool, int, float) if field.annotation in (basic, basic | None)), str)
        kind = list[str] if get_origin(field.annotation) is tuple else kind
        help_ = mark.help or f"Short for --set {key}={mark.metavar or 'true'}."
        completion = options.complete_environments if name == "env" else None
        option = typer.Option(
            f"--{name.replace('_', '-')}", metavar=mark.metavar or None, help=help_, autocompletion=completion
        )
        declared[name] = Annotated[kind | None, option], None
    return declared


def parameters(declared: Declared) -> list[Any]:
    """Return options as Click reads them; typer makes them of the signature of a function."""

    def function(**values: Any) -> None: ...

    keywords = [
        Parameter(name, Parameter.KEYWORD_ONLY, annotation=annotation, default=default)
        for name, (annotation, default) in declared.items()
    ]
    function.__signature__ = Signature(keywords)  # type: ignore[attr-defined]
    function.__annotations__ = {name: annotation for name, (annotation, _) in declared.items()}
    program = typer.Typer(add_completion=False)
    program.command()(function)
    return list(typer.main.get_command(program).params)


def read_arguments(model: Any, values: Mapping[str, Any]) -> Any:
    """Return the model of the arguments that a command was given; `UsageError` for a value that it refuses."""
    from pydantic import ValidationError

    try:
        return model(**{name: values[name] for name in model.model_fields if values.get(name) is not None})
    except ValidationError as error:
        problem = error.errors(include_url=False)[0]
        option = str(problem["loc"][0]).replace("_", "-")
        raise UsageError(
            "cli.option-value-refused", name=option, value=problem["input"], refusal=refusal(problem)
        ) from None


def typed_settings(stage: str, values: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the settings that a stage's options and --set stand for, as `option_layers` does."""
    from composer_stages.runs import settings
    from composer_stages.runs.stage import load_stage

    loaded = load_stage(stage)
    options = {key: values.get(key.rpartition(".")[2]) for key, _, _ in settings.options(loaded.config)}
    options |= {loaded.limit_setting: values.get("limit")} if loaded.limit_setting else {}
    return option_layers(loaded.config, options, values.get("set_") or (), loaded.limit_setting)


def option_layers(
    config: Any, options: Mapping[str, Any], typed: Iterable[str], limit_setting: str | None
) -> list[dict[str, Any]]:
    """Return the settings that options and --set stand for; `UsageError` for one that both give, with other values.

    options: values by dotted key, None or empty for an option that is not given. limit_setting: the key of --limit.
    """
    from composer_stages.runs import settings

    layers = {key: settings.nested(key, value) for key, value in options.items() if value not in (None, [])}
    assigned = [*map(settings.assignment, typed)]
    trees = [settings.dotted(settings.expanded(config, tree)) for tree in assigned]
    for name, layer in layers.items():
        for key, option_value in settings.dotted(settings.expanded(config, layer)).items():
            if others := [tree[key] for tree in trees if str(tree.get(key, option_value)) != str(option_value)]:
                option = "limit" if name == limit_setting else name.rpartition(".")[2]
                raise UsageError("cli.option-and-setting", name=option, given=option_value, key=key, value=others[0])
    return [*layers.values(), *assigned]


def read_positionals(stage: str, words: Sequence[str]) -> tuple[list[dict[str, Any]], list[str]]:
    """Return the settings that the positional arguments of a stage set, and the runs to read that they name.

    An example is `composer export FORMAT RUN`. Raises `UsageError` when there are too many words.
    """
    from composer_stages.runs.settings import nested

    meanings = STAGES[stage].positionals
    if "paths" in meanings:
        return [nested("paths", list(words))] if words else [], []
    if len(words) > len(meanings):
        expected = f"`{command_words(stage)} {STAGES[stage].usage}`".replace(" `", "`")
        raise UsageError("cli.one-word-too-many", word=words[len(meanings)], expected=expected)
    named = dict(zip(meanings, words, strict=False))
    runs = [named.pop("run")] if "run" in named else []
    return [nested(key, word) for key, word in named.items()], runs


class ChainCommand(HelpCommand):
    """The command of a chain, whose help with `--all` lists the settings of each executor."""

    def __init__(self, name: str, help: str) -> None:
        super().__init__(name, help=help, rich_markup_mode=None)

    def all_params(self, ctx: Any) -> list[Any]:
        """Return the options."""
        from composer_cli.call import ChainArguments

        declared: Declared = {
            "preset": (options.Preset, None),
            "set_": (options.Set, None),
            **of_fields(ChainArguments),
            "tune": (options.Tune, None),
            **{name: option for name, option in ON_COMMAND_LINE.items() if name != "plan"},
        }
        self.params = self.params or parameters(declared)
        return super().all_params(ctx)

    def settings(self, ctx: Any) -> Iterable[tuple[str, Any, str]]:
        """Yield the settings of every --on."""
        from composer_cli.executors import base

        for word in base.EXECUTORS if ctx.meta.get(ALL) else ():
            title = f"Settings of --on {word}, for --set on.KEY=VALUE or a table [on] in a file"
            yield title, base.load(word).settings, "on."

    def invoke(self, ctx: Any) -> None:
        """Run the chain, submit it, or show its plan, as its options ask."""
        from composer_cli import call, chain
        from composer_cli.console import Console
        from composer_cli.executors import base, jobs
        from composer_cli.preset import configure_preset, load_preset, read_for_preset
        from composer_stages.runs.settings import assignment

        values = ctx.params
        with reporting_errors(json=values["json"], verbose=values["verbose"], resumes=not values["dry_run"]):
            call.require_one_process("composer run")
            arguments: call.ChainArguments = read_arguments(call.ChainArguments, values)
            where = arguments.on or base.LOCAL
            preset = load_preset(values["preset"]).to_run(arguments.to_the_end)
            console, typed = Console(arguments.quiet, watch=values["watch"]), list(values["set_"] or ())
            files = read_for_preset(preset, arguments.config, console.notify)
            layers, on_settings = jobs.split_on([*files, *map(assignment, typed)])
            files, typed_layers = layers[: len(files)], layers[len(files) :]
            configured = partial(
                configure_preset, preset, typed=typed_layers, policy=arguments.policy, trust=arguments.trust
            )
            configs = configured(files)
            if base.executor(where) is not None:
                if values["tune"]:
                    raise UsageError("cli.tune-with-on")
                request = jobs.Request(str(values["preset"]), arguments, typed, configs, on_settings)
                unsure = Sentence("cli.perhaps-submitted")
                with interrupt_leaves(unsure):
                    jobs.submit_or_show(request, dry_run=values["dry_run"], json=values["json"])
                return
            if any("on" in layer for layer in map(assignment, typed)):
                raise UsageError("cli.settings-of-no-service", services=[*base.EXECUTORS])
            arguments = arguments.model_copy(update={"on": None if where == base.LOCAL else where})
            if values["tune"]:
                from composer_cli import tuning  # with the statistics and numpy, which few chains need

                if values["dry_run"]:
                    _, preset, configs = tuning.trial_entries(preset, configs, *tuning.parse(values["tune"]))
                else:
                    configs, _ = tuning.tune(preset, configs, values["tune"], arguments, console)
            if values["dry_run"]:
                # Of the entries that --tune adds no file changes the bill.
                chain.show_plan(
                    *(preset, configs, arguments, console, values["json"], files),
                    lambda trees: {**configs, **configured(trees)},
                )
                return
            results = chain.run(preset, configs, arguments, console)
            raise typer.Exit(chain.show(preset, results, arguments.artifacts, values["json"]))
