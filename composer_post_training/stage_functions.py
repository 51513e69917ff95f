"""Stages as functions: called with the runs that they read and their settings, with a signature that says what is true.

`StageFunction` has the words of `help`, of `?` in a notebook and of `inspect.signature`, made from the settings of its
stage when it is asked for, so that importing this package imports no stage.
"""

import textwrap
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from inspect import Parameter, Signature
from pathlib import Path
from types import UnionType
from typing import Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from composer_cli import launch, settings
from composer_cli.console import Console
from composer_cli.help import FEW, described, is_basic
from composer_cli.show import runs as run_folders
from composer_cli.stage_command import SHORTCUTS
from composer_post_training.phrasing import errors_in_python, function_name, in_python
from composer_post_training.results import Evaluation, ReadableRun, opened
from stages import STAGES
from stages.errors import UsageError
from stages.runs.run import Inputs, Run
from stages.runs.settings import StageConfig
from stages.runs.stage import Plan, load_stage

Listener = Callable[[str, int, int], None]
"""Called with (what, units done, units in all); with 0 in all, `what` is a remark on the state of the work."""
ARTIFACTS = "artifacts"
ARGUMENTS = {
    "config=()": "A TOML file with settings, or several; later ones and keywords win.",
    "artifacts='artifacts'": "The folder where runs are kept.",
    "out=None": "Another folder for this run, or s3://BUCKET/RUN.",
    "resume=False": "Go on with an unfinished run.",
    "clean=False": "Delete what the run's folder holds and start anew.",
    "on=None": 'Workers that do the work, such as "processes:4".',
    "max_cost=None": "USD, never more, over all attempts.",
    "trust=False": "Send a provider's key to another server where a settings file says so.",
    "quiet=False": "No progress on stderr.",
    "listener=None": "Called with the progress in place of stderr: (what, units done, units in all).",
}
"""What every stage's function takes besides its settings, with its meaning."""


class PythonConsole(Console):
    """Prints remarks and progress on stderr, in the words of this interface."""

    def tell(self, text: str) -> None:
        """Print one line."""
        super().tell(in_python(text))


