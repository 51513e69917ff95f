"""Exceptions that end a stage: a code, the values of its sentence, and an exit code by the class.

The sentences stand in `words.toml` files (stages/words.py); each says what happened, shows the value, and says what to
do next. Every layer may raise.

    raise BadInput("runs.no-run", name="collect", folder=root)
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

from composer_stages import words

# What pydantic calls a value that has the wrong form, by its types of errors; all others are bounds and choices, which
# it puts into words of its own ("Input should be greater than 0").
FORMS = {
    "integer": ("int_type", "int_parsing", "int_parsing_size", "int_from_float"),
    "number": ("float_type", "float_parsing"),
    "boolean": ("bool_type", "bool_parsing"),
    "text": ("string_type", "string_sub_type", "string_unicode"),
    "path": ("path_type",),
    "list": ("list_type", "tuple_type", "set_type", "frozen_set_type"),
    "table": ("dict_type", "mapping_type", "model_type", "model_attributes_type", "dataclass_type"),
}
FORM_OF = {kind: form for form, kinds in FORMS.items() for kind in kinds}


class ComposerError(Exception):
    """An expected failure, shown as one sentence without a traceback.

    A text that is no code of a table is a sentence itself: errors of environments and policies of users need no table.
    """

    exit_code: ClassVar[int] = 1
    interface: words.Interface = words.COMMAND_LINE
    """Whose words `str` uses."""

    def __init__(self, code: str, /, **values: Any) -> None:
        super().__init__(code)
        self.code: str = code.code if isinstance(code, words.Sentence) else code
        self.values: Mapping[str, Any] = code.filled if isinstance(code, words.Sentence) else values

    def __str__(self) -> str:
        return words.render(self.code, self.values, self.interface)

    @property
    def remedies(self) -> list[words.Remedy]:
        """Return what the sentence tells a user to do: options, settings, commands and runs to give."""
        return words.remedies(self.code, self.values)


class Refusal(Exception):
    """Why something is refused, raised and handled within a room; its text is the sentence of a code, or any text."""

    def __init__(self, code: str, /, **values: Any) -> None:
        super().__init__(words.Sentence(code, **values) if values or not isinstance(code, words.Sentence) else code)


class UsageError(ComposerError):
    """The request cannot be carried out as asked (name, value, settings file, folder in use): exit code 2."""

    exit_code = 2


class Incomplete(ComposerError):
    """Part of the work failed or was stopped by a budget; what was done is saved: exit code 3."""

    exit_code = 3


class BadInput(ComposerError):
    """What a command works on (runs, tasks, rollouts, models) is missing, damaged or of another kind: exit code 4."""

    exit_code = 4


def not_a_folder(path: Path, *options: str) -> UsageError:
    """Return the refusal of a file that cannot hold runs, with the options that name another place."""
    return UsageError("file-instead-of-folder", path=path, options=[words.CallOption(option) for option in options])


def refusal(problem: Mapping[str, Any]) -> str:
    """Return why pydantic refused a value, in plain words: the rest of a sentence after "tasks = 'abc': ".

    problem: one of `ValidationError.errors()`.
    """
    kind, bounds = str(problem["type"]), problem.get("ctx", {})
    if form := FORM_OF.get(kind):
        return words.Sentence("value-of-other-form", form=form)
    if kind == "missing":
        return words.Sentence("value-missing")
    if kind == "extra_forbidden":
        return words.Sentence("key-unknown")
    if kind in ("string_too_short", "too_short"):
        return words.Sentence("value-too-short", least=bounds["min_length"])
    if kind in ("string_too_long", "too_long"):
        return words.Sentence("value-too-long", most=bounds["max_length"])
    if kind == "string_pattern_mismatch":
        return words.Sentence("value-without-pattern", pattern=bounds["pattern"])
    return str(problem["msg"]).removeprefix("Value error, ").replace("Input should", "it should")


class Breakdown(ComposerError):
    """The machine or Composer itself failed (a full disk, no memory, an error that nobody foresaw): exit code 5.

    No verdict has this code: 1 may also mean "worse".
    """

    exit_code = 5


class InfrastructureError(ComposerError):
    """Something around the work broke (server, sandbox, network, engine): exit code 3, for it may work later.

    In a rollout it is an error with a null reward, never a score.
    """

    exit_code = 3
