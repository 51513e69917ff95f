"""Write composer_post_training/signatures.py: what every stage's function takes, for editors and type checkers.

    PYTHONPATH=. .venv/bin/python docs/signatures.py

`./dev docs` does it too. A test compares the file with the settings.
"""

import subprocess
import sys
import types
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel

from composer_cli.settings import known
from composer_cli.stage_command import SHORTCUTS
from stages import STAGES
from stages.runs.stage import load_stage

FILE = Path(__file__).parents[1] / "composer_post_training" / "signatures.py"
HEAD = '''"""The words of the Python interface with their types, for type checkers. docs/signatures.py generates it."""

# ruff: noqa: D101, D102, D400

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, Protocol, TypedDict, Unpack

from composer_post_training.results import Evaluation, ReadableRun
from stages.runs.run import Run
from stages.runs.stage import Plan

Listener = Callable[[str, int, int], None]
'''
FUNCTION = '''

class {name}(Protocol):
    """{help}"""

    name: str

    def __call__(
        self,
        *runs: Run,
        config: Path | str | Sequence[Path | str] = ...,
        artifacts: Path | str = ...,
        out: Path | str | None = ...,
        resume: bool = ...,
        clean: bool = ...,
        on: str | None = ...,
        max_cost: float | None = ...,
        trust: bool = ...,
        quiet: bool = ...,
        listener: Listener | None = ...,
        **chosen: Unpack[{name}Words],
    ) -> {returns}: ...

    def plan(
        self,
        *runs: Run,
        config: Path | str | Sequence[Path | str] = ...,
        artifacts: Path | str = ...,
        trust: bool = ...,
        **chosen: Unpack[{name}Words],
    ) -> Plan: ...

    def settings(self) -> dict[str, Any]: ...
'''


def text() -> str:
    """Return the file's content."""
    groups: dict[str, str] = {}
    functions = []
    for stage, entry in STAGES.items():
        name = "".join(word.capitalize() for word in stage.split("-"))
        _group(f"{name}Words", load_stage(stage).config, groups, "Path | str | ")
        returns = "Evaluation" if stage == "evaluate" else "ReadableRun"
        functions.append(FUNCTION.format(name=name, help=entry.help, returns=returns))
    return HEAD + "".join(groups.values()) + "".join(functions)


def _group(name: str, model: type[BaseModel], groups: dict[str, str], short: str = "") -> None:
    """Add the typed dictionary of a group of settings after those that it holds.

    short: the other types of those groups for which a text may be given, as for short options.
    """
    if name in groups:
        return
    keys = {key.partition(".")[0] for key, _ in known(model) if key in SHORTCUTS.values() and "." in key}
    texts = {*keys, *({"teachers"} & model.model_fields.keys())} & SHORTCUTS.keys()
    lines = [
        f"    {field}: {short if field in texts else ''}{_type(about.annotation, groups)}"
        for field, about in model.model_fields.items()
        if field.isidentifier()
    ]
    body = "\n".join(lines) or "    pass"
    groups[name] = f"\n\nclass {name}(TypedDict, total=False):\n{body}\n"


def _type(annotation: Any, groups: dict[str, str]) -> str:
    """Return an annotation as source; a group of settings is its dictionary."""
    origin, inner = get_origin(annotation), get_args(annotation)
    if annotation is None or annotation is type(None):
        return "None"
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        _group(f"{annotation.__name__}Words", annotation, groups)
        return f"{annotation.__name__}Words | Mapping[str, Any]"
    if origin in (Union, types.UnionType):
        return " | ".join(dict.fromkeys(_type(one, groups) for one in inner))
    if origin is Literal:
        return "Literal[" + ", ".join(repr(one).replace("'", '"') for one in inner) + "]"
    if origin in (list, tuple, frozenset):
        held = [one for one in inner if one is not Ellipsis]
        return f"Sequence[{' | '.join(dict.fromkeys(_type(one, groups) for one in held))}]"
    if origin is dict:
        return f"Mapping[str, {_type(inner[1], groups)}]"
    if hasattr(annotation, "__metadata__"):
        return _type(annotation.__origin__, groups)
    if annotation is Path:
        return "Path | str"
    return annotation.__name__ if annotation in (int, float, str, bool) else "Any"


if __name__ == "__main__":
    FILE.write_text(text())
    subprocess.run([sys.executable, "-m", "ruff", "format", "--quiet", str(FILE)], check=True)
