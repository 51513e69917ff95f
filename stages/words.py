"""The sentences of refusals and remarks: templates in `words.toml` files, filled in the words of an interface.

A code names a sentence: `runs.run-damaged` is the entry `run-damaged` of `stages/runs/words.toml`, `cli.` and `python.`
stand for the words of `composer_cli` and `composer_post_training`, and a code without a dot is in `stages/words.toml`.
The tables of a file are the classes of errors (`[usage]`, `[input]`, `[infrastructure]`, `[incomplete]`, `[failed]`,
`[breakdown]`), and `[remark]` for sentences that end nothing. Templates are of Jinja; line breaks count as spaces.

A template writes what a user is to do as `option("resume")`, `setting("weights.dpo", 0.1)`, `command("status")` or
`from_run("RUN")`, which the command line and Python render in their own way: `--resume` and `resume=True`.
"""

import re
import tomllib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from composer_stages.data_files import template_environment
from composer_stages.layout import counted, signed

if TYPE_CHECKING:
    import jinja2

STAGES = Path(__file__).parent
ROOTS = {"cli": STAGES.parent / "composer_cli", "python": STAGES.parent / "composer_post_training"}
FILE = "words.toml"
FILTERS: Mapping[str, Callable[..., str]] = {
    "repr": repr,
    "counted": counted,
    "fixed": lambda number, digits=0: f"{number:,.{digits}f}",
    "grouped": lambda number: f"{number:,}",
    "general": lambda number: f"{number:g}",
    "signed": signed,
}
"""Formats that every template of sentences may use."""
CODE = re.compile(r"(?:[a-z][a-z0-9_]*\.)*[a-z0-9]+(?:-[a-z0-9]+)*")


@dataclass(frozen=True)
class CallOption:
    """An option of a command by its name without dashes, such as `resume` or `env`, with its value where it has one."""

    name: str
    value: str = ""


@dataclass(frozen=True)
class Setting:
    """A setting by its dotted key, with a value."""

    key: str
    value: Any


@dataclass(frozen=True)
class Command:
    """A command by its words without `composer`: `Command("collect", "--help")`."""

    words: tuple[str, ...]


@dataclass(frozen=True)
class FromRun:
    """A run that a call shall read, by its name or a placeholder."""

    name: str = "RUN"


Remedy = CallOption | Setting | Command | FromRun
"""What a user can do about a refusal."""


class Interface(Protocol):
    """How a call of this project is written: on the command line, or in Python."""

    words: Mapping[str, str]
    """Words that differ: `call` is what runs a stage, `again` what interrupts it, `a_table` keys with their values."""

    def remedy(self, remedy: Remedy) -> str:
        """Return how a remedy is written."""
        ...


class CommandLine:
    """The words of the command line, which are those of manifests and reports too."""

    words: Mapping[str, str] = {
        "call": "command",
        "again": "Ctrl-C again",
        "a_table": "a table of keys and values",
        "true_or_false": "true or false",
    }

    def remedy(self, remedy: Remedy) -> str:
        """Return `--resume`, `--set weights.dpo=0.1`, `composer collect --help` or `with --from RUN`."""
        match remedy:
            case CallOption(name, value):
                return f"--{name} {value}".rstrip()
            case Setting(key, value):
                return f"--set {key}={value}"
            case Command(words):
                return " ".join(("composer", *words))
            case FromRun(name):
                return f"with --from {name}".rstrip()


COMMAND_LINE = CommandLine()


class Sentence(str):
    """A sentence in the words of the command line, which keeps its code and its values."""

    code: str
    filled: Mapping[str, Any]
    """Its values, by their names in the template."""

    def __new__(cls, code: str, /, **values: Any) -> "Sentence":
        """Return the sentence of a code with these values."""
        self = super().__new__(cls, render(code, values))
        self.code, self.filled = code, values
        return self

    def __getnewargs_ex__(self) -> tuple[tuple[str], dict[str, Any]]:
        return (self.code,), dict(self.filled)


def render(code: str, values: Mapping[str, Any], interface: Interface = COMMAND_LINE) -> str:
    """Return the sentence of a code; a text that is no code of a table is a sentence itself."""
    try:
        template = _template(code)
    except ImportError:  # an interpreter of another program, which may lack Jinja
        return f"{code}: {dict(values)}"
    if template is None:
        return code
    return template.render(
        {name: _plain(value, interface) for name, value in values.items()},
        **interface.words,
        option=lambda name, value="": interface.remedy(CallOption(name, str(value))),
        setting=lambda key, value: interface.remedy(Setting(key, value)),
        command=lambda *words: interface.remedy(Command(words)),
        stage_command=lambda stage: interface.remedy(Command(words_of_stage(stage))),
        from_run=lambda name="RUN": interface.remedy(FromRun(name)),
    )


def in_interface(text: str, interface: Interface) -> str:
    """Return a text in the words of an interface; one that is no `Sentence` stays as it is."""
    return render(text.code, text.filled, interface) if isinstance(text, Sentence) else text


def words_of_stage(stage: str) -> tuple[str, ...]:
    """Return the words of a stage's command: `probe`, `svd` for probe-svd."""
    return tuple(stage.split("-", 1)) if stage.startswith("probe-") else (stage,)


class _Recorder(CommandLine):
    """Keeps the remedies that a template names."""

    def __init__(self) -> None:
        self.remedies = list[Remedy]()

    def remedy(self, remedy: Remedy) -> str:
        self.remedies.append(remedy)
        return super().remedy(remedy)


def remedies(code: str, values: Mapping[str, Any]) -> list[Remedy]:
    """Return what a sentence tells a user to do, in its order."""
    recorder = _Recorder()
    render(code, values, recorder)
    return recorder.remedies


def _plain(value: Any, interface: Interface) -> Any:
    """Return a value in which every remedy and every sentence is written."""
    if isinstance(value, Remedy):
        return interface.remedy(value)
    if isinstance(value, Sentence):
        return render(value.code, value.filled, interface)
    return [_plain(each, interface) for each in value] if isinstance(value, (list, tuple)) else value


def did_you_mean(word: str, words: Iterable[str], cutoff: float = 0.6) -> str:
    """Return " Did you mean 'kata'?" with the known word that is most similar, in any case; "" where none is.

    cutoff: the least similarity, of 1.
    """
    spelt = {name.lower(): name for name in words}
    return "".join(f" Did you mean {spelt[near]!r}?" for near in get_close_matches(word.lower(), spelt, 1, cutoff))


@cache
def _environment() -> "jinja2.Environment":
    environment = template_environment()
    environment.filters |= FILTERS
    environment.globals["did_you_mean"] = did_you_mean
    return environment


@cache
def _template(code: str) -> "jinja2.Template | None":
    entry = _entry(code)
    return _environment().from_string(entry[1]) if entry else None


def _entry(code: str) -> tuple[str, str] | None:
    """Return the table and the template of a code."""
    if not CODE.fullmatch(code):
        return None
    room, _, name = code.rpartition(".")
    return entries(room).get(name)


@cache
def entries(room: str) -> Mapping[str, tuple[str, str]]:
    """Return the sentences of a room (`runs`, `envs.harbor`, `cli`): table and template by name."""
    first, *below = room.split(".") if room else [""]
    path = ROOTS.get(first, STAGES / first).joinpath(*below, FILE)
    if not path.is_file():
        return {}
    tables: Mapping[str, Mapping[str, str]] = tomllib.loads(path.read_text("utf-8"))
    return {
        name: (table, re.sub(r"\s*\n\s*", " ", text.strip()))
        for table, texts in tables.items()
        for name, text in texts.items()
    }