class StageFunction:
    """One stage, to be called with the runs that it reads and its settings.

    Settings are given as `tasks=2`, `policy={"model": "m"}` or `**{"policy.model": "m"}`; `settings()` names them all.
    Raises `UsageError`, `BadInput` or `Incomplete`. example: a call, as `help` shows it.
    """

    def __init__(self, name: str, example: str = "") -> None:
        self.name, self.example = name, example
        self.__name__ = self.__qualname__ = function_name(name)

    @property
    def __doc__(self) -> str:  # type: ignore[override]
        """Return what the stage does, and its settings with their defaults: what `help` prints."""
        name = self.__name__
        rows = self.main_settings()
        every = settings.known(load_stage(self.name).config)
        more = f"all {len(list(every))} settings by their dotted keys"
        return "\n".join(
            [
                f"{STAGES[self.name].help} Returns its run, executed now or found complete.",
                f"\n{name}(*runs, **settings)",
                *(["\nExample:", textwrap.indent(self.example, "    ")] if self.example else []),
                '\nSettings that most runs need; one in a group as policy={"model": ...} or **{"policy.model": ...}:',
                *(_entry(shown, text) for shown, text in rows),
                f"\n{name}.settings() returns {more}, each with its explanation.",
                f"{name}.plan(...) returns what a call would do and cost at most.",
                "\nArguments of every stage:",
                *(_entry(shown, text) for shown, text in {"*runs": self.reads(), **ARGUMENTS}.items()),
                "\nRaises UsageError for a request that cannot be executed, BadInput for a run or a file that it",
                "cannot read, Incomplete if part of the work failed and the rest is saved.",
            ]
        )

    def reads(self) -> str:
        """Return in a sentence which runs the stage reads."""
        slots = load_stage(self.name).inputs.values()
        kinds = ", ".join(f"{slot.kind.plural}{' (optional)' * slot.optional}" for slot in slots)
        return f"It reads runs that hold {kinds}; the newest, where none are given." if kinds else "It reads no runs."

    def main_settings(self) -> list[tuple[str, str]]:
        """Return the settings that most runs need, as `KEY=DEFAULT` and what each means."""
        rows = described(load_stage(self.name).config)
        return [(shown, in_python(text)) for key, shown, text in rows if len(rows) <= FEW or is_basic(key)]

    @property
    def __call__(self) -> Callable[..., ReadableRun]:
        """Return the function to call, with the signature of the stage: notebooks read it from here."""
        call = partial(self._run)
        call.__signature__ = self.__signature__  # type: ignore[attr-defined]
        call.__doc__ = None  # the one of this object is shown already
        return call

    def _run(
        self,
        *runs: Run,
        config: Path | str | Sequence[Path | str] = (),
        artifacts: Path | str = ARTIFACTS,
        out: Path | str | None = None,
        resume: bool = False,
        clean: bool = False,
        on: str | None = None,
        max_cost: float | None = None,
        trust: bool = False,
        quiet: bool = False,
        listener: Listener | None = None,
        **chosen: Any,
    ) -> ReadableRun:
        """Run the stage, or find it done; returns its run. The arguments are in `ARGUMENTS`."""
        console = PythonConsole(quiet or listener is not None)
        with errors_in_python(resumes=True):
            check_arguments(artifacts, out, max_cost)
            if on is not None and load_stage(self.name).work is None:
                raise UsageError(f"{self.name} deals no work to workers. Leave out on = {on!r}.")
            configuration, inputs = self._configure(runs, config, artifacts, chosen, console, trust=trust)
            job = launch.StageJob(self.name, self.name, inputs, configuration)
            asked = launch.RunOptions(Path(artifacts), None, resume, clean, max_cost, on)
            where = launch.with_out(self.name, None if out is None else str(out), asked)
            done = job.run(where, listener) if listener else launch.execute(job, where, console)
            return opened(done.path)

    def plan(
        self,
        *runs: Run,
        config: Path | str | Sequence[Path | str] = (),
        artifacts: Path | str = ARTIFACTS,
        trust: bool = False,
        **chosen: Any,
    ) -> Plan:
        """Return what a call with these arguments would do and at most what it would cost, without executing it."""
        with errors_in_python():
            console = PythonConsole()
            configuration, inputs = self._configure(runs, config, artifacts, chosen, console, trust=trust)
            return load_stage(self.name).plan(inputs, configuration)

    def settings(self) -> dict[str, Any]:
        """Return every setting by its dotted key, with its default; None where there is none."""
        return {key: settings.default_of(field) for key, field in settings.known(load_stage(self.name).config)}

    @property
    def __signature__(self) -> Signature:
        """Return the words that it takes in plain types: every setting with its default, then those of every stage.

        A group of settings is a dictionary whose default is empty: what it leaves out has its own default.
        """
        own = [*Signature.from_callable(self._run).parameters.values()]
        own = [one.replace(annotation=plain_type(one.annotation)) for one in own]
        fields = load_stage(self.name).config.model_fields.items()
        chosen = [
            Parameter(name, Parameter.KEYWORD_ONLY, default=_shown_default(field), annotation=_shown_type(name, field))
            for name, field in fields
            if name.isidentifier()
        ]
        returns = Evaluation if self.name == "evaluate" else ReadableRun
        return Signature([own[0], *chosen, *own[1:]], return_annotation=returns)

    def __repr__(self) -> str:
        return f"<stage function {self.__name__}>"

    def _configure(
        self,
        runs: tuple[Run, ...],
        config: Path | str | Sequence[Path | str],
        artifacts: Path | str,
        chosen: dict[str, Any],
        console: Console,
        *,
        trust: bool,
    ) -> tuple[StageConfig, Inputs]:
        """Return the settings and the runs to read; a text in the place of a group is its short option's value."""
        model = load_stage(self.name).config
        keys = dict(settings.known(model))
        layers, teachers = list[settings.Tree](), None
        for key, value in chosen.items():
            is_text = isinstance(value, (str, Path))
            if is_text and key == "teachers" and key in model.model_fields:
                teachers = Path(value)
            elif is_text and (short := SHORTCUTS.get(key)) in keys:
                layers.append(settings.nested(str(short), str(value)))
            else:
                layers.append(settings.nested(key, value))
        named, files = paths_of_runs(runs), paths(config)
        made = launch.configure(self.name, files, layers, {}, teachers, None, [], console.tell, trust=trust)
        return made, run_folders.choose(self.name, named, Path(artifacts), console.tell)


