"""Stages as functions, called with the runs that they read and their settings, with a signature derived from these.

`StageFunction` has the words of `help`, of `?` in a notebook and of `inspect.signature`, made from the settings of its
stage when it is asked for, so that importing this package imports no stage.
"""

import textwrap
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from inspect import Parameter, Signature
from pathlib import Path
from types import UnionType
from typing import Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from composer_cli import call, chain
from composer_cli.call import Arguments
from composer_cli.console import Console
from composer_cli.help import FEW, describe_settings
from composer_post_training.results import OF_STAGE, Chain, ReadableRun, opened
from composer_post_training.words import PYTHON, errors_in_python, function_name
from composer_stages import STAGES
from composer_stages.errors import UsageError
from composer_stages.runs import catalog, settings
from composer_stages.runs.run import Inputs, Run
from composer_stages.runs.settings import StageConfig, basic_settings
from composer_stages.runs.stage import Plan, load_stage, read_for_stage, with_inherited
from composer_stages.words import Sentence, in_interface

Listener = Callable[[str, int, int], None]
"""Called with (what, units done, units in all); with 0 in all, `what` is a remark on the state of the work."""
Given = Run | Path | str
"""A run that a stage reads, or of a stage that reads files, one of these."""


class PythonConsole(Console):
    """Prints remarks and progress on stderr, in the words of this interface."""

    def notify(self, text: str) -> None:
        """Print one line."""
        super().notify(in_interface(text, PYTHON))


