"""What type checkers and editors read of the stages as functions: `composer_post_training/settings.pyi`, from settings.

Every group of settings is a TypedDict, so that `collect(policy={"modle": "m"})` is an error before it runs.
"""

import textwrap
from collections.abc import Callable, Iterator
from datetime import date
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel, BeforeValidator
from pydantic_core import PydanticUndefined

from composer_cli.call import Arguments
from composer_cli.executors.base import EXECUTORS
from composer_cli.help import describe_settings
from composer_post_training.results import OF_STAGE
from composer_post_training.stage_functions import StageFunction
from composer_stages import STAGES
from composer_stages.envs.config import EnvConfig
from composer_stages.runs.settings import InFile, Settings
from composer_stages.runs.stage import load_stage
from composer_stages.terms import ENVIRONMENTS

Group = type[BaseModel]
HEAD = """from collections.abc import Callable, Mapping, Sequence
from datetime import date
from pathlib import Path
from typing import Any, Literal, Required, TypedDict, Unpack

from composer_post_training.results import ComparedLogs, Evaluation, ReadableRun
from composer_stages.runs.run import Run
from composer_stages.runs.settings import Settings as _Group
from composer_stages.runs.stage import Plan

class _Function:
    def settings(self) -> dict[str, Any]:
        \"\"\"Return every setting by its dotted key, with its default; None where there is none.\"\"\"
"""


def stubs() -> str:
    """Return the groups of all stages, then the functions."""
    configs = {name: load_stage(name).config for name in STAGES}
    groups = dict.fromkeys(group for config in (Arguments, *configs.values()) for group in _needed(config))
    executors = ", ".join(f'"{name}"' for name in EXECUTORS if EXECUTORS.ships(name))
    lines = [HEAD, f"Submitted = Literal[{executors}]", '"""Where a chain is submitted to."""', ""]
    lines += ["class Arguments(TypedDict, total=False):", *_fields(Arguments).values()]
    for group in groups:
        base = _base(group)
        own = [text for name, text in _fields(group).items() if not base or name not in base.model_fields]
        lines += ["", f"class {_title(group)}({_title(base) if base else 'TypedDict'}, total=False):", *own]
    functions, of_probe = list[str](), list[str]()
    for name, config in configs.items():
        function = StageFunction(name)
        kind = "".join(word.capitalize() for word in name.split("-"))
        returns = OF_STAGE.get(name, NoneType).__name__.replace("NoneType", "ReadableRun")
        positional = function.positionals()
        first = "*runs: Run" if positional == "runs" else "*files: Run | Path | str"
        base = _base(config, positional)
        own = [text for name, text in _fields(config, positional).items() if not base or name not in base.model_fields]
        above = f"{_title(base)}, Arguments" if base else "Arguments"
        lines += ["", f"class {kind}Settings({above}, total=False):", *(own or ["    pass"])]
        lines += ["", f"class _{kind}(_Function):", f'    """{STAGES[name].help}"""', ""]
        for method, result in (("__call__", returns), ("plan", "Plan")):
            lines.append(f"    def {method}(self, {first}, **settings: Unpack[{kind}Settings]) -> {result}: ...")
        group, _, own = function.__name__.rpartition(".")
        (of_probe if group else functions).append(f"{own}: _{kind}")
    return "\n".join([*lines, "", *functions, "", "class probe:", *(f"    {line}" for line in of_probe)])


def shipped_environments() -> str:
    """Return imports of the classes of the environments that ship, for type checkers."""
    shipped = sorted(entry.environment for name, entry in ENVIRONMENTS.items() if ENVIRONMENTS.ships(name))
    imports = (target.partition(":") for target in shipped)
    return "\n".join(f"    from {module} import {word} as {word}" for module, _, word in imports)


def stage_functions() -> str:
    """Return an import of the stages as functions and of the names of executors, for type checkers."""
    stages = {StageFunction(name).__name__.partition(".")[0] for name in STAGES}
    names = [f"        {name} as {name}," for name in ("Submitted", *sorted(stages))]
    return "\n".join(["    from composer_post_training.settings import (", *names, "    )"])


def _needed(config: Group) -> Iterator[Group]:
    """Yield the groups inside of a group and those that it extends, innermost first."""
    inside = (group for field in config.model_fields.values() for group in _groups(field.annotation))
    for group in (*inside, *filter(None, [_base(config)])):
        yield from (*_needed(group), group)


def _base(group: Group, positional: str = "") -> Group | None:
    """Return the first base of a group of which it has all settings unchanged; None without one."""
    fields = _fields(group, positional).items()
    return next((b for b in group.__bases__ if b.model_fields and _fields(b).items() <= fields), None)


def _groups(annotation: Any) -> Iterator[Group]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel) and not issubclass(annotation, EnvConfig):
        yield annotation
    for argument in get_args(annotation):
        yield from _groups(argument)


def _title(group: Group) -> str:
    """Return the name of a group's TypedDict: `PolicySettings` for `PolicyConfig`."""
    return f"{group.__name__.removesuffix('Config').removesuffix('Settings')}Settings"


def _fields(group: Group, positional: str = "") -> dict[str, str]:
    """Return the lines of each setting, its type and its help, by its name."""
    lines = dict[str, str]()
    told = {key: " ".join(text.split()) for key, _, text in describe_settings(group)}
    before = {
        name: decorator.info.json_schema_input_type
        for decorator in group.__pydantic_decorators__.field_validators.values()
        if decorator.info.mode == "before"
        for name in decorator.info.fields
    }
    for name, field in group.model_fields.items():
        validators = (x for x in field.metadata if isinstance(x, BeforeValidator))
        types = [before.get(name), *(validator.json_schema_input_type for validator in validators)]
        accepted = [x for x in types if x not in (None, PydanticUndefined)] or [field.annotation]
        text = " | ".join(dict.fromkeys([*_types(accepted[0]), *["str", "Path"] * (InFile() in field.metadata)]))
        lines[name] = f"    {name}: {f'Required[{text}]' if field.is_required() and name != positional else text}"
        if told.get(name):
            lines[name] += "\n" + textwrap.indent(textwrap.fill(f'"""{told[name]}"""', 116), "    ")
    return lines


def _types(annotation: Any) -> list[str]:
    """Return the members of the union that a setting accepts."""
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return _types(arguments[0])
    if origin in (Union, UnionType):
        return [word for member in arguments for word in _types(member)]
    if origin is Literal:
        return [f"Literal[{', '.join(map(repr, arguments))}]"]
    if origin is Callable:
        return [f"Callable[[{', '.join(x.__name__ for x in arguments[0])}], {arguments[1]}]"]
    if annotation in (Any, NoneType):
        return ["Any" if annotation is Any else "None"]
    if annotation in (date, Path):
        return [annotation.__name__, "str"]
    if origin is dict:
        return [f"Mapping[str, {' | '.join(_types(arguments[1]))}]"]
    if origin in (list, tuple, frozenset):
        member = " | ".join(_types(arguments[0]))
        return [f"list[{member}]", f"tuple[{member}, ...]"] if "str" in member.split(" | ") else [f"Sequence[{member}]"]
    if isinstance(annotation, type) and issubclass(annotation, Settings):
        table = "Mapping[str, Any]" if issubclass(annotation, EnvConfig) else _title(annotation)
        return ["_Group", table, *["str"] * bool(annotation.text_sets)]
    return [annotation.__name__]