def _entry(shown: str, text: str) -> str:
    """Return an argument and what it means, as lines of a docstring."""
    words = " ".join(f"{shown}  - {text}".removesuffix("  - ").split(" "))
    return textwrap.fill(words, 110, initial_indent="    ", subsequent_indent=" " * 8)


def _shown_type(name: str, field: FieldInfo) -> Any:
    """Return the type of a setting in plain types; a text is short for a group with a short option, or for its file."""
    found = plain_type(field.annotation)
    takes_text = name == "teachers" or SHORTCUTS.get(name, name) != name
    return str | found if takes_text and found in (dict, list) else found


def _shown_default(field: FieldInfo) -> Any:
    """Return the default of a setting as a signature shows it: groups and tuples as what a user would write."""
    if field.is_required():
        return Parameter.empty
    default = settings.default_of(field)
    if isinstance(default, BaseModel):
        return {}
    if isinstance(default, (list, tuple, frozenset)):
        return [one.model_dump(exclude_defaults=True) if isinstance(one, BaseModel) else one for one in default]
    return str(default) if isinstance(default, Path) else default


def plain_type(annotation: Any) -> Any:
    """Return a type in terms of bool, int, float, str, list and dict; choices among words stay as they are."""
    origin = get_origin(annotation)
    if origin in (Union, UnionType):
        *others, joined = dict.fromkeys(map(plain_type, get_args(annotation)))
        for one in reversed(others):
            joined = one | joined
        return joined
    if origin is Literal or annotation in (Run, bool, int, float, str, Any, type(None)):
        return annotation
    if hasattr(annotation, "__metadata__"):
        return plain_type(annotation.__origin__)
    made = origin or annotation
    if made is Callable:
        return made
    for plain, classes in ((str, (str, Path)), (list, (Sequence, frozenset)), (dict, (dict, BaseModel))):
        if isinstance(made, type) and issubclass(made, classes):
            return plain
    return Any


def paths_of_runs(runs: Sequence[object]) -> list[str]:
    """Return the folders of runs that were passed; `UsageError` where one is something else."""
    found = []
    for one in runs:
        if not isinstance(one, Run):
            shown = repr(str(one)) if isinstance(one, (str, Path)) else f"A {type(one).__name__}"
            raise UsageError(
                f'{shown} is no run. Positional arguments are runs, such as find("collect"); all others have a name.'
            )
        found.append(str(one.path))
    return found


def paths(config: Path | str | Sequence[Path | str]) -> list[Path]:
    """Return the paths of settings files; `UsageError` for something else."""
    files = [config] if isinstance(config, (str, Path)) else config
    if not isinstance(files, (list, tuple)) or not all(isinstance(one, (str, Path)) for one in files):
        raise UsageError(f"config = {config!r}: it should be the path of a TOML file, or a list of them.")
    return [Path(one) for one in files]


def check_arguments(artifacts: object, out: object, max_cost: object) -> None:
    """Raise `UsageError` for an argument of every stage that has another type."""
    for name, value, types, form in (
        ("artifacts", artifacts, (str, Path), "the path of a folder"),
        ("out", out, (str, Path, type(None)), "the path of a folder"),
        ("max_cost", max_cost, (int, float, type(None)), "a number"),
    ):
        if not isinstance(value, types):
            raise UsageError(f"{name} = {value!r}: it should be {form}.")


def checked_settings(chosen: object) -> dict[str, Any]:
    """Return the settings of a chain by their keys; `UsageError` for something else."""
    if not isinstance(chosen, (Mapping, type(None))) or not all(isinstance(key, str) for key in chosen or ()):
        raise UsageError(f'chosen = {chosen!r}: it should be a dictionary, such as {{"collect.tasks": 5}}.')
    return dict(chosen or {})
