"""The reference of the Python interface, from its signatures and docstrings.

A docstring is a sentence, explanations, arguments as `name: meaning`, a paragraph `Raises ...`, and an example as in
doctest. The examples of the page are executed in their order by the tests of documents.
"""

import ast
import inspect
import re
import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import composer_post_training as composer
from composer_cli.help import described
from composer_cli.settings import known
from composer_post_training.phrasing import in_python
from composer_post_training.stage_functions import ARGUMENTS, StageFunction, plain_type
from stages import STAGES, command_words
from stages.errors import ComposerError
from stages.runs.stage import load_stage

SHARED = {"artifacts": ARGUMENTS["artifacts='artifacts'"]}
"""Arguments of several functions, where their docstrings do not explain them."""
RUN = ("path", "manifest", "rollouts", "pairs", "scan", "tables", "read_file")
MEMBERS = {
    "ReadableRun": RUN,
    "Evaluation": ("verdict", "differences", "document"),
    "Rollout": ("rollout_id", "task_id", "reward", "outcome", "messages", "steps", "row", "folder"),
    "Scan": ("path", "kind", "columns", "pandas", "arrow", "duckdb", "rows", "batches"),
    "Differences": ("table", "pandas"),
    "Difference": (*composer.Difference.__dataclass_fields__,),
    "Table": ("columns", "cells", "title", "total", "note", "shown", "pandas"),
    "Plan": (*composer.Plan.__dataclass_fields__,),
    "Chain": ("runs", "differences", "table"),
    "Job": ("name", "on", "status", "log", "cancel"),
}
"""The public attributes and methods of each class, in reading order."""
ERRORS = ("ComposerError", "UsageError", "BadInput", "Incomplete", "InfrastructureError")
QUALIFIED = re.compile(r"(?:stages|composer_\w+|pathlib|typing|collections)\.(?:\w+\.)*(\w+)")
ALIASES = {"Row": "dict[str, Any]", "Message": "dict[str, str]", "Columns": "Sequence[str] | str | None"}
"""Names of types that a reader would have to look up, with what they are."""


@dataclass(frozen=True)
class Entry:
    """A function or a method with what its docstring says."""

    name: str
    function: Any

    @cached_property
    def paragraphs(self) -> list[str]:
        """Return the docstring in paragraphs, each on one line but the example."""
        found = (inspect.getdoc(self.function) or "").split("\n\n")
        return [one if one.startswith(">>>") else " ".join(one.split()) for one in found]

    @cached_property
    def parameters(self) -> list[inspect.Parameter]:
        """Return the parameters that a caller gives."""
        return [one for one in inspect.signature(self.function).parameters.values() if one.name != "self"]

    @property
    def signature(self) -> str:
        """Return a call as it is written, and what it returns."""
        given = ", ".join(self._given())
        returns = inspect.signature(self.function).return_annotation
        return f"{self.name}({given})" + (f" -> {type_text(returns)}" if returns not in (None, "None") else "")

    def _given(self) -> Iterator[str]:
        """Yield the parameters without their types, and `*` before those that are given by name alone."""
        kinds = [one.kind for one in self.parameters]
        for place, one in enumerate(self.parameters):
            by_name = one.kind is one.KEYWORD_ONLY and one.KEYWORD_ONLY not in kinds[:place]
            if by_name and one.VAR_POSITIONAL not in kinds:
                yield "*"
            yield str(one.replace(annotation=inspect.Parameter.empty))

    @cached_property
    def meanings(self) -> dict[str, str]:
        """Return what each argument means, by its name; `ValueError` where one is not explained."""
        names = "|".join(one.name for one in self.parameters) or "$^"
        found = dict(SHARED)
        for paragraph in self.paragraphs:
            parts = re.split(rf"(?:^|(?<=\. ))({names}): ", paragraph)
            found |= dict(zip(parts[1::2], map(sentence, parts[2::2]), strict=True))
        if missing := [one.name for one in self.parameters if one.name not in found]:
            raise ValueError(f"The docstring of {self.name} explains no {', '.join(missing)}.")
        return found

    def text(self) -> Iterator[str]:
        """Yield the paragraphs that explain no argument, and no error, without the example."""
        names = "|".join(one.name for one in self.parameters) or "$^"
        for paragraph in self.paragraphs:
            head = re.split(rf"(?:^|(?<=\. ))(?:{names}): ", paragraph)[0].strip()
            if head and not head.startswith(">>>"):
                yield head

    def paragraphs_without_example(self) -> list[str]:
        """Return the docstring without its example."""
        return [one for one in self.paragraphs if not one.startswith(">>>")]

    @property
    def example(self) -> str:
        """Return the example of the docstring."""
        return "\n\n".join(one for one in self.paragraphs if one.startswith(">>>"))

    @property
    def errors(self) -> set[str]:
        """Return the names of the errors that the docstring says it raises."""
        said = " ".join(one for one in self.paragraphs if "Raises" in one)
        return set(re.findall(r"\w+", said.partition("Raises")[2])) & set(ERRORS)


