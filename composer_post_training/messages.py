"""Messages of the command line in the words of Python: `--resume` becomes `resume=True`.

All messages are written for the command line, which also keeps them in manifests. An option or a command in a message
is read as the command line reads it, and written as the argument or call that does the same. Sentences stay as they
are, so they are written such that either fits: "Go on with --resume.", "`composer collect --help --all` lists all."

A value of an option has an equals sign, a slash or a colon, or is a placeholder in capitals (`--out FOLDER`); between
backticks it may be any word (`--env kata`).
"""

import re
import shlex
import signal
import sys
from collections.abc import Mapping, Sequence
from functools import cache
from types import TracebackType

from composer_cli.call import Arguments, ChainArguments
from composer_cli.printing import sentence_and_code
from composer_cli.stage_command import read_positionals
from stages import STAGES, command_words
from stages.errors import ComposerError, UsageError
from stages.runs import settings
from stages.runs.stage import load_stage
from stages.stopping import Interrupted
from stages.words import CallOption, Command, FromRun, Remedy, Sentence, Setting, group_of, in_interface

ARGUMENTS = {
    name.replace("_", "-"): field.annotation is bool
    for name, field in (ChainArguments.model_fields | Arguments.model_fields).items()
}
"""The arguments of every stage and chain by their options, and whether they have no value."""
OTHERS = ("from", "port", "preset", "set")
"""Options with a value that are no arguments of a stage."""
FUNCTIONS = {"status": "runs", "show": "find", "query": "query", "report": "report", "view": "view", "run": "run"}
"""The functions of commands that are no stages; other commands exist on the command line alone."""
ONLY_COMMANDS = ("tasks check", "tasks convert")
"""Commands that begin with the name of a stage."""
VALUE = r"(?:[\w.]+=)?(?:'[^']*'|\"[^\"]*\")|[^\s`]*[=/:][^\s`]*|[A-Z][A-Z_]*\b"
NAME = r"--[a-z][a-z-]*(?![\w-])"
OPTION = rf"{NAME}(?:[ =](?:{VALUE}))?"
OTHER_WORDS = {
    "same command": "same call",
    "Ctrl-C again stops": "A second interrupt stops",
    "it should be a table of keys and values": "it should be a dictionary",
    "it should be true or false": "it should be True or False",
}
WORDS = re.compile(
    rf"`(?P<quoted>(?:composer |{NAME})[^`]*)`|with --from(?: (?:RUN|FOLDER)\b)?|(?<![\w-]){OPTION}(?: {OPTION})*"
)


class Python:
    """The words of calls in Python: `resume=True`, `weights={'dpo': 0.1}`, `collect.settings()`, `as an argument`."""

    words: Mapping[str, str] = {
        "call": "call",
        "again": "A second interrupt",
        "a_table": "a dictionary",
        "true_or_false": "True or False",
    }

    def remedy(self, remedy: Remedy) -> str:
        """Return how a remedy is written."""
        match remedy:
            case CallOption(name, value):
                return ", ".join(_arguments([f"--{name}", *([value] if value else [])]))
            case Setting(key, value):
                return ", ".join(_arguments(["--set", f"{key}={value}"]))
            case Command(words):
                command = " ".join(words)
                return _call(words) or f"composer {command}"
            case FromRun():
                return "as an argument"


PYTHON = Python()


def translate_message(message: str) -> str:
    """Return a message of the command line with the words of the Python interface."""
    if isinstance(message, Sentence):
        return in_interface(message, PYTHON)
    said = WORDS.sub(_phrase, message)
    for words, instead in OTHER_WORDS.items():
        said = said.replace(words, instead)
    return said


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
            if group_of(error.code) is None:
                error.code = translate_message(error.code)
            raise error.with_traceback(None) from error.__cause__
        if isinstance(error, (KeyboardInterrupt, Interrupted)):
            sentence, code = sentence_and_code(error, resumes=self._resumes)
            if code == 128 + signal.SIGINT:
                raise KeyboardInterrupt(translate_message(sentence)) from None
            print(translate_message(sentence), file=sys.stderr)
            raise SystemExit(code) from None