class StageFunction:
    """One stage, to be called with the runs that it reads and its settings.

    Settings are given as `tasks=2` or `policy={"model": "m"}`, which type checkers know; `settings()` names them all.
    Raises `UsageError`, `BadInput` or `Incomplete`.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.__name__ = self.__qualname__ = function_name(name)

    @property
    def __doc__(self) -> str:  # type: ignore[override]
        """Return what the stage does, and its settings with their defaults: what `help` prints."""
        name, example = self.__name__, load_stage(self.name).example
        rows = self.main_settings()
        all_settings = settings.known(load_stage(self.name).config)
        more = f"all {len(list(all_settings))} settings by their dotted keys"
        return "\n".join(
            [
                f"{STAGES[self.name].help} Returns its run, executed now or found complete.",
                f"\n{name}(*{self.positionals()}, **settings)",
                *(["\nExample:", textwrap.indent(example, "    ")] if example else []),
                '\nSettings that most runs need; policy.model is given as policy={"model": ...}:',
                *(_entry(entry, text) for entry, text in rows),
                f"\n{name}.settings() returns {more}, each with its explanation.",
                f"{name}.plan(...) returns what a call would do and cost at most.",
                "\nArguments of every stage:",
                _entry(f"*{self.positionals()}", self.reads()),
                *(_entry(entry, text) for _, entry, text in describe_settings(Arguments)),
                "\nRaises UsageError for a request that cannot be executed, BadInput for a run or a file that it",
                "cannot read, Incomplete if part of the work failed and the rest is saved.",
            ]
        )

    def positionals(self) -> str:
        """Return what the arguments without a name are: `runs`, or of a stage that reads files `paths`."""
        return "paths" if "paths" in STAGES[self.name].positionals else "runs"

    def reads(self) -> str:
        """Return in a sentence which runs or files the stage reads."""
        if self.positionals() == "paths":
            return "The paths of files; paths=[...] is the same."
        slots = load_stage(self.name).inputs.values()
        kinds = ", ".join(f"{slot.kind.plural}{' (optional)' * slot.optional}" for slot in slots)
        return f"It reads runs that hold {kinds}; the newest, where none are given." if kinds else "It reads no runs."

    def main_settings(self) -> list[tuple[str, str]]:
        """Return the settings that most runs need, as `KEY=DEFAULT` and what each means."""
        config = load_stage(self.name).config
        rows, basic = describe_settings(config), basic_settings(config)
        return [(entry, text) for key, entry, text in rows if len(rows) <= FEW or key in basic]

    @property
    def __call__(self) -> Callable[..., ReadableRun | Chain]:
        """Return the function to call, with the signature of the stage: notebooks read it from here."""
        function: Any = partial(self._run)
        function.__signature__ = self.__signature__
        function.__doc__ = None  # the one of this object is shown already
        return function

    def plan(self, *runs: Given, **keywords: Any) -> Plan:
        """Return what a call with these arguments would do and at most what it would cost, without executing it."""
        with errors_in_python():
            _, configuration, inputs = self._configure(runs, keywords, PythonConsole())
            planned, num = load_stage(self.name).plan(inputs, configuration), len(configuration.each_seed())
            tokens, cost = num * planned.max_completion_tokens, num * planned.max_cost_usd
            return replace(planned, units=num * planned.units, max_completion_tokens=tokens, max_cost_usd=cost)

    def _run(self, *runs: Given, **keywords: Any) -> ReadableRun | Chain:
        """Run the stage, or find it done; returns its run, or those of several seeds."""
        console = PythonConsole(bool(keywords.get("quiet")) or keywords.get("listener") is not None)
        with errors_in_python(resumes=True):
            if keywords.get("on") is not None and load_stage(self.name).work is None:
                raise UsageError("python.no-work-to-deal", stage=self.name, on=keywords["on"])
            arguments, configuration, inputs = self._configure(runs, keywords, console)
            if len(configuration.each_seed()) > 1:
                preset, configs = chain.of_seeds(self.name, configuration, arguments)
                results = chain.run(preset, configs, arguments, console, [*inputs.runs()])
                return Chain({title: opened(result.path) for title, result in results.items()})
            job, arguments = call.add_mirror(call.StageJob(self.name, self.name, inputs, configuration), arguments)
            run = opened(call.execute(job, arguments, console).path)
            if failed := run.manifest.summary.get("failed_checks"):
                sentence = Sentence("python.checks-failed", run=catalog.name(run.path), failed=failed)
                warnings.warn(in_interface(sentence, PYTHON), stacklevel=2)
            return run

    def settings(self) -> dict[str, Any]:
        """Return every setting by its dotted key, with its default; None where there is none."""
        return {key: settings.default_of(field) for key, field in settings.known(load_stage(self.name).config)}

    @property
    def __signature__(self) -> Signature:
        """Return the words that it takes: runs or paths, every setting with its default, then `Arguments`."""
        first = self.positionals()
        read = Parameter(first, Parameter.VAR_POSITIONAL, annotation=Run if first == "runs" else Given)
        models = load_stage(self.name).config, Arguments
        words = [
            Parameter(name, Parameter.KEYWORD_ONLY, default=_shown_default(field), annotation=_shown_type(field))
            for model in models
            for name, field in model.model_fields.items()
            if name.isidentifier() and name != first
        ]
        return Signature([read, *words], return_annotation=OF_STAGE.get(self.name, ReadableRun))

    def __repr__(self) -> str:
        names = [parameter.replace(annotation=Parameter.empty) for parameter in self.__signature__.parameters.values()]
        return f"<stage function {self.__name__}{Signature(names)}>"

    def _configure(
        self, runs: tuple[Given, ...], keywords: dict[str, Any], console: Console
    ) -> tuple[Arguments, StageConfig, Inputs]:
        """Return the arguments of every stage, the settings, and the runs to read."""
        if self.positionals() == "paths" and "paths" not in keywords:
            keywords, runs = {"paths": [str(getattr(run, "path", run)) for run in runs], **keywords}, ()
        named = folders_of_runs(runs)
        of_arguments = {key: value for key, value in keywords.items() if key in Arguments.model_fields}
        arguments = settings.build(self.name, Arguments, [of_arguments])
        typed = [settings.nested(key, value) for key, value in keywords.items() if key not in of_arguments]
        files = read_for_stage(self.name, arguments.config, console.notify)
        configuration = call.configure(self.name, files, typed, trust=arguments.trust)
        inputs = catalog.choose(
            self.name, named, arguments.artifacts, console.notify, unasked=configuration.reads_runs()
        )
        return arguments, with_inherited(self.name, inputs, configuration), inputs


def _entry(name: str, text: str) -> str:
    """Return an argument and what it means, as lines of a docstring."""
    words = " ".join(f"{name}  - {text}".removesuffix("  - ").split(" "))
    return textwrap.fill(words, 110, initial_indent="    ", subsequent_indent=" " * 8)


def _shown_type(field: FieldInfo) -> Any:
    """Return the type of a setting in plain types; a text is short for a group that has one."""
    plain = plain_type(field.annotation)
    return str | plain if getattr(field.annotation, "text_sets", None) else plain


def _shown_default(field: FieldInfo) -> Any:
    """Return the default of a setting as a signature shows it: groups and tuples as what a user would write."""
    if field.is_required():
        return Parameter.empty
    default = settings.default_of(field)
    if isinstance(default, BaseModel):
        return {}
    if isinstance(default, (list, tuple, frozenset)):
        return [
            element.model_dump(exclude_defaults=True) if isinstance(element, BaseModel) else element
            for element in default
        ]
    return str(default) if isinstance(default, Path) else default


def plain_type(annotation: Any) -> Any:
    """Return a type in terms of bool, int, float, str, list and dict; choices among words stay as they are."""
    origin = get_origin(annotation)
    if origin in (Union, UnionType):
        *types, joined = dict.fromkeys(map(plain_type, get_args(annotation)))
        for member in reversed(types):
            joined = member | joined
        return joined
    if origin is Literal or annotation in (Run, bool, int, float, str, Any, type(None)):
        return annotation
    if hasattr(annotation, "__metadata__"):
        return plain_type(annotation.__origin__)
    base = origin or annotation
    if base is Callable:
        return base
    for plain, classes in ((str, (str, Path)), (list, (Sequence, frozenset)), (dict, (dict, BaseModel))):
        if isinstance(base, type) and issubclass(base, classes):
            return plain
    return Any


def folders_of_runs(runs: Sequence[object]) -> list[str]:
    """Return the folders of runs that were passed; `UsageError` where one is something else."""
    paths = []
    for run in runs:
        if not isinstance(run, Run):
            value = repr(str(run)) if isinstance(run, (str, Path)) else f"A {type(run).__name__}"
            raise UsageError("python.not-a-run", value=value)
        paths.append(str(run.path))
    return paths


def check_settings(chosen: object) -> dict[str, Any]:
    """Return the settings of a chain by their keys; `UsageError` for something else."""
    if not isinstance(chosen, (Mapping, type(None))) or not all(isinstance(key, str) for key in chosen or ()):
        raise UsageError("python.chosen-not-dictionary", chosen=chosen)
    return dict(chosen or {})