def functions(*names: str) -> str:
    """Return a section for each of these functions: call, explanation, arguments, errors, example."""
    return "\n".join(line for name in names for line in _function(Entry(f"composer.{name}", getattr(composer, name))))


def stage_functions(*names: str) -> str:
    """Return a section for each of these functions of stages, with the settings that most runs need."""
    return "\n".join(line for name in names for line in _stage(getattr(composer, name)))


def probe_functions() -> str:
    """Return a table of the functions of the gradient probe."""
    rows = []
    for stage, entry in STAGES.items():
        if stage.startswith("probe-"):
            name = f"composer.probe.{stage.removeprefix('probe-').replace('-', '_')}"
            count = len(described(load_stage(stage).config))
            rows.append((f"`{name}`", entry.help, f"[{count}]({_link(stage)})"))
    return "\n".join(_table(("function", "what it does", "settings"), rows))


def stage_arguments() -> str:
    """Return the table of the arguments of every stage's function."""
    rows = [(f"`{name.partition('=')[0]}`", f"`{name.partition('=')[2]}`", text) for name, text in ARGUMENTS.items()]
    return "\n".join(_table(("argument", "default", "meaning"), rows))


def classes(*names: str) -> str:
    """Return a section for each of these classes: what it is, its attributes, its methods, an example."""
    return "\n".join(line for name in names for line in _class(name, getattr(composer, name)))


def errors() -> str:
    """Return the table of errors, with the functions whose docstrings say that they raise them."""
    entries = [
        Entry(name, getattr(composer, name)) for name in composer.__all__ if inspect.isfunction(getattr(composer, name))
    ]
    for owner, members in MEMBERS.items():
        found = ((name, getattr(getattr(composer, owner), name, None)) for name in members)
        entries += [Entry(f"{owner}.{name}", of) for name, of in found if of is not None and hasattr(of, "__doc__")]
    rows = []
    for name in ERRORS:
        kind: type[ComposerError] = getattr(composer, name)
        stages = ["all stages"] if name in ("UsageError", "BadInput", "Incomplete") else []
        raised = [*stages, *(f"`{one.name}`" for one in entries if name in Entry(one.name, one.function).errors)]
        rows.append((f"`composer.{name}`", " ".join((kind.__doc__ or "").split()), ", ".join(raised)))
    return "\n".join(_table(("error", "meaning, and the exit code of the command line", "raised by"), rows))


def sentence(text: str) -> str:
    """Return a meaning as a sentence: with a capital and a point."""
    return f"{text[:1].upper()}{text[1:]}".strip().removesuffix(".") + "."


def type_text(annotation: Any) -> str:
    """Return a type as it is written, without modules."""
    if annotation is inspect.Parameter.empty:
        return ""
    text = annotation if isinstance(annotation, str) else inspect.formatannotation(annotation)
    plain = QUALIFIED.sub(r"\1", text).replace('"', "").replace("'", "")
    return re.sub(r"\w+", lambda word: ALIASES.get(word[0], word[0]), plain)