@cache
def short_options() -> dict[str, str]:
    """Return the settings that are options of some stage's command, by the option. Imports the stages."""
    keys = [key for stage in STAGES for key, _, _ in settings.options(load_stage(stage).config)]
    return {key.rpartition(".")[2]: key for key in keys}


def is_option(name: str) -> bool:
    """Return whether a stage's command has this option; those of other programs stay as they are."""
    return name in ARGUMENTS or name in OTHERS or name.replace("-", "_") in short_options()


def function_name(stage: str) -> str:
    """Return the function of a stage: `probe.teacher_pool` for probe-teacher-pool."""
    name = "import_traces" if stage == "import" else stage.replace("-", "_")
    return name.replace("probe_", "probe.", 1)


def _phrase(found: re.Match[str]) -> str:
    """Return what to write for options, or for a command or options between backticks."""
    quoted = found["quoted"]
    named = re.findall(NAME, found[0]) if quoted is None or quoted.startswith("--") else []
    if not all(is_option(name.removeprefix("--")) for name in named):
        return found[0]
    if quoted is None:
        if found[0].startswith("with --from"):
            return "as an argument"
        # A sentence ends after the last value: its point is no part of it.
        text = found[0].rstrip(".,;:)")
        arguments = _arguments(_split(text))
        said = f"`{arguments[0]}`" if arguments[0].isidentifier() else ", ".join(arguments)
        return said + found[0][len(text) :]
    words = _split(quoted)
    call = _call(words[1:]) if words[0] == "composer" else ", ".join(_arguments(words))
    return found[0] if call is None else f"`{call}`"


def _split(text: str) -> list[str]:
    try:
        return shlex.split(text)
    except ValueError:  # a quotation mark of the sentence
        return text.split()


def _call(words: Sequence[str]) -> str | None:
    """Return the call that does what a command does; None where there is none."""
    stages = {command_words(stage).removeprefix("composer "): stage for stage in STAGES}
    named = " ".join(words[:2])
    if named in ONLY_COMMANDS:
        return None
    stage = stages.get(named) or stages.get(words[0])
    rest = list(words[len((named if named in stages else words[0]).split()) :])
    first = next((number for number, word in enumerate(rest) if word.startswith("-")), len(rest))
    bare, options = rest[:first], rest[first:]
    if words[0] == "cancel":
        return f"job({bare[0]!r}).cancel()"
    if stage is None:
        function = FUNCTIONS.get(words[0])
        named_run = options[1:2] if options[:1] == ["--preset"] else bare
        return function and f"{function}({', '.join(map(repr, named_run))})"
    if options in (["--help"], ["--help", "--all"]):
        return f"{function_name(stage)}.settings()"
    try:
        layers, runs = read_positionals(stage, bare)
    except UsageError:  # a message about a command that takes no such words
        return None
    chosen = [f"{key}={value!r}" for layer in layers for key, value in layer.items()]
    return f"{function_name(stage)}({', '.join([*(f'find({run!r})' for run in runs), *chosen, *_arguments(options)])})"


def _arguments(words: Sequence[str]) -> list[str]:
    """Return options with their values as the arguments of a call."""
    said = list[str]()
    for number, word in enumerate(words):
        if not word.startswith("--"):
            continue
        option, equals, value = word.partition("=")
        if not equals and number + 1 < len(words) and not words[number + 1].startswith("--"):
            value = words[number + 1]
        name = option.removeprefix("--").replace("-", "_")
        if ARGUMENTS.get(name.replace("_", "-")):
            said.append(f"{name}=True")
        elif name == "from":
            said.append(f"find({value!r})" if value else "an argument")
        elif name == "set" and "=" in value:
            said += [f"{key}={tree!r}" for key, tree in settings.assignment(value).items()]
        elif value:
            tree = settings.nested(short_options().get(name, name), value)
            said += [f"{group}={one!r}" for group, one in tree.items()]
        else:
            said.append(name)
    return said
