"""The words of the Python interface: what a sentence of `words.toml` names as an option, a setting or a command.

`--resume` of the command line is `resume=True` here, `composer collect --help` is `collect.settings()`.
"""

import signal
import sys
from collections.abc import Mapping, Sequence
from functools import cache
from types import TracebackType
from typing import Any

from composer_cli.call import Arguments, ChainArguments
from composer_cli.printing import sentence_and_code
from composer_cli.stage_command import read_positionals
from composer_stages import STAGES
from composer_stages.errors import ComposerError, UsageError
from composer_stages.runs import settings
from composer_stages.runs.stage import load_stage
from composer_stages.stopping import Interrupted
from composer_stages.words import CallOption, Command, FromRun, Remedy, Setting, in_interface, words_of_stage

FLAGS = {
    name: field.annotation is bool for name, field in (ChainArguments.model_fields | Arguments.model_fields).items()
}
"""The arguments of every stage and chain, and whether they have no value."""
FUNCTIONS = {"status": "runs", "show": "find", "query": "query", "report": "report", "view": "view", "run": "run"}
"""The functions of commands that are no stages; other commands exist on the command line alone."""
ONLY_COMMANDS = ("check", "convert")
"""Words behind the name of the stage `tasks` that make another command of it."""


class Python:
    """The words of calls in Python: `resume=True`, `weights={'dpo': 0.1}`, `collect.settings()`, "as an argument"."""

    words: Mapping[str, str] = {
        "call": "call",
        "again": "A second interrupt",
        "a_table": "a dictionary",
        "true_or_false": "True or False",
    }

    def remedy(self, remedy: Remedy) -> str:
        """Return how a remedy is written."""
        match remedy:
            case CallOption(name, ""):
                return f"{name}=True" if FLAGS.get(name) else f"`{name.replace('-', '_')}`"
            case CallOption(name, value):
                return argument(name, value)
            case Setting(key, value):
                return _assigned(settings.nested(key, value))
            case Command(words):
                return call(words) or " ".join(("composer", *words))
            case FromRun():
                return "as an argument"


PYTHON = Python()


class errors_in_python:  # noqa: N801 (used as a function)
    """Raise the errors of a block with the words of this interface, and `KeyboardInterrupt` with what is saved.

    Any other signal than Ctrl-C asks the process to end: `SystemExit` with its exit code, as of the command line.
    An expected failure is shown as the call and the sentence, without the frames in between. A generator with
    `contextmanager` could not do that: it gives an error its traceback back.

    resumes: whether the block is that of a run, which goes on with resume=True.
    """

    def __init__(self, *, resumes: bool = False) -> None:
        self._resumes = resumes

    def __enter__(self) -> None:
        pass

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        __tracebackhide__ = True  # read by IPython and pytest
        if isinstance(error, ComposerError):
            error.interface = PYTHON
            raise error.with_traceback(None) from error.__cause__
        if isinstance(error, (KeyboardInterrupt, Interrupted)):
            sentence, code = sentence_and_code(error, resumes=self._resumes)
            if code == 128 + signal.SIGINT:
                raise KeyboardInterrupt(in_interface(sentence, PYTHON)) from None
            print(in_interface(sentence, PYTHON), file=sys.stderr)
            raise SystemExit(code) from None


@cache
def short_options() -> dict[str, str]:
    """Return the settings that are options of some stage's command, by the option. Imports the stages."""
    keys = [key for stage in STAGES for key, _, _ in settings.options(load_stage(stage).config)]
    return {key.rpartition(".")[2]: key for key in keys}


def function_name(stage: str) -> str:
    """Return the function of a stage: `probe.teacher_pool` for probe-teacher-pool."""
    name = "import_traces" if stage == "import" else stage.replace("-", "_")
    return name.replace("probe_", "probe.", 1)


def argument(option: str, value: str) -> str:
    """Return an option of a command with its value as an argument of the function."""
    name = option.replace("-", "_")
    if name == "from":
        return f"find({value!r})"
    if name == "set" and "=" in value:
        return _assigned(settings.assignment(value))
    return _assigned(settings.nested(short_options().get(name, name), value))


def call(words: Sequence[str]) -> str | None:
    """Return the call that does what a command does, by its words without `composer`; None where there is none."""
    stages = {words_of_stage(stage): stage for stage in STAGES}
    named = tuple(words[:2]) if tuple(words[:2]) in stages else tuple(words[:1])
    rest = list(words[len(named) :])
    if named == ("tasks",) and rest[:1] and rest[0] in ONLY_COMMANDS:
        return None
    first = next((number for number, word in enumerate(rest) if word.startswith("-")), len(rest))
    bare, options = rest[:first], rest[first:]
    if named == ("cancel",):
        return f"job({bare[0]!r}).cancel()"
    if named not in stages:
        function = FUNCTIONS.get(words[0])
        runs = options[1:2] if options[:1] == ["--preset"] else bare
        return function and f"{function}({', '.join(map(repr, runs))})"
    function = function_name(stages[named])
    if options in (["--help"], ["--help", "--all"]):
        return f"{function}.settings()"
    try:
        layers, paths = read_positionals(stages[named], bare)
    except UsageError:  # a message about a command that takes no such words
        return None
    arguments = [f"find({path!r})" for path in paths] + [_assigned(layer) for layer in layers]
    return f"{function}({', '.join([*arguments, *_options(options)])})"


def _options(words: Sequence[str]) -> list[str]:
    """Return options with their values, as words of a command, as arguments."""
    arguments, rest = list[str](), list(words)
    while rest:
        name, equals, value = rest.pop(0).removeprefix("--").partition("=")
        if not equals and rest and not rest[0].startswith("--"):
            value = rest.pop(0)
        arguments.append(argument(name, value) if value else PYTHON.remedy(CallOption(name)).strip("`"))
    return arguments


def _assigned(tree: Mapping[str, Any]) -> str:
    return ", ".join(f"{group}={value!r}" for group, value in tree.items())