def _function(entry: Entry) -> Iterator[str]:
    yield from (f"### {entry.name}", "", *_call(entry.signature), "")
    for paragraph in entry.text():
        yield from (paragraph, "")
    rows = [
        (f"`{one.name}`", f"`{type_text(one.annotation)}`", _default(one), entry.meanings[one.name])
        for one in entry.parameters
    ]
    yield from _table(("argument", "type", "default", "meaning"), rows)
    yield from _example(entry.example)


def _stage(function: StageFunction) -> Iterator[str]:
    stage = function.name
    name, returns = f"composer.{function.__name__}", "Evaluation" if stage == "evaluate" else "ReadableRun"
    yield from (f"### {name}", "", *_call(f"{name}(*runs, **settings) -> {returns}"), "")
    yield from (f"{STAGES[stage].help} {function.reads()}", "")
    rows, fields = [], dict(known(load_stage(stage).config))
    for shown, text in function.main_settings():
        key, _, default = shown.partition("=")
        kind = type_text(plain_type(fields[key].annotation))
        rows.append((f"`{key}`", f"`{kind}`", f"`{default}`" if default else "", text))
    yield from _table(("setting", "type", "default", "meaning"), rows)
    count = len(described(load_stage(stage).config))
    if count > len(rows):
        yield from (f"[All {count} settings]({_link(stage)}).", "")
    yield from _example(function.example)


def _class(name: str, of: type) -> Iterator[str]:
    about = Entry(name, of)
    yield from (f"### composer.{name}", "")
    for paragraph in about.paragraphs_without_example():
        yield from (paragraph, "")
    declared = _declared(of)
    rows, methods = list[tuple[str, ...]](), list[Entry]()
    for member in MEMBERS[name]:
        value = inspect.getattr_static(of, member, None)
        if inspect.isfunction(value):
            methods.append(Entry(member, value))
        elif member in declared:
            rows.append((f"`{member}`", f"`{declared[member][0]}`", declared[member][1]))
        else:
            function = value.func if isinstance(value, cached_property) else value.fget  # type: ignore[union-attr]
            entry = Entry(member, function)
            meaning = sentence(" ".join(entry.paragraphs_without_example()).removeprefix("Return "))
            rows.append((f"`{member}`", f"`{type_text(inspect.signature(function).return_annotation)}`", meaning))
    yield from _table(("attribute", "type", "meaning"), rows)
    for entry in methods:
        yield from (f"**`{entry.signature}`**: {' '.join(entry.paragraphs_without_example())}", "")
    yield from _example(about.example)


def _declared(of: type) -> dict[str, tuple[str, str]]:
    """Return the type and the docstring of each attribute that a class and those above it declare."""
    found: dict[str, tuple[str, str]] = {}
    for one in reversed(of.__mro__):
        if not one.__module__.startswith(("stages", "composer")):
            continue
        body = ast.parse(textwrap.dedent(inspect.getsource(one))).body[0].body  # type: ignore[attr-defined]
        for place, node in enumerate(body):
            if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
                after = body[place + 1] if place + 1 < len(body) else None
                text = (
                    after.value.value if isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant) else None
                )
                if not isinstance(text, str):
                    continue
                found[node.target.id] = (type_text(ast.unparse(node.annotation)), " ".join(text.split()))
    return found


def _default(parameter: inspect.Parameter) -> str:
    return "" if parameter.default is parameter.empty else f"`{parameter.default!r}`"


def _call(text: str) -> list[str]:
    lines = textwrap.wrap(text, 100, subsequent_indent=" " * (text.index("(") + 1))
    return ["```", *lines, "```"]


def _example(text: str) -> list[str]:
    return ["```pycon", *text.splitlines(), "```", ""] if text else []


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    if not rows:
        return []
    cells = [
        [" ".join(in_python(text).split()).replace("|", "\\|").replace("<", "&lt;") for text in row] for row in rows
    ]
    return [f"| {' | '.join(row)} |" for row in (head, ["---"] * len(head), *cells)] + [""]


def _link(stage: str) -> str:
    return f"commands.md#{command_words(stage).replace(' ', '-')}"
